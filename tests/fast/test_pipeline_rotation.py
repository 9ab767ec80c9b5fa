"""Keys that are re-rotated on the way through the pipeline, on a simulated device: two launches in place of one.

Its order is a scenario of `test_pipeline_order.py`; bits on a GPU are `test_rotated_scatter.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_worlds import CHUNK_BYTES, SLOTS, World, same
from simulated import SimulatedDevice

from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref.errors import StrideError
from lmcache_ref.plan import ChunkSpan

KEYS, VALUES = "scatter_rotated_bfloat16_float32", "scatter_16"


def skipping() -> torch.Tensor:
    slots = SLOTS[:21].clone()
    slots[[0, 8, 9, 20]] = -1
    return slots


@pytest.mark.parametrize("skip", [0, 6])
@pytest.mark.parametrize("staging", [1, CHUNK_BYTES, 3 * CHUNK_BYTES, 1 << 20])
def test_any_staging_size(staging, skip, monkeypatch):
    """Segments that hold keys, values or both; rows skipped by slot and by prefix; without a rotation, no such kernel."""
    monkeypatch.setenv(STAGING_BYTES, str(staging))
    device = SimulatedDevice(staging)
    world = World(device, chunk_tokens=7, num_chunks=3)
    rotated, plain = world.rotated_plan(0, skipping(), skip), world.plan(0, skipping(), skip)
    expected, expected_plain = world.scattered(rotated), world.scattered(plain)
    assert not torch.equal(expected, expected_plain)
    for plan, pages, kernels in ((rotated, expected, {KEYS, VALUES}), (plain, expected_plain, {VALUES})):
        device.launches.clear()
        world.load(plan).synchronize()
        same(device.host_reads(world.memory), pages, "the pages")
        assert set(device.launches) == kernels
    device.finish()


@pytest.mark.parametrize(("chunk_tokens", "num_launches"), [(4, 3), (8, 3), (16, 6)])
def test_as_many_launches_as_there_are_planes_for(chunk_tokens, num_launches, monkeypatch):
    """Segments of a whole chunk, of the planes of keys or of values, of one plane."""
    monkeypatch.setenv(STAGING_BYTES, "1")  # a place is 256 bytes
    device = SimulatedDevice(2)
    world = World(device, chunk_tokens=chunk_tokens, num_chunks=3)
    plan = world.rotated_plan(0, torch.randperm(48)[: 3 * chunk_tokens])
    expected = world.scattered(plan)
    world.load(plan).synchronize()
    same(device.host_reads(world.memory), expected, "the pages")
    assert device.launches.count(KEYS) == device.launches.count(VALUES) == num_launches


@pytest.mark.parametrize("zero_copy", [0, 1 << 20])
def test_chunks_of_both_kinds_and_small_calls(zero_copy, monkeypatch):
    monkeypatch.setenv(ZERO_COPY_BYTES, str(zero_copy))
    device = SimulatedDevice(1)
    world = World(device)
    device.device_tensors |= {chunk.data_ptr() for chunk in world.pools[0][::2]}
    plan = world.rotated_plan(0)
    expected = world.scattered(plan)
    world.load(plan).synchronize()
    same(device.host_reads(world.memory), expected, "the pages")
    assert device.launches == [KEYS, VALUES] * 2


def test_keys_that_are_not_aligned_are_refused(monkeypatch):
    """A kernel that reaches host memory would read elements across their boundaries."""
    monkeypatch.setenv(ZERO_COPY_BYTES, str(1 << 20))
    device = SimulatedDevice(1)
    world = World(device)
    plan, before = world.rotated_plan(0), world.memory.clone()
    flat = torch.zeros(CHUNK_BYTES + 1, dtype=torch.uint8)
    odd = torch.frombuffer(flat.numpy(), dtype=torch.bfloat16, offset=1, count=CHUNK_BYTES // 2)
    span = ChunkSpan(odd.view(2, 2, 4, 1, 8), 0, 4)
    with pytest.raises(StrideError, match=r"rotation: keys of torch\.bfloat16 .* multiples of 1 byte"):
        world.load(replace(plan, spans=(span,)))
    same(device.host_reads(world.memory), before, "the pages")


def test_positions_changed_after_they_were_checked_are_not_followed():
    """Nor are they taken for a slot out of range: such a key stays, its value moves."""
    device = SimulatedDevice(1)
    world = World(device)
    slots = SLOTS.clone()
    device.register(slots)
    device.device_tensors.add(slots.data_ptr())
    plan = world.rotated_plan(0, slots)
    expected = world.scattered(plan)
    block, offset = divmod(int(slots[5]), 4)
    expected[:, 0, block, offset, :, :6] = world.memory[:, 0, block, offset, :, :6]
    plan.rotation.old_positions[5] = 1 << 40
    world.load(plan).synchronize()
    same(device.host_reads(world.memory), expected, "the pages")
