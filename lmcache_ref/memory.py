"""Memory objects (one or more tensors in one piece of a byte pool) and the allocators that own the pools.

Formats are names here; their axes are rows of the layout table. Nothing here moves tokens or orders streams:
whoever copies asynchronously holds a reference of their own until the copy is done.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .errors import ArgumentError, BackendError, DoubleFreeError, ObjectError, UseAfterFreeError

PAGE_BYTES = 4096
WIDEST_DTYPE_BYTES = 16  # complex128; an object whose address is a multiple of it can be viewed as any dtype

Shapes = Sequence[int] | Sequence[Sequence[int]]  # one shape, or a list of them
Dtypes = torch.dtype | Sequence[torch.dtype]


class MemoryFormat(Enum):
    """What the axes of an object's tensors mean."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, NL, T, D]
    KV_T2D = 2  # [T, 2, D]
    KV_2TD = 3  # [2, T, D]
    KV_MLA_FMT = 4  # [1, NL, T, D] or [T, D]
    BINARY = 5  # bytes


@dataclass
class MemoryObjMetadata:
    """What is known about one object. `address` and `phy_size` are bytes within the allocator's pool."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    address: int
    phy_size: int
    fmt: MemoryFormat
    ref_count: int = 1
    pin_count: int = 0
    cached_positions: torch.Tensor | None = None  # int64 [T]: the positions at which the keys were rotated


class MemoryObj:
    """Tensors side by side in the pool of one allocator, born with one reference.

    The memory returns to the pool when the last reference and the last pin are gone; from then on its tensors
    raise UseAfterFreeError. Tensors are views of the pool, never copies; views taken earlier are not tracked.
    """

    def __init__(self, allocator: MemoryAllocator, metadata: MemoryObjMetadata):
        self.metadata = metadata
        self._allocator = allocator
        self.offsets_bytes, self._size_bytes = _pack(metadata.shapes, metadata.dtypes)
        self._freed = False  # free() was called; other holders may still keep the memory

    def __repr__(self) -> str:
        return f"MemoryObj({self.metadata})"

    @property
    def tensor(self) -> torch.Tensor | None:
        """The first (mostly the only) tensor; None for an object allocated with empty lists."""
        if self.metadata.shapes:
            return self.get_tensor(0)
        self.require_valid()
        return None

    @property
    def raw_tensor(self) -> torch.Tensor:
        """uint8 [get_size()]: the bytes of all tensors, padding between them included."""
        return self._view(0, self._size_bytes)

    def get_tensor(self, i: int) -> torch.Tensor:
        """Tensor `i` of the object, in its shape and dtype. ArgumentError when there is no such tensor."""
        shapes, dtypes = self.metadata.shapes, self.metadata.dtypes
        if not 0 <= i < len(shapes):
            raise ArgumentError(f"i: {i!r}; the object has {len(shapes)} tensors, counted from 0")
        self.require_valid()
        known, address = self._allocator.views, self.metadata.address + self.offsets_bytes[i]
        view = known.get(address)
        if view is None or view.shape != shapes[i] or view.dtype != dtypes[i]:
            length_bytes = math.prod(shapes[i]) * dtypes[i].itemsize
            with torch.inference_mode(False):  # else whoever comes later, outside that mode, could not write to it
                view = self._view(self.offsets_bytes[i], length_bytes).view(dtypes[i]).view(shapes[i])
            known[address] = view
        return view

    def get_size(self) -> int:
        """Bytes of all tensors, and of padding where a later dtype could not be viewed at its offset."""
        return self._size_bytes

    def get_physical_size(self) -> int:
        """Bytes taken from the pool: get_size() rounded up to the alignment or to the pool's end."""
        return self.metadata.phy_size

    def get_shape(self) -> torch.Size:
        """Shape of the first tensor; [0] for an object allocated with empty lists."""
        return self.metadata.shapes[0] if self.metadata.shapes else torch.Size([0])

    def get_dtype(self) -> torch.dtype:
        """Dtype of the first tensor; uint8 for an object allocated with empty lists."""
        return self.metadata.dtypes[0] if self.metadata.dtypes else torch.uint8

    def get_memory_format(self) -> MemoryFormat:
        return self.metadata.fmt

    def get_ref_count(self) -> int:
        return self.metadata.ref_count

    def parent(self) -> MemoryAllocator:
        """The allocator whose pool the object is in."""
        return self._allocator

    @property
    def is_pinned(self) -> bool:
        return self.metadata.pin_count > 0

    @property
    def can_evict(self) -> bool:
        """Whether one holder is left (the cache that asks) and nobody has pinned the object."""
        return self.metadata.ref_count == 1 and not self.is_pinned

    def is_valid(self) -> bool:
        """Whether somebody holds the object and its pool is open."""
        return (self.metadata.ref_count > 0 or self.metadata.pin_count > 0) and self._allocator.pool is not None

    def ref_count_up(self) -> None:
        """Take one more reference. UseAfterFreeError when the memory is gone."""
        with self._allocator.lock:
            self.require_valid()
            self.metadata.ref_count += 1

    def ref_count_down(self) -> None:
        """Give one reference back; the last one returns the memory. DoubleFreeError when there is none."""
        with self._allocator.lock:
            if self.metadata.ref_count == 0:
                raise DoubleFreeError(f"ref_count_down of an object without references: {self}")
            self.metadata.ref_count -= 1
            self._allocator.reclaim(self)

    def pin(self) -> None:
        """Keep the memory, and keep it from eviction, until `unpin`. UseAfterFreeError when it is gone."""
        with self._allocator.lock:
            self.require_valid()
            self.metadata.pin_count += 1

    def unpin(self) -> None:
        """Undo one `pin`; returns the memory if no reference is left either. ObjectError if not pinned."""
        with self._allocator.lock:
            if not self.is_pinned:
                raise ObjectError(f"unpin of an object that is not pinned: {self}")
            self.metadata.pin_count -= 1
            self._allocator.reclaim(self)

    def require_valid(self) -> None:
        """UseAfterFreeError when the memory is gone."""
        if not self.is_valid():
            raise UseAfterFreeError(f"the object was freed, or its allocator closed: {self}")

    def _view(self, offset_bytes: int, length_bytes: int) -> torch.Tensor:
        self.require_valid()
        start = self.metadata.address + offset_bytes
        return self._allocator.require_pool()[start : start + length_bytes]


