"""Cases 20 to 25 and 37 on CUDA, for every connector: what a busy device, streams and several devices can upset.

Everything runs on the backend that is asked for and on the reference. Without a device it is skipped; the same rules are
tested anywhere by `test_ordering.py` on a backend that is late.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch

from drive import CONNECTORS, LAYERWISE, POOL_BYTES, Bench, Sizes, accepted_layouts
from helpers import assert_same, words
from lmcache_ref.backends import use_backend
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV3
from lmcache_ref.connectors.buffers import DeviceBuffers
from lmcache_ref.errors import SlotRangeError
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat, PinMemoryAllocator
from lmcache_ref.metadata import LMCacheMetadata
from steps import REQUESTS, SLOTS, Open, assert_nothing_is_left, assert_usable
from test_connector_matrix import PATTERNS, store_and_load

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAMES = [name for name in CONNECTORS if name != "mock"]  # its pages are host memory
SPANS = REQUESTS[0]
WAYS = [
    (name, use_gpu, reference)
    for name in NAMES
    for use_gpu in ([True] if CONNECTORS[name].blends else [False, True])
    for reference in (False, True)
]


def way_id(name, use_gpu, reference):
    return f"{name}-{'staged' if use_gpu else 'direct'}-{'reference' if reference else 'asked for'}"


every_way = pytest.mark.parametrize(("name", "use_gpu", "reference"), WAYS, ids=[way_id(*way) for way in WAYS])
streams = pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])


@contextmanager
def bench_on_gpu(name, use_gpu, reference, pinned=True, **options):
    """A bench whose engine is device memory and whose pool is pinned or pageable; the device is idle afterwards."""
    allocator = (PinMemoryAllocator if pinned else HostMemoryAllocator)(POOL_BYTES, align_bytes=64)
    with use_backend("reference") if reference else nullcontext():
        bench = Bench(name, use_gpu=use_gpu, sizes=Sizes(NH=3), device=DEVICE, allocator=allocator, **options)
        try:
            yield bench
        finally:
            torch.cuda.synchronize()


def on_stream(own_stream: bool):
    return torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def on_device(bench: Bench, logical: torch.Tensor) -> torch.Tensor:
    """The engine's flat buffer as it is when the cache holds `logical`, in device memory."""
    return bench.engine_holding(logical)[0].to(DEVICE)


def blank_request(bench: Bench) -> torch.Tensor:
    return bench.request_values(len(SLOTS)).fill_(bench.untouched_cache().view(-1)[0])


def check_engine(bench: Bench, logical: torch.Tensor, what: str) -> None:
    __tracebackhide__ = True
    assert_same(bench.engine[0], bench.engine_holding(logical)[0], what)


# The moves themselves


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_every_layout_in_device_memory(name, pinned):
    """The matrix again, with two chunk patterns, the slots on the host and the objects in either kind of host memory."""
    staging = [True] if CONNECTORS[name].blends else [False, True]
    for layout in accepted_layouts(name):
        for use_gpu, pattern in itertools.product(staging, ("ragged", "gaps")):
            with bench_on_gpu(name, use_gpu, False, pinned, layout=layout) as bench:
                store_and_load(bench, PATTERNS[pattern])


@every_way
def test_slots_on_the_device(name, use_gpu, reference):
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects, cache = bench.allocate(SPANS), bench.cache_values()
        for slots in (torch.tensor(SLOTS, device=DEVICE), torch.tensor(SLOTS, device=DEVICE, dtype=torch.int32)):
            bench.put_engine(cache)
            bench.put_objects(objects, blank_request(bench), SPANS)
            bench.store(objects, SPANS, slots)
            stored = bench.stored(cache, blank_request(bench), SPANS, SLOTS)
            assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, SPANS), "the pool")
            bench.put_engine(bench.untouched_cache())
            bench.load(objects, SPANS, slots)
            check_engine(bench, bench.loaded(bench.untouched_cache(), stored, SPANS, SLOTS), "the engine")


@every_way
def test_a_slot_out_of_range_on_the_device_is_an_error_and_the_next_request_works(name, use_gpu, reference):
    """It comes from the storing call; from the loading call, its next step or the next call. Nothing outside is touched."""
    bad = [*SLOTS[:4], 28, *SLOTS[5:]]
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects = bench.allocate(SPANS)
        guard = bench.engine_holding(bench.untouched_cache())[0]
        with pytest.raises(SlotRangeError):
            bench.store(objects, SPANS, torch.tensor(bad, device=DEVICE))
        bench.put_objects(objects, bench.request_values(len(SLOTS)), SPANS)
        with pytest.raises(SlotRangeError):
            bench.load(objects, SPANS, torch.tensor(bad, device=DEVICE))
            torch.cuda.synchronize()
            bench.load(objects, SPANS, torch.tensor(SLOTS, device=DEVICE))
        torch.cuda.synchronize()
        bench.connector.reap()
        changed = (words(bench.engine[0]) != words(guard)).sum()
        assert int(changed) <= 4 * bench.NL * bench.TWO * bench.NH * bench.sizes.HS
        for row in objects:
            for obj in row:
                obj.ref_count_down()
        assert_usable(bench)


