"""A memory object's bytes to a device buffer and back: one plain copy on the current stream, no layout, no slots.

The one thing to mind is a host pool that was page-locked in pieces: a copy may not span two registrations.
"""

from __future__ import annotations

import torch

from ..c_ops import TransferDirection, lmcache_memcpy_async
from ..errors import ArgumentError
from ..memory import MemoryObj

_ONE_PIECE_BYTES = 1 << 62  # a boundary that no pool reaches


def lmcache_memcpy_async_h2d(memory_obj: MemoryObj, gpu_buffer: torch.Tensor) -> None:
    """Copy all bytes of `memory_obj` into `gpu_buffer`, which is **written**.

    gpu_buffer: contiguous, any dtype and shape, of `memory_obj.get_size()` bytes. Runs on the current stream; the host
    does not wait, so the caller keeps a reference to the object until the copy is done. Raises ArgumentError (sizes
    differ), StrideError or UseAfterFreeError before anything is copied.
    """
    host_bytes, offset, alignment = _host_side(memory_obj, gpu_buffer)
    nbytes = host_bytes.numel()
    lmcache_memcpy_async(gpu_buffer, host_bytes, nbytes, TransferDirection.H2D, offset, alignment)


def lmcache_memcpy_async_d2h(gpu_buffer: torch.Tensor, memory_obj: MemoryObj) -> None:
    """Copy all bytes of `gpu_buffer` into `memory_obj`, which is **written**; arguments as in `lmcache_memcpy_async_h2d`.

    The object's bytes are final once the current stream has been synchronised.
    """
    host_bytes, offset, alignment = _host_side(memory_obj, gpu_buffer)
    nbytes = host_bytes.numel()
    lmcache_memcpy_async(host_bytes, gpu_buffer, nbytes, TransferDirection.D2H, offset, alignment)


def _host_side(memory_obj: MemoryObj, gpu_buffer: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The object's bytes, where they begin in the pool, and how long the pieces are in which it is page-locked."""
    if not isinstance(memory_obj, MemoryObj):
        raise ArgumentError(f"memory_obj must be a MemoryObj, got {type(memory_obj).__name__}")
    if not isinstance(gpu_buffer, torch.Tensor):
        raise ArgumentError(f"gpu_buffer must be a tensor, got {type(gpu_buffer).__name__}")
    host_bytes = memory_obj.raw_tensor
    if host_bytes.numel() != gpu_buffer.nbytes:
        raise ArgumentError(f"gpu_buffer has {gpu_buffer.nbytes} bytes, memory_obj {host_bytes.numel()}; must match")
    return host_bytes, memory_obj.metadata.address, memory_obj.parent().piece_bytes or _ONE_PIECE_BYTES
