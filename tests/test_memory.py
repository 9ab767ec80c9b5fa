"""Memory objects and allocators: views, sizes, life cycle, every error, and the free list against a naive model.

The state machine at the end predicts each address and compares every live object's bytes after each step; mutants
of the free list show that it can fail.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lmcache_ref import memory
from lmcache_ref.errors import ArgumentError, BackendError, DoubleFreeError, ObjectError, UseAfterFreeError
from lmcache_ref.memory import (
    AddressSpace,
    GPUMemoryAllocator,
    HostMemoryAllocator,
    MemoryFormat,
    MemoryObj,
    PinMemoryAllocator,
)

PAGE = 4096
DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}

ALLOCATORS = {
    "host": HostMemoryAllocator,
    "pin": PinMemoryAllocator,
    "gpu-on-cpu": lambda size, **kwargs: GPUMemoryAllocator(size, device="cpu", **kwargs),
    "gpu-on-cuda": lambda size, **kwargs: GPUMemoryAllocator(size, device="cuda", **kwargs),
}
each_allocator = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.gpu] if name.endswith("cuda") else [])
        for name, make in ALLOCATORS.items()
    ],
)


def take(allocator, size_bytes: int) -> MemoryObj:
    """An object of that many bytes, which is expected to fit."""
    obj = allocator.allocate([size_bytes], torch.uint8, MemoryFormat.BINARY)
    assert obj is not None
    return obj


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


U8 = torch.uint8
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


# Page-locking and CUDA


class FakeRuntime:
    """Answers as the CUDA runtime does, and keeps count of what is registered."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:
        assert pointer % PAGE == size_bytes % PAGE == flags == 0
        if self.code == 0:
            self.registered[pointer] = size_bytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("align_bytes", [64, 1 << 16])
def test_whole_pages_of_its_own_are_registered(fake_runtime: FakeRuntime, align_bytes: int) -> None:
    allocators = [PinMemoryAllocator(3 * PAGE + 100, align_bytes=align_bytes) for _ in range(20)]
    assert fake_runtime.registered == {allocator.pool.data_ptr(): 4 * PAGE for allocator in allocators}
    for allocator in allocators:
        storage = allocator.pool.untyped_storage()
        assert allocator.pool.data_ptr() + 4 * PAGE <= storage.data_ptr() + storage.nbytes()


def test_close_unregisters_once(fake_runtime: FakeRuntime) -> None:
    allocator = PinMemoryAllocator(PAGE)
    assert len(fake_runtime.registered) == 1 and not allocator._unlock.atexit
    allocator.close()
    assert not fake_runtime.registered
    allocator.close()


def test_collection_unregisters(fake_runtime: FakeRuntime) -> None:
    allocator = PinMemoryAllocator(PAGE)
    obj = take(allocator, 8)
    del allocator
    gc.collect()
    assert len(fake_runtime.registered) == 1, "the object keeps its pool"
    del obj
    gc.collect()
    assert not fake_runtime.registered


def test_refused_registration(fake_runtime: FakeRuntime) -> None:
    fake_runtime.code = 2
    with pytest.raises(BackendError, match=r"^size: 4096 bytes of host memory cannot be pinned, CUDA error 2$"):
        PinMemoryAllocator(PAGE)


def test_nothing_to_register(fake_runtime: FakeRuntime) -> None:
    PinMemoryAllocator(0).close()
    HostMemoryAllocator(PAGE).close()
    assert not fake_runtime.registered


def is_locked(tensor: torch.Tensor, at_byte: int) -> bool:
    """Whether the CUDA driver knows that byte as page-locked host memory."""
    torch.zeros(1, device="cuda")  # the question needs a context
    memory_type = ctypes.c_uint(0)
    attribute_memory_type, type_host, code_success, code_invalid = 2, 1, 0, 1
    code = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(memory_type), attribute_memory_type, ctypes.c_void_p(tensor.data_ptr() + at_byte)
    )
    assert code in (code_success, code_invalid)
    return code == code_success and memory_type.value == type_host


@pytest.mark.gpu
def test_pinned_pool_is_locked_until_closed() -> None:
    size_bytes = 3 * PAGE + 100
    allocator = PinMemoryAllocator(size_bytes)
    view = take(allocator, size_bytes).raw_tensor
    assert is_locked(view, 0) and is_locked(view, size_bytes - 1)
    assert not is_locked(HostMemoryAllocator(PAGE).pool, 0)
    view.copy_(torch.arange(size_bytes) % 251)
    on_device = view.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), view)
    allocator.close()
    assert not is_locked(view, 0) and torch.equal(on_device.cpu(), view)


