"""How time and memory are measured: a clock for a host and one for a GPU, with the same verbs; medians; ceilings.

What is timed is `figures.py`. A clock also makes streams and events, so that figures and peers name no device.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..transfer import Transfer

Seconds = dict[str, "float | Exception"]  # runner -> median, or why there is none

CEILING_BYTES = 1 << 30
BUSY_CYCLES, BUSY_CYCLES_PER_CALL = 2_000_000, 60_000  # about 1 ms, and 30 us for each launch that a run makes


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    once: Callable[[Callable[[], Any]], float],
    repeats: int,
    of_all: Callable[[list[float]], float] = statistics.median,
) -> Seconds:
    """The median (or another `of_all`) of `once(run)`, in seconds, for each run, taken in turn so that a slow moment meets
    them all.

    Every run is warmed up once. One that raises is left out from there on, and its exception stands for its time.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    failed: Seconds = {}
    for round_number in range(repeats + 1):
        for name in [name for name in runs if name not in failed]:
            try:
                seconds = once(runs[name])
            except Exception as error:  # whatever a guest raises is its own result; the others go on
                failed[name] = error
                continue
            if round_number:
                taken[name].append(seconds)
    return {name: failed[name] if name in failed else of_all(taken[name]) for name in runs}


class HostClock:
    """A host on which a call has done all when it returns. Streams and events are there in name only."""

    asynchronous = False

    def __init__(self, device: torch.device):
        self.device = device

    def whole(self, run: Callable[[], Any]) -> float:
        """Seconds of a run and all that it set going."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started

    def on_device(self, run: Callable[[], Any], calls: int = 1) -> float:
        """Seconds on the current stream, the host's own time not counted. calls: launches that the run may make."""
        return self.whole(run)

    def until_return(self, run: Callable[[], Transfer]) -> float:
        """Seconds until a run returns its handle, begun on an idle device."""
        self.synchronize()
        started = time.perf_counter()
        handle = run()
        taken = time.perf_counter() - started
        handle.synchronize()
        return taken

    def synchronize(self) -> None:
        """Make the host wait for the device."""

    def new_stream(self) -> Any:
        """A stream of the device."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Within the block, `stream` is the current one."""
        return contextlib.nullcontext()

    def follow(self, stream: Any) -> None:
        """`stream` goes on when what the current stream was given is done."""

    def record(self, timing: bool = False) -> Any:
        """An event behind what the current stream was given; has `query`, `synchronize`, and `elapsed_time` in ms."""
        return HostEvent()

    def wait(self, event: Any) -> None:
        """The current stream goes on when the event has happened."""

    def extra_bytes(self, run: Callable[[], Any]) -> tuple[int, int]:
        """Bytes that torch allocates during a run: the most at one time, and what is left of them behind it."""
        with PeakMemory() as memory:
            run()
        return memory.peak_bytes, 0

    def release(self) -> None:
        """Give memory that nobody uses back to the device."""

    def describe(self) -> str:
        """The device, for a report."""
        return f"{self.device}, {torch.get_num_threads()} threads"


class HostEvent:
    """A moment on the host."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds."""
        return 1e3 * (later.seconds - self.seconds)


class CudaClock(HostClock):
    """The current CUDA device."""

    asynchronous = True

    def on_device(self, run: Callable[[], Any], calls: int = 1) -> float:
        """By events; the stream is kept busy meanwhile, so that the host is ahead of it."""
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES + BUSY_CYCLES_PER_CALL * calls)
        begin = self.record(timing=True)
        run()
        end = self.record(timing=True)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def follow(self, stream: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream())

    def record(self, timing: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=timing)
        event.record()
        return event

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def extra_bytes(self, run: Callable[[], Any]) -> tuple[int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def describe(self) -> str:
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def clock_of(device: torch.device) -> HostClock:
    """The clock for a device; CUDA's must be the current one."""
    return CudaClock(device) if device.type == "cuda" else HostClock(device)


def ceilings(clock: HostClock, host: torch.Tensor, repeats: int) -> dict[str, float]:
    """GB/s of plain copies, the best of all repeats: device to host, host to device, both at once (sum), device to device
    (read + written).

    host: uint8, pinned where that means something; overwritten.
    """
    size = min(len(host) // 2, CEILING_BYTES)
    ups, downs = host[:size], host[size : 2 * size]
    one, two = (torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
    streams = [clock.new_stream() for _ in range(2)]

    def down() -> None:
        with clock.on(streams[0]):
            downs.copy_(one, non_blocking=True)

    def up() -> None:
        with clock.on(streams[1]):
            two.copy_(ups, non_blocking=True)

    def both() -> None:
        down()
        up()

    taken = interleaved({"d2h": down, "h2d": up, "both": both}, clock.whole, repeats, min)
    taken |= interleaved({"device": lambda: two.copy_(one)}, clock.on_device, repeats, min)
    moved = {"d2h": size, "h2d": size, "both": 2 * size, "device": 2 * size}
    rates = {}
    for name, seconds in taken.items():
        if isinstance(seconds, Exception):
            raise seconds
        rates[name] = moved[name] / seconds / 1e9
    return rates


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that torch operations allocate within the block and keep alive at one time.

    `peak_bytes` is the most at any moment; memory that existed before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in before or key in self._seen:
            return
        self._seen.add(key)
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

        def gone() -> None:
            self._seen.discard(key)
            self._bytes -= nbytes

        weakref.finalize(storage, gone)
