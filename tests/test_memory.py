"""Memory objects and their pools: views, sizes, alignment, first fit, and a pool that is full or closed.

Life cycle and errors, page-locking, and the free list have files of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcache_ref.errors import ObjectError, UseAfterFreeError
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat
from memory_pools import PAGE, each_allocator, take

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# Views and sizes


def test_format_values() -> None:
    values = {fmt.name: fmt.value for fmt in MemoryFormat}
    assert values == {"UNDEFINED": 0, "KV_2LTD": 1, "KV_T2D": 2, "KV_2TD": 3, "KV_MLA_FMT": 4, "BINARY": 5}


@each_allocator
def test_new_object(make: Callable) -> None:
    allocator = make(4 * PAGE)
    obj = allocator.allocate(torch.Size([2, 3, 5, 8]), torch.bfloat16)
    assert obj.get_shape() == torch.Size([2, 3, 5, 8]) and obj.metadata.shapes == [obj.get_shape()]
    assert obj.get_dtype() is torch.bfloat16 and obj.metadata.dtypes == [torch.bfloat16]
    assert obj.get_memory_format() is obj.metadata.fmt is MemoryFormat.KV_2LTD
    assert obj.get_size() == 2 * 3 * 5 * 8 * 2 and obj.get_physical_size() == obj.metadata.phy_size == PAGE
    assert obj.get_ref_count() == obj.metadata.ref_count == 1
    assert obj.metadata.pin_count == 0 and obj.metadata.cached_positions is None
    assert obj.is_valid() and obj.can_evict and not obj.is_pinned
    assert obj.tensor.shape == obj.get_shape() and obj.tensor.dtype is torch.bfloat16
    assert obj.tensor.device.type == allocator.pool.device.type
    assert obj.raw_tensor.shape == (obj.get_size(),) and obj.raw_tensor.dtype is torch.uint8
    assert (allocator.total_bytes, allocator.used_bytes, allocator.free_bytes) == (4 * PAGE, PAGE, 3 * PAGE)


@each_allocator
def test_tensors_are_views_of_the_pool(make: Callable) -> None:
    allocator = make(3 * PAGE)
    allocator.pool.fill_(0xEE)
    take(allocator, 1)
    obj = allocator.allocate([2, 3], torch.int16)
    obj.tensor[1, 2] = 0x0102
    expected = torch.full((3 * PAGE,), 0xEE, dtype=torch.uint8)
    expected[PAGE + 10 : PAGE + 12] = torch.tensor([2, 1], dtype=torch.uint8)
    assert torch.equal(allocator.pool.cpu(), expected)
    obj.raw_tensor.fill_(7)
    expected[PAGE : PAGE + 12] = 7
    assert torch.equal(allocator.pool.cpu(), expected)
    assert torch.equal(obj.tensor.cpu(), torch.full((2, 3), 0x0707, dtype=torch.int16))


def test_every_dtype() -> None:
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool, torch.complex128} < DTYPES
    tried = 0
    for dtype in DTYPES:
        allocator = HostMemoryAllocator(PAGE, align_bytes=16)
        take(allocator, 1)  # the next object starts at 16, a multiple of no more than the widest dtype
        obj = allocator.allocate([2, 3], dtype)
        assert obj.metadata.address == 16 and obj.get_size() == 6 * dtype.itemsize
        assert obj.tensor.dtype is dtype and obj.tensor.shape == (2, 3)
        assert obj.tensor.data_ptr() == allocator.pool.data_ptr() + 16
        assert obj.tensor.untyped_storage().data_ptr() == allocator.pool.untyped_storage().data_ptr()
        tried += 1
    assert tried == len(DTYPES) >= 20


def test_all_byte_values_survive_fp8() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = allocator.allocate([256], torch.float8_e4m3fn)
    obj.raw_tensor.copy_(torch.arange(256, dtype=torch.uint8))
    assert torch.equal(obj.tensor.view(torch.uint8), torch.arange(256, dtype=torch.uint8))


def test_tensors_are_packed_without_gaps() -> None:
    """MLA rows of 576 bf16 beside an indexer's 132 bytes, three layers each, five tokens."""
    obj = HostMemoryAllocator(8 * PAGE).allocate([[1, 3, 5, 576], [1, 3, 5, 132]], [torch.bfloat16, torch.uint8])
    assert obj.get_size() == 3 * 5 * (1152 + 132)
    latent, indexer = obj.get_tensor(0), obj.get_tensor(1)
    assert latent.shape == (1, 3, 5, 576) and indexer.shape == (1, 3, 5, 132)
    obj.raw_tensor.fill_(0)
    latent.view(torch.uint8).fill_(1)
    indexer.fill_(2)
    expected = torch.tensor([1, 2], dtype=torch.uint8).repeat_interleave(torch.tensor([3 * 5 * 1152, 3 * 5 * 132]))
    assert torch.equal(obj.raw_tensor, expected)
    assert torch.equal(obj.tensor.view(torch.uint8), latent.view(torch.uint8))


