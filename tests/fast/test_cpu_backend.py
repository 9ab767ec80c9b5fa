"""The backend `cpu` against the specification: whole buffers, bit for bit, at any strides, widths and sizes.

The engines' layouts come from the conformance suite; here are memory that no layout has, what a backend may do on its own
(threads, streaming stores, tiles) and what it must refuse.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strided import FORMATS, GEOMETRIES, REQUEST, ROWS, Case, Request, Sizes, World, assert_same_worlds

from helpers import assert_same
from lmcache_fast.cpu import backend as cpu_module
from lmcache_ref import PagedKVCache, gather, get_backend, scatter, use_backend
from lmcache_ref.backends import Operations
from lmcache_ref.conformance import Case as LayoutCase
from lmcache_ref.conformance import all_cases, expected_count, run_case
from lmcache_ref.errors import BackendError, DuplicateSlotError, SlotRangeError
from lmcache_ref.layouts import LAYOUTS
from lmcache_ref.memory import MemoryFormat

DIRECTIONS = ("gather", "scatter")


@pytest.fixture(scope="module")
def cpu() -> Operations:
    return get_backend("cpu")


@pytest.fixture(scope="module")
def reference() -> Operations:
    return get_backend("reference")


def compare(case: Case, direction: str, cpu: Operations, reference: Operations) -> None:
    worlds = [World(case, gathers=direction == "gather") for _ in range(2)]
    for world, backend in zip(worlds, (cpu, reference), strict=True):
        getattr(backend, direction)(world.plan()).synchronize()
    assert_same_worlds(*worlds, f"{direction} {case}")


def test_it_is_registered_and_the_first_choice_for_host_memory(cpu):
    assert get_backend(device="cpu") is cpu
    assert cpu.stages


# ------------------------------------------------------------------------------------------------ the engines' layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_direction_format_and_dtype(layout):
    cases = all_cases({layout: LAYOUTS[layout]})
    for case in cases:
        run_case(case, "cpu", "cpu")
    assert len(cases) == expected_count({layout: LAYOUTS[layout]})


def test_real_sizes():
    """Large enough for several threads."""
    run_case(LayoutCase.parse("NL_X_TWO_NB_BS_NH_HS-gather-KV_2LTD-bfloat16-real"), "cpu", "cpu")
    run_case(LayoutCase.parse("NL_X_TWO_NB_NH_BS_HS-scatter-KV_2LTD-bfloat16-real"), "cpu", "cpu")


# ------------------------------------------------------------------------------------------------ any memory


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_any_strides(geometry, direction, cpu, reference):
    count = 0
    for (NH, HS, dtype), (_, chunk_format), chunk_pad, BS in itertools.product(ROWS, FORMATS.items(), (0, 3), (3, 4)):
        sizes = Sizes(3, chunk_format.planes, 7, BS, NH, HS)
        compare(Case(sizes, dtype, GEOMETRIES[geometry], chunk_format, REQUEST, chunk_pad), direction, cpu, reference)
        count += 1
    assert count == 13 * 5 * 2 * 2


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    sizes = Sizes(
        NL=draw(st.integers(1, 4)),
        TWO=draw(st.integers(1, 2)),
        NB=draw(st.integers(1, 9)),
        BS=draw(st.integers(1, 9)),
        NH=draw(st.integers(1, 3)),
        HS=draw(st.integers(1, 40)),
    )
    num_slots = sizes.NB * sizes.BS
    slots = draw(st.permutations([*range(num_slots), *[-1] * draw(st.integers(0, 5))]))
    cuts = sorted(draw(st.lists(st.integers(0, len(slots)), min_size=2, max_size=8)))
    if len(cuts) % 2:
        cuts.pop()
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    request = Request(tuple(slots), spans, draw(st.integers(0, len(slots) + 2)), draw(st.integers(0, sizes.NL - 1)))
    formats = [chunk_format for chunk_format in FORMATS.values() if chunk_format.planes == sizes.TWO]
    return Case(
        sizes,
        draw(st.sampled_from((torch.uint8, torch.bfloat16, torch.float32, torch.float64))),
        draw(st.sampled_from(list(GEOMETRIES.values()))),
        draw(st.sampled_from(formats)),
        request,
        draw(st.integers(0, 5)),
    )


@given(case=drawn_cases(), direction=st.sampled_from(DIRECTIONS))
def test_any_sizes_and_requests(case, direction):
    compare(case, direction, get_backend("cpu"), get_backend("reference"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("geometry", ["nhd", "hnd", "off_by_one"])
@pytest.mark.parametrize(("NH", "HS"), [(2, 64), (3, 16), (1, 528)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_tiles_and_streaming_stores_change_nothing(
    threads, NH, HS, geometry, direction, cpu, reference, monkeypatch
):
    """Chunks longer than a tile; every store streamed that can be, though the batch is small: rows of whole cache lines,
    and of one and a half and sixteen and a half, where each second row begins within a line."""
    monkeypatch.setattr(cpu_module, "STREAM_BYTES", 0)
    monkeypatch.setattr(cpu_module, "ONE_THREAD_BYTES", 0)
    generator = torch.Generator().manual_seed(1)
    slots = tuple(torch.randperm(96 * 8, generator=generator)[:700].tolist())
    request = Request(slots, ((0, 300), (300, 301), (310, 700)), skip=20)
    case = Case(Sizes(2, 2, 96, 8, NH, HS), torch.bfloat16, GEOMETRIES[geometry], FORMATS["KV_2LTD"], request)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(case, direction, cpu, reference)
    finally:
        torch.set_num_threads(before)


def test_the_comparison_sees_one_byte_anywhere(cpu, reference):
    case = Case(Sizes(2, 2, 7, 3, 2, 8), torch.uint8, GEOMETRIES["fused"], FORMATS["KV_2LTD"], REQUEST)
    for memory in ("cache_memory", "chunk_memory"):
        for index in (0, -1, 77):
            worlds = [World(case, gathers=True) for _ in range(2)]
            getattr(worlds[0], memory)[index] += 1
            with pytest.raises(AssertionError, match="1 of"):
                assert_same_worlds(*worlds, "tampered")


# ------------------------------------------------------------------------------------------------ offsets past 2^31


def test_offsets_past_2_to_the_31():
    """The last slot of 2.4 GB of MLA, a view into the middle of more: a byte offset cut to 32 bits, which is then negative,
    lands inside the buffer.

    Nobody touches the rest of the buffer, so it stays the zero page and costs no memory.
    """
    NB, BS, HS = 64000, 64, 576
    lead_bytes = 2 << 30
    memory = torch.zeros(lead_bytes + NB * BS * HS + (1 << 20), dtype=torch.uint8)
    plane = memory[lead_bytes : lead_bytes + NB * BS * HS].view(NB, BS, 1, HS)
    cache = PagedKVCache(((plane,),))
    slots = torch.tensor([NB * BS - 1, NB * BS // 2 + 12345], dtype=torch.int64)
    source = (torch.arange(2 * HS) % 255 + 1).to(torch.uint8).view(1, 1, 2, HS)
    target = torch.zeros_like(source)
    with use_backend("cpu"):
        scatter(cache, slots, [source], fmt=MemoryFormat.KV_MLA_FMT)
        gather(cache, slots, [target], fmt=MemoryFormat.KV_MLA_FMT)
    for token, slot in enumerate(slots.tolist()):
        start = lead_bytes + slot * HS
        assert_same(memory[start : start + HS], source[0, 0, token], f"slot {slot}")
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    assert int(torch.count_nonzero(words)) == math.ceil(2 * HS / 8), "something else was written"
    assert_same(target.flatten(), source.flatten(), "the round trip")


# ------------------------------------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slot", [21, 1 << 31, (1 << 32) + 1, (1 << 63) - 1])
def test_a_slot_out_of_range_is_the_references_error_and_nothing_moves(slot, direction, cpu, reference):
    slots = list(REQUEST.slots)
    slots[6] = slot
    request = Request(tuple(slots), REQUEST.spans, REQUEST.skip)
    case = Case(Sizes(2, 2, 7, 3, 2, 8), torch.bfloat16, GEOMETRIES["hnd"], FORMATS["KV_2LTD"], request)
    messages = []
    for backend in (cpu, reference):
        world, fresh = (World(case, gathers=direction == "gather") for _ in range(2))
        with pytest.raises(SlotRangeError) as raised:
            getattr(backend, direction)(world.plan())
        messages.append(str(raised.value))
        assert_same_worlds(world, fresh, "after the error")
    assert messages[0] == messages[1]
    assert f"slots[6] = {slot}" in messages[0]


@pytest.mark.parametrize("token", [1, 5, 7])
def test_slots_that_are_not_used_are_not_looked_at(token, cpu, reference):
    """In the skipped prefix, and between the chunks."""
    slots = list(REQUEST.slots)
    slots[token] = 1 << 40
    request = Request(tuple(slots), REQUEST.spans, REQUEST.skip)
    case = Case(Sizes(2, 2, 7, 3, 2, 8), torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], request)
    compare(case, "scatter", cpu, reference)


def test_duplicate_slots_are_looked_for_when_asked(cpu, monkeypatch):
    request = Request((3, 5, 3), ((0, 3),))
    case = Case(Sizes(1, 2, 7, 3, 1, 8), torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], request)
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    world, fresh = (World(case, gathers=False) for _ in range(2))
    with pytest.raises(DuplicateSlotError, match=r"slots\[0\] and slots\[2\] are both 3"):
        cpu.scatter(world.plan())
    assert_same_worlds(world, fresh, "after the error")
    monkeypatch.setenv("LMCACHE_VALIDATE", "0")
    cpu.scatter(world.plan())


def test_slots_need_not_be_contiguous(cpu, reference):
    results = []
    for backend in (cpu, reference):
        world = World(
            Case(Sizes(1, 2, 7, 3, 1, 8), torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], REQUEST), True
        )
        plan = world.plan()
        wide = torch.stack([plan.slots, torch.full_like(plan.slots, 1 << 50)], 1)
        object.__setattr__(plan, "slots", wide[:, 0])
        backend.gather(plan)
        results.append(world)
    assert_same_worlds(*results, "every second slot")


def test_memory_of_another_device_is_refused_by_name(cpu):
    planes = ((torch.empty(2, 2, 1, 4, device="meta"),),)
    with pytest.raises(BackendError, match="the KV cache is on meta"):
        with use_backend("cpu"):
            gather(PagedKVCache(planes), torch.tensor([0]), [torch.empty(1, 1, 1, 4)], fmt=MemoryFormat.KV_MLA_FMT)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_chunks_on_another_device_go_through_the_host(direction, cpu, reference):
    case = Case(Sizes(2, 2, 7, 3, 2, 8), torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], REQUEST)
    world, expected = (World(case, gathers=direction == "gather") for _ in range(2))
    getattr(reference, direction)(expected.plan())
    on_host, world.chunks = world.chunks, [chunk.cuda() for chunk in world.chunks]
    getattr(cpu, direction)(world.plan())
    for target, chunk in zip(on_host, world.chunks, strict=True):
        target.copy_(chunk)
    assert_same_worlds(world, expected, direction)
