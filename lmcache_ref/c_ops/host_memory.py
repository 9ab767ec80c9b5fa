"""Host memory by address: page-aligned, page-locked where CUDA is, on one NUMA node, or shared under a name.

An address is all that callers keep; the books here say what it was taken as, and every address is given back once.
Memory objects and their pools are `lmcache_ref.memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, BackendError, DoubleFreeError, ObjectError
from .caches import checked_count

SHARED_MEMORY = Path("/dev/shm")
ONLINE_NODES = Path("/sys/devices/system/node/online")
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_MPOL_BIND = 2
_NODE_BITS = 1024


@dataclass(frozen=True)
class Allocation:
    """One mapping. kind: what it was taken as. release: undoes what was done to it before it is unmapped."""

    kind: str
    size_bytes: int
    mapping: mmap.mmap
    shm_name: str = ""
    release: Callable[[], None] = lambda: None


_allocations: dict[int, Allocation] = {}  # address -> what is there
_lock = threading.Lock()


def alloc_pinned_ptr(size: int, device_id: int = 0) -> int:
    """Address of `size` bytes of zeroed host memory, page-aligned, page-locked where CUDA is (for all its devices).

    Raises ArgumentError for a size below 1, BackendError when CUDA refuses.
    """
    return _record("pinned", _anonymous(size), pinned=True)


def free_pinned_ptr(ptr: int) -> None:
    """Give back what `alloc_pinned_ptr` returned. DoubleFreeError for an address nobody holds, ObjectError for one
    that was taken as something else. Finish copies first."""
    _free("pinned", ptr)


def alloc_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    """`alloc_pinned_ptr`, on the NUMA node `numa_id`. ArgumentError where there is no such node, BackendError when the
    kernel refuses to bind."""
    return _record("pinned numa", _on_node(size, numa_id), pinned=True)


def free_pinned_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_pinned_numa_ptr` returned; errors as `free_pinned_ptr`, and for another `size`."""
    _free("pinned numa", ptr, size)


def alloc_numa_ptr(size: int, numa_id: int = 0) -> int:
    """`alloc_pinned_numa_ptr` without page-locking."""
    return _record("numa", _on_node(size, numa_id), pinned=False)


