"""The doors of `c_ops` that move one layer, or whole blocks, or rotate; and the flash pair.

Expected contents come from `raw_layouts.py`; whole buffers are compared, those of the other layers too.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers import assert_same, words
from lmcache_ref import c_ops, use_backend
from lmcache_ref.c_ops import D2H, GPUKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache_ref.errors import ArgumentError, ChunkError, LayoutError, SlotRangeError
from lmcache_ref.rope import RotarySpec, rerotate
from raw_layouts import BS, DTYPE, HS, MLA, NB, NH, NL, SHAPES, TOKENS, D, Guarded, Paged, moved, planes_of

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


# Whole blocks

BLOCK_IDS = [4, 1, -1, 0, 3, 2]  # for three objects of two blocks
OBJECTS = 3
CHUNK_TOKENS = 2 * BS


def shape_desc(name: str, dtype: torch.dtype = DTYPE, **changes) -> PageBufferShapeDesc:
    desc = PageBufferShapeDesc()
    desc.kv_size, desc.nl, desc.nb, desc.bs = planes_of(name), NL, NB, BS
    desc.nh, desc.hs = (1, D) if name in MLA else (NH, HS)
    desc.element_size = dtype.itemsize
    for attribute, value in changes.items():
        setattr(desc, attribute, value)
    return desc


def block_slots(blocks):
    return [block * BS + offset if block >= 0 else -1 for block in blocks for offset in range(BS)]


class BlockCase:
    """Paged memory, and three objects by address."""

    def __init__(self, name: str, direction: str, dtype: torch.dtype = DTYPE, device: str = "cpu", elements=None):
        self.name, self.direction, self.dtype = name, direction, dtype
        self.paged = Paged(name, dtype, written=direction == "D2H", device=device)
        if elements is not None:  # another extent: blocks with padding between them
            numbers = itertools.count(step=elements + 100)
            firsts = [next(numbers) if direction == "D2H" else None for _ in self.paged.parts]
            self.paged.parts = [Guarded(elements, dtype, first, device) for first in firsts]
        first = 50000 if direction == "H2D" else None
        size = planes_of(name) * NL * CHUNK_TOKENS * D
        self.objects = [Guarded(size, dtype, first and first + 3000 * i) for i in range(OBJECTS)]

    def call(self, desc: PageBufferShapeDesc, skip: int = 0, source=None, device: str = "cpu", **changes):
        arguments = dict(
            paged_buffer_ptrs_tensor=self.paged.pointers(device) if source is None else source,
            lmcache_objects_ptrs=[part.inner.data_ptr() for part in self.objects],
            block_ids=torch.tensor(BLOCK_IDS, device=device),
            device=torch.device(device),
            direction=TransferDirection[self.direction],
            shape_desc=desc,
            lmcache_chunk_size=CHUNK_TOKENS,
            gpu_kv_format=GPUKVFormat[self.name],
            skip_prefix_n_blocks=skip,
        )
        c_ops.multi_layer_block_kv_transfer(**{**arguments, **changes})

    def snapshot(self):
        self.before = [words(part.whole).clone() for part in (*self.paged.parts, *self.objects)]

    def check(self, skip: int = 0, **options):
        paged, objects = self.before[: len(self.paged.parts)], self.before[len(self.paged.parts) :]
        for index in range(OBJECTS):
            slots = block_slots(BLOCK_IDS[2 * index : 2 * index + 2])
            skipped = max(0, skip - 2 * index) * BS
            paged, objects[index] = moved(self.name, paged, objects[index], slots, skipped, self.direction, **options)
        for part, expected in zip((*self.paged.parts, *self.objects), (*paged, *objects), strict=True):
            assert_same(part.whole.cpu(), expected.view(self.dtype), self.name)

    def check_untouched(self):
        for part, expected in zip((*self.paged.parts, *self.objects), self.before, strict=True):
            assert torch.equal(words(part.whole), expected)


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_whole_blocks(name, direction, skip):
    case = BlockCase(name, direction)
    case.snapshot()
    case.call(shape_desc(name), skip)
    case.check(skip)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_whole_blocks_of_elements_of_any_width(dtype):
    case = BlockCase("NL_X_NB_TWO_NH_BS_HS", "D2H", dtype)
    case.snapshot()
    case.call(shape_desc(case.name, dtype))
    case.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_whole_blocks_from_tensors(direction):
    case = BlockCase("NL_X_TWO_NB_NH_BS_HS", direction)
    case.snapshot()
    case.call(shape_desc(case.name), source=case.paged.tensors(), block_ids=BLOCK_IDS)
    case.check()


STEP = 2 * NL * BS * D + 13  # from block to block: more than any row's block
PADDED = {
    "NL_X_NB_BS_HS": lambda i, k, b, o, h: (i, b * STEP + o * D + h * HS),
    "NL_X_NB_TWO_BS_NH_HS": lambda i, k, b, o, h: (i, b * STEP + ((k * BS + o) * NH + h) * HS),
    "NL_X_TWO_NB_BS_NH_HS": lambda i, k, b, o, h: (i, (k * NB + b) * STEP + (o * NH + h) * HS),
    "NL_X_NB_NH_BS_TWO_HS": lambda i, k, b, o, h: (i, b * STEP + ((h * BS + o) * 2 + k) * HS),
    "NB_NL_TWO_NH_BS_HS": lambda i, k, b, o, h: (0, b * STEP + (((i * 2 + k) * NH + h) * BS + o) * HS),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PADDED)
def test_padding_between_blocks(name, direction):
    case = BlockCase(name, direction, elements=2 * NB * STEP)
    case.snapshot()
    case.call(shape_desc(name, block_stride_elems=STEP))
    case.check(address=PADDED[name])


@pytest.mark.parametrize("name", ["NL_X_NB_BS_HS", "TWO_X_NL_X_NBBS_NH_HS"])
def test_a_block_stride_that_says_tight(name):
    case = BlockCase(name, "D2H")
    case.snapshot()
    case.call(shape_desc(name, block_stride_elems=BS * D))
    case.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["NL_X_NB_NH_BS_TWO_HS", "NL_X_NB_BS_NH_TWO_HS", "LBHNC"])
def test_k_and_v_side_by_side_moved_as_one_plane(name, direction):
    """kv_size 1 and twice the head size: the object keeps K and V of a head side by side."""
    case = BlockCase(name, direction)
    case.snapshot()
    case.call(shape_desc(name, kv_size=1, hs=2 * HS))
    case.check(place=lambda k, layer, t, head: (layer * CHUNK_TOKENS + t) * 2 * D + (head * 2 + k) * HS)


BLOCK_ERRORS = {
    "element size": (dict(element_size=3), {}, ArgumentError, "shape_desc.element_size: 3; allowed: 1, 2, 4, 8"),
    "kv size": (dict(kv_size=1), {}, ArgumentError, "shape_desc.kv_size: 1, but NL_X_NB_TWO_BS_NH_HS.* has 2"),
    "no block size": (dict(bs=0), {}, ArgumentError, "page_buffer_size: 0"),
    "stride too small": (dict(block_stride_elems=100), {}, ArgumentError, "block_stride_elems: 100; a block has 336"),
    "block range": ({}, dict(block_ids=torch.tensor([0, 1, 2, 3, 4, NB])), SlotRangeError, r"slots\[20\] = 20"),
    "too few blocks": (
        {},
        dict(block_ids=torch.arange(5)),
        ArgumentError,
        "block_ids: 5 blocks of 4 tokens do not fill",
    ),
    "chunk size": ({}, dict(lmcache_chunk_size=6), ArgumentError, "do not fill 3 objects of 6 tokens"),
    "null object": ({}, dict(lmcache_objects_ptrs=[0, 0, 0]), ArgumentError, r"lmcache_objects_ptrs\[0\]: 0 is no"),
    "skip": ({}, dict(skip_prefix_n_blocks=-1), ArgumentError, "skip_prefix_n_blocks must be an int >= 0, got -1"),
    "too few pointers": (
        {},
        dict(paged_buffer_ptrs_tensor=torch.ones(1, dtype=torch.int64)),
        LayoutError,
        "1 pointers",
    ),
}


@pytest.mark.parametrize("what", BLOCK_ERRORS)
def test_whole_blocks_wrong_input(what):
    desc, changes, error, message = BLOCK_ERRORS[what]
    case = BlockCase("NL_X_NB_TWO_BS_NH_HS", "H2D")
    case.snapshot()
    with pytest.raises(error, match=message):
        case.call(shape_desc(case.name, **desc), **changes)
    case.check_untouched()


def test_tensors_of_another_width_than_described():
    case = BlockCase("NL_X_NB_TWO_BS_NH_HS", "H2D")
    case.snapshot()
    with pytest.raises(ArgumentError, match="element_size: 4, but the paged memory is torch.bfloat16"):
        case.call(shape_desc(case.name, element_size=4), source=case.paged.tensors())
    case.check_untouched()


def test_a_row_without_an_axis_of_blocks_cannot_be_padded():
    case = BlockCase("NL_X_NBBS_ONE_HS", "H2D")
    case.snapshot()
    with pytest.raises(ArgumentError, match=f"block_stride_elems: {STEP}, but NL_X_NBBS_ONE_HS.* no axis of blocks"):
        case.call(shape_desc(case.name, block_stride_elems=STEP))
    case.check_untouched()


def test_whole_blocks_are_one_batch_of_the_backend(monkeypatch):
    seen = []

    def gather(cache, slots, chunks, **options):
        seen.append((slots.tolist(), len(chunks), options))
        raise ArgumentError("seen")

    monkeypatch.setattr("lmcache_ref.c_ops.transfers.gather", gather)
    with pytest.raises(ArgumentError, match="seen"):
        BlockCase("NL_X_NB_BS_HS", "D2H").call(shape_desc("NL_X_NB_BS_HS"), 2)
    (slots, num_chunks, options) = seen[0]
    assert [slot if slot >= 0 else -1 for slot in slots] == block_slots(BLOCK_IDS)
    assert num_chunks == OBJECTS and options["skip_prefix_n_tokens"] == 2 * BS


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_whole_blocks_on_the_device(name, direction, where):
    case = BlockCase(name, direction, device="cuda:0")
    for part in case.objects:
        part.whole = {"pinned": part.whole.pin_memory, "pageable": part.whole.clone, "device": part.whole.cuda}[where]()
    case.snapshot()
    case.call(shape_desc(name), 1, device="cuda:0")
    torch.cuda.synchronize()
    case.check(1)


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
