"""Raw addresses as tensors, and whose memory an address is. Nothing here knows layouts or moves anything.

An address carries no owner: whoever handed it over keeps the memory alive.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

from ..errors import ArgumentError

WORD_BYTES = 8  # the widest word that the specification moves
_MEMORY_TYPE, _DEVICE_ORDINAL, _DEVICE_MEMORY = 2, 9, 2  # of CUDA's driver interface


_values_seen: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = {}


def values_of(pointers: torch.Tensor) -> tuple[int, ...]:
    """The addresses in an int64 tensor `[pointers]`.

    On a device the host has to wait for them, and for all that the current stream was given before: once, and again only
    when torch has written to the tensor since. Tensors of inference mode do not say when that was, and are read each time.
    """
    if pointers.is_cpu or pointers.is_inference():
        return tuple(pointers.tolist())
    key, version = id(pointers), pointers._version
    seen = _values_seen.get(key)
    if seen is None or seen[0]() is not pointers or seen[1] != version:
        gone = functools.partial(_values_seen.pop, key)
        seen = _values_seen[key] = (weakref.ref(pointers, lambda _: gone(None)), version, tuple(pointers.tolist()))
    return seen[2]


class _CudaMemory:
    """What torch needs to see bytes on a CUDA device as a tensor."""

    def __init__(self, pointer: int, size_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_at(name: str, pointer: Any, size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 `[size_bytes]`, the memory at `pointer` on `device`; a view, never a copy.

    The storage begins at a whole word at or below `pointer`, so that the storage offset tells how the address is
    aligned; what lies before `pointer` is not touched. Raises ArgumentError naming `name`.
    """
    if isinstance(pointer, bool) or not isinstance(pointer, int) or pointer <= 0:
        raise ArgumentError(f"{name}: {pointer!r} is no address")
    lead_bytes = pointer % WORD_BYTES
    start, length_bytes = pointer - lead_bytes, size_bytes + lead_bytes
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * length_bytes).from_address(start), dtype=torch.uint8)
    elif device.type == "cuda":
        try:
            memory = torch.as_tensor(_CudaMemory(start, length_bytes))
        except RuntimeError as error:
            raise ArgumentError(f"{name}: {pointer:#x} is no memory of {device}: {error}") from error
        if memory.device != device:
            raise ArgumentError(f"{name}: {pointer:#x} is memory of {memory.device}, not of {device}")
    else:
        raise ArgumentError(f"{name}: addresses can be followed on cpu and cuda, not on {device.type}; pass tensors")
    assert memory.data_ptr() == start, "torch copied what it was to wrap"
    return memory[lead_bytes:]


def tensor_at(name: str, pointer: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[numel]` elements of `dtype` at `pointer`, as `bytes_at`; ArgumentError where the address is not aligned to it."""
    if isinstance(pointer, int) and pointer % min(dtype.itemsize, WORD_BYTES):
        raise ArgumentError(f"{name}: {pointer:#x} is not aligned to {dtype}")
    return bytes_at(name, pointer, numel * dtype.itemsize, device).view(dtype)


def device_of(pointer: Any) -> torch.device:
    """The CUDA device whose memory an address is, else the host (registered with CUDA or not, or no address at all)."""
    driver = _driver() if torch.cuda.is_available() and isinstance(pointer, int) else None
    if driver is not None and _attribute(driver, _MEMORY_TYPE, pointer) == _DEVICE_MEMORY:
        return torch.device("cuda", _attribute(driver, _DEVICE_ORDINAL, pointer))
    return torch.device("cpu")


def indexed(device: torch.device | str) -> torch.device:
    """`device` with its index: the current one where CUDA is named without."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def get_gpu_pci_bus_id(device_id: int = 0) -> str | None:
    """PCI address of a CUDA device, such as `"0000:29:00.0"`; None where there is no such device."""
    if not torch.cuda.is_available() or not 0 <= device_id < torch.cuda.device_count():
        return None
    driver, handle, text = _driver(), ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), device_id):
        return None
    return None if driver.cuDeviceGetPCIBusId(text, len(text), handle) else text.value.decode().upper()


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    """CUDA's driver library, which torch has loaded and initialised; None where it is another vendor's."""
    torch.cuda.init()
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _attribute(driver: Any, attribute: int, pointer: int) -> int:
    """One attribute of an address; 0 for memory that CUDA does not know."""
    value = ctypes.c_uint(0)
    code = driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(pointer))
    return 0 if code else value.value