def free_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_numa_ptr` returned; errors as `free_pinned_numa_ptr`."""
    _free("numa", ptr, size)


def alloc_shm_pinned_ptr(size: int, shm_name: str = "") -> int:
    """`alloc_pinned_ptr`, in shared memory that other processes can open as `shm_name` (default: a new name).

    A segment of that name which no allocation of this process holds is replaced. ArgumentError for a name that
    cannot be one or is held; BackendError where the system has no shared memory, or too little.
    """
    name = shm_name.removeprefix("/") or f"lmcache-{secrets.token_hex(8)}"
    if "/" in name or name in (".", ".."):
        raise ArgumentError(f"shm_name: {shm_name!r} is no name of shared memory")
    mapping, identity = _shared(name, size)
    return _record("shm", mapping, pinned=True, shm_name=name, undo=lambda: _unlink(SHARED_MEMORY / name, identity))


def free_shm_pinned_ptr(ptr: int, size: int = 0, shm_name: str = "") -> None:
    """Give back what `alloc_shm_pinned_ptr` returned, and its name; errors as `free_pinned_numa_ptr`."""
    _free("shm", ptr, size, shm_name.removeprefix("/"))


# ------------------------------------------------------------------------------------------------ the books


def _record(
    kind: str, mapping: mmap.mmap, *, pinned: bool, shm_name: str = "", undo: Callable[[], None] = lambda: None
) -> int:
    """Enter a new mapping into the books, page-locked where asked and where CUDA is."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    release = undo
    if pinned and torch.cuda.is_available():
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(mapping), 0))
        if code:
            error = BackendError(f"size: {len(mapping)} bytes of host memory cannot be pinned, CUDA error {code}")
            undo()
            mapping.close()
            raise error

        def release() -> None:
            torch.cuda.cudart().cudaHostUnregister(address)
            undo()

    with _lock:
        _allocations[address] = Allocation(kind, len(mapping), mapping, shm_name, release)
    return address


def _free(kind: str, ptr: int, size: int | None = None, shm_name: str = "") -> None:
    """Strike an address from the books and unmap it; nothing happens when what the caller says of it is wrong."""
    with _lock:
        held = _allocations.get(ptr)
        if held is None:
            raise DoubleFreeError(f"ptr: {ptr!r} is held by nobody: freed before, or never allocated here")
        if held.kind != kind:
            raise ObjectError(f"ptr: {ptr:#x} was allocated as {held.kind} memory, not as {kind}")
        if size not in (None, 0, held.size_bytes):
            raise ObjectError(f"size: {size}, but {ptr:#x} was allocated with {held.size_bytes} bytes")
        if shm_name not in ("", held.shm_name):
            raise ObjectError(f"shm_name: {shm_name!r}, but {ptr:#x} is {held.shm_name!r}")
        del _allocations[ptr]
    held.release()
    held.mapping.close()


# ------------------------------------------------------------------------------------------------ the memory


def _anonymous(size: int) -> mmap.mmap:
    """Private zeroed memory. ArgumentError for a size below 1."""
    if not checked_count("size", size):
        raise ArgumentError("size: 0; at least one byte is needed")
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise BackendError(f"size: {size} bytes of host memory cannot be mapped: {error}") from error


def _on_node(size: int, numa_id: int) -> mmap.mmap:
    """Anonymous memory whose pages come from one NUMA node. A machine with one node needs no binding."""
    nodes = _online_nodes()
    node = checked_count("numa_id", numa_id)
    if node not in nodes:
        raise ArgumentError(f"numa_id: {node}; this machine has the nodes {sorted(nodes)}")
    mapping = _anonymous(size)
    if len(nodes) > 1:
        try:
            _bind(mapping, node)
        except BackendError:
            mapping.close()
            raise
    return mapping


def _online_nodes() -> set[int]:
    """NUMA nodes of this machine; one, numbered 0, where the system does not say."""
    try:
        text = ONLINE_NODES.read_text(encoding="ascii").strip()
    except OSError:
        return {0}
    ranges = [part.partition("-") for part in text.split(",")]
    return {node for first, _, last in ranges for node in range(int(first), int(last or first) + 1)}


def _bind(mapping: mmap.mmap, node: int) -> None:
    """Let untouched pages come from `node` alone; BackendError when the kernel refuses."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise BackendError(f"numa_id: {node}; binding memory is not known on {platform.machine()}")
    libc: Any = ctypes.CDLL(None, use_errno=True)
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_NODE_BITS // word_bits))()
    mask[node // word_bits] = 1 << (node % word_bits)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(len(mapping)), _MPOL_BIND, mask)
    if libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(_NODE_BITS), 0):
        raise BackendError(f"numa_id: {node}; memory cannot be bound: {os.strerror(ctypes.get_errno())}")


def _shared(name: str, size: int) -> tuple[mmap.mmap, tuple[int, int]]:
    """A new segment of shared memory, and what tells its file from a later one of the same name."""
    if not checked_count("size", size):
        raise ArgumentError("size: 0; at least one byte is needed")
    with _lock:
        if any(held.shm_name == name for held in _allocations.values()):
            raise ArgumentError(f"shm_name: {name!r} is held by an allocation of this process")
    path = SHARED_MEMORY / name
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise BackendError(f"shm_name: {name!r} cannot be created: {error}") from error
    try:
        os.posix_fallocate(descriptor, 0, size)  # a full file system says so here, not at a later write
        status = os.fstat(descriptor)
        return mmap.mmap(descriptor, size), (status.st_dev, status.st_ino)
    except (OSError, OverflowError) as error:
        path.unlink(missing_ok=True)
        raise BackendError(f"size: {size} bytes of shared memory cannot be had: {error}") from error
    finally:
        os.close(descriptor)


def _unlink(path: Path, identity: tuple[int, int]) -> None:
    """Remove a segment's name, unless somebody has replaced it since."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        if (status.st_dev, status.st_ino) == identity:
            path.unlink()