class AddressSpace:
    """Which bytes of `[0, size_bytes)` are taken: first fit, aligned starts, free neighbours merged."""

    def __init__(self, size_bytes: int, align_bytes: int):
        self.size_bytes, self.align_bytes = size_bytes, align_bytes
        self._used: dict[int, int] = {}  # start -> end
        self._free = [(0, size_bytes)] if size_bytes else []  # (start, end), sorted

    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, length_bytes: int) -> tuple[int, int] | None:
        """(start, bytes taken), or None when no free block is long enough. Zero bytes take nothing."""
        if length_bytes == 0:
            return 0, 0
        rounded_bytes = _round_up(length_bytes, self.align_bytes)
        for i, (start, end) in enumerate(self._free):
            if length_bytes <= end - start:
                cut = min(start + rounded_bytes, end)  # only the block at the pool's end can be cut short
                self._free[i : i + 1] = [(cut, end)] if cut < end else []
                self._used[start] = cut
                return start, cut - start
        return None

    def give_back(self, start: int) -> None:
        """Free what `take` returned at `start`."""
        end = self._used.pop(start)
        i = bisect_left(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))

    def check(self) -> bool:
        """Whether used and free blocks tile the space exactly, aligned, the free ones sorted and merged."""
        blocks = [(*block, True) for block in self._free] + [(*block, False) for block in self._used.items()]
        position, previous_is_free = 0, False
        for start, end, is_free in sorted(blocks):
            if start != position or start >= end or start % self.align_bytes or (is_free and previous_is_free):
                return False
            position, previous_is_free = end, is_free
        return position == self.size_bytes and self._free == sorted(self._free)


