"""Device memory that a connector keeps between calls. Nothing here is ordered: whoever borrows waits before returning."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch


class DeviceBuffers:
    """Buffers taken at first use, grown on demand, and returned by every path out of a call.

    `in_use` counts the buffers lent at the moment; it is 0 between calls.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self.in_use = 0

    @property
    def held_bytes(self) -> int:
        """Bytes kept for later calls, those lent not counted."""
        return sum(raw.numel() for raw in self._free)

    @contextlib.contextmanager
    def borrow(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
        """A contiguous tensor with undefined contents, for the length of the block."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = self._take(nbytes, device)
        try:
            yield raw[:nbytes].view(dtype).view(tuple(shape))
        finally:
            with self._lock:
                self._free.append(raw)
                self.in_use -= 1

    def _take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The smallest free buffer that is large enough; a new one replaces a smaller one."""
        with self._lock:
            here = sorted((raw for raw in self._free if raw.device == device), key=torch.Tensor.numel)
            fitting = [raw for raw in here if raw.numel() >= nbytes]
            chosen = fitting[0] if fitting else here[-1] if here else None
            if chosen is not None:
                self._free = [raw for raw in self._free if raw is not chosen]
            if chosen is None or chosen.numel() < nbytes:
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.in_use += 1
            return chosen
