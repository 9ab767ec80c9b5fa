"""The order of the pipeline without a GPU: the very code of `lmcache_fast.cuda.pipeline` on a simulated device.

Results are compared with the reference under any order that streams and events allow; races are found whatever the order.
Each wait and each record of the pipeline is left out once, and that must be noticed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_scenarios import SCENARIOS
from pipeline_worlds import BS, CHUNK_BYTES, FILL, NB, OTHERS, SLOTS, World, same
from simulated import VERBS, Race, SimulatedDevice

from lmcache_fast.cuda import holdings, native, pipeline, steps
from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref.errors import BackendError, DuplicateSlotError, SlotRangeError
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan


@pytest.fixture(autouse=True)
def four_segments_fit(monkeypatch):
    monkeypatch.setenv(STAGING_BYTES, str(4 * CHUNK_BYTES))
    monkeypatch.delenv("LMCACHE_VALIDATE", raising=False)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_legal_order(name, seed):
    SCENARIOS[name](SimulatedDevice(seed))


# ------------------------------------------------------------------------------------------------ what is left out is missed


def uses_of(name: str) -> dict[str, list]:
    device = SimulatedDevice(0)
    SCENARIOS[name](device)
    return device.uses


def fails(name: str, left_out: tuple[str, int]) -> bool:
    """Whether a scenario notices, in one of a few orders."""
    for seed in range(6):
        try:
            SCENARIOS[name](SimulatedDevice(seed, left_out))
        except (AssertionError, pytest.fail.Exception):
            return True
    return False


@functools.cache
def missed(name: str) -> dict[tuple[str, int], bool]:
    """For each use of a verb whether leaving it out is noticed; uses without effect are not tried."""
    return {
        (verb, number): fails(name, (verb, number))
        for verb, uses in uses_of(name).items()
        for number, use in enumerate(uses)
        if not use.idle
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_leaving_out_any_wait_or_record_is_noticed(name):
    uses = uses_of(name)
    unnoticed = [uses[verb][number] for (verb, number), noticed in missed(name).items() if not noticed]
    assert not unnoticed, "\n".join(map(str, unnoticed))


def test_every_wait_and_record_in_the_code_was_left_out_once():
    """Each place of the pipeline where a verb stands had an effect in some scenario; in all, this many."""
    places, effective = set(), set()
    for name in SCENARIOS:
        for verb, uses in uses_of(name).items():
            for number, use in enumerate(uses):
                places.add(use.site)
                if (verb, number) in missed(name):
                    effective.add(use.site)
    assert effective == places
    source = "".join(Path(module.__file__).read_text() for module in (holdings, pipeline, steps))
    assert len(places) == sum(source.count(f".{verb}(") for verb in VERBS)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_chunk_freed_before_the_handle_is_done_is_found(direction):
    device = SimulatedDevice(0)
    world = World(device)
    getattr(world, direction)(world.plan(0))
    with pytest.raises(Race, match="host writes a tensor"):
        device.host_writes(world.pools[0], FILL)


def test_slots_of_the_host_are_checked_before_anything_moves():
    device = SimulatedDevice(0)
    world = World(device)
    bad = SLOTS.clone()
    bad[3] = NB * BS
    before = world.pools.clone(), world.memory.clone()
    for move in (world.store, world.load):
        with pytest.raises(SlotRangeError, match=r"slots\[3\] = 48"):
            move(world.plan(0, bad))
    assert set(device.launches) <= {"gather_16"}  # to staging, which nobody sees
    for memory, was in zip((world.pools, world.memory), before, strict=True):
        same(device.host_reads(memory), was, "what was refused")
    for move in (world.store, world.load):
        move(world.plan(0, bad, skip=4)).synchronize()  # nobody uses it
    assert device.launches.count("scatter_16") == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_slots_that_nobody_writes_to_are_looked_at_once(compiled, monkeypatch):
    """By the tensor, not by what is in it; in a cache that has fewer slots, and where some are negative, they are again."""
    monkeypatch.setattr(steps, "SLOTS_THAT_TRAVEL", 0)
    device = SimulatedDevice(0, library=native.load()[0] if compiled else None)
    world, compared = World(device), []
    monkeypatch.setattr(
        device, "same", lambda *a: compared.append(a) or SimulatedDevice.same(device, *a), raising=False
    )
    some = SLOTS.clone()
    some[::5] = -1
    for slots in (SLOTS, some):
        for pool in range(2):
            plan = replace(world.plan(pool, slots), slots_fixed=True)
            expected = world.gathered(plan, pool)
            world.store(plan).synchronize()
            same(device.host_reads(world.pools[pool]), expected, f"pool {pool}")
    assert len(compared) == 1  # SLOTS with `some`
    world.store(replace(world.plan(0, SLOTS), slots_fixed=True)).synchronize()
    cache = PagedKVCache(tuple(tuple(plane[: NB // 2] for plane in layer) for layer in world.cache.planes))
    smaller = TransferPlan.build(cache, SLOTS, list(world.pools[0]), fmt=MemoryFormat.KV_2LTD)
    with pytest.raises(SlotRangeError, match=rf"the cache has NB\*BS = {NB // 2}\*{BS} = "):
        world.store(replace(smaller, slots_fixed=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_bad_slot_in_a_call_that_fails_is_not_the_next_call_s(direction, compiled):
    """The kernel has found it when a later launch of the call fails; the next call, in the same block, is a good one."""
    device = SimulatedDevice(0, library=native.load()[0] if compiled else None)
    world = World(device)
    bad = SLOTS.clone()
    bad[0] = NB * BS
    for slots in (bad, SLOTS):
        device.device_tensors.add(slots.data_ptr())
        device.register(slots)
    device.launches_left = 2
    with pytest.raises(RuntimeError, match="this launch fails"):
        getattr(world, direction)(world.plan(0, bad))
    device.launches_left = None
    getattr(world, direction)(world.plan(1)).synchronize()
    lane = world.engine.lanes["gather" if direction == "store" else "scatter"]
    assert len(lane._blocks._free) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_slots_are_on_their_way_while_the_current_stream_is_busy(on_device, compiled, monkeypatch):
    monkeypatch.setattr(steps, "SLOTS_THAT_TRAVEL", 0)
    device = SimulatedDevice(0, library=native.load()[0] if compiled else None, held=True)
    world = World(device)
    if on_device:
        device.device_tensors |= {chunk.data_ptr() for pool in world.pools for chunk in pool}
    device.work(lambda: None, [], [world.memory])
    busy = device.masks[device.current()]
    world.store(world.plan(0))
    copy, *more = device.queues[world.engine.lanes["gather"]._streams[-1]]
    assert copy.label.startswith("copy") and not more and not copy.before & busy
    others = [operation for stream, queue in device.queues.items() if stream for operation in queue]
    assert on_device or all(other.before & busy for other in others if other is not copy)
    device.finish()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_launch_that_fails_on_the_current_stream(compiled, monkeypatch):
    """What it had brought to the device has arrived when the next call writes to the same block."""
    monkeypatch.setattr(steps, "SLOTS_THAT_TRAVEL", 0)
    device = SimulatedDevice(0, library=native.load()[0] if compiled else None)
    world = World(device)
    device.device_tensors |= {chunk.data_ptr() for pool in world.pools for chunk in pool}
    expected = world.gathered(world.plan(1, OTHERS), 1)
    device.held, device.launches_left = True, 0
    with pytest.raises(RuntimeError, match="this launch fails"):
        world.store(world.plan(0))
    device.launches_left = None
    world.store(world.plan(1, OTHERS)).synchronize()
    same(device.host_reads(world.pools[1]), expected, "the next call's pool")
    lane = world.engine.lanes["gather"]
    assert not lane._blocks._free and lane._kept, "the only block has the slots of the second call"


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("pageable", [False, True])
@pytest.mark.parametrize("skip", [0, 6])
@pytest.mark.parametrize("staging", [1, CHUNK_BYTES, 3 * CHUNK_BYTES, 1 << 20])
def test_skipped_rows_and_any_staging_size(staging, skip, pageable, direction, monkeypatch):
    """Chunks whole and cut between tokens, rows skipped by slot and by prefix, memory that kernels reach or not."""
    monkeypatch.setenv(STAGING_BYTES, str(staging))
    device = SimulatedDevice(staging)
    world = World(device, chunk_tokens=7, num_chunks=3)
    if pageable:
        device.pageable.append((world.pools.data_ptr(), world.pools.data_ptr() + world.pools.nbytes))
    slots = SLOTS[:21].clone()
    slots[[0, 8, 9, 20]] = -1
    plan = world.plan(0, slots, skip)
    if direction == "store":
        expected, found = world.gathered(plan, 0), world.pools[0]
    else:
        expected, found = world.scattered(plan), world.memory
    getattr(world, direction)(plan).synchronize()
    same(device.host_reads(found), expected, direction)
    device.finish()
    assert any(launch.startswith("keep") for launch in device.launches) == (direction == "store" and not pageable)


@pytest.mark.parametrize("pageable", range(6))
def test_skipped_rows_of_chunks_some_of_which_kernels_cannot_reach(pageable):
    """One chunk of pageable memory among others, in the first segment or in a later one."""
    device = SimulatedDevice(pageable)
    world = World(device)
    chunk = world.pools[0][pageable]
    device.pageable.append((chunk.data_ptr(), chunk.data_ptr() + chunk.nbytes))
    slots = SLOTS.clone()
    slots[::3] = -1
    plan = world.plan(0, slots)
    expected = world.gathered(plan, 0)
    world.store(plan).synchronize()
    same(device.host_reads(world.pools[0]), expected, "the pool")


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("zero_copy", [0, 1 << 20])
def test_chunks_of_both_kinds_and_small_calls(zero_copy, direction, monkeypatch):
    monkeypatch.setenv(ZERO_COPY_BYTES, str(zero_copy))
    device = SimulatedDevice(1)
    world = World(device)
    device.device_tensors |= {chunk.data_ptr() for chunk in world.pools[0][::2]}
    plan = world.plan(0)
    if direction == "store":
        expected, found = world.gathered(plan, 0), world.pools[0]
    else:
        expected, found = world.scattered(plan), world.memory
    transfer = getattr(world, direction)(plan)
    transfer.wait()
    transfer.synchronize()
    assert transfer.done()
    same(device.host_reads(found), expected, direction)
    assert len(device.launches) == (2 if zero_copy else 3)


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_of_two_kinds_of_chunks_one_bad_slot_does_not_spare_the_other_kind(how):
    """All chunks are the caller's again when the error comes, and no later call hears of it."""
    device = SimulatedDevice(0, held=True)
    world = World(device)
    bad = SLOTS.clone()
    bad[1], bad[-1] = NB * BS, NB * BS + 5
    device.register(bad)
    device.device_tensors |= {chunk.data_ptr() for chunk in world.pools[0][:3]} | {bad.data_ptr()}
    transfer = world.store(world.plan(0, bad))
    if how == "wait":
        device.finish()
    with pytest.raises(SlotRangeError, match=r"slots\[1\] = 48"):
        getattr(transfer, how)()
    device.host_writes(world.pools[0], 1)
    world.store(world.plan(1)).synchronize()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_where_the_second_kind_of_chunks_cannot_begin_the_first_is_waited_for(direction):
    device = SimulatedDevice(0, held=True)
    world = World(device)
    device.device_tensors |= {chunk.data_ptr() for chunk in world.pools[0][:3]}
    device.launches_left = 1
    with pytest.raises(RuntimeError, match="this launch fails"):
        getattr(world, direction)(world.plan(0))
    device.launches_left = None
    device.host_writes(world.pools[0], 1)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_nothing_of_a_call_is_captured_in_a_graph_and_the_next_call_runs(direction):
    device = SimulatedDevice(0, capturing=True)
    world = World(device)
    with pytest.raises(BackendError, match="CUDA graph"):
        getattr(world, direction)(world.plan(0))
    assert not device.launches
    device.capturing = False
    getattr(world, direction)(world.plan(0)).synchronize()