@pytest.mark.gpu
def test_collected_pool_is_unlocked() -> None:
    allocator = PinMemoryAllocator(PAGE)
    view = allocator.pool
    assert is_locked(view, 0)
    del allocator
    gc.collect()
    assert not is_locked(view, 0)


@pytest.mark.gpu
def test_default_device_is_the_gpu() -> None:
    assert take(GPUMemoryAllocator(PAGE), 8).tensor.is_cuda


# The checks, and what they catch


def space_with_a_hole() -> AddressSpace:
    """Four blocks of 64 bytes: used, free, used, free."""
    space = AddressSpace(256, 64)
    starts = [space.take(64) for _ in range(3)]
    assert starts == [(0, 64), (64, 64), (128, 64)]
    space.give_back(64)
    assert space.check() and space._free == [(64, 128), (192, 256)] and space._used == {0: 64, 128: 192}
    return space


BROKEN_BOOKS = {
    "leak": lambda space: space._free.pop(),
    "lost use": lambda space: space._used.pop(0),
    "overlap": lambda space: space._used.update({64: 128}),
    "beyond the end": lambda space: space._free.append((256, 320)),
    "unsorted": lambda space: space._free.reverse(),
    "empty block": lambda space: space._free.insert(1, (192, 192)),
    "neighbours not merged": lambda space: (space._used.pop(128), space._free.insert(1, (128, 192))),
    "unaligned": lambda space: (space._used.update({0: 65}), space._free.__setitem__(0, (65, 128))),
}


@pytest.mark.parametrize("name", BROKEN_BOOKS)
def test_memcheck_fails_on_broken_books(name: str) -> None:
    allocator = HostMemoryAllocator(256, align_bytes=64)
    allocator._space = space_with_a_hole()
    assert allocator.memcheck()
    BROKEN_BOOKS[name](allocator._space)
    assert not allocator.memcheck()


def test_the_books_are_opened_under_the_lock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[str] = set()

    class GuardedSpace(AddressSpace):
        def __getattribute__(self, name: str) -> object:
            if name in ("take", "give_back", "check", "free_bytes"):
                assert allocator.lock._is_owned(), name
                opened.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(memory, "AddressSpace", GuardedSpace)
    allocator = HostMemoryAllocator(4 * PAGE)
    with pytest.raises(AssertionError, match=r"^take"):
        allocator._space.take(1)
    first, second = allocator.batched_allocate([8], U8, 2)
    assert allocator.batched_allocate([8], U8, 3) is None
    first.pin()
    allocator.free(first)
    first.unpin()
    second.ref_count_down()
    assert allocator.memcheck() and allocator.free_bytes == 4 * PAGE and allocator.used_bytes == 0
    assert opened == {"take", "give_back", "check", "free_bytes"}


def test_threads() -> None:
    """Eight threads take, fill, check and release; every byte is their own while they hold it."""
    allocator = HostMemoryAllocator(64 * PAGE)
    rounds, failures, allocated = 200, [], [0] * 8
    shared = take(allocator, 8)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait()
            for i in range(rounds):
                shared.ref_count_up()
                shared.pin()
                objs = allocator.batched_allocate([PAGE + i], U8, 1 + i % 4)
                for obj in objs or ():
                    obj.raw_tensor.fill_(number)
                for obj in objs or ():
                    assert bool((obj.raw_tensor == number).all())
                    allocated[number] += 1
                allocator.batched_free(objs or ())
                shared.unpin()
                shared.ref_count_down()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and min(allocated) > 0
    assert shared.get_ref_count() == 1 and not shared.is_pinned
    assert allocator.memcheck() and allocator.used_bytes == PAGE


# The free list against a naive model

ALIGN = 64
POOL_BYTES = 20 * ALIGN + 24


