"""The few verbs that the pipeline speaks to a CUDA device: streams, events, copies, launches, memory.

Every verb is a driver call or two on raw addresses; none makes the host wait but `synchronize`, `fetch`, `bring`,
`constant` and `table`. The device must be current (`guard`). What is ordered after what, `steps.py` says; tests run it on
a simulated device of the same verbs.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lmcache_ref.errors import BackendError
from lmcache_ref.rope import RotarySpec

from .compile import Kernels

TYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
THREADS = 256  # a block, in every launch
UNREGISTERED = 0  # cudaMemoryType of memory that CUDA does not know
SUCCESS, NOT_READY = 0, 600  # cudaError


class Event:
    """An event on loan from the device's pool; it goes back when nobody holds it any more."""

    __slots__ = ("_pool", "handle")

    def __init__(self, handle: int, pool: list[int]):
        self.handle, self._pool = handle, pool

    def __del__(self) -> None:
        self._pool.append(self.handle)


class Memory:
    """Memory at `address`; kept as long as this object."""

    __slots__ = ("_owner", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int, owner: Any):
        self.address, self.num_bytes, self._owner = address, num_bytes, owner


class Arguments:
    """The structures that a kernel takes, as a launch wants them. Their content counts when they are launched."""

    __slots__ = ("address", "pointers", "structures")

    def __init__(self, *structures: ctypes.Structure):
        self.structures = structures
        self.pointers = (ctypes.c_void_p * len(structures))(*map(ctypes.addressof, structures))
        self.address = ctypes.addressof(self.pointers)


class _Guard(torch.cuda.device):
    """torch's guard; cupy's runtime library, which may be another copy, is told as well."""

    def __init__(self, index: int, runtime: Any):
        super().__init__(index)
        self._index, self._runtime = index, runtime

    def __enter__(self) -> None:
        super().__enter__()
        self._runtime.setDevice(self._index)


