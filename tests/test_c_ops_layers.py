"""The doors of `c_ops` that move one layer, the flash pair, and rotation.

Expected contents come from `raw_layouts.py`; whole buffers are compared, those of the other layers too.
"""

from __future__ import annotations

import pytest
import torch

from helpers import assert_same, words
from lmcache_ref import c_ops, use_backend
from lmcache_ref.c_ops import D2H, GPUKVFormat, TransferDirection
from lmcache_ref.errors import ArgumentError, ChunkError, LayoutError
from lmcache_ref.rope import RotarySpec, rerotate
from raw_layouts import BS, DTYPE, HS, MLA, NB, NH, NL, SHAPES, TOKENS, D, Guarded, Paged, moved

LAYER = 1
T = len(TOKENS)
DIRECTIONS = ["H2D", "D2H"]
#: rows that keep one tensor a layer
PER_LAYER = [name for name, (lists, _) in SHAPES.items() if lists in ((NL,), (1, NL))]

PLACES = {
    "[2, T, D]": ((2, T, D), lambda k, layer, t, head: (k * T + t) * D + head * HS),
    "[T, 2, D]": ((T, 2, D), lambda k, layer, t, head: (t * 2 + k) * D + head * HS),
    "[T, D]": ((T, D), lambda k, layer, t, head: t * D + head * HS),
}


class LayerCase:
    """The memory of all layers of one row, and a chunk of one layer."""

    def __init__(self, name: str, direction: str, fmt: str):
        self.name, self.direction = name, direction
        shape, self.place = PLACES[fmt]
        self.paged = Paged(name, DTYPE, written=direction == "D2H")
        self.chunk = Guarded(torch.Size(shape).numel(), DTYPE, 7777 if direction == "H2D" else None)
        self.view = self.chunk.inner.view(shape)
        self.slots, self.way = torch.tensor(TOKENS), TransferDirection[direction]
        self.before = [whole.clone() for whole in (*self.paged.wholes, self.chunk.whole)]

    def layer(self, kv: int = 0) -> torch.Tensor:
        part = self.paged.parts[kv * NL + LAYER]
        return part.inner.view(SHAPES[self.name][1])

    def check(self):
        *paged, chunk = self.before
        paged, chunk = moved(self.name, paged, chunk, TOKENS, 0, self.direction, place=self.place, layers=[LAYER])
        for got, expected in zip((*self.paged.wholes, self.chunk.whole), (*paged, chunk), strict=True):
            assert_same(got, expected.view(DTYPE), self.name)

    def check_untouched(self):
        for got, expected in zip((*self.paged.wholes, self.chunk.whole), self.before, strict=True):
            assert torch.equal(words(got), words(expected))


LAYER_CASES = [(name, fmt) for name in PER_LAYER for fmt in (["[T, D]"] if name in MLA else ["[2, T, D]", "[T, 2, D]"])]


def test_every_row_with_one_tensor_a_layer_is_covered():
    assert len(PER_LAYER) == 12 and len(LAYER_CASES) == 19


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("name", "fmt"), LAYER_CASES)
def test_single_layer(name, fmt, direction):
    case = LayerCase(name, direction, fmt)
    c_ops.single_layer_kv_transfer(
        case.view, case.layer(), case.slots, case.way, GPUKVFormat[name], token_major=fmt == "[T, 2, D]"
    )
    case.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", ["[2, T, D]", "[T, 2, D]"])
@pytest.mark.parametrize("called", ["NL_X_TWO_NB_NH_BS_HS", "NL_X_TWO_NB_BS_NH_HS"])
def test_single_layer_whose_shape_shows_another_order_than_memory(called, fmt, direction):
    """HND in memory, NHD in the shape: both names of it move the same bytes."""
    case = LayerCase("NL_X_TWO_NB_NH_BS_HS", direction, fmt)
    shown = case.layer().transpose(2, 3)
    c_ops.single_layer_kv_transfer(
        case.view, shown, case.slots, case.way, GPUKVFormat[called], token_major=fmt == "[T, 2, D]"
    )
    case.check()


def test_the_comparison_sees_the_wrong_layer_and_the_wrong_order():
    case = LayerCase("NL_X_TWO_NB_BS_NH_HS", "D2H", "[2, T, D]")
    other = case.paged.parts[0].inner.view(SHAPES[case.name][1])
    c_ops.single_layer_kv_transfer(case.view, other, case.slots, case.way, GPUKVFormat[case.name])
    with pytest.raises(AssertionError, match="elements differ"):
        case.check()
    case = LayerCase("NL_X_TWO_NB_BS_NH_HS", "H2D", "[2, T, D]")
    token_major = case.chunk.inner.view(T, 2, D)
    c_ops.single_layer_kv_transfer(token_major, case.layer(), case.slots, case.way, GPUKVFormat[case.name], True)
    with pytest.raises(AssertionError, match="elements differ"):
        case.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", ["[2, T, D]", "[T, 2, D]"])