def test_padding_only_where_a_wider_dtype_needs_it() -> None:
    shapes, dtypes = [[3], [5], [2], [1], [0, 4]], [torch.uint8] * 2 + [torch.bfloat16, torch.float32, torch.int64]
    obj = HostMemoryAllocator(PAGE).allocate(shapes, dtypes)
    offsets = [obj.get_tensor(i).data_ptr() - obj.raw_tensor.data_ptr() for i in range(4)]
    assert offsets == [0, 3, 8, 12] and obj.get_size() == 16
    obj.raw_tensor.fill_(0xEE)
    for i in range(5):
        obj.get_tensor(i).view(torch.uint8).fill_(i)
    assert obj.raw_tensor.tolist() == [0] * 3 + [1] * 5 + [2] * 4 + [3] * 4
    padded = HostMemoryAllocator(PAGE).allocate([[3], [1]], [torch.uint8, torch.float32])
    assert padded.get_size() == 8
    padded.raw_tensor.fill_(0xEE)
    padded.get_tensor(0).fill_(1)
    padded.get_tensor(1).fill_(0.0)
    assert padded.raw_tensor.tolist() == [1] * 3 + [0xEE] + [0] * 4


@each_allocator
def test_zero_tokens(make: Callable) -> None:
    allocator = make(PAGE)
    full = take(allocator, PAGE)
    empty = allocator.allocate([[2, 3, 0, 8], [1, 3, 0, 4]], [torch.bfloat16, torch.uint8])
    assert empty.tensor.shape == (2, 3, 0, 8) and empty.get_tensor(1).shape == (1, 3, 0, 4)
    assert empty.get_size() == empty.get_physical_size() == empty.raw_tensor.numel() == 0
    assert allocator.used_bytes == PAGE and allocator.memcheck()
    allocator.free(empty)
    assert allocator.used_bytes == PAGE and allocator.memcheck() and not empty.is_valid()
    with pytest.raises(UseAfterFreeError):
        _ = empty.tensor
    allocator.free(full)
    assert allocator.free_bytes == PAGE


def test_object_without_tensors() -> None:
    allocator = HostMemoryAllocator(PAGE)
    obj = allocator.allocate([], [], MemoryFormat.UNDEFINED)
    assert obj.tensor is None and obj.raw_tensor.numel() == obj.get_size() == 0
    assert obj.get_shape() == torch.Size([0]) and obj.get_dtype() is torch.uint8
    allocator.free(obj)
    with pytest.raises(UseAfterFreeError):
        _ = obj.tensor


def test_scalar_shape() -> None:
    assert HostMemoryAllocator(PAGE).allocate([], torch.float32).tensor.shape == ()


def test_objects_share_no_metadata() -> None:
    first, second = HostMemoryAllocator(4 * PAGE).batched_allocate([[4]], [torch.uint8], 2)
    first.metadata.shapes.append(torch.Size([1]))
    first.metadata.fmt = MemoryFormat.KV_T2D
    first.metadata.cached_positions = torch.arange(4)
    assert second.metadata.shapes == [torch.Size([4])] and second.get_memory_format() is MemoryFormat.KV_2LTD
    assert second.metadata.cached_positions is None


# The pool