def test_duplicates_are_found_when_asked_for(monkeypatch):
    world = World(SimulatedDevice(0))
    twice = SLOTS.clone()
    twice[5] = twice[0]
    world.load(world.plan(0, twice)).synchronize()
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    with pytest.raises(DuplicateSlotError):
        world.load(world.plan(0, twice))


def test_pageable_memory_is_said_once(caplog):
    pipeline._say_that_memory_is_pageable.cache_clear()
    device = SimulatedDevice(0)
    world = World(device)
    device.pageable.append((world.pools.data_ptr(), world.pools.data_ptr() + world.pools.nbytes))
    for _ in range(2):
        world.store(world.plan(0)).synchronize()
    assert [record.message for record in caplog.records if "pageable" in record.message] == [
        "chunks in pageable host memory: copies are slower and make the host wait; PinMemoryAllocator pins"
    ]


def test_released_staging_is_taken_again():
    world = World(SimulatedDevice(0))
    expected = world.gathered(world.plan(0), 0)
    world.store(world.plan(1))
    lane = world.engine.lanes["gather"]
    lane.release()
    assert lane._ring is None
    world.store(world.plan(0)).synchronize()
    same(world.device.host_reads(world.pools[0]), expected, "the pool")


def test_descriptor_blocks_and_transfers_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(steps, "SLOTS_THAT_TRAVEL", 0)
    world = World(SimulatedDevice(0))
    for _ in range(5):
        world.store(world.plan(0)).synchronize()
    lane = world.engine.lanes["gather"]
    assert len(lane._under_way) == 1
    blocks = {id(block) for block in (lane._kept.block, *lane._blocks._free)}
    assert len(blocks) == 1  # the slots are kept in it
    for skip in (1, 2):
        world.store(world.plan(0, SLOTS.roll(skip))).synchronize()
    assert len(lane._blocks._free) == 1