@pytest.mark.parametrize("name", ["TWO_X_NL_X_NB_BS_NH_HS", "TWO_X_NL_X_NBBS_NH_HS"])
def test_single_layer_sgl(name, fmt, direction):
    case = LayerCase(name, direction, fmt)
    c_ops.single_layer_kv_transfer_sgl(
        case.view, case.layer(0), case.layer(1), case.slots, case.way, token_major=fmt == "[T, 2, D]"
    )
    case.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flash_pair(direction):
    """The chunk has all layers; one of them moves. Negative slots are skipped, as everywhere."""
    name = "TWO_X_NL_X_NB_BS_NH_HS"
    paged = Paged(name, DTYPE, written=direction == "D2H")
    chunk = Guarded(2 * NL * T * D, DTYPE, 7777 if direction == "H2D" else None)
    before = [whole.clone() for whole in (*paged.wholes, chunk.whole)]
    function = c_ops.load_and_reshape_flash if direction == "D2H" else c_ops.reshape_and_cache_back_flash
    keys, values = paged.tensors()
    function(chunk.inner.view(2, NL, T, D), keys[LAYER], values[LAYER], torch.tensor(TOKENS), LAYER)
    expected = moved(name, before[:-1], before[-1], TOKENS, 0, direction, layers=[LAYER])
    for got, want in zip((*paged.wholes, chunk.whole), (*expected[0], expected[1]), strict=True):
        assert_same(got, want.view(DTYPE), direction)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(layer_idx=NL), ArgumentError, "layer_idx: 3; key_value has NL = 3"),
        (dict(layer_idx=-1), ArgumentError, "layer_idx must be an int >= 0, got -1"),
        (dict(key_value=torch.zeros(2, T, D)), ChunkError, "4 axes are needed"),
        (dict(value_cache=torch.zeros(4, 3)), LayoutError, r"value_cache: \(4, 3\); \[NB, BS, NH, HS\]"),
        (dict(key_cache=None), LayoutError, "key_cache: NoneType"),
        (dict(slot_mapping=torch.arange(T - 1)), ChunkError, "6 slots, the chunk 7 tokens"),
    ],
)
@pytest.mark.parametrize("function", [c_ops.load_and_reshape_flash, c_ops.reshape_and_cache_back_flash])
def test_flash_pair_wrong_input(function, change, error, message):
    arguments = dict(
        key_value=torch.zeros(2, NL, T, D),
        key_cache=torch.zeros(NB, BS, NH, HS),
        value_cache=torch.zeros(NB, BS, NH, HS),
        slot_mapping=torch.arange(T),
        layer_idx=LAYER,
    )
    with pytest.raises(error, match=message):
        function(**{**arguments, **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("NB_NL_TWO_BS_NH_HS", {}, r"NL is 3, expected 1|1 tensors"),
        ("TWO_X_NL_X_NBBS_NH_HS", {}, "1 tensors, but .* has 2 tensors"),
        ("NL_X_NB_TWO_BS_NH_HS", dict(memory=torch.zeros(NB, 2, BS, NH, 5, dtype=DTYPE)), "6\\*5, expected 42"),
        ("NL_X_NB_BS_HS", dict(chunk=torch.zeros(2, T, D, dtype=DTYPE)), "KV_2TD"),
        ("NL_X_NB_TWO_BS_NH_HS", dict(chunk=torch.zeros(T, D, dtype=DTYPE)), "KV_MLA_FMT"),
        ("NL_X_NB_TWO_BS_NH_HS", dict(chunk=torch.zeros(2, 1, T, D, dtype=DTYPE)), "2 or 3 axes"),
    ],
)
def test_single_layer_wrong_input(name, change, message):
    memory = change.get("memory", torch.zeros(SHAPES[name][1], dtype=DTYPE))
    chunk = change.get("chunk", torch.zeros((T, D) if name in MLA else (2, T, D), dtype=DTYPE))
    with pytest.raises((LayoutError, ChunkError), match=message):
        c_ops.single_layer_kv_transfer(chunk, memory, torch.arange(T), D2H, GPUKVFormat[name])


# Rotation


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("flat", [True, False])
def test_rotation_has_the_bits_of_the_specification(flat, dtype, is_neox):
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(5, NH * 8 + 6, generator=generator).to(dtype)
    keys = whole[:, 3 : 3 + NH * 8]  # not contiguous
    old = torch.randint(0, 40, (5,), generator=generator)
    new = torch.randint(0, 40, (5,), generator=generator)
    angles = torch.randn(40, 3, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    untouched, expected = whole.clone(), whole.clone()
    rerotate(expected[:, 3 : 3 + NH * 8].unflatten(1, (NH, 8)), old, new, RotarySpec(table, is_neox))
    with use_backend("reference"):
        key = keys if flat else keys.unflatten(1, (NH, 8))
        c_ops.rotary_embedding_k_fused(old, new, key, 8, table, is_neox)
    assert torch.equal(words(whole), words(expected)) and not torch.equal(whole, untouched)


@pytest.mark.parametrize(
    ("key", "head_size", "error", "message"),
    [
        (torch.zeros(5, 48), 7, ArgumentError, "head_size: 7"),
        (torch.zeros(5, 6, 8), 6, ArgumentError, "head_size: 6"),
        (torch.zeros(5, 48), 0, ArgumentError, "head_size: 0"),
        (torch.zeros(48), 8, ChunkError, "2 or 3 axes"),
        (torch.zeros(4, 48), 8, ArgumentError, "old_positions"),
    ],
)
def test_rotation_wrong_input(key, head_size, error, message):
    positions = torch.arange(5)
    with pytest.raises(error, match=message):
        c_ops.rotary_embedding_k_fused(positions, positions + 1, key, head_size, torch.ones(40, 8), True)
