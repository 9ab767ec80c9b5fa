"""Device memory that a connector keeps between calls, handed from one borrower's stream to the next one's."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class DeviceBuffers:
    """Buffers taken at first use, grown on demand, and returned by every path out of a call.

    `in_use` counts the buffers lent at the moment; it is 0 between calls. What a borrower has queued on its current stream
    happens before anything the next one queues on its own; for work on other streams a borrower waits itself.
    """

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, Any]] = []  # and the event of the last use, None on the CPU
        self._lock = threading.Lock()
        self.in_use = 0

    @property
    def held_bytes(self) -> int:
        """Bytes kept for later calls, those lent not counted."""
        return sum(raw.numel() for raw, _ in self._free)

    @contextlib.contextmanager
    def borrow(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
        """A contiguous tensor with undefined contents, for the length of the block."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = self._take(nbytes, device)
        try:
            yield raw[:nbytes].view(dtype).view(tuple(shape))
        finally:
            used = _last_use(raw)
            with self._lock:
                self._free.append((raw, used))
                self.in_use -= 1

    def _take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The smallest free buffer that is large enough; a new one replaces a smaller one."""
        with self._lock:
            here = sorted((entry for entry in self._free if entry[0].device == device), key=lambda entry: len(entry[0]))
            fitting = [entry for entry in here if len(entry[0]) >= nbytes]
            chosen, used = fitting[0] if fitting else here[-1] if here else (None, None)
            self._free = [entry for entry in self._free if entry[0] is not chosen]
            if chosen is None or len(chosen) < nbytes:
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=device)
            elif used is not None:
                _streams(device).current_stream(device).wait_event(used)
            self.in_use += 1
            return chosen


def _streams(device: torch.device) -> Any:
    """The torch module of an accelerator, which has its streams and events."""
    return getattr(torch, device.type)


def _last_use(raw: torch.Tensor) -> Any:
    """An event after all that the current stream does with `raw`; None on the CPU. The memory will not be freed before."""
    if raw.device.type == "cpu":
        return None
    stream, event = _streams(raw.device).current_stream(raw.device), _streams(raw.device).Event()
    raw.record_stream(stream)
    event.record(stream)
    return event