class CudaDevice:
    """One CUDA device. Construction compiles the kernels and makes its context. Streams are integers. Thread-safe."""

    def __init__(self, index: int):
        from cupy.cuda import driver, pinned_memory, runtime

        self.index = index
        self._runtime, self._driver, self._pinned = runtime, driver, pinned_memory
        self._events: list[int] = []
        self._tables: weakref.WeakKeyDictionary[RotarySpec, torch.Tensor] = weakref.WeakKeyDictionary()
        self._table_lock = threading.Lock()
        with self.guard():
            torch.cuda.current_stream(index).synchronize()  # torch makes the context
            self.kernels = Kernels(self.guard)
            self.num_multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
            self._memory_stream = self.new_stream()

    def guard(self) -> AbstractContextManager[Any]:
        """Make the device current within a block, and the one before it afterwards."""
        return _Guard(self.index, self._runtime)

    # ------------------------------------------------------------------------------------------ streams and events

    def current(self) -> int:
        """torch's current stream."""
        return _current_raw_stream(self.index)

    def is_capturing(self) -> bool:
        """Whether the current stream's work is recorded for a CUDA graph, not done."""
        return bool(torch.cuda.is_current_stream_capturing())

    def new_stream(self, urgent: bool = False) -> int:
        """A stream that never waits for the legacy default stream. urgent: its kernels go first, where cupy can say so."""
        if urgent and hasattr(self._runtime, "streamCreateWithPriority"):
            return int(self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, -1))
        return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def new_event(self) -> Event:
        """An event that was not recorded yet."""
        try:
            handle = self._events.pop()
        except IndexError:
            with self.guard():
                handle = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
        return Event(handle, self._events)

    def record(self, stream: int) -> Event:
        """An event that happens when all that `stream` was given so far is done."""
        event = self.new_event()
        self._runtime.eventRecord(event.handle, stream)
        return event

    def wait(self, stream: int, event: Event) -> None:
        """What `stream` is given from now on runs after `event`."""
        self._runtime.streamWaitEvent(stream, event.handle)

    def is_done(self, event: Event) -> bool:
        """Whether it has happened. Raises what broke the device."""
        status = int(self._runtime.eventQuery(event.handle))
        if status not in (SUCCESS, NOT_READY):
            self._runtime.eventSynchronize(event.handle)  # raises it by name
        return status == SUCCESS

    def synchronize(self, event: Event) -> None:
        """Make the host wait for it."""
        self._runtime.eventSynchronize(event.handle)

    # ------------------------------------------------------------------------------------------ copies and launches

    def copy(self, target: int, source: int, num_bytes: int, stream: int, seams: Sequence[int] = ()) -> None:
        """Contiguous bytes, between any two of host and device. The host waits only for pageable memory.

        seams: offsets where what is one run may be two allocations. CUDA refuses a copy across those; then it is made part
        by part.
        """
        kind = self._runtime.memcpyDefault
        try:
            self._runtime.memcpyAsync(target, source, num_bytes, kind, stream)
        except self._runtime.CUDARuntimeError:
            if not seams:
                raise
            for begin, end in itertools.pairwise((0, *seams, num_bytes)):
                self._runtime.memcpyAsync(target + begin, source + begin, end - begin, kind, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """`height` runs of `width` bytes, pitches from one to the next; else as `copy`, a seam before every run."""
        kind = self._runtime.memcpyDefault
        try:
            self._runtime.memcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind, stream)
        except self._runtime.CUDARuntimeError:
            for row in range(height):
                self._runtime.memcpyAsync(target + row * target_pitch, source + row * source_pitch, width, kind, stream)

    def launch(self, kernel: str, stream: int, arguments: Arguments, num_blocks: int) -> None:
        """Run a kernel of csrc; the structures are copied by the call."""
        function = self.function(kernel)
        self._driver.launchKernel(function, num_blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments.address, 0)

    def function(self, kernel: str) -> int:
        """The driver's handle of a kernel of csrc."""
        return self.kernels.find(kernel)

    # ------------------------------------------------------------------------------------------ compiled steps

    def native(self, library: ctypes.CDLL) -> tuple[Callable[[int, int], int], int]:
        """What `native.py` calls for one call of the pipeline, and the verbs that it then speaks."""
        with self.guard():
            verbs = library.lmcache_fast_driver_verbs(THREADS)
        if not verbs:
            raise BackendError("libcuda.so.1 has not the functions that csrc/driver.h names, or no context is current")
        return library.lmcache_fast_steps_on_gpu, verbs

    def raise_native(self, status: int) -> None:
        """Raise what the driver returned to the compiled steps, by name."""
        self._driver.check_status(-status)

    # ------------------------------------------------------------------------------------------ memory

    def device_memory(self, num_bytes: int) -> Memory:
        """Fresh memory from torch's allocator, with no work of any stream pending on it."""
        stream = torch.cuda.ExternalStream(self._memory_stream, device=self.index)
        with torch.cuda.stream(stream):  # a pool of its own: what lies there was never another stream's
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", self.index))
        stream.synchronize()  # idle, unless a debugging aid fills fresh memory
        return Memory(tensor.data_ptr(), num_bytes, tensor)

    def bring(self, address: int, words: array[int]) -> None:
        """Words to device memory; the host waits for their way there, and for no other work."""
        self.copy(address, words.buffer_info()[0], len(words) * words.itemsize, self._memory_stream)
        self._runtime.streamSynchronize(self._memory_stream)

    def constant(self, words: array[int]) -> Memory:
        """Words in device memory that any stream may read; the host waits as for `bring`."""
        memory = self.device_memory(len(words) * words.itemsize)
        self.bring(memory.address, words)
        return memory

    def table(self, rope: RotarySpec) -> torch.Tensor:
        """A rotation's table in device memory, rows contiguous; kept as long as `rope`. Any stream may read it."""
        with (
            self._table_lock
        ):  # one table for all threads: a second one would take the first one's place while it is read
            known = self._tables.get(rope)
            if known is None:
                table = rope.cos_sin_cache.detach().to(torch.device("cuda", self.index))
                known = table if table.stride(1) == 1 else table.contiguous()
                torch.cuda.current_stream(self.index).synchronize()
                self._tables[rope] = known
            return known

    def pinned_memory(self, num_bytes: int) -> Memory:
        """Page-locked host memory."""
        memory = self._pinned.alloc_pinned_memory(num_bytes)
        return Memory(int(memory.ptr), num_bytes, memory)

    def write(self, address: int, source: int, num_bytes: int) -> None:
        """The host writes to page-locked memory."""
        ctypes.memmove(address, source, num_bytes)

    def same(self, address: int, other: int, num_bytes: int) -> bool:
        """Whether the host sees the same bytes at two addresses of its memory."""
        return _memcmp(address, other, num_bytes) == 0

    def read_word(self, address: int) -> int:
        """The host reads eight bytes of page-locked memory."""
        return ctypes.c_int64.from_address(address).value

    def fetch(self, address: int) -> int:
        """Eight bytes of device memory; the host waits."""
        word = ctypes.c_int64()
        self._runtime.memcpy(ctypes.addressof(word), address, 8, self._runtime.memcpyDeviceToHost)
        return word.value

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the host cannot look at a tensor without waiting."""
        return not tensor.is_cpu

    def mapped(self, address: int) -> int | None:
        """What kernels call host memory at `address`; None for pageable memory, which they cannot reach."""
        attributes = self._runtime.pointerGetAttributes(address)
        return int(attributes.devicePointer) or None if attributes.type != UNREGISTERED else None


_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int


def _current_raw_stream(index: int) -> int:
    """torch's current stream."""
    return int(torch.cuda.current_stream(index).cuda_stream)


# The call that torch's own compiler uses takes a tenth of the time; where there is none, the public one serves.
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_raw_stream)
