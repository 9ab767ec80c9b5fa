"""Tokens cut into chunks, and the names of chunks: a chain of hashes, the same in every process and on every machine.

A chunk's name depends on all tokens before it, so a hit on it is a hit on a prefix. Where chunks are kept is not known.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import torch

from ..errors import ArgumentError
from ..metadata import LMCacheMetadata

Tokens = Iterable[int] | torch.Tensor
LONGEST_NAME = 150  # characters of an escaped model name in a folder's name


@dataclass(frozen=True)
class CacheKey:
    """The name of one chunk of one worker. `str()` of it can be the name of a file and differs for different keys.

    chunk_hash: 64 hexadecimal digits, the same for all workers. dtype: of the KV cache, such as `bfloat16`.
    """

    model: str
    world_size: int
    worker_id: int
    dtype: str
    chunk_hash: str

    @property
    def scope(self) -> str:
        """All but the hash: what the chunks of one worker have in common; can be the name of a folder."""
        name = quote(self.model, safe="")
        if len(name) > LONGEST_NAME:
            name = f"{name[:60]}~{hashlib.sha256(name.encode()).hexdigest()}"
        return f"{name}@{self.world_size}@{self.worker_id}@{self.dtype}"

    def __str__(self) -> str:
        return f"{self.scope}@{self.chunk_hash}"


class Span(NamedTuple):
    """Tokens `[start, end)` of a request, and the name of what they hold."""

    start: int
    end: int
    key: CacheKey

    @property
    def tokens(self) -> int:
        return self.end - self.start


class ChunkNames:
    """Cuts the tokens of a request into chunks of `chunk_size` and names them.

    layout: what else the bytes of a chunk depend on, such as its format, as JSON values; it goes into every hash, so
    that one folder can serve different settings. save_unfull_chunk: a last chunk that is not full is a chunk too.
    """

    def __init__(
        self,
        chunk_size: int,
        metadata: LMCacheMetadata,
        layout: Mapping[str, Any] | None = None,
        *,
        save_unfull_chunk: bool = False,
    ) -> None:
        self.chunk_size, self.save_unfull_chunk = chunk_size, save_unfull_chunk
        dtype = str(metadata.kv_dtype).removeprefix("torch.")
        self._worker = (metadata.model_name, metadata.world_size, metadata.worker_id, dtype)
        self._layout = {"version": 1, "chunk_size": chunk_size, **(layout or {})}

    @property
    def scope(self) -> str:
        return CacheKey(*self._worker, chunk_hash="").scope

    def spans(self, tokens: Tokens, cache_salt: str | None = None) -> list[Span]:
        """The chunks from the first token on. ArgumentError for what is no list of token ids.

        cache_salt: whatever else the keys and values depend on, such as an adapter's name; requests with different
        salts share nothing.
        """
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ArgumentError(f"cache_salt: {cache_salt!r}; allowed: a string or None")
        ids = token_ids(tokens)
        seed = json.dumps({**self._layout, "salt": cache_salt}, sort_keys=True)
        digest = hashlib.sha256(seed.encode()).digest()
        last = len(ids) if self.save_unfull_chunk else len(ids) - len(ids) % self.chunk_size
        spans = []
        for start in range(0, last, self.chunk_size):
            part = ids[start : start + self.chunk_size]
            digest = hashlib.sha256(digest + _little_endian(part)).digest()
            spans.append(Span(start, start + len(part), CacheKey(*self._worker, chunk_hash=digest.hex())))
        return spans


def token_ids(tokens: Tokens) -> array[int]:
    """Token ids as int64. Takes a list, a tensor `[tokens]` on any device, or what yields integers."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    if isinstance(tokens, torch.Tensor):
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise ArgumentError(f"tokens: {tokens.dtype} {tuple(tokens.shape)}; allowed: integers [tokens]")
        tokens = tokens.tolist()
    if isinstance(tokens, (str, bytes)):
        raise ArgumentError(f"tokens: {tokens[:20]!r}; allowed: token ids, a list or a tensor")
    try:
        ids = array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ArgumentError(f"tokens: {type(tokens).__name__} ({error}); allowed: token ids of 64 bits") from None
    return ids


def _little_endian(ids: array[int]) -> bytes:
    """The ids in the byte order that hashes are made of."""
    if sys.byteorder == "big":
        ids = array("q", ids)
        ids.byteswap()
    return ids.tobytes()


def skipped_tokens(mask: torch.Tensor | None, num_tokens: int, chunk_size: int) -> int:
    """How many tokens at the front are left out: the False of `mask`, bool `[tokens]`; none without a mask.

    ArgumentError unless False comes before True, over whole chunks, or over everything.
    """
    if mask is None:
        return 0
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != (num_tokens,):
        found = (mask.dtype, tuple(mask.shape)) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ArgumentError(f"mask: {found}; allowed: torch.bool [{num_tokens}], as many as tokens")
    skipped = num_tokens - int(mask.sum())
    if bool(mask[:skipped].any()):
        raise ArgumentError("mask: has False after True; allowed: False for a prefix, then True")
    if skipped % chunk_size and skipped != num_tokens:
        raise ArgumentError(f"mask: {skipped} tokens are False; allowed: a multiple of chunk_size {chunk_size}")
    return skipped
