"""VLLMPagedMemGPUConnectorV2: batches, staging, references, and on a GPU the order of streams.

What is refused is in `test_vllm_v2.py`; layouts and cases are in `test_cases_*.py`.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from helpers import addressed, assert_same, untouched
from lmcache_ref.backends import register_backend, unregister_backend, use_backend
from lmcache_ref.errors import SlotError
from lmcache_ref.memory import PinMemoryAllocator
from lmcache_ref.rope import rerotate
from lmcache_ref.transfer import reference_gather, reference_scatter
from v2_bench import ENGINE, K2, SLOTS, connector, expected_object, half, memory

# Batches


@pytest.fixture
def counted():
    """A backend that moves as the reference does and records the spans of each call."""
    calls = []

    def counting(name, move):
        def counted_move(plan):
            calls.append((name, [(span.start, span.end) for span in plan.spans]))
            return move(plan)

        return counted_move

    operations = {"gather": counting("gather", reference_gather), "scatter": counting("scatter", reference_scatter)}
    register_backend("counting", SimpleNamespace(**operations, rerotate=rerotate))
    with use_backend("counting"):
        yield calls
    unregister_backend("counting")


SPANS = [(7, 10), (0, 2), (3, 3), (4, 5)]  # out of order, with gaps, one empty


def test_a_batch_is_one_backend_call(counted):
    made, flat = connector(), memory()
    objects = [half(end - start) for start, end in SPANS]
    given = {"kvcaches": ENGINE.tensors(flat), "slot_mapping": SLOTS}
    made.batched_from_gpu(objects, *zip(*SPANS, strict=True), **given)
    made.batched_to_gpu(objects, *zip(*SPANS, strict=True), **given)
    assert counted == [("gather", SPANS), ("scatter", SPANS)]
    assert_same(flat, memory(), "what was loaded where it came from")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
def test_chunks_in_any_order_with_gaps(staged, slots_dtype):
    """Each object holds its own tokens; loading them writes those slots and no others."""
    made = connector(use_gpu=staged, chunk_size=2, dtype=torch.float16, device="cpu")
    flat, objects = memory(), [half(end - start) for start, end in SPANS]
    starts, ends = map(list, zip(*SPANS, strict=True))
    slots = SLOTS.to(slots_dtype)
    made.batched_from_gpu(objects, starts, ends, kvcaches=ENGINE.tensors(flat), slot_mapping=slots)
    for obj, (start, end) in zip(objects, SPANS, strict=True):
        assert obj.metadata.fmt is K2
        if end > start:
            assert_same(
                obj.tensor.reshape(-1), expected_object(flat, SLOTS[start:end].tolist()), f"tokens {start}..{end}"
            )
    target, expected = (untouched(ENGINE.num_elements, torch.float16) for _ in range(2))
    for start, end in SPANS:
        for layer, kv, slot in itertools.product(range(2), range(2), SLOTS[start:end].tolist()):
            ENGINE.token(ENGINE.tensors(expected), layer, kv, slot)[:] = ENGINE.token(
                ENGINE.tensors(flat), layer, kv, slot
            )
    made.batched_to_gpu(objects, starts, ends, kvcaches=ENGINE.tensors(target), slot_mapping=slots)
    assert_same(target, expected, "the engine's whole memory")


def test_case_14_in_a_batch_the_prefix_is_the_request_s():
    """Chunks 0..4, 4..8, 8..10 and 6 cached tokens: the first is left out, the second written from token 6 on."""
    made, flat = connector(), memory()
    spans = [(0, 4), (4, 8), (8, 10)]
    starts, ends = map(list, zip(*spans, strict=True))
    objects = [half(end - start) for start, end in spans]
    made.batched_from_gpu(objects, starts, ends, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS)
    target, expected = (untouched(ENGINE.num_elements, torch.float16) for _ in range(2))
    for layer, kv, slot in itertools.product(range(2), range(2), SLOTS[6:].tolist()):
        ENGINE.token(ENGINE.tensors(expected), layer, kv, slot)[:] = ENGINE.token(ENGINE.tensors(flat), layer, kv, slot)
    given = {"kvcaches": ENGINE.tensors(target), "slot_mapping": SLOTS, "vllm_cached_tokens": 6}
    made.batched_to_gpu(objects, starts, ends, **given)
    assert_same(target, expected, "the engine's whole memory")


def test_the_staging_buffer_holds_chunk_size_tokens(counted):
    """Longer chunks go through it in parts; on the host's device too, so that it can be tested there."""
    made = connector(use_gpu=True, chunk_size=4, dtype=torch.float16, device="cpu")
    objects, given = [half(10), half(3)], {"kvcaches": ENGINE.tensors(memory()), "slot_mapping": SLOTS}
    made.batched_from_gpu(objects, [0, 2], [10, 5], **given)
    assert counted == [("gather", [span]) for span in ((0, 4), (4, 8), (8, 10), (2, 5))]


