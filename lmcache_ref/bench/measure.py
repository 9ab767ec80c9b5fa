"""How time and memory are measured: medians of interleaved runs, the peak of what an operation allocates, ceilings."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def interleaved_medians(runs: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each run, taken in turn so that a slow moment of the machine meets them all.

    Every run is warmed up once; on a device the host waits before and after each.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeats + 1):
        for name, run in runs.items():
            synchronize(device)
            started = time.perf_counter()
            run()
            synchronize(device)
            if round_number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def synchronize(device: torch.device) -> None:
    """Make the host wait for the device, if it is one."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


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
