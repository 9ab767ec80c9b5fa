"""A small Llama with random weights, its prefilled KV cache as plain rows, and going on from such rows.

Only here does the demo touch transformers (4.48 and later). Nothing is downloaded: the weights are drawn from a seed.
No paged memory, no connector.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..rope import RotarySpec

NL, QUERY_HEADS, NH, HS = 4, 4, 2, 64
VOCABULARY = 512
PROMPT_TOKENS = 100
DECODED_TOKENS = 8
DTYPE = torch.bfloat16

#: `rows[layer][0 | 1]`: K and V, each `[T, NH, HS]`
Rows = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Uninterrupted:
    """What the model does when nobody moves its cache.

    rows: the cache after the prompt. first_token: int64 `[1, 1]`, what the prompt's last logits say. logits: of each
    later step, `[VOCABULARY]`.
    """

    model: Any
    rows: Rows
    first_token: torch.Tensor
    logits: list[torch.Tensor]


def build_model(seed: int, device: torch.device) -> Any:
    """`LlamaForCausalLM` in bfloat16 for evaluation, weights from `seed`; the global generators stay as they were.

    Raises ImportError saying what to install when transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("the demo needs transformers: pip install 'lmcache-ref[demo]'") from error
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=QUERY_HEADS * HS,
        intermediate_size=2 * QUERY_HEADS * HS,
        num_hidden_layers=NL,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=NH,
        head_dim=HS,
        max_position_embeddings=2 * PROMPT_TOKENS,
        initializer_range=0.1,  # wide enough for attention to pick tokens out: the usual 0.02 looks at all of them alike
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return model.to(device=device, dtype=DTYPE).eval()


def run_uninterrupted(seed: int, device: torch.device) -> Uninterrupted:
    """Build the model, prefill a random prompt, decode DECODED_TOKENS more.

    Raises RuntimeError when the same cache does not give the same logits twice: then nothing can be compared.
    """
    model = build_model(seed, device)
    prompt = torch.randint(VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed)).to(device)
    cache = cache_of([])
    first_token = forward(model, prompt, cache).argmax().view(1, 1)
    rows = rows_of(cache)
    logits = list(decode(model, cache, first_token))
    again = decode(model, cache_of(rows), first_token)
    if not all(same_bits(one, other) for one, other in zip(logits, again, strict=True)):
        raise RuntimeError(f"on {device} the model gives other logits for the same cache: nothing can be compared")
    return Uninterrupted(model, rows, first_token, logits)


@torch.no_grad()
def forward(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits `[VOCABULARY]` after the last of `tokens` `[1, T]`; `cache` grows by T."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with threads(1):
        return model(tokens, use_cache=True, **{name: cache}).logits[0, -1]


@contextlib.contextmanager
def threads(number: int) -> Iterator[int]:
    """`number` CPU threads for torch; yields how many there were.

    What the demo does itself is too small to share: threads cost ten times what they save.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def decode(model: Any, cache: Any, token: torch.Tensor) -> Iterator[torch.Tensor]:
    """Greedy: the logits of each of DECODED_TOKENS steps, as they come; `cache` grows by one token a step."""
    for _ in range(DECODED_TOKENS):
        logits = forward(model, token, cache)
        yield logits
        token = logits.argmax().view(1, 1)


def rope_of(model: Any) -> RotarySpec:
    """How the model rotates its keys: with cosines and sines that it rounds to the keys' dtype first."""
    spec = RotarySpec.from_module(model.model.rotary_emb, is_neox=True)
    return RotarySpec(spec.cos_sin_cache.to(DTYPE), spec.is_neox)


@torch.no_grad()
def rotated_again(model: Any, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Keys `[T, NH, HS]` that the model rotated at positions `old`, as they are at `new`, in float64.

    The model's own functions, nothing of this library: its rotation backwards at `old`, forwards at `new`.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(states, states, cos, sin)[1]

    tables = [model.model.rotary_emb(keys, positions[None].to(keys.device)) for positions in (old, new)]
    (old_cos, old_sin), (new_cos, new_sin) = [(cos.double(), sin.double()) for cos, sin in tables]
    scale = (old_cos.square() + old_sin.square())[:, None]  # rounded cosines and sines do not lie on the circle
    unrotated = turned(keys.double().transpose(0, 1)[None], old_cos, -old_sin) / scale
    return turned(unrotated, new_cos, new_sin)[0].transpose(0, 1)


def rows_of(cache: Any) -> Rows:
    """A copy of a `DynamicCache` `[1, NH, T, HS]` as rows `[T, NH, HS]`."""
    if hasattr(cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
    else:  # transformers before 4.54
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [[side[0].transpose(0, 1).clone() for side in pair] for pair in pairs]


def cache_of(rows: Rows) -> Any:
    """A `DynamicCache` that holds `rows`, in memory of its own."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, pair in enumerate(rows):
        keys, values = (side.transpose(0, 1).contiguous()[None] for side in pair)
        cache.update(keys, values, layer)
    return cache


def latent_of(rows: Rows) -> Rows:
    """What an MLA layout carries here: one row a token, K then V, `[T, 2*NH*HS]`.

    No Llama has MLA, and transformers keeps the caches of the models that do decompressed, as K and V. The layout only
    says where one row a token lies, so that the bytes of K and V are as good a latent row as any.
    """
    return [[torch.cat([side.flatten(1) for side in pair], dim=1)] for pair in rows]


def rows_of_latent(latent: Rows) -> Rows:
    """The inverse of `latent_of`."""
    return [[half.unflatten(1, (NH, HS)) for half in row.chunk(2, dim=1)] for (row,) in latent]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bytes: NaN equals itself, -0.0 is not 0.0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def tokens_of(logits: Sequence[torch.Tensor]) -> list[int]:
    """The greedy choice of each step."""
    return [int(step.argmax()) for step in logits]
