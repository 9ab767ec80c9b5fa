"""Copies of raw bytes: one between host and device, in pieces that no registration of host memory is crossed by, or many.

Nothing here waits for the device; what the copies mean is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, StrideError
from .caches import checked_count
from .enums import TransferDirection, checked_direction
from .pointers import bytes_at, device_of

HOST = torch.device("cpu")


def lmcache_memcpy_async(
    dest: int | torch.Tensor,
    src: int | torch.Tensor,
    nbytes: int,
    direction: TransferDirection,
    host_buffer_offset: int,
    host_buffer_alignments: int,
) -> None:
    """Copy the first `nbytes` bytes of src to dest on the current stream; the host does not wait.

    dest, src: both addresses, or both contiguous tensors; with H2D src is on the host, with D2H dest is.
    host_buffer_offset: bytes from the start of the pool to the host address. host_buffer_alignments: a power of two;
    no single copy crosses a multiple of it in the pool, where another registration of host memory may begin.

    Raises ArgumentError, or StrideError for a tensor that is not contiguous, before anything is copied.
    """
    nbytes = checked_count("nbytes", nbytes)
    offset = checked_count("host_buffer_offset", host_buffer_offset)
    alignment = checked_count("host_buffer_alignments", host_buffer_alignments)
    if alignment.bit_count() != 1:
        raise ArgumentError(f"host_buffer_alignments: {alignment}; allowed: a power of two")
    to_device = checked_direction(direction) is TransferDirection.H2D
    if isinstance(dest, torch.Tensor) != isinstance(src, torch.Tensor):
        kinds = f"{type(dest).__name__} and {type(src).__name__}"
        raise ArgumentError(f"dest and src are {kinds}; allowed: two addresses or two tensors")
    target = _bytes_of("dest", dest, nbytes, on_host=not to_device)
    source = _bytes_of("src", src, nbytes, on_host=to_device)
    for start, end in pieces(offset, nbytes, alignment):
        target[start:end].copy_(source[start:end], non_blocking=True)


def pieces(offset: int, length: int, alignment: int) -> Iterator[tuple[int, int]]:
    """`[start, end)` in `[0, length)`, cut wherever `offset + start` is a multiple of `alignment`."""
    start = 0
    while start < length:
        end = min(length, start + alignment - (offset + start) % alignment)
        yield start, end
        start = end


def batched_memcpy(src_ptrs: Sequence[int], dst_ptrs: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy `sizes[i]` bytes from address `src_ptrs[i]` to `dst_ptrs[i]`, for all i; ranges must not overlap.

    Host memory is final on return; a copy that involves a device is ordered by the current stream.
    Raises ArgumentError before anything is copied.
    """
    if not len(src_ptrs) == len(dst_ptrs) == len(sizes):
        raise ArgumentError(f"{len(src_ptrs)} src_ptrs, {len(dst_ptrs)} dst_ptrs, {len(sizes)} sizes: lengths differ")
    copies = []
    for index, (src, dst, size) in enumerate(zip(src_ptrs, dst_ptrs, sizes, strict=True)):
        if checked_count(f"sizes[{index}]", size):
            source = bytes_at(f"src_ptrs[{index}]", src, size, device_of(src))
            copies.append((bytes_at(f"dst_ptrs[{index}]", dst, size, device_of(dst)), source))
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _bytes_of(name: str, memory: Any, nbytes: int, *, on_host: bool) -> torch.Tensor:
    """uint8 `[nbytes]`: the first bytes of a tensor, or the memory at an address."""
    if not isinstance(memory, torch.Tensor):
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return bytes_at(name, memory, nbytes, HOST if on_host else device_of(memory))
    if not memory.is_contiguous():
        raise StrideError(f"{name}: shape {tuple(memory.shape)}, strides {memory.stride()}; must be contiguous")
    if memory.nbytes < nbytes:
        raise ArgumentError(f"nbytes: {nbytes}, but {name} has {memory.nbytes} bytes")
    return memory.view(-1).view(torch.uint8)[:nbytes]
