"""What a call of the pipeline holds on to: descriptor blocks, places in the staging ring, the handle that ends it.

Which launch and which copy comes when is `pipeline.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_ref.errors import SlotRangeError
from lmcache_ref.plan import TransferPlan
from lmcache_ref.transfer import Transfer

from ..descriptors import PlaneTable
from .device import Arguments, Memory

WORD_BYTES = 8
FIRST_BLOCK_BYTES = 64 << 10
NO_BAD_TOKEN = -1  # all ones, unsigned


class Block(NamedTuple):
    """Descriptors of one call: written by the host in page-locked memory, read by kernels in device memory."""

    pinned: Memory
    device: Memory


class Blocks:
    """Blocks that no call uses. One is taken by a call and returns when its transfer is done."""

    def __init__(self, device: Any):
        self._device = device
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """A free one that is large enough, else a new one."""
        with self._lock:
            for i, block in enumerate(self._free):
                if block.pinned.num_bytes >= num_bytes:
                    return self._free.pop(i)
        size = max(FIRST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        return Block(self._device.pinned_memory(size), self._device.device_memory(size))

    def give_back(self, block: Block) -> None:
        with self._lock:
            self._free.append(block)


class Slots(NamedTuple):
    """What is known of a call's slots. on_device: their values are not on the host. reports: nobody has looked at them, so
    the kernel must say which is out of range. may_skip: a token may be skipped."""

    on_device: bool
    reports: bool
    may_skip: bool


class Uploaded(NamedTuple):
    """A block in use; where on the device the planes, the chunks (behind the planes) and the slots are."""

    block: Block
    planes_address: int
    chunks_address: int
    slots_address: int


class Rotated(NamedTuple):
    """The kernel for keys that are re-rotated on the way, and what it takes: a lane's batch, and the rotation."""

    kernel: str
    arguments: Arguments


class Call(NamedTuple):
    """What the segments of one call share. keeps: rows in staging must hold what they had."""

    plan: TransferPlan
    slots: Slots
    planes: PlaneTable
    uploaded: Uploaded
    kernel: str
    tile_tokens: int
    keeps: bool
    rotated: Rotated | None


class CudaTransfer(Transfer):
    """Handle of a transfer under way. It keeps what the device still reads or writes.

    events: when all have happened, the bytes have arrived. counted: how many slots there are, for the message; None when
    there is nothing to report.
    """

    def __init__(
        self, device: Any, blocks: Blocks, events: Sequence[Any], uploaded: Uploaded, counted: str | None, keep: Any
    ):
        self._device, self._blocks, self._counted = device, blocks, counted
        self._events = tuple(events)
        self._under_way: tuple[Uploaded, Any] | None = (uploaded, keep)
        self._error: SlotRangeError | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Make the current stream wait; raise SlotRangeError where it is known already. The host does not wait."""
        events = self._events
        if self._counted is not None and self.done():
            self.raise_error()
        if self._under_way is not None:
            current = self._device.current()
            for event in events:
                self._device.wait(current, event)

    def synchronize(self) -> None:
        """Make the host wait. Raises SlotRangeError, once, when a slot on the device was out of range."""
        self.finish()
        self.raise_error()

    def finish(self) -> None:
        """Make the host wait; what the kernel found is kept for later."""
        for event in self._events:
            self._device.synchronize(event)
        self._finish()

    def done(self) -> bool:
        """Whether the bytes have arrived."""
        if self._under_way is not None:
            if not all(self._device.is_done(event) for event in self._events):
                return False
            self._finish()
        return True

    def raise_error(self) -> None:
        """Raise what the kernel found, unless that was done before."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        """Once all events have happened: read the flag, let go of everything."""
        with self._lock:
            if self._under_way is None:
                return
            (block, _, _, slots_address), _ = self._under_way
            if self._counted is not None:
                token = self._device.read_word(block.pinned.address)
                if token != NO_BAD_TOKEN:
                    value = self._device.fetch(slots_address + token * WORD_BYTES)
                    self._error = SlotRangeError(f"slots[{token}] = {value}: the cache has {self._counted} slots")
            self._events, self._under_way = (), None
            self._blocks.give_back(block)


class Place(NamedTuple):
    """Staging memory for one segment, and the stream on which all that concerns it runs."""

    address: int
    stream: int


class Ring:
    """Staging memory as places of one size, used in turn. A place has one stream, so who uses it next is behind who used it
    last."""

    def __init__(self, memory: Memory, place_bytes: int, streams: Sequence[int]):
        self.memory, self.place_bytes = memory, place_bytes
        self._places = deque(Place(memory.address + i * place_bytes, stream) for i, stream in enumerate(streams))

    def next(self) -> Place:
        """The place that was used longest ago."""
        self._places.rotate(-1)
        return self._places[-1]
