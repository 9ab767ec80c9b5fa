"""The allocators that memory tests run over, and objects taken from them. No test lives here."""

from __future__ import annotations

import pytest
import torch

from lmcache_ref.memory import GPUMemoryAllocator, HostMemoryAllocator, MemoryFormat, MemoryObj, PinMemoryAllocator

PAGE = 4096
U8 = torch.uint8
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
