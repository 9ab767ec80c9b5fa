"""The order of the pipeline without a GPU: the very code of `lmcache_fast.cuda.pipeline` on a simulated device.

Results are compared with the reference under any order that streams and events allow; races are found whatever the order.
Each wait and each record of the pipeline is left out once, and that must be noticed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_worlds import BS, CHUNK_BYTES, FILL, NB, OTHERS, SLOTS, World, fill_chunks, same
from simulated import VERBS, Race, SimulatedDevice

from lmcache_fast.cuda import holdings, pipeline
from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref.errors import DuplicateSlotError, SlotRangeError


@pytest.fixture(autouse=True)
def four_segments_fit(monkeypatch):
    monkeypatch.setenv(STAGING_BYTES, str(4 * CHUNK_BYTES))
    monkeypatch.delenv("LMCACHE_VALIDATE", raising=False)


# ------------------------------------------------------------------------------------------------ scenarios


def store_twice(device: SimulatedDevice) -> None:
    """Two stores at once see what the current stream wrote; later work may overwrite pages and chunks."""
    world = World(device)
    final = world.memory + 1000
    device.work(lambda: world.memory.copy_(final), [], [world.memory])
    plans = [world.plan(0), world.plan(1, OTHERS)]
    transfers = [world.store(plan) for plan in plans]
    seen = [torch.empty_like(pool) for pool in world.pools]
    for transfer, pool, copy in zip(transfers, world.pools, seen, strict=True):
        transfer.wait()
        device.work(functools.partial(copy.copy_, pool), [pool], [])
    device.work(lambda: world.memory.fill_(FILL), [], [world.memory])
    device.finish()
    world.memory.copy_(final)
    for i, plan in enumerate(plans):
        same(seen[i], world.gathered(plan, i), f"pool {i}")


def store_and_free(device: SimulatedDevice) -> None:
    """Final bytes when the handle is done; then the chunks' memory is somebody else's."""
    world = World(device)
    for number in range(2):
        plan = world.plan(number)
        expected = world.gathered(plan, number)
        transfer = world.store(plan)
        if number:
            transfer.synchronize()
        while not transfer.done():
            pass
        same(device.host_reads(world.pools[number]), expected, f"pool {number}")
        device.host_writes(world.pools[number], FILL)
    device.finish()
    assert bool((world.pools.view(torch.uint8) == FILL).all()), "a copy came after the end"


def load_twice(device: SimulatedDevice) -> None:
    """Two loads at once, behind readers of the pages and writers of the chunks; later work sees the pages; done chunks are
    freed."""
    world = World(device)
    fill_chunks(world)
    old, seen, later = world.memory.clone(), torch.empty_like(world.memory), torch.empty_like(world.memory)
    device.work(lambda: seen.copy_(world.memory), [world.memory], [])
    plans = [world.plan(0), world.plan(1, OTHERS)]
    expected = world.memory.clone()
    for plan in plans:
        expected = torch.where(world.scattered(plan) != world.memory, world.scattered(plan), expected)
    transfers = [world.load(plan) for plan in plans]
    for transfer in transfers:
        transfer.wait()
    device.work(lambda: later.copy_(world.memory), [world.memory], [])
    for transfer, pool in zip(transfers, world.pools, strict=True):
        while not transfer.done():
            pass
        device.host_writes(pool, FILL)
    device.finish()
    same(seen, old, "what was read before")
    same(later, expected, "what was read after")


def load_rotated(device: SimulatedDevice) -> None:
    """Keys re-rotated on the way, behind readers of the pages and writers of the chunks, before later work; then chunks and
    positions are somebody else's. Chunks of both kinds; slots of the device."""
    world = World(device)
    fill_chunks(world)
    slots = SLOTS.clone()
    device.register(slots)
    device.device_tensors |= {slots.data_ptr(), *(chunk.data_ptr() for chunk in world.pools[1])}
    old, seen, later = world.memory.clone(), torch.empty_like(world.memory), torch.empty_like(world.memory)
    device.work(lambda: seen.copy_(world.memory), [world.memory], [])
    plans = [world.rotated_plan(0, slots), world.rotated_plan(1, OTHERS)]
    expected = world.memory.clone()
    for plan in plans:
        expected = torch.where(world.scattered(plan) != world.memory, world.scattered(plan), expected)
    transfers = [world.load(plan) for plan in plans]
    for plan in plans:
        plan.rotation.old_positions.fill_(0)
    for transfer in transfers:
        transfer.wait()
    device.work(lambda: later.copy_(world.memory), [world.memory], [])
    for transfer, pool in zip(transfers, world.pools, strict=True):
        while not transfer.done():
            pass
        device.host_writes(pool, FILL)
    device.finish()
    same(seen, old, "what was read before")
    same(later, expected, "what was read after")
    assert device.launches.count("scatter_rotated_bfloat16_float32") >= 2


def store_then_load(device: SimulatedDevice) -> None:
    """A load of the chunks that a store has just filled, ordered by `wait` alone; then the other way round."""
    world = World(device)
    rows = world.gathered(world.plan(0), 0)
    world.store(world.plan(0)).wait()
    world.load(world.plan(0, OTHERS)).wait()
    world.store(world.plan(1, OTHERS)).synchronize()
    same(device.host_reads(world.pools[1]), rows, "the bytes that went round")
    device.finish()


