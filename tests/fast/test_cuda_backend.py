"""The backend `cuda` on a GPU, against the specification bit for bit; cases 20 to 25 and 37 at the level of a backend.

Its order without a GPU is `test_pipeline_order.py`, its kernels without a GPU `test_kernels_on_host.py`. The connectors on
a GPU are `test_connectors_gpu.py`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from helpers import assert_same, untouched
from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref.backends import get_backend
from lmcache_ref.conformance import Case, all_cases, expected_count, run_case
from lmcache_ref.errors import BackendError, DuplicateSlotError, SlotRangeError
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.layouts import LAYOUTS
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat, PinMemoryAllocator
from lmcache_ref.plan import TransferPlan
from lmcache_ref.transfer import reference_gather, reference_scatter

on_gpu = pytest.mark.gpu
DIRECTIONS = ("gather", "scatter")
NL, NB, BS, NH, HS, CHUNK = 4, 40, 16, 2, 64, 48
NUM_CHUNKS = 6
T = CHUNK * NUM_CHUNKS
SOME_SEGMENTS = 300_000  # bytes of staging: a chunk is 98304


# ------------------------------------------------------------------------------------------------ every layout


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_direction_format_and_dtype(layout):
    """Chunks and slots on the device, then in pinned host memory."""
    cases = all_cases({layout: LAYOUTS[layout]})
    for case in cases:
        run_case(case, "cuda", "cuda")
    assert len(cases) == expected_count({layout: LAYOUTS[layout]})


@on_gpu
@pytest.mark.parametrize("variable", [STAGING_BYTES, ZERO_COPY_BYTES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_many_segments_and_by_zero_copy(layout, variable, monkeypatch):
    monkeypatch.setenv(variable, "3000" if variable == STAGING_BYTES else str(1 << 30))
    for case in all_cases({layout: LAYOUTS[layout]}):
        if case.cache_dtype == case.chunk_dtype and case.cache_dtype in (torch.uint8, torch.bfloat16):
            run_case(case, "cuda", "cuda")


@on_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NL_X_NB_NH_BS_TWO_HS"])
def test_real_sizes(layout, direction):
    run_case(Case.parse(f"{layout}-{direction}-KV_2LTD-bfloat16-real"), "cuda", "cuda")


@on_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("gap_bytes", [0, 4096])
def test_chunks_of_equal_distance_in_allocations_of_their_own(gap_bytes, direction, cuda):
    """One copy for all of them is tried, which CUDA refuses: each is page-locked by itself."""
    from cupy.cuda import runtime

    page = torch.full((12 * 8192,), 0x5A, dtype=torch.uint8)
    begin = -page.data_ptr() % 4096
    steps = [begin + i * (4096 + gap_bytes) for i in range(4)]
    chunks = [page[step : step + 4096].view(1, 1, 16, 256) for step in steps]
    cache_memory = torch.arange(16 * 16 * 256, device="cuda").to(torch.uint8).view(1, 16, 16, 1, 256)
    cache = PagedKVCache(((cache_memory[0],),))
    slots = torch.randperm(256)[:64]
    for chunk in chunks:
        runtime.hostRegister(chunk.data_ptr(), 4096, 0)
    try:
        if direction == "scatter":
            for number, chunk in enumerate(chunks):
                chunk.copy_(torch.full_like(chunk, number + 1))
        plan = TransferPlan.build(cache, slots, chunks, fmt=MemoryFormat.KV_MLA_FMT)
        getattr(cuda, direction)(plan).synchronize()
        rows = cache_memory.view(256, 256).cpu()[slots]
        assert torch.equal(torch.cat([chunk.view(16, 256) for chunk in chunks]), rows)
    finally:
        for chunk in chunks:
            runtime.hostUnregister(chunk.data_ptr())


# ------------------------------------------------------------------------------------------------ one request


class World:
    """A cache on the device, chunks in a pool of host memory, and copies of both on the host for the reference."""

    def __init__(self, kind: str = "pinned", device: str = "cuda", seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.pages = torch.randint(-(1 << 15), 1 << 15, (NL, 2, NB, BS, NH, HS), generator=generator).to(torch.int16)
        self.memory = self.pages.to(device)
        size = NUM_CHUNKS * 2 * NL * CHUNK * NH * HS * 2
        allocators = {"pinned": PinMemoryAllocator, "pageable": HostMemoryAllocator}
        self.allocator = allocators[kind](size) if kind in allocators else None
        flat = self.allocator.require_pool() if self.allocator else torch.empty(size, dtype=torch.uint8, device=device)
        self.pool = flat.view(torch.int16).view(NUM_CHUNKS, 2, NL, CHUNK, NH * HS)
        self.wipe()
        self.slots = torch.randperm(NB * BS, generator=generator)[:T]

    def wipe(self) -> None:
        self.pool.view(torch.uint8).fill_(0xEE)

    def plan(self, slots: torch.Tensor | None = None, on_host: bool = False, skip: int = 0) -> TransferPlan:
        """For the backend, or with everything on the host for the reference."""
        memory = self.pages if on_host else self.memory
        cache = PagedKVCache(tuple(tuple(memory[layer, kv] for kv in range(2)) for layer in range(NL)))
        pool = self.pool.cpu().clone() if on_host else self.pool
        slots = self.slots if slots is None else slots
        plan = TransferPlan.build(
            cache, slots.cpu() if on_host else slots, list(pool), fmt=MemoryFormat.KV_2LTD, skip_prefix_n_tokens=skip
        )  # fmt: skip
        self.reference_pool = pool
        return plan

    def stored(self, slots: torch.Tensor | None = None, skip: int = 0) -> torch.Tensor:
        """What the pool holds after a store, by the reference; the pool is not touched."""
        reference_gather(self.plan(slots, on_host=True, skip=skip))
        return self.reference_pool

    def loaded(self, slots: torch.Tensor | None = None, skip: int = 0) -> torch.Tensor:
        before = self.pages.clone()
        reference_scatter(self.plan(slots, on_host=True, skip=skip))
        after = self.pages.clone()
        self.pages.copy_(before)
        return after


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    __tracebackhide__ = True
    assert_same(got.flatten(), expected.flatten(), what)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.fixture
def cuda():
    return get_backend("cuda")


@pytest.fixture(params=[None, SOME_SEGMENTS], ids=["one ring", "many segments"])
def segments(request, monkeypatch):
    if request.param:
        monkeypatch.setenv(STAGING_BYTES, str(request.param))


@on_gpu
@pytest.mark.parametrize("slots_on", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_negative_slots_and_prefix(direction, kind, slots_on, cuda, segments):
    for negatives, skip in itertools.product(([], [0, 1, 50, 51, 99, T - 1], range(CHUNK, 2 * CHUNK)), (0, 70)):
        world = World(kind)
        slots = world.slots.clone()
        slots[list(negatives)] = -1
        plan = world.plan(slots.to(slots_on), skip=skip)
        if direction == "gather":
            expected = world.stored(slots, skip)
        else:
            world.pool.copy_(torch.arange(world.pool.numel()).view(world.pool.shape).to(torch.int16))
            expected = world.loaded(slots, skip)
        transfer = getattr(cuda, direction)(plan)
        transfer.wait()
        transfer.synchronize()
        assert transfer.done()
        same(world.pool.cpu() if direction == "gather" else world.memory.cpu(), expected, f"{direction} {skip}")


@on_gpu
@pytest.mark.parametrize("kind", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_bad_slot_on_the_device_is_named_and_the_others_move(direction, kind, cuda, segments):
    world = World(kind)
    world.pool.copy_(torch.arange(world.pool.numel()).view(world.pool.shape).to(torch.int16))
    good, bad = world.slots.clone(), world.slots.clone()
    good[[100, 200]] = -1
    bad[100], bad[200] = NB * BS, 1 << 40
    expected = world.stored(good) if direction == "gather" else world.loaded(good)
    transfer = getattr(cuda, direction)(world.plan(bad.cuda()))
    message = rf"^slots\[100\] = {NB * BS}: the cache has NB\*BS = {NB}\*{BS} = {NB * BS} slots$"
    with pytest.raises(SlotRangeError, match=message):
        transfer.synchronize()
    assert transfer.done()
    transfer.synchronize()  # said once
    same(world.pool.cpu() if direction == "gather" else world.memory.cpu(), expected, direction)
    getattr(cuda, direction)(world.plan()).synchronize()


@on_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_bad_slot_that_nobody_asked_for_comes_with_the_next_call(direction, cuda):
    world = World()
    bad = world.slots.clone()
    bad[5] = NB * BS
    getattr(cuda, direction)(world.plan(bad.cuda()))
    torch.cuda.synchronize()
    with pytest.raises(SlotRangeError, match=r"^slots\[5\]"):
        getattr(cuda, direction)(world.plan())
    getattr(cuda, direction)(world.plan()).synchronize()


@on_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_checked_moves_nothing(direction, cuda, monkeypatch):
    world = World()
    before, pages = world.pool.clone(), world.memory.clone()
    bad = world.slots.clone()
    bad[T - 1] = NB * BS
    with pytest.raises(SlotRangeError, match=rf"slots\[{T - 1}\]"):
        getattr(cuda, direction)(world.plan(bad))
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    with pytest.raises(SlotRangeError, match=rf"slots\[{T - 1}\]"):
        getattr(cuda, direction)(world.plan(bad.cuda()))
    if direction == "scatter":
        bad[T - 1] = bad[0]
        with pytest.raises(DuplicateSlotError):
            cuda.scatter(world.plan(bad.cuda()))
    torch.cuda.synchronize()
    same(world.pool, before, "the pool")
    same(world.memory.cpu(), pages.cpu(), "the pages")


# ------------------------------------------------------------------------------------------------ cases 20 to 25 and 37


@on_gpu
@pytest.mark.parametrize("slots_on", ["cpu", "cuda"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_20_a_store_sees_what_the_current_stream_wrote(own_stream, slots_on, cuda, segments):
    world = World()
    final = world.memory.flip(0).contiguous()
    world.pages = final.cpu()
    expected = world.stored()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        busy(20)
        world.memory.copy_(final)
        transfer = cuda.gather(world.plan(world.slots.to(slots_on)))
        transfer.wait()
        world.memory.fill_(0)  # the engine goes on
        transfer.synchronize()
    same(world.pool, expected, "the pool")


@on_gpu
def test_21_final_bytes_each_time(cuda, segments):
    world = World()
    expected = world.stored().clone()
    ballast = torch.randn(2048, 2048, device="cuda")
    for _ in range(100):
        ballast = ballast @ ballast * 1e-3
        transfer = cuda.gather(world.plan())
        while not transfer.done():
            pass
        same(world.pool, expected, "the pool")
        world.wipe()


@on_gpu
def test_22_stores_and_loads_alternate(cuda, segments):
    """Without waiting on the host; each load is of what the store before it brought."""
    worlds = [World(seed=seed) for seed in range(2)]
    others = [torch.tensor(sorted(set(range(NB * BS)) - set(world.slots.tolist())))[:T] for world in worlds]
    expected = []
    for world, other in zip(worlds, others, strict=True):
        rows = world.stored()
        after = world.pages.clone()
        for i, slot in enumerate(other.tolist()):
            after[:, :, slot // BS, slot % BS] = (
                rows[i // CHUNK, :, :, i % CHUNK].transpose(0, 1).reshape(NL, 2, NH, HS)
            )
        expected.append(after)
    transfers = []
    for _ in range(10):
        for world, other in zip(worlds, others, strict=True):
            store = cuda.gather(world.plan())
            store.wait()
            chunks = list(world.pool)[: len(other) // CHUNK]
            count = len(chunks) * CHUNK
            plan = TransferPlan.build(world.plan().cache, other[:count], chunks, fmt=MemoryFormat.KV_2LTD)
            load = cuda.scatter(plan)
            load.wait()
            transfers += [store, load]
    for transfer in transfers:
        transfer.synchronize()
    for world, other, after in zip(worlds, others, expected, strict=True):
        count = len(other) // CHUNK * CHUNK
        for slot in other[count:].tolist():
            after[:, :, slot // BS, slot % BS] = world.pages[:, :, slot // BS, slot % BS]
        same(world.memory.cpu(), after, "the pages")


@on_gpu
def test_23_new_memory_each_call(cuda):
    for seed in range(5):
        world = World(seed=seed)
        cuda.gather(world.plan()).synchronize()
        same(world.pool, world.stored(), f"the pool, {seed}")


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_25_another_device_than_the_current_one(kind, cuda):
    torch.cuda.set_device(0)
    world = World(kind, device="cuda:1")
    expected = world.stored()
    cuda.gather(world.plan()).synchronize()
    same(world.pool.cpu(), expected, "the pool")
    cuda.scatter(world.plan(world.slots.to("cuda:0"))).synchronize()
    same(world.memory.cpu(), world.pages, "the pages")
    assert torch.cuda.current_device() == 0


@on_gpu
@pytest.mark.parametrize("slots_on", ["cpu", "cuda"])
def test_37_a_chunk_is_overwritten_once_the_handle_is_done(slots_on, cuda, segments):
    world = World()
    world.pool.copy_(torch.arange(world.pool.numel()).view(world.pool.shape).to(torch.int16))
    expected = world.loaded()
    slots = world.slots.to(slots_on)
    busy(20)
    transfer = cuda.scatter(world.plan(slots))
    slots.fill_(0)  # the caller's buffer is used again
    while not transfer.done():
        pass
    world.wipe()
    torch.cuda.synchronize()
    same(world.memory.cpu(), expected, "the pages")


@on_gpu
def test_no_call_waits_on_the_host(cuda):
    """Behind a busy device, calls return long before it is idle."""
    world = World()
    for _ in range(2):
        cuda.gather(world.plan()).synchronize()
        cuda.scatter(world.plan()).synchronize()
    slots = world.slots.cuda()
    busy(300)
    marker = torch.cuda.Event()
    marker.record()
    transfers = [cuda.gather(world.plan(slots))]
    transfers[0].wait()
    transfers.append(cuda.scatter(world.plan()))
    transfers[1].wait()
    assert not marker.query()
    assert not transfers[0].done() and not transfers[1].done()
    for transfer in transfers:
        transfer.synchronize()


@on_gpu
def test_a_call_cannot_be_captured_and_spoils_no_later_one(cuda):
    world, near = World(), torch.ones(1, device="cuda")
    plan = world.plan()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(BackendError, match="CUDA graph"):
        near.zero_()
        cuda.gather(plan)
    cuda.gather(plan).synchronize()


@on_gpu
def test_memory_of_the_host_is_refused(cuda):
    with pytest.raises(BackendError, match="the KV cache is on cpu"):
        cuda.gather(World().plan(on_host=True))


# ------------------------------------------------------------------------------------------------ far addresses


@on_gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 12 << 30, reason="needs 12 GB"
)
def test_11_offsets_past_two_to_the_31(cuda):
    """uint8 MLA `[64000, 64, 576]` in the middle of a larger buffer: the last slot, and the guards on both sides."""
    length, guard = math.prod((64000, 64, 576)), 1 << 32
    buffer = torch.zeros(length + 2 * guard, dtype=torch.uint8, device="cuda")
    plane = buffer[guard : guard + length].view(64000, 64, 1, 576)
    chunk = torch.arange(576).to(torch.uint8).view(1, 1, 1, 576) | 1
    cache = PagedKVCache(((plane,),))
    slot = torch.tensor([64000 * 64 - 1], dtype=torch.int32)
    plan = TransferPlan.build(cache, slot, [chunk], fmt=MemoryFormat.KV_MLA_FMT)
    cuda.scatter(plan).synchronize()
    assert torch.equal(plane[-1, -1, 0].cpu(), chunk.flatten())
    assert int(buffer.count_nonzero()) == 576
    back = untouched(576, torch.uint8).view(1, 1, 1, 576)
    cuda.gather(TransferPlan.build(cache, slot, [back], fmt=MemoryFormat.KV_MLA_FMT)).synchronize()
    assert torch.equal(back, chunk)