def test_the_backend_is_looked_up_at_every_call(counted):
    made, given = connector(), {"kvcaches": ENGINE.tensors(memory()), "slot_mapping": SLOTS}
    with use_backend("reference"):
        made.from_gpu(half(2), 0, 2, **given)
    assert counted == []
    made.from_gpu(half(2), 0, 2, **given)
    assert len(counted) == 1


@pytest.mark.parametrize("staged", [False, True])
def test_references_are_as_before_after_success_and_after_failure(staged):
    made = connector(use_gpu=staged, chunk_size=4, dtype=torch.float16, device="cpu")
    objects, given = [half(3), half(3)], {"kvcaches": ENGINE.tensors(memory()), "slot_mapping": SLOTS}
    for move in (made.batched_from_gpu, made.batched_to_gpu):
        move(objects, [0, 4], [3, 7], **given)
        with pytest.raises(SlotError):
            move(objects, [0, 4], [3, 7], **{**given, "slot_mapping": torch.full((10,), 20)})
        assert [obj.get_ref_count() for obj in objects] == [1, 1]


# On a GPU

LONG = 40_000_000  # cycles of a busy kernel: tens of milliseconds


@pytest.fixture
def on_cuda():
    """(the engine's memory on the device, one pinned object of three tokens, the connector's keywords)."""
    flat = memory().cuda()
    obj = PinMemoryAllocator(1 << 12).allocate([2, 2, 3, 24], torch.float16, K2)
    obj.raw_tensor.fill_(0xEE)
    return flat, obj, {"chunk_size": 2, "dtype": torch.float16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("slots_on", ["cpu", "cuda"])
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
def test_a_cuda_cache_and_a_pinned_object(on_cuda, staged, slots_on, slots_dtype):
    flat, obj, options = on_cuda
    made, slots = connector(use_gpu=staged, **options), SLOTS[:3].to(slots_on, slots_dtype)
    made.from_gpu(obj, 0, 3, kvcaches=ENGINE.tensors(flat), slot_mapping=slots)
    assert_same(obj.tensor.reshape(-1), expected_object(flat.cpu(), [5, 0, 19]), "the object, on return")
    target, expected = (untouched(ENGINE.num_elements, torch.float16).cuda() for _ in range(2))
    for layer, kv, slot in itertools.product(range(2), range(2), (5, 0, 19)):
        ENGINE.token(ENGINE.tensors(expected), layer, kv, slot)[:] = ENGINE.token(ENGINE.tensors(flat), layer, kv, slot)
    made.to_gpu(obj, 0, 3, kvcaches=ENGINE.tensors(target), slot_mapping=slots)
    assert_same(target, expected, "the engine's whole memory")


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_case_20_storing_sees_what_the_stream_still_writes(on_cuda, staged, own_stream):
    """A long kernel, then the write of the final values, then `from_gpu` at once: the object has the final values."""
    flat, obj, options = on_cuda
    final, made = memory(3000).cuda(), connector(use_gpu=staged, **options)
    made.from_gpu(obj, 0, 3, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS[:3])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        torch.cuda._sleep(LONG)
        flat.copy_(final)
        made.from_gpu(obj, 0, 3, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS[:3])
        assert_same(obj.tensor.reshape(-1), expected_object(final.cpu(), [5, 0, 19]), "the object, on return")


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_case_37_later_work_sees_what_was_loaded_from_an_object_released_at_once(staged, own_stream):
    """A busy stream, `to_gpu`, the object released and its memory overwritten if it can be had: the object's old bytes."""
    flat, source = memory().cuda(), addressed(2 * 2 * 3 * 24, torch.float16, 7000)
    made = connector(use_gpu=staged, chunk_size=2, dtype=torch.float16, device="cuda")
    pool = PinMemoryAllocator(source.nbytes)  # one object
    expected = flat.clone()
    theirs, rows = ENGINE.tensors(expected), source.view(2, 2, 3, 3, 8).cuda()
    for layer, kv, (row, slot) in itertools.product(range(2), range(2), enumerate((5, 0, 19))):
        ENGINE.token(theirs, layer, kv, slot)[:] = rows[kv, layer, row]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        for _ in range(3):
            obj = pool.allocate([2, 2, 3, 24], torch.float16, K2)
            obj.tensor.reshape(-1).copy_(source)
            torch.cuda._sleep(LONG)
            made.to_gpu(obj, 0, 3, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS[:3])
            after = flat.clone()
            obj.ref_count_down()
            again = pool.allocate([2, 2, 3, 24], torch.float16, K2)
            if again is not None:  # the copy is done already
                again.raw_tensor.fill_(0xEE)
                again.ref_count_down()
            torch.cuda.synchronize()
            assert_same(after, expected, "the cache, as later work on the stream sees it")
            flat.copy_(memory())
            made.from_gpu(half(1), 0, 1, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS)  # the next call lets it go