def slots_on_the_device(device: SimulatedDevice) -> None:
    """Slots that the current stream makes before the call and overwrites after it; skipped rows stay; a bad one is named."""
    world = World(device)
    for number, bad in enumerate((False, True)):
        wanted = SLOTS.clone()
        wanted[[1, 6, 7]] = -1
        slots = torch.zeros_like(SLOTS)
        device.register(slots)
        device.device_tensors.add(slots.data_ptr())
        plan = world.plan(number, slots)
        expected = world.gathered(world.plan(number, wanted), number)
        if bad:
            wanted[7] = NB * BS
        device.work(functools.partial(slots.copy_, wanted), [], [slots])
        transfer = world.store(plan)
        device.work(functools.partial(slots.fill_, 0), [], [slots])
        if bad:
            with pytest.raises(
                SlotRangeError, match=rf"^slots\[7\] = {NB * BS}: the cache has NB\*BS = 12\*4 = 48 slots$"
            ):
                transfer.synchronize()
            assert transfer.done()
            transfer.synchronize()  # said once
        else:
            while not transfer.done():
                pass
            transfer.synchronize()
        same(device.host_reads(world.pools[number]), expected, f"pool {number}")
    assert any(launch.startswith("keep") for launch in device.launches)
    device.finish()


def load_by_slots_on_the_device(device: SimulatedDevice) -> None:
    """The same for a load; the error comes with the next call when nobody asked."""
    world = World(device)
    fill_chunks(world)
    wanted = SLOTS.clone()
    wanted[[1, 6, 7]] = -1
    expected = world.scattered(world.plan(0, wanted))
    wanted[7] = NB * BS + 5
    slots = torch.zeros_like(SLOTS)
    device.register(slots)
    device.device_tensors.add(slots.data_ptr())
    device.work(functools.partial(slots.copy_, wanted), [], [slots])
    transfer = world.load(world.plan(0, slots))
    device.work(functools.partial(slots.fill_, 0), [], [slots])
    while not transfer.done():
        pass
    with pytest.raises(SlotRangeError, match=r"^slots\[7\] = 53: the cache has"):
        world.load(world.plan(1, OTHERS))
    same(device.host_reads(world.memory), expected, "the pages")
    device.host_writes(world.pools[0], FILL)
    device.finish()


def on_the_device(device: SimulatedDevice) -> None:
    """Device chunks: one launch on the current stream; another stream waits for it; done means done."""
    world = World(device)
    for pool in world.pools:
        device.device_tensors |= {chunk.data_ptr() for chunk in pool}
    expected = [world.gathered(world.plan(i), i) for i in range(2)]
    device.stream = device.new_stream()
    transfer, second = (world.store(world.plan(i)) for i in range(2))
    device.stream = 0
    transfer.wait()
    seen = torch.empty_like(expected[0])
    device.work(lambda: seen.copy_(world.pools[0]), [world.pools[0]], [])
    while not second.done():
        pass
    same(device.host_reads(world.pools[1]), expected[1], "the chunks of the second")
    device.finish()
    same(seen, expected[0], "the chunks of the first")


def a_launch_that_fails(device: SimulatedDevice) -> None:
    """The third segment of a call cannot be launched: the error comes when nothing uses the caller's memory any more, and the
    next call works."""
    world = World(device)
    for direction in (world.store, world.load):
        device.launches_left = 2
        with pytest.raises(RuntimeError, match="this launch fails"):
            direction(world.plan(0))
        device.host_writes(world.pools[0], FILL)
        device.host_writes(world.memory, FILL)
    device.launches_left = None
    plan = world.plan(1)
    world.store(plan).synchronize()
    same(device.host_reads(world.pools[1]), world.gathered(plan, 1), "the next call's pool")
    device.finish()
    assert bool((world.pools[0].view(torch.uint8) == FILL).all()), "a copy came after the error"


def by_zero_copy(scenario: Callable[[SimulatedDevice], None]) -> Callable[[SimulatedDevice], None]:
    """The same calls when kernels reach host memory."""

    def run(device: SimulatedDevice) -> None:
        with mock.patch.dict(os.environ, {ZERO_COPY_BYTES: str(1 << 20)}):
            scenario(device)
        assert not any(launch.startswith("keep") for launch in device.launches)

    return run


STAGED = (store_twice, store_and_free, load_twice, load_rotated, store_then_load, load_by_slots_on_the_device)
OTHERS_TOO = (slots_on_the_device, on_the_device, a_launch_that_fails)
SCENARIOS: dict[str, Callable[[SimulatedDevice], None]] = {
    **{scenario.__name__: scenario for scenario in (*STAGED, *OTHERS_TOO)},
    **{f"{scenario.__name__} by zero copy": by_zero_copy(scenario) for scenario in STAGED},
}


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
    source = "".join(Path(module.__file__).read_text() for module in (holdings, pipeline))
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


def test_descriptor_blocks_and_transfers_do_not_pile_up():
    world = World(SimulatedDevice(0))
    for _ in range(5):
        world.store(world.plan(0)).synchronize()
    lane = world.engine.lanes["gather"]
    assert len(lane._under_way) == 1
    assert len(lane._blocks._free) == 1