class AllocatorMachine(RuleBasedStateMachine):
    """The model is a list of live blocks; a block's place is found by trying every aligned address in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = HostMemoryAllocator(POOL_BYTES, align_bytes=ALIGN)
        self.allocator.pool.fill_(0)
        self.live: list[dict] = []
        self.dead: list[MemoryObj] = []
        self.stamp = 0

    def lowest_place(self, size_bytes: int, taken: list[tuple[int, int]]) -> int | None:
        for start in range(0, POOL_BYTES - size_bytes + 1, ALIGN):
            if all(start + size_bytes <= low or high <= start for low, high in taken):
                return start
        return None

    def expected_blocks(self, size_bytes: int, count: int) -> list[tuple[int, int]] | None:
        taken = [(entry["address"], entry["end"]) for entry in self.live if entry["size"]]
        found = []
        for _ in range(count):
            start = self.lowest_place(size_bytes, taken) if size_bytes else 0
            if start is None:
                return None
            end = min(start + (size_bytes + ALIGN - 1) // ALIGN * ALIGN, POOL_BYTES)
            found.append((start, end))
            taken += [(start, end)] if size_bytes else []
        return found

    @rule(size_bytes=st.integers(0, POOL_BYTES + ALIGN), count=st.integers(1, 3))
    def allocate_large(self, size_bytes: int, count: int) -> None:
        self.allocate(size_bytes, count)

    @rule(size_bytes=st.integers(0, 3 * ALIGN), count=st.integers(0, 4))
    def allocate(self, size_bytes: int, count: int) -> None:
        expected = self.expected_blocks(size_bytes, count)
        objs = self.allocator.batched_allocate([size_bytes], U8, count, MemoryFormat.BINARY)
        if expected is None:
            assert objs is None
            return
        assert [obj.metadata.address for obj in objs] == [start for start, _ in expected]
        for obj, (start, end) in zip(objs, expected, strict=True):
            self.stamp = self.stamp % 250 + 1
            obj.raw_tensor.fill_(self.stamp)
            self.live.append(
                dict(obj=obj, address=start, end=end, size=size_bytes, stamp=self.stamp, refs=1, pins=0, freed=False)
            )

    def pick(self, data: st.DataObject) -> dict:
        return self.live[data.draw(st.integers(0, len(self.live) - 1), label="object")]

    def drop_if_unheld(self, entry: dict) -> None:
        if entry["refs"] == entry["pins"] == 0:
            self.live.remove(entry)
            self.dead.append(entry["obj"])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ref_count_up(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry["obj"].ref_count_up()
        entry["refs"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ref_count_down(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["refs"] == 0:
            with pytest.raises(DoubleFreeError):
                entry["obj"].ref_count_down()
            return
        entry["obj"].ref_count_down()
        entry["refs"] -= 1
        self.drop_if_unheld(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry["obj"].pin()
        entry["pins"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["pins"] == 0:
            with pytest.raises(ObjectError):
                entry["obj"].unpin()
            return
        entry["obj"].unpin()
        entry["pins"] -= 1
        self.drop_if_unheld(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["freed"] or entry["refs"] == 0:
            with pytest.raises(DoubleFreeError):
                self.allocator.free(entry["obj"])
            return
        self.allocator.free(entry["obj"])
        entry["freed"] = True
        entry["refs"] -= 1
        self.drop_if_unheld(entry)

    @invariant()
    def books_are_right(self) -> None:
        assert self.allocator.memcheck()
        used = sum(entry["end"] - entry["address"] for entry in self.live)
        assert (self.allocator.used_bytes, self.allocator.free_bytes) == (used, POOL_BYTES - used)

    @invariant()
    def every_live_byte_is_its_owners(self) -> None:
        for entry in self.live:
            obj = entry["obj"]
            assert (obj.get_ref_count(), obj.metadata.pin_count) == (entry["refs"], entry["pins"])
            assert obj.raw_tensor.tolist() == [entry["stamp"]] * entry["size"]

    @invariant()
    def the_dead_stay_dead(self) -> None:
        for obj in self.dead[-3:]:
            assert not obj.is_valid()
            with pytest.raises(UseAfterFreeError):
                _ = obj.tensor


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40)


class SpaceThatRoundsDown(AddressSpace):
    def take(self, length_bytes: int) -> tuple[int, int] | None:
        return super().take(length_bytes // self.align_bytes * self.align_bytes)


class SpaceThatFitsLast(AddressSpace):
    def take(self, length_bytes: int) -> tuple[int, int] | None:
        self._free.reverse()
        block = super().take(length_bytes)
        self._free.reverse()
        return block


class SpaceThatNeverMerges(AddressSpace):
    def give_back(self, start: int) -> None:
        self._free.append((start, self._used.pop(start)))
        self._free.sort()


class SpaceThatNeverFrees(AddressSpace):
    def give_back(self, start: int) -> None:
        assert start in self._used


class SpaceThatForgetsUse(AddressSpace):
    """Hands the same bytes out again, with books that look right."""

    def take(self, length_bytes: int) -> tuple[int, int] | None:
        before = copy.deepcopy((self._used, self._free))
        block = super().take(length_bytes)
        self._used, self._free = before
        return block

    def give_back(self, start: int) -> None:
        pass


MUTANTS = [
    SpaceThatRoundsDown,
    SpaceThatFitsLast,
    SpaceThatNeverMerges,
    SpaceThatNeverFrees,
    SpaceThatForgetsUse,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_state_machine_catches(mutant: type[AddressSpace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AddressSpace", mutant)
    quick = settings(max_examples=200, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AllocatorMachine, settings=quick)
