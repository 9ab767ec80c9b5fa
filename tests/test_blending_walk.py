"""A blending walk on a small Llama: two texts prefilled alone, cached at positions 0.., loaded in the other order with a gap.

The keys that arrive in the engine are those of a model that rotated them where they now stand: its own keys before rotation,
taken by a hook for each text alone, and transformers' own `apply_rotary_pos_emb`. Values arrive bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers
from einops import rearrange
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drive import Bench, Sizes
from helpers import assert_same
from lmcache_ref.rope import RotarySpec

NL, NH, HS, BS, NB = 3, 2, 16, 4, 20
FIRST, SECOND, MIDDLE = 11, 7, 5  # tokens of the two cached texts, and of the one between them
#: the request: two tokens of its own, the second text, the middle one, the first text
SECOND_AT, MIDDLE_AT, FIRST_AT = 2, 2 + SECOND, 2 + SECOND + MIDDLE
TOKENS = FIRST_AT + FIRST
ROPES = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@dataclass
class Text:
    """One text prefilled alone: its cached keys and values, and its keys before rotation, each `[NL, T, NH, HS]`."""

    keys: torch.Tensor
    values: torch.Tensor
    unrotated: torch.Tensor


def build_model(rope: dict, dtype: torch.dtype):
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=4 * HS,
        intermediate_size=96,
        num_hidden_layers=NL,
        num_attention_heads=4,
        num_key_value_heads=NH,
        head_dim=HS,
        max_position_embeddings=64,
    )
    settings = {"rope_theta": 10000.0, **rope}
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = settings
    else:
        config.rope_scaling = rope
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def prefill(model, tokens: int, seed: int) -> Text:
    """A text of its own, at positions 0..tokens-1."""
    taken = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _module, _input, output: taken.append(output[0]))
        for layer in model.model.layers
    ]
    ids = torch.randint(97, (1, tokens), generator=torch.Generator().manual_seed(seed))
    cache = transformers.DynamicCache()
    model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    rows = [rearrange(torch.stack(list(of)), "nl 1 nh t hs -> nl t nh hs") for of in zip(*rows_of(cache), strict=True)]
    return Text(*rows, rearrange(torch.stack(taken), "nl t (nh hs) -> nl t nh hs", nh=NH))


def rows_of(cache):
    """(keys, values) of every layer, `[1, NH, T, HS]`, under any version of transformers."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def rotated_by_the_model(model, unrotated: torch.Tensor, start: int) -> torch.Tensor:
    """Keys `[NL, T, NH, HS]` as the model rotates them at positions from `start` on."""
    keys = rearrange(unrotated, "nl t nh hs -> nl nh t hs")
    positions = torch.arange(start, start + unrotated.shape[1])[None]
    cos, sin = model.model.rotary_emb(keys, positions)
    return rearrange(apply_rotary_pos_emb(keys, keys, cos, sin)[1], "nl nh t hs -> nl t nh hs")


