"""Memory objects from allocation to release: references, pins, use after free, double free, and every bad argument.

What a live object's tensors are is in `test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcache_ref.errors import ArgumentError, DoubleFreeError, ObjectError, UseAfterFreeError
from lmcache_ref.memory import GPUMemoryAllocator, HostMemoryAllocator
from memory_pools import PAGE, U8, each_allocator, take

# Life cycle


def test_memory_returns_with_the_last_reference() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = take(allocator, 8)
    obj.ref_count_up()
    assert obj.get_ref_count() == 2 and not obj.can_evict
    obj.ref_count_down()
    assert obj.is_valid() and obj.can_evict and allocator.used_bytes == PAGE
    obj.ref_count_down()
    assert not obj.is_valid() and not obj.can_evict and obj.get_ref_count() == 0 and allocator.used_bytes == 0


def test_a_pin_keeps_the_memory() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = take(allocator, 8)
    obj.pin()
    obj.pin()
    obj.unpin()
    assert obj.is_pinned and not obj.can_evict
    obj.ref_count_down()
    assert obj.is_valid() and obj.raw_tensor.numel() == 8 and allocator.used_bytes == PAGE
    obj.unpin()
    assert not obj.is_valid() and not obj.is_pinned and allocator.used_bytes == 0 and allocator.memcheck()


def test_free_waits_for_other_holders() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = take(allocator, 8)
    obj.ref_count_up()
    allocator.free(obj)
    assert obj.is_valid() and obj.get_ref_count() == 1 and allocator.used_bytes == PAGE
    with pytest.raises(DoubleFreeError):
        allocator.free(obj)
    assert obj.get_ref_count() == 1
    obj.ref_count_down()
    assert not obj.is_valid() and allocator.used_bytes == 0


def test_use_after_free() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = take(allocator, 8)
    allocator.free(obj)
    uses = [lambda: obj.tensor, lambda: obj.raw_tensor, lambda: obj.get_tensor(0), obj.ref_count_up, obj.pin]
    for use in uses:
        with pytest.raises(UseAfterFreeError, match="was freed"):
            use()
    with pytest.raises(ObjectError, match="not pinned"):
        obj.unpin()
    again = take(allocator, 8)
    assert again.metadata.address == obj.metadata.address and not obj.is_valid()


def test_double_free() -> None:
    allocator = HostMemoryAllocator(2 * PAGE)
    freed, live = take(allocator, 8), take(allocator, 8)
    allocator.free(freed)
    for act in (lambda: allocator.free(freed), freed.ref_count_down, lambda: allocator.batched_free([live, freed])):
        with pytest.raises(DoubleFreeError):
            act()
    with pytest.raises(DoubleFreeError):
        allocator.batched_free([live, live])
    assert live.is_valid() and allocator.used_bytes == PAGE and allocator.memcheck()
    live.ref_count_down()
    with pytest.raises(DoubleFreeError):
        allocator.free(live)


def test_free_of_what_is_not_ours() -> None:
    ours, theirs = HostMemoryAllocator(PAGE), HostMemoryAllocator(PAGE)
    obj, foreign = take(ours, 8), take(theirs, 8)
    for objs in ([foreign], [obj, foreign], [obj, torch.zeros(8)], [None]):
        with pytest.raises(ObjectError, match="HostMemoryAllocator"):
            ours.batched_free(objs)
    with pytest.raises(ObjectError):
        ours.free(foreign)
    assert obj.is_valid() and foreign.is_valid()


# Bad arguments


BAD_CONSTRUCTIONS = {
    "negative size": ("size", dict(size=-1)),
    "fractional size": ("size", dict(size=1.5)),
    "no power of two": ("align_bytes", dict(size=8, align_bytes=48)),
    "too small an alignment": ("align_bytes", dict(size=8, align_bytes=8)),
    "alignment zero": ("align_bytes", dict(size=8, align_bytes=0)),
    "negative alignment": ("align_bytes", dict(size=8, align_bytes=-4096)),
    "fractional alignment": ("align_bytes", dict(size=8, align_bytes=64.0)),
}


@each_allocator
@pytest.mark.parametrize("name", BAD_CONSTRUCTIONS)
def test_bad_constructions(make: Callable, name: str) -> None:
    argument, kwargs = BAD_CONSTRUCTIONS[name]
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        make(**kwargs)


def test_unknown_device() -> None:
    with pytest.raises(ArgumentError, match=r"^device: 'gpu'"):
        GPUMemoryAllocator(8, device="gpu")


BAD_ALLOCATIONS = {
    "negative size": ("shapes", ([2, -1], U8)),
    "fractional size": ("shapes", ([2.0], U8)),
    "a number for a shape": ("shapes", (4, U8)),
    "shapes for one dtype": ("shapes", ([[4], [4]], U8)),
    "one shape for a list of dtypes": ("shapes", ([4], [U8])),
    "fewer dtypes": ("shapes, dtypes", ([[4], [4]], [U8])),
    "fewer shapes": ("shapes, dtypes", ([[4]], [U8, U8])),
    "no dtype": ("shapes, dtypes", ([4], None)),
    "a dtype's name": ("dtypes", ([[4]], ["uint8"])),
    "a format's name": ("fmt", ([4], U8, "KV_2LTD")),
    "a format's number": ("fmt", ([4], U8, 1)),
    "no format": ("fmt", ([4], U8, None)),
}


@pytest.mark.parametrize("name", BAD_ALLOCATIONS)
def test_bad_allocations(name: str) -> None:
    argument, args = BAD_ALLOCATIONS[name]
    allocator = HostMemoryAllocator(4 * PAGE)
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        allocator.allocate(*args)
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        allocator.batched_allocate(*args[:2], 2, *args[2:])
    assert allocator.used_bytes == 0


@pytest.mark.parametrize("batch_size", [-1, 1.0, None])
def test_bad_batch_size(batch_size: object) -> None:
    with pytest.raises(ArgumentError, match=r"^batch_size: "):
        HostMemoryAllocator(PAGE).batched_allocate([4], U8, batch_size)


@pytest.mark.parametrize("i", [-1, 1])
def test_bad_tensor_index(i: int) -> None:
    obj = take(HostMemoryAllocator(PAGE), 4)
    with pytest.raises(ArgumentError, match=f"^i: {i}; the object has 1 tensors"):
        obj.get_tensor(i)


@pytest.mark.parametrize("pool_in_mode", [False, True])
def test_a_tensor_first_seen_in_inference_mode_can_be_written_outside_it_and_inside(pool_in_mode):
    """vLLM's worker runs in that mode, the threads of the storage tiers do not; they see the same tensor."""
    with torch.inference_mode(pool_in_mode):
        allocator = HostMemoryAllocator(1 << 16)
    obj = allocator.allocate(torch.Size([2, 3]), torch.bfloat16)
    with torch.inference_mode():
        seen = obj.tensor
        seen.fill_(1)
    obj.tensor.fill_(2)
    obj.raw_tensor[:2].fill_(0)
    assert obj.tensor is seen
    with torch.inference_mode():
        obj.tensor.copy_(torch.full((2, 3), 3.0))
    assert seen.tolist() == [[3.0] * 3] * 2