# Streams


@every_way
@streams
def test_case_20_a_store_sees_what_a_long_kernel_wrote(name, use_gpu, reference, own_stream):
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects, cache = bench.allocate(SPANS), bench.cache_values()
        final = on_device(bench, cache)
        torch.cuda.synchronize()
        with on_stream(own_stream):
            busy(30)
            bench.engine[0].copy_(final)
            bench.store(objects, SPANS, torch.tensor(SLOTS))
        stored = bench.stored(cache, blank_request(bench), SPANS, SLOTS)
        assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, SPANS), "the pool, at once")


@every_way
@streams
def test_case_20_a_load_is_between_what_was_queued_before_and_after(name, use_gpu, reference, own_stream):
    """Earlier work of the current stream still sees the old slots, later work the new ones."""
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects, values, cache = bench.allocate(SPANS), bench.request_values(len(SLOTS)), bench.cache_values()
        bench.put_objects(objects, values, SPANS)
        bench.put_engine(cache)
        before, after = torch.empty_like(bench.engine[0]), torch.empty_like(bench.engine[0])
        torch.cuda.synchronize()
        with on_stream(own_stream):
            busy(30)
            before.copy_(bench.engine[0])
            bench.load(objects, SPANS, torch.tensor(SLOTS))
            after.copy_(bench.engine[0])
        torch.cuda.synchronize()
        assert_same(before, bench.engine_holding(cache)[0], "what was queued before")
        assert_same(after, bench.engine_holding(bench.loaded(cache, values, SPANS, SLOTS))[0], "what was queued after")


@every_way
def test_case_21_stores_into_pinned_memory_are_final_a_hundred_times_beside_a_busy_device(name, use_gpu, reference):
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects, slots = bench.allocate(SPANS), torch.tensor(SLOTS)
        caches = [bench.cache_values(5000 * i) for i in range(4)]
        sources = [on_device(bench, cache) for cache in caches]
        wanted = [
            bench.pool_holding(objects, bench.stored(cache, blank_request(bench), SPANS, SLOTS), SPANS)
            for cache in caches
        ]
        noise, other = torch.randn(1024, 1024, device=DEVICE), torch.cuda.Stream()
        torch.cuda.synchronize()
        for turn in range(100):
            with torch.cuda.stream(other):
                noise @ noise
                busy(0.5)
            bench.engine[0].copy_(sources[turn % 4])
            bench.store(objects, SPANS, slots)
            assert torch.equal(bench.allocator.pool, wanted[turn % 4]), f"turn {turn}"


@every_way
@streams
def test_case_22_stores_and_loads_of_two_requests_alternate_without_a_wait(name, use_gpu, reference, own_stream):
    spans, mappings = [(0, 3), (3, 5)], [[5, 0, 9, 27, 11], [2, 19, 8, 1, 26]]
    with bench_on_gpu(name, use_gpu, reference) as bench:
        cache = bench.cache_values()
        bench.put_engine(cache)
        objects, held = [bench.allocate(spans), bench.allocate(spans)], [None, None]
        with on_stream(own_stream):
            for turn in range(20):
                mine = turn % 2
                busy(0.5)
                bench.store(objects[mine], spans, torch.tensor(mappings[mine]))
                held[mine] = bench.stored(cache, blank_request(bench), spans, mappings[mine])
                if turn:
                    bench.load(objects[1 - mine], spans, torch.tensor(mappings[mine]))
                    cache = bench.loaded(cache, held[1 - mine], spans, mappings[mine])
            seen = bench.engine[0].clone()
        torch.cuda.synchronize()
        assert_same(seen, bench.engine_holding(cache)[0], "the engine")


