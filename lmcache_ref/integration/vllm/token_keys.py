"""The tokens by which the cache keys a request: its token ids, changed where the same ids do not mean the same KV.

Chunk keys are chained, so one changed token changes the keys of everything behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any


def keyed_prompt(request: Any) -> list[int] | None:
    """The prompt's tokens as the cache keys them; None for a prompt of embeddings, which has no tokens to go by.

    `request`: vLLM's `Request`, or the `NewRequestData` of a scheduler output. Placeholders of images and the like are
    replaced by numbers that stand for their content; a LoRA adapter or a cache salt changes the first token.
    """
    prompt = request.prompt_token_ids
    if prompt is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    tokens = list(prompt)
    for content, start, length in _media(request):
        for place in range(start, min(start + length, len(tokens))):
            tokens[place] = _number(content, place - start)
    identity = _identity(request)
    if identity and tokens:
        tokens[0] = _number(identity, tokens[0])
    return tokens


def _number(text: str, index: int) -> int:
    """A negative 63-bit number, so that it is no token id; the same in every process."""
    digest = hashlib.sha256(f"{index}:{text}".encode()).digest()
    return -1 - (int.from_bytes(digest[:8], "little") >> 2)


def _media(request: Any) -> Iterator[tuple[str, int, int]]:
    """(content hash, first token, number of tokens) of each image, audio clip and so on."""
    features = getattr(request, "mm_features", None)
    if features is not None:  # vLLM 0.11 on: one object each
        for feature in features:
            yield feature.identifier, feature.mm_position.offset, feature.mm_position.length
        return
    positions = getattr(request, "mm_positions", None) or ()
    hashes = getattr(request, "mm_hashes", None) or ()
    for index, position in enumerate(positions):
        # Without a hash (the engine's own prefix cache is off) nothing says that two images are the same: never a hit.
        content = hashes[index] if index < len(hashes) else f"request {_request_id(request)}"
        offset, length = (
            (position["offset"], position["length"])
            if isinstance(position, dict)
            else (position.offset, position.length)
        )
        yield content, offset, length


def _request_id(request: Any) -> str:
    return getattr(request, "request_id", None) or request.req_id


def _identity(request: Any) -> str:
    """What else the KV of the same tokens depends on; empty for nothing."""
    parts = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        parts.append(f"lora {lora.lora_name} {getattr(lora, 'lora_path', '')}")
    if getattr(request, "cache_salt", None):
        parts.append(f"salt {request.cache_salt}")
    return "\n".join(parts)