@each_allocator
@pytest.mark.parametrize("align_bytes", [16, 64, 4096, 1 << 16])
def test_alignment(make: Callable, align_bytes: int) -> None:
    allocator = make(4 * align_bytes, align_bytes=align_bytes)
    assert allocator.pool.numel() == 4 * align_bytes
    objs = [take(allocator, n) for n in (1, align_bytes, align_bytes - 1)]
    assert [obj.metadata.address for obj in objs] == [0, align_bytes, 2 * align_bytes]
    assert [obj.get_physical_size() for obj in objs] == [align_bytes] * 3
    assert all(obj.raw_tensor.data_ptr() % max(align_bytes, PAGE) == 0 for obj in objs[:1])
    assert all(obj.raw_tensor.data_ptr() % align_bytes == 0 for obj in objs)


def test_pool_holds_exactly_its_size() -> None:
    allocator = HostMemoryAllocator(PAGE + 1000)
    assert allocator.allocate([PAGE + 1001], torch.uint8) is None
    whole = take(allocator, PAGE + 1000)
    assert whole.get_physical_size() == PAGE + 1000 and allocator.free_bytes == 0 and allocator.memcheck()
    allocator.free(whole)
    head, tail = take(allocator, 1), take(allocator, 10)
    assert tail.metadata.address == PAGE and tail.get_physical_size() == 1000 and allocator.memcheck()
    assert allocator.allocate([1], torch.uint8) is None
    allocator.batched_free([head, tail])
    assert allocator.free_bytes == PAGE + 1000 and allocator.memcheck()


def test_empty_pool() -> None:
    allocator = HostMemoryAllocator(0)
    assert allocator.allocate([1], torch.uint8) is None and allocator.memcheck()
    assert allocator.allocate([0], torch.uint8).get_size() == 0


def test_full_is_none_and_changes_nothing() -> None:
    allocator = HostMemoryAllocator(4 * PAGE)
    objs = [take(allocator, PAGE) for _ in range(4)]
    assert allocator.allocate([1], torch.uint8) is None
    allocator.free(objs[1])
    allocator.free(objs[3])
    assert allocator.allocate([PAGE + 1], torch.uint8) is None, "two free pages apart hold no object of two"
    assert allocator.used_bytes == 2 * PAGE and allocator.memcheck()


def test_first_fit_and_merging() -> None:
    allocator = HostMemoryAllocator(6 * PAGE)
    objs = [take(allocator, PAGE) for _ in range(6)]
    for i in (0, 2, 1, 5, 4):  # alone; alone; joins both; alone; joins the right one
        allocator.free(objs[i])
        assert allocator.memcheck()
    assert take(allocator, 3 * PAGE).metadata.address == 0
    assert take(allocator, PAGE).metadata.address == 4 * PAGE
    allocator.free(objs[3])  # joins nothing: its neighbours are taken
    assert take(allocator, PAGE).metadata.address == 3 * PAGE


@each_allocator
def test_batched_allocate(make: Callable) -> None:
    allocator = make(4 * PAGE)
    objs = allocator.batched_allocate([2, 5], torch.float16, 3, MemoryFormat.KV_MLA_FMT)
    assert [obj.metadata.address for obj in objs] == [0, PAGE, 2 * PAGE]
    assert all(obj.get_memory_format() is MemoryFormat.KV_MLA_FMT and obj.get_shape() == (2, 5) for obj in objs)
    assert allocator.batched_allocate([1], torch.uint8, 2) is None
    assert allocator.used_bytes == 3 * PAGE and allocator.memcheck()
    assert len(allocator.batched_allocate([1], torch.uint8, 1)) == 1
    assert allocator.batched_allocate([1], torch.uint8, 0) == []
    allocator.batched_free(objs)
    assert allocator.used_bytes == PAGE and allocator.memcheck()


@each_allocator
def test_close(make: Callable) -> None:
    allocator = make(2 * PAGE)
    obj = take(allocator, 8)
    view = obj.raw_tensor.fill_(3)
    allocator.close()
    allocator.close()
    assert not obj.is_valid() and view.tolist() == [3] * 8
    with pytest.raises(UseAfterFreeError, match="closed"):
        _ = obj.tensor
    with pytest.raises(ObjectError, match="closed"):
        allocator.allocate([1], torch.uint8)
    obj.ref_count_down()
    assert allocator.used_bytes == 0 and allocator.memcheck()
