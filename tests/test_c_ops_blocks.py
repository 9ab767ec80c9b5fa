"""The door of `c_ops` that moves whole blocks between paged memory and many objects, all by address.

Expected contents come from `raw_layouts.py`; whole buffers are compared.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers import assert_same, words
from lmcache_ref import c_ops
from lmcache_ref.c_ops import GPUKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache_ref.errors import ArgumentError, LayoutError, SlotRangeError
from raw_layouts import BS, DTYPE, HS, MLA, NB, NH, NL, SHAPES, D, Guarded, Paged, moved, planes_of

DIRECTIONS = ["H2D", "D2H"]
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
    with pytest.raises(ArgumentError, match=r"element_size: 4, but the paged memory is torch\.bfloat16"):
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