class Walk:
    """The engine's pages, the two texts stored from them, and what the request's pages hold after the load."""

    def __init__(self, rope: dict, dtype: torch.dtype):
        self.model = build_model(rope, dtype)
        self.first, self.second, self.middle = (
            prefill(self.model, tokens, seed) for seed, tokens in enumerate((FIRST, SECOND, MIDDLE))
        )
        spec = RotarySpec.from_module(self.model.model.rotary_emb, is_neox=True, max_position=64)
        if dtype is torch.bfloat16:  # this model casts cosines and sines to bfloat16 before it rotates
            spec = RotarySpec(spec.cos_sin_cache.bfloat16(), spec.is_neox)
        self.spec = spec
        self.bench = Bench("buffer", "NL_X_NB_TWO_BS_NH_HS", dtype=dtype, sizes=Sizes(NL, NB, BS, NH, HS), rope=spec)
        generator = torch.Generator().manual_seed(3)
        self.slots = torch.randperm(NB * BS, generator=generator)
        self.objects = {
            "first": self.cached(self.first, self.slots[:FIRST]),
            "second": self.cached(self.second, self.slots[20 : 20 + SECOND]),
        }
        self.request = self.slots[40 : 40 + TOKENS]

    def cached(self, text: Text, slots: torch.Tensor):
        """The text's own request: its rows lie in the engine's pages, and are stored from there."""
        cache, tokens = self.bench.untouched_cache(), len(slots)
        cache[:, 0, slots], cache[:, 1, slots] = text.keys.view(cache.dtype), text.values.view(cache.dtype)
        self.bench.put_engine(cache)
        objects = self.bench.allocate([(0, tokens)])
        self.bench.store(objects, [(0, tokens)], slots)
        return [row[0] for row in objects]

    def load(self, blend=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Load both in the other order. blend(layer, K, V) edits each layer. Returns rows `[NL, TOKENS, NH, HS]`."""
        bench = self.bench
        bench.put_engine(bench.untouched_cache())
        starts, ends = [SECOND_AT, FIRST_AT], [SECOND_AT + SECOND, TOKENS]
        generator = bench.connector.batched_to_gpu(starts, ends, **bench.kwargs(self.request))
        next(generator)
        for layer, pair in enumerate(zip(self.objects["second"], self.objects["first"], strict=True)):
            generator.send(list(pair))
            if blend:
                blend(layer, *bench.connector.get_kv(layer))
        next(generator)
        pages = torch.stack(bench.kvcaches)  # [NL, NB, TWO, BS, NH, HS]
        rows = rearrange(pages, "nl nb two bs nh hs -> two nl (nb bs) nh hs")
        written = self.request[SECOND_AT:]
        expected = bench.untouched_cache()
        expected[:, :, written] = rearrange(rows[:, :, written], "two nl t nh hs -> nl two t nh hs").view(
            expected.dtype
        )
        assert_same(bench.engine[0], bench.engine_holding(expected)[0], "outside the request's slots")
        return rows[0][:, self.request], rows[1][:, self.request]


def far_from(keys: torch.Tensor, wanted: torch.Tensor) -> float:
    """The greatest error of a pair, relative to its norm."""
    error, exact = (
        rearrange(x.double(), "nl t nh (two pair) -> nl t nh pair two", two=2) for x in (keys.double() - wanted, wanted)
    )
    return float((error.norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_keys_are_those_of_a_model_that_rotated_them_where_they_stand(rope, dtype, limit):
    walk = Walk(ROPES[rope], dtype)
    keys, values = walk.load()
    for text, start in ((walk.second, SECOND_AT), (walk.first, FIRST_AT)):
        end = start + text.keys.shape[1]
        wanted = rotated_by_the_model(walk.model, text.unrotated, start)
        assert far_from(keys[:, start:end], wanted) <= limit
        assert far_from(text.keys, wanted) > 1e-2, "nothing had to be rotated"
        assert_same(values[:, start:end].flatten(), text.values.flatten(), "values")
    gap = slice(MIDDLE_AT, FIRST_AT)
    assert not keys[:, gap].any() and not values[:, gap].any()


def test_bfloat16_keys_are_one_rounding_from_the_exact_rotation_of_what_was_stored():
    walk = Walk(ROPES["default"], torch.bfloat16)
    keys, values = walk.load()
    cos, sin = (half.double() for half in walk.spec.cos_sin_cache.chunk(2, -1))
    for text, start in ((walk.second, SECOND_AT), (walk.first, FIRST_AT)):
        tokens = torch.arange(text.keys.shape[1])
        x, y = (half.double() for half in text.keys.chunk(2, -1))
        stored = torch.complex(x, y) / torch.complex(cos, sin)[tokens, None]
        exact = torch.view_as_real(stored * torch.complex(cos, sin)[tokens + start, None])
        exact = rearrange(exact, "nl t nh pair two -> nl t nh (two pair)").bfloat16()
        got = keys[:, start : start + len(tokens)].contiguous()
        assert int((got.view(torch.int16).int() - exact.view(torch.int16).int()).abs().max()) <= 1
        assert_same(values[:, start : start + len(tokens)].flatten(), text.values.flatten(), "values")


def test_a_blender_fills_the_gap_and_the_whole_request_stands_in_the_engine():
    """The middle text is computed anew, layer by layer, in the buffer."""
    walk = Walk(ROPES["llama3"], torch.float32)
    middle = rotated_by_the_model(walk.model, walk.middle.unrotated, MIDDLE_AT)

    def blend(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = slice(MIDDLE_AT - SECOND_AT, FIRST_AT - SECOND_AT)
        assert keys.shape == (TOKENS - SECOND_AT, NH * HS) and not keys[rows].any() and not values[rows].any()
        keys[rows], values[rows] = middle[layer].flatten(1), walk.middle.values[layer].flatten(1)

    keys, values = walk.load(blend)
    parts = [(walk.second, SECOND_AT), (walk.middle, MIDDLE_AT), (walk.first, FIRST_AT)]
    wanted = torch.cat([rotated_by_the_model(walk.model, text.unrotated, start) for text, start in parts], 1)
    assert far_from(keys[:, SECOND_AT:], wanted) <= 1e-5
    assert_same(keys[:, MIDDLE_AT:FIRST_AT].flatten(), middle.flatten(), "the blended keys")
    together = torch.cat([text.values for text, _ in parts], 1)
    assert_same(values[:, SECOND_AT:].flatten(), together.flatten(), "values")


def test_the_reference_of_this_test_is_the_model():
    """At the positions where a text was prefilled, the hook and transformers' rotation give the cached keys themselves."""
    model = build_model(ROPES["yarn"], torch.float32)
    text = prefill(model, FIRST, 0)
    assert torch.equal(rotated_by_the_model(model, text.unrotated, 0), text.keys)