@every_way
def test_case_23_a_new_list_of_caches_on_the_second_call(name, use_gpu, reference):
    with bench_on_gpu(name, use_gpu, reference) as bench:
        objects, values = bench.allocate(SPANS), bench.request_values(len(SLOTS))
        bench.put_objects(objects, values, SPANS)
        blank = bench.engine_holding(bench.untouched_cache())[0]
        bench.load(objects, SPANS, torch.tensor(SLOTS))
        first = bench.engine[0]
        bench.engine, bench.kvcaches = bench._engine()
        first.copy_(blank)
        bench.load(objects, SPANS, torch.tensor(SLOTS))
        check_engine(bench, bench.loaded(bench.untouched_cache(), values, SPANS, SLOTS), "the new caches")
        assert_same(first, blank, "the old caches")


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("way", ["close", "throw", "wrong objects"])
def test_case_24_left_in_the_middle_behind_a_busy_device(name, use_gpu, kind, way):
    with bench_on_gpu(name, use_gpu or name == "buffer", False) as bench:
        busy(20)
        opened = Open(bench, kind, SPANS).run(1 + bench.NL // 2)
        if way == "throw":
            with pytest.raises(ZeroDivisionError):
                opened.generator.throw(ZeroDivisionError())
        elif way == "wrong objects" and kind == "load":
            with pytest.raises(ValueError, match="no tensor"):
                opened.generator.send([None, None])
        else:
            opened.generator.close()
        torch.cuda.synchronize()
        bench.connector.reap()
        assert_nothing_is_left(opened)
        assert_usable(bench)


@every_way
@streams
def test_case_37_objects_are_overwritten_behind_a_busy_device(name, use_gpu, reference, own_stream):
    with bench_on_gpu(name, use_gpu, reference) as bench:
        cache = bench.cache_values()
        bench.put_engine(cache)
        objects, values = bench.allocate(SPANS), bench.request_values(len(SLOTS))
        bench.put_objects(objects, values, SPANS)
        torch.cuda.synchronize()
        with on_stream(own_stream):
            busy(30)
            bench.load(objects, SPANS, torch.tensor(SLOTS))
            for row in objects:
                for obj in row:
                    obj.ref_count_down()
            taken = []
            while (obj := bench.allocator.allocate([64], torch.uint8)) is not None:
                obj.raw_tensor.fill_(0x11)
                taken.append(obj)
            seen = bench.engine[0].clone()
        torch.cuda.synchronize()
        assert_same(seen, bench.engine_holding(bench.loaded(cache, values, SPANS, SLOTS))[0], "the engine")
        bench.connector.reap()
        bench.allocator.batched_free(taken)
        assert bench.allocator.free_bytes == bench.allocator.total_bytes


def test_a_connectors_buffer_passes_from_one_stream_to_the_next_in_order():
    buffers, first, second = DeviceBuffers(), torch.cuda.Stream(), torch.cuda.Stream()
    device, seen = torch.device(DEVICE, torch.cuda.current_device()), torch.zeros(1 << 20, device=DEVICE)
    with buffers.borrow([1 << 20], torch.float32, device):
        pass
    torch.cuda.synchronize()
    with torch.cuda.stream(first), buffers.borrow([1 << 20], torch.float32, device) as buffer:
        buffer.fill_(1)
        busy(30)
        seen.copy_(buffer)
        place = buffer.data_ptr()
    with torch.cuda.stream(second), buffers.borrow([1 << 20], torch.float32, device) as buffer:
        assert buffer.data_ptr() == place
        buffer.fill_(2)
    torch.cuda.synchronize()
    assert bool((seen == 1).all())


# Checks that are asked for


@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("direction", ["from_gpu", "to_gpu"])
def test_validation_finds_a_bad_slot_of_the_second_group_before_the_first_moves(monkeypatch, use_gpu, direction):
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    layers = [torch.zeros(shape, dtype=torch.float16, device=DEVICE) for shape in ((2, 4, 4, 2, 8), (2, 4, 8, 1, 8))]
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float16, (2, 2, 4, 2, 8))
    connector = VLLMPagedMemGPUConnectorV3(metadata, DEVICE, use_gpu)
    connector.initialize_kvcaches_ptr(kvcaches=layers)
    obj = PinMemoryAllocator(1 << 14).allocate(connector.get_shapes(3), metadata.get_dtypes(), MemoryFormat.KV_2LTD)
    obj.raw_tensor.fill_(7)
    slots = [torch.tensor([9, 0, 15], device=DEVICE), torch.tensor([31, 2, 32], device=DEVICE)]
    with pytest.raises(SlotRangeError):
        getattr(connector, direction)(obj, 0, 3, slot_mapping=slots)
    torch.cuda.synchronize()
    assert not any(bool(layer.any()) for layer in layers) and bool((obj.raw_tensor == 7).all())


# Several devices


@every_way
def test_case_25_caches_on_another_device_than_the_current_one(name, use_gpu, reference, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    monkeypatch.setattr("test_connectors_gpu.DEVICE", "cuda:1")
    before = torch.cuda.current_device()
    assert before == 0
    with bench_on_gpu(name, use_gpu, reference) as bench:
        for where in ("cpu", "cuda:0", "cuda:1"):
            objects, cache, slots = bench.allocate(SPANS), bench.cache_values(), torch.tensor(SLOTS, device=where)
            bench.put_engine(cache)
            bench.put_objects(objects, blank_request(bench), SPANS)
            torch.cuda.synchronize("cuda:1")
            bench.store(objects, SPANS, slots)
            stored = bench.stored(cache, blank_request(bench), SPANS, SLOTS)
            assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, SPANS), f"the pool, slots on {where}")
            bench.put_engine(bench.untouched_cache())
            bench.load(objects, SPANS, slots)
            torch.cuda.synchronize("cuda:1")
            check_engine(bench, bench.loaded(bench.untouched_cache(), stored, SPANS, SLOTS), f"slots on {where}")
            bench.connector.reap()
            for row in objects:
                for obj in row:
                    obj.ref_count_down()
        assert torch.cuda.current_device() == before
