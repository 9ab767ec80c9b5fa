"""What a call of the pipeline holds on to: descriptor blocks, places in the staging ring, the handle that ends it.

Which launch and which copy comes when is `steps.py`.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmcache_ref.errors import SlotRangeError
from lmcache_ref.transfer import Transfer

from .device import Memory

if TYPE_CHECKING:
    from .steps import Outcome, Request

WORD_BYTES = 8
FIRST_BLOCK_BYTES = 64 << 10
FLAG_WORDS = 2  # of a block: the first bad token; the first that cannot be rotated, which the checks of a plan rule out
NO_BAD_TOKEN = -1  # all ones, unsigned


class Block:
    """Descriptors: written by the host in page-locked memory, read by kernels in device memory."""

    __slots__ = ("device", "pinned", "users")

    def __init__(self, pinned: Memory, device: Memory):
        self.pinned, self.device, self.users = pinned, device, 1


class Blocks:
    """Blocks that nobody uses, their flags without a bad token. One is taken by a call and returns when its transfer is done,
    and whoever shares it."""

    def __init__(self, device: Any):
        self._device = device
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """A free one that is large enough, the last used first; else a new one."""
        with self._lock:
            for i in range(len(self._free) - 1, -1, -1):
                if self._free[i].pinned.num_bytes >= num_bytes:
                    block = self._free.pop(i)
                    block.users = 1
                    return block
        size = max(FIRST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._device.guard():
            block = Block(self._device.pinned_memory(size), self._device.device_memory(size))
        self.reset(block)
        return block

    def reset(self, block: Block) -> None:
        """Let the flags of a block that nobody uses say that nothing is wrong. The host waits for no other work."""
        flags = array("q", [NO_BAD_TOKEN] * FLAG_WORDS)
        with self._device.guard():
            self._device.write(block.pinned.address, flags.buffer_info()[0], len(flags) * WORD_BYTES)
            self._device.bring(block.device.address, flags)

    def share(self, block: Block) -> Block:
        """The same block for one more user."""
        with self._lock:
            block.users += 1
        return block

    def give_back(self, block: Block) -> None:
        with self._lock:
            block.users -= 1
            if not block.users:
                self._free.append(block)


class KeptSlots(NamedTuple):
    """Slots of the host that an earlier call has brought to the device; in `block`, behind the flags. A connector that moves
    layer by layer has the same ones in every call.

    ready: when they are there. fixed: the tensor they came from, if nobody writes to it any more; least and most of it, -1 if
    nobody has looked.
    """

    block: Block
    num_slots: int
    ready: Any
    fixed: torch.Tensor | None
    least: int
    most: int


class Resident:
    """A table of planes in device memory. moves: the structs Move over it, by (number of layers, first layer), but for what
    changes from call to call."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.moves: dict[tuple[int, int], ctypes.Structure] = {}


class CudaTransfer(Transfer):
    """Handle of a transfer under way. It keeps what the device still reads or writes.

    counted: how many slots there are, for the message; None when there is nothing to report.
    """

    def __init__(self, device: Any, blocks: Blocks, request: Request, outcome: Outcome, counted: str | None):
        self._device, self._blocks, self._counted = device, blocks, counted
        self._events, self._slots_address = tuple(outcome.events), outcome.slots_address
        self._under_way: Request | None = request
        self._error: SlotRangeError | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Make the current stream wait; raise SlotRangeError where it is known already. The host does not wait."""
        events = self._events
        if self._counted is not None and self.done():
            self.raise_error()
        if self._under_way is not None:
            with self._device.guard():  # the default stream has the same name on each device
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
            block = self._under_way.block
            if self._counted is not None:
                token = self._device.read_word(block.pinned.address)
                if token != NO_BAD_TOKEN:
                    value = self._device.fetch(self._slots_address + token * WORD_BYTES)
                    self._error = SlotRangeError(f"slots[{token}] = {value}: the cache has {self._counted} slots")
                    self._blocks.reset(block)
            self._events, self._under_way = (), None
            self._blocks.give_back(block)


class Place(NamedTuple):
    """Staging memory for one segment, and the stream on which all that concerns it runs."""

    address: int
    stream: int


class Ring:
    """Staging memory as places of one size, used in turn. A place has one stream, so who uses it next is behind who used it
    last. turn: how many places were used so far."""

    def __init__(self, memory: Memory, place_bytes: int, streams: Sequence[int]):
        self.memory, self.place_bytes, self.turn = memory, place_bytes, 0
        self.places = tuple(Place(memory.address + i * place_bytes, stream) for i, stream in enumerate(streams))

    def next(self) -> Place:
        """The place that was used longest ago."""
        place = self.places[self.turn % len(self.places)]
        self.turn += 1
        return place
