"""Page-locking of host pools, against a CUDA runtime that only counts and against the real one, and the GPU's pool.

What every allocator does alike is in `test_memory.py`.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from lmcache_ref.errors import BackendError
from lmcache_ref.memory import GPUMemoryAllocator, HostMemoryAllocator, PinMemoryAllocator
from memory_pools import PAGE, take


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
