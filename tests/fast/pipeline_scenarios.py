"""What is done with the pipeline on a simulated device, one scenario a function, and checked at its end.

Which orders they run in, and what is left out of them, is `test_pipeline_order.py`; no test lives here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from pipeline_worlds import BS, CHUNK, FILL, NB, OTHERS, SLOTS, World, fill_chunks, same
from simulated import SimulatedDevice

from lmcache_fast.cuda import steps
from lmcache_fast.environment import ZERO_COPY_BYTES
from lmcache_ref.errors import SlotRangeError
from lmcache_ref.plan import TransferPlan


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


def load_all(world: World, plans: list[TransferPlan], begun: Callable[[], object] = lambda: None) -> None:
    """Load behind readers of the pages; later work sees the pages; done chunks are freed. begun: called once all loads
    are under way."""
    device = world.device
    old, seen, later = world.memory.clone(), torch.empty_like(world.memory), torch.empty_like(world.memory)
    device.work(lambda: seen.copy_(world.memory), [world.memory], [])
    expected = world.memory.clone()
    for plan in plans:
        expected = torch.where(world.scattered(plan) != world.memory, world.scattered(plan), expected)
    transfers = [world.load(plan) for plan in plans]
    begun()
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


def load_twice(device: SimulatedDevice) -> None:
    """Two loads at once, behind readers of the pages and writers of the chunks; later work sees the pages; done chunks are
    freed."""
    world = World(device)
    fill_chunks(world)
    load_all(world, [world.plan(0), world.plan(1, OTHERS)])


def load_rotated(device: SimulatedDevice) -> None:
    """Keys re-rotated on the way, behind readers of the pages and writers of the chunks, before later work; then chunks and
    positions are somebody else's. Chunks of both kinds; slots of the device."""
    world = World(device)
    fill_chunks(world)
    slots = SLOTS.clone()
    device.register(slots)
    device.device_tensors |= {slots.data_ptr(), *(chunk.data_ptr() for chunk in world.pools[1])}
    plans = [world.rotated_plan(0, slots), world.rotated_plan(1, OTHERS)]

    def overwrite_positions() -> None:
        for plan in plans:
            plan.rotation.old_positions.fill_(0)

    load_all(world, plans, overwrite_positions)
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


def the_same_slots_again(device: SimulatedDevice) -> None:
    """Calls of one segment each, by the same slots, which only the first one brings to the device; their memory may be
    somebody else's from its return on."""
    world = World(device, num_chunks=2)
    slots = SLOTS[: 2 * CHUNK].clone()
    plans = [world.plan(number, slots) for number in range(2)]
    final, old = world.memory + 1000, world.memory.clone()
    world.memory.copy_(final)
    expected = [world.gathered(plan, number) for number, plan in enumerate(plans)]
    world.memory.copy_(old)
    device.held = True  # else the first call may be done when the second one begins
    device.work(lambda: world.memory.copy_(final), [], [world.memory])
    transfers = [world.store(plans[0])]
    before, seen = world.pools[1].clone(), torch.empty_like(world.pools[1])
    device.work(lambda: seen.copy_(world.pools[1]), [world.pools[1]], [])
    transfers.append(world.store(plans[1]))
    slots.fill_(0)
    device.held = False
    for number, transfer in enumerate(transfers):
        while not transfer.done():
            pass
        same(device.host_reads(world.pools[number]), expected[number], f"pool {number}")
    same(seen, before, "what was read before")
    other = world.plan(0, OTHERS[: 2 * CHUNK])
    expected_of_others = world.gathered(other, 0)
    world.store(other).synchronize()
    same(device.host_reads(world.pools[0]), expected_of_others, "by other slots")
    device.finish()


def slots_on_the_device(device: SimulatedDevice) -> None:
    """Slots that the current stream makes before the call and overwrites after it; skipped rows stay; a bad one is named."""
    world = World(device)
    for number, bad in ((0, False), (1, True), (0, False)):  # a good one after a bad one: nothing of it is left
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


def by_upload(scenario: Callable[[SimulatedDevice], None]) -> Callable[[SimulatedDevice], None]:
    """The same calls when no slots travel with a launch."""

    def run(device: SimulatedDevice) -> None:
        with mock.patch.object(steps, "SLOTS_THAT_TRAVEL", 0):
            scenario(device)

    return run


STAGED = (store_twice, store_and_free, load_twice, load_rotated, store_then_load, load_by_slots_on_the_device)
OTHERS_TOO = (the_same_slots_again, slots_on_the_device, on_the_device, a_launch_that_fails)
SCENARIOS: dict[str, Callable[[SimulatedDevice], None]] = {
    **{scenario.__name__: by_upload(scenario) for scenario in (*STAGED, *OTHERS_TOO)},
    **{f"{scenario.__name__} by few slots": scenario for scenario in (*STAGED, on_the_device)},
    **{f"{scenario.__name__} by zero copy": by_zero_copy(scenario) for scenario in STAGED},
}
