"""Cases from the field, each with its whole kind: slots that are skipped or wrong, prefixes, chunks of any length.

They go through `VLLMPagedMemGPUConnectorV2`, with and without staging, on every device there is. What the engine's memory
looks like is in `test_cases_memory.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from engines import engine_of, first, loaded, new_object, on_devices, stored, use_gpu
from helpers import addressed, assert_same, untouched, words
from lmcache_ref.errors import ChunkError, SlotRangeError

__all__ = ["use_gpu"]


# Cases 14 and 15: prefixes and slots that are skipped


@on_devices
@pytest.mark.parametrize("cached", [0, 8, 9, 12, 15, 16, 20, None])
def test_case_14_a_prefix_of_the_engine_is_not_written(cached, use_gpu, device):
    """Chunk of tokens 8..15, BS 4: slots of tokens below `vllm_cached_tokens` keep the sentinel."""
    engine = engine_of(2, (2, 5, 4, 3, 8), None, {}, first(4))
    connector = engine.connector(torch.float16, use_gpu, device, chunk_size=8)
    obj = new_object(connector, 8, torch.float16)
    obj.raw_tensor.copy_(addressed(obj.get_size(), torch.uint8))
    slots = [*range(19, 11, -1), 3, 7, 0, 11, 9, 1, 8, 2]
    flat, expected = (untouched(engine.num_elements, torch.float16).to(device) for _ in range(2))
    for layer, kv, token in itertools.product(range(2), range(2), range(max(8, cached or 0), 16)):
        place = engine.token(engine.tensors(expected), layer, kv, slots[token])
        place[:] = obj.tensor[kv, layer, token - 8].view(3, 8).to(device)
    given = {} if cached is None else {"vllm_cached_tokens": cached}
    connector.to_gpu(obj, 8, 16, kvcaches=engine.tensors(flat), slot_mapping=torch.tensor(slots), **given)
    assert_same(flat, expected, "the engine's whole memory")


@on_devices
@pytest.mark.parametrize("slots_on", ["cpu", "device"])
@pytest.mark.parametrize(
    "slots", [[3, -1, 0, -1, 7], [-1, -1, -1, -1, -1], [-8, 5, -1, 4, -(2**40)], [-1, -1, -1, -1, 0]]
)
def test_case_15_negative_slots_are_skipped(slots, slots_on, use_gpu, device):
    """On load only the others are written; on store the rows of the skipped tokens stay as they were."""
    engine = engine_of(2, (2, 3, 4, 2, 8), None, {}, first(4))
    connector = engine.connector(torch.float16, use_gpu, device, chunk_size=2)
    obj = stored(engine, connector, addressed(engine.num_elements, torch.float16).to(device), slots, torch.float16)
    loaded(engine, connector, obj, slots, device)


@on_devices
@pytest.mark.parametrize("slot", [12, 13, 2**31, 2**32, 2**32 + 3, 2**62])
def test_case_15_a_slot_past_the_end(slot, use_gpu, device):
    engine = engine_of(2, (2, 3, 4, 2, 8), None, {}, first(4))
    connector = engine.connector(torch.float16, use_gpu, device, chunk_size=2)
    flat = addressed(engine.num_elements, torch.float16).to(device)
    before, obj = flat.clone(), new_object(connector, 4, torch.float16)
    for move in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(SlotRangeError, match=rf"slots\[2\] = {slot}: the cache has NB\*BS = 3\*4 = 12 slots"):
            move(obj, 0, 4, kvcaches=engine.tensors(flat), slot_mapping=torch.tensor([3, -1, slot, 0]))
    assert_same(flat, before, "the engine's memory")
    assert_same(obj.raw_tensor, untouched(obj.get_size(), torch.uint8), "the object")


# Cases 18 and 19: staging that is larger or smaller than a chunk, nothing at all


@on_devices
def test_case_18_a_partial_chunk_then_a_full_one_through_one_staging_buffer(device):
    """Staging for 8 tokens: objects of 3, 8, 1 and 19 tokens, with skipped rows, in one connector: nothing stale."""
    engine = engine_of(3, (2, 7, 4, 2, 8), None, {}, first(4))
    connector = engine.connector(torch.float16, True, device, chunk_size=8)
    for round_, tokens in enumerate((3, 8, 1, 19, 3, 8)):
        content = addressed(engine.num_elements, torch.float16, 1000 * round_).to(device)
        slots = [(slot * 5 + round_) % 28 if slot % 4 != 3 else -1 for slot in range(tokens)]
        obj = stored(engine, connector, content, slots, torch.float16)
        loaded(engine, connector, obj, slots, device)


@on_devices
def test_case_19_no_tokens_and_no_chunks(use_gpu, device):
    engine = engine_of(2, (2, 3, 4, 2, 8), None, {}, first(4))
    connector = engine.connector(torch.float16, use_gpu, device)
    flat = addressed(engine.num_elements, torch.float16).to(device)
    before = flat.clone()
    nothing = new_object(connector, 0, torch.float16)
    for slots in ([], [3, 5]):
        given = {"kvcaches": engine.tensors(flat), "slot_mapping": torch.tensor(slots, dtype=torch.int64)}
        for objects in ([], [nothing], [nothing, nothing]):
            spans = [0] * len(objects)
            connector.batched_from_gpu(objects, spans, spans, **given)
            connector.batched_to_gpu(objects, spans, spans, **given)
        connector.from_gpu(nothing, 0, 0, **given)
        connector.to_gpu(nothing, len(slots), len(slots), **given)
        with pytest.raises(ChunkError):
            connector.to_gpu(nothing, len(slots) + 1, len(slots) + 1, **given)
    some = new_object(connector, 2, torch.float16)
    full = {"kvcaches": engine.tensors(flat), "slot_mapping": torch.tensor([3, 5]), "vllm_cached_tokens": 2}
    connector.to_gpu(some, 0, 2, **full)
    assert_same(flat, before, "the engine's memory")
    assert words(some.tensor.reshape(-1)).unique().numel() == 1