class MemoryAllocator:
    """Memory objects out of one pool of exactly `size` bytes on one device; thread-safe.

    Every object starts at a multiple of `align_bytes` (a power of two, at least 16), also in memory. What was
    returned may be handed out at once: streams are the caller's business.
    """

    #: the pool is page-locked in pieces of so many bytes (a power of two) from its start on; None: in one piece
    piece_bytes: int | None = None

    def __init__(self, size: int, device: torch.device | str, align_bytes: int = PAGE_BYTES):
        if not isinstance(size, int) or size < 0:
            raise ArgumentError(f"size: {size!r}; allowed: a number of bytes, 0 or more")
        if not isinstance(align_bytes, int) or align_bytes < WIDEST_DTYPE_BYTES or align_bytes.bit_count() != 1:
            raise ArgumentError(f"align_bytes: {align_bytes!r}; allowed: a power of two, at least 16")
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device: {device!r}; allowed: a torch device ({error})") from error
        # The pages that the pool touches are touched by nothing else, so that they can be locked.
        base_align_bytes = max(align_bytes, PAGE_BYTES)
        with torch.inference_mode(False):  # else nobody outside that mode could write to it later
            memory = torch.empty(size + base_align_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
        skipped_bytes = -memory.data_ptr() % base_align_bytes
        self.pool: torch.Tensor | None = memory[skipped_bytes : skipped_bytes + size]  # None once closed
        self.total_bytes = size
        self.views: dict[int, torch.Tensor] = {}  # address in the pool -> the newest tensor that begins there
        self.lock = threading.RLock()
        self._space = AddressSpace(size, align_bytes)

    def require_pool(self) -> torch.Tensor:
        """uint8 [size]: all bytes. ObjectError after `close`."""
        if self.pool is None:
            raise ObjectError(f"this {type(self).__name__} is closed")
        return self.pool

    @property
    def free_bytes(self) -> int:
        with self.lock:
            return self._space.free_bytes()

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    def allocate(self, shapes: Shapes, dtypes: Dtypes, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> MemoryObj | None:
        """An object for one shape and dtype, or a list of each, not cleared; None when it does not fit.

        ArgumentError for shapes, dtypes or a format that make no object.
        """
        objects = self.batched_allocate(shapes, dtypes, 1, fmt)
        return objects[0] if objects else None

    def batched_allocate(
        self, shapes: Shapes, dtypes: Dtypes, batch_size: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> list[MemoryObj] | None:
        """`batch_size` objects, each as from `allocate`; None, and nothing taken, when not all fit."""
        shape_list, dtype_list = _as_lists(shapes, dtypes)
        if not isinstance(fmt, MemoryFormat):
            raise ArgumentError(f"fmt: {fmt!r}; allowed: {', '.join(map(str, MemoryFormat))}")
        if not isinstance(batch_size, int) or batch_size < 0:
            raise ArgumentError(f"batch_size: {batch_size!r}; allowed: a number of objects, 0 or more")
        size_bytes = _pack(shape_list, dtype_list)[1]
        blocks: list[tuple[int, int]] = []
        with self.lock:
            self.require_pool()
            while len(blocks) < batch_size and (block := self._space.take(size_bytes)):
                blocks.append(block)
            if len(blocks) < batch_size:
                for start, _ in blocks:
                    self._space.give_back(start)
                return None
        return [MemoryObj(self, MemoryObjMetadata([*shape_list], [*dtype_list], *block, fmt)) for block in blocks]

    def free(self, obj: MemoryObj) -> None:
        """Give up the caller's reference, once per object; the memory returns when nobody else holds it.

        DoubleFreeError when the object was freed before, ObjectError when it is not this allocator's.
        """
        self.batched_free([obj])

    def batched_free(self, objs: Sequence[MemoryObj]) -> None:
        """`free` each object; nothing is freed when one of them cannot be."""
        with self.lock:
            seen: set[int] = set()
            for obj in objs:
                if not isinstance(obj, MemoryObj) or obj._allocator is not self:
                    raise ObjectError(f"free of what is no object of this {type(self).__name__}: {obj!r}")
                if obj._freed or obj.metadata.ref_count == 0 or id(obj) in seen:
                    raise DoubleFreeError(f"free of an object that was freed before: {obj}")
                seen.add(id(obj))
            for obj in objs:
                obj._freed = True
                obj.ref_count_down()

    def reclaim(self, obj: MemoryObj) -> None:
        """Take the object's memory back if nobody holds it any more. Called with the lock held."""
        if obj.metadata.ref_count == 0 and not obj.is_pinned and obj.metadata.phy_size:
            self._space.give_back(obj.metadata.address)
            for offset_bytes in obj.offsets_bytes:
                self.views.pop(obj.metadata.address + offset_bytes, None)

    def memcheck(self) -> bool:
        """Whether the books are right: used and free tile the pool, aligned, sorted, merged."""
        with self.lock:
            return self._space.check()

    def close(self) -> None:
        """Let the pool go; its objects are invalid from here on. Finish copies first. May be called twice."""
        with self.lock:
            self.pool = None
            self.views.clear()


class HostMemoryAllocator(MemoryAllocator):
    """Pageable host memory."""

    def __init__(self, size: int, *, align_bytes: int = PAGE_BYTES):
        super().__init__(size, "cpu", align_bytes)


class PinMemoryAllocator(MemoryAllocator):
    """Host memory, page-locked where CUDA is available: one registration, so that no copy can span two.

    Registered rather than allocated by torch, which would take the next power of two of memory (8 GiB for 5).
    `Tensor.is_pinned` knows only what torch allocated and may say False. BackendError when CUDA refuses.
    """

    def __init__(self, size: int, *, align_bytes: int = PAGE_BYTES):
        super().__init__(size, "cpu", align_bytes)
        self._unlock: Callable[[], object] = lambda: None
        if size and torch.cuda.is_available():
            pool = self.require_pool()
            code = int(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), _round_up(size, PAGE_BYTES), 0))
            if code:
                raise BackendError(f"size: {size} bytes of host memory cannot be pinned, CUDA error {code}")
            self._unlock = unlock = weakref.finalize(self, _unregister, pool)
            unlock.atexit = False  # the end of the process unlocks them anyway, and CUDA may be gone by then

    def close(self) -> None:
        super().close()
        self._unlock()


class GPUMemoryAllocator(MemoryAllocator):
    """Memory of `device`; by default the current CUDA device where CUDA is available, else the host."""

    def __init__(self, size: int, device: torch.device | str | None = None, *, align_bytes: int = PAGE_BYTES):
        super().__init__(size, device or ("cuda" if torch.cuda.is_available() else "cpu"), align_bytes)


def _unregister(pool: torch.Tensor) -> None:
    """Unlock the pages; whoever arranged the call has kept them from being freed first."""
    torch.cuda.cudart().cudaHostUnregister(pool.data_ptr())


def _round_up(length_bytes: int, align_bytes: int) -> int:
    return -(-length_bytes // align_bytes) * align_bytes


def _pack(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> tuple[list[int], int]:
    """(offset of each tensor, size of all) in bytes: no gaps but to reach a multiple of the dtype's width."""
    offsets_bytes, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets_bytes.append(_round_up(end, dtype.itemsize))
        end = offsets_bytes[-1] + math.prod(shape) * dtype.itemsize
    return offsets_bytes, end


def _as_lists(shapes: Any, dtypes: Any) -> tuple[list[torch.Size], list[torch.dtype]]:
    """One shape and dtype, or equally long lists of them, as two lists. ArgumentError otherwise."""
    if isinstance(dtypes, torch.dtype):
        shapes, dtypes = [shapes], [dtypes]
    if not isinstance(shapes, Sequence) or not isinstance(dtypes, Sequence) or len(shapes) != len(dtypes):
        raise ArgumentError(f"shapes, dtypes: {shapes!r}, {dtypes!r}; allowed: one of each or equally long lists")
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"dtypes: {dtype!r} is no torch.dtype")
        if not isinstance(shape, Sequence) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ArgumentError(f"shapes: {shape!r}; a shape is a list of integers of 0 or more")
    return [torch.Size(shape) for shape in shapes], list(dtypes)
