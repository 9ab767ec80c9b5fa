"""The steps of one call: which launch and which copy runs on which stream, and what waits for what.

This is their specification, in the verbs of `device.py`; nothing else decides an order. `native.py` takes the same steps
compiled, and tests hold it to the same verbs with the same arguments.
Host chunks go through a ring of staging memory: a store gathers a segment in one short launch, then the copy engines
carry it off; a load is the reverse. Each place of the ring has a stream of its own, so that no segment needs an event: while
one place is copied, another one is gathered. Chunks on the device are moved by one launch on the current stream. Slots that
do not travel with a launch are brought on a stream of their own, which waits for nothing.
Where keys are re-rotated on the way, each launch is two: one for keys, one for values.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lmcache_ref.errors import StrideError
from lmcache_ref.plan import TransferPlan, check_slots, used_runs

from ..descriptors import (
    CHUNKS_IN_BATCH,
    SLOTS_IN_BATCH,
    WIDEST_VECTOR_BYTES,
    Batch,
    Homes,
    Move,
    Part,
    PlaneTable,
    chunk_rows,
    granule_bytes,
    moved_parts,
)
from .device import Arguments
from .holdings import FLAG_WORDS, WORD_BYTES, Block, Place, Ring
from .segments import LEAST_SEGMENT_BYTES, Segment, cut, segment_bytes

STAGED_BLOCKS = 1056  # thread blocks of a staged launch: a short burst on all of an H200, which disturbs a model least
ZERO_COPY_BLOCKS = 32  # enough to keep the link full; more would take multiprocessors away from the model
MOST_BLOCKS = (1 << 31) - 1  # of a launch on device memory only: a unit each
RESIDENT_BLOCKS = 1056  # that an H200 runs at a time: with few tiles, a unit is of fewer planes
PLANES_PER_UNIT = 4  # at most
SLOTS_THAT_TRAVEL = SLOTS_IN_BATCH  # up to so many slots of the host go with each launch


class Rotated(NamedTuple):
    """The kernel for keys that are re-rotated on the way, and what it takes beside a batch."""

    kernel: str
    rotation: ctypes.Structure


class Request(NamedTuple):
    """One call. Whoever takes its steps writes to `block`, moves on in `ring`, and keeps nothing.

    planes: of the plan's layers and perhaps others; move: all of a batch that does not change from call to call, addresses
    of planes on the device included. slots: the plan's, int64, contiguous, on the host or on the cache's device. checked: the
    host has looked at their values. in_use: each of them is one of the cache's, none is negative. ring: for chunks in host
    memory; None: all chunks are in the cache's device. zero_copy_bytes: calls up to here reach host memory by kernels.
    words_before: in `block`, flags included; those behind the flags are written (rotation). kept: an event; once it has
    happened, the slots are in the block on the device, and the block must not be written to. idle: no other call of this
    direction is under way.
    """

    plan: TransferPlan
    planes: PlaneTable
    move: ctypes.Structure
    slots: torch.Tensor
    slots_on_device: bool
    checked: bool
    in_use: bool
    ring: Ring | None
    zero_copy_bytes: int
    block: Block
    words_before: int
    rotated: Rotated | None
    kept: Any
    idle: bool


class Outcome(NamedTuple):
    """What a call set going. events: when all have happened, the bytes have arrived. reports: the block's first word then is
    the first token whose slot is out of range. slots_address: on the device. pageable: kernels cannot reach chunks. ready: an
    event behind the way of the block to the device, where this call has brought it."""

    events: Sequence[Any]
    reports: bool
    slots_address: int
    pageable: bool
    ready: Any = None


class Known(NamedTuple):
    """What is known of a call's slots. reports: nobody has looked at them, so the kernel must say which is out of range.
    may_skip: a token may be skipped."""

    reports: bool
    may_skip: bool


class Steps:
    """The steps of one direction on one device; one call at a time. streams: of the places of every ring, and a last one."""

    def __init__(self, device: Any, operation: str, streams: Sequence[int]):
        self._device, self._operation, self._stores = device, operation, operation == "gather"
        self._zero_copy_stream, self._bringing, self._slots_in_batch = streams[0], streams[-1], SLOTS_THAT_TRAVEL
        self._entered, self._ready, self._brought = None, None, None  # events: see `_describe` and `_enter`
        self._batch, self._homes = Batch(), Homes()  # of the next launch; copied by it
        self._move, self._chunks = self._batch.move, self._batch.chunks  # parts of the batch
        self._arguments, self._keep_arguments = Arguments(self._batch), Arguments(self._batch, self._homes)

    def run(self, request: Request) -> Outcome | None:
        """Set a call going; None if nothing is to be moved. Raises SlotError and StrideError before anything is queued;
        what the device raises later leaves it to the caller to wait for the streams."""
        parts = list(moved_parts(request.plan))
        if not parts:
            return None
        with self._device.guard():
            known = self._look_at_slots(request, parts)
            if request.ring is None:
                return self._direct(request, known, parts, self._device.current(), MOST_BLOCKS)
            if _num_bytes(request, parts) <= request.zero_copy_bytes:
                mapped = self._mapped(parts)
                if mapped is not None:
                    return self._direct(request, known, mapped, self._zero_copy_stream, ZERO_COPY_BLOCKS)
            return self._staged(request, request.ring, known, parts)

    def _look_at_slots(self, request: Request, parts: Sequence[Part]) -> Known:
        """Check what the host can see without waiting."""
        if request.in_use:
            return Known(reports=False, may_skip=False)
        if request.slots_on_device:
            return Known(reports=not request.checked, may_skip=True)
        may_skip = False
        for first, end in used_runs((part[2], part[2] + part[3]) for part in parts):
            least, most = map(int, torch.aminmax(request.slots[first:end]))
            if most >= request.plan.cache.num_slots:
                check_slots(request.plan, duplicates=False)  # says which
            may_skip |= least < 0
        return Known(reports=False, may_skip=may_skip)

    # ------------------------------------------------------------------------------------------ descriptors

    def _describe(self, request: Request, width: int, chunks: list[int], keeps: bool) -> int:
        """Set the tables of a call on their way to the device, and fill in the batch but for its chunks. Returns where the
        chunks are: slots are behind them. Few slots travel with the launch, unless other kernels need them too."""
        if request.rotated is not None and width % request.plan.cache.dtype.itemsize:
            raise too_narrow(request, width)
        near, chunks_at = request.block.device.address, request.words_before * WORD_BYTES
        slots, slots_at = request.slots, chunks_at + len(chunks) * WORD_BYTES
        travels = (
            not (chunks or keeps or request.rotated or request.slots_on_device) and len(slots) <= self._slots_in_batch
        )
        self._entered = self._ready = None  # of this call: behind the current stream; behind the way of its block
        if not travels and request.kept is None:
            if chunks:
                words = array("q", chunks)
                self._device.write(
                    request.block.pinned.address + chunks_at, words.buffer_info()[0], len(words) * WORD_BYTES
                )
            self._ready = self._bring(request, slots_at)
        self._brought = None if travels else self._ready if request.kept is None else request.kept
        self._batch.move = Move.from_buffer_copy(request.move)
        self._move.ids, self._move.bad_token = 0 if travels else near + slots_at, near
        if travels:
            self._batch.slots[: len(slots)] = slots.tolist()
        return near + chunks_at

    def _bring(self, request: Request, end: int) -> Any:
        """Bring what is in a block behind the flags, up to `end`, to the device, and slots behind it: those of the host too,
        others on the current stream. An event behind the former, where there is any."""
        device, slots, begin = self._device, request.slots, FLAG_WORDS * WORD_BYTES
        pinned, near = request.block.pinned.address, request.block.device.address
        slots_bytes = len(slots) * WORD_BYTES
        if request.slots_on_device:
            device.copy(near + end, slots.data_ptr(), slots_bytes, device.current())  # the caller may overwrite them
        else:
            device.write(pinned + end, slots.data_ptr(), slots_bytes)
            end += slots_bytes
        if end == begin:
            return None
        device.copy(near + begin, pinned + begin, end - begin, self._bringing)
        return device.record(self._bringing)

    def _enter(self, stream: int) -> None:
        """What `stream` is given from now on runs behind all that the current stream was given, and finds the block."""
        device = self._device
        current = device.current()
        if stream != current:
            if self._entered is None:
                self._entered = device.record(current)
            device.wait(stream, self._entered)
        if self._brought is not None:
            device.wait(stream, self._brought)

    def _fetch_flag(self, request: Request, stream: int) -> None:
        """Bring the first bad token to the host, behind the last kernel."""
        block = request.block
        self._device.copy(block.pinned.address, block.device.address, WORD_BYTES, stream)

    def _mapped(self, parts: Sequence[Part]) -> list[Part] | None:
        """Parts of chunks by the addresses that kernels have for them; None if some are out of reach."""
        addresses = [self._device.mapped(part[0]) for part in parts]
        if None in addresses:
            return None
        return [(address or 0, *part[1:]) for address, part in zip(addresses, parts, strict=True)]

    def _point(self, rows: list[int] | None, table: int, num_chunks: int, num_tiles: int) -> None:
        """Let the batch have these chunks: rows that travel with the launch, or a table on the device."""
        move = self._move
        move.num_chunks, move.num_tiles, move.chunks = num_chunks, num_tiles, 0 if rows is not None else table
        if rows is not None:
            self._chunks[: len(rows)] = rows

    def _launch(self, request: Request, width: int, stream: int, most_blocks: int) -> None:
        """Move what the batch describes; where keys are rotated, the planes of keys in a launch of their own."""
        device, kernel, move = self._device, f"{self._operation}_{width}", self._move
        wanted_units = min(most_blocks, RESIDENT_BLOCKS)
        move.planes_per_unit = min(PLANES_PER_UNIT, -(-move.num_tiles * move.num_planes // wanted_units))
        num_blocks = min(most_blocks, move.num_tiles * -(-move.num_planes // move.planes_per_unit))
        if request.rotated is None:
            device.launch(kernel, stream, self._arguments, num_blocks)
            return
        num_layers, first, end = move.num_layers, move.first_plane, move.first_plane + move.num_planes
        if first < num_layers:
            move.num_planes = min(end, num_layers) - first
            arguments = Arguments(self._batch, request.rotated.rotation)
            device.launch(request.rotated.kernel, stream, arguments, num_blocks)
        if end > num_layers:
            move.first_plane = max(first, num_layers)
            move.num_planes = end - move.first_plane
            device.launch(kernel, stream, self._arguments, num_blocks)

    # ------------------------------------------------------------------------------------------ one launch

    def _direct(
        self, request: Request, known: Known, parts: Sequence[Part], stream: int, most_blocks: int
    ) -> Outcome:  # fmt: skip
        """One launch over all chunks."""
        rows, num_tiles = chunk_rows(parts, request.move.tile_tokens)
        width = math.gcd(WIDEST_VECTOR_BYTES, request.planes.granule_bytes, granule_bytes(parts))
        travels = len(parts) <= CHUNKS_IN_BATCH
        table = self._describe(request, width, [] if travels else rows, False)
        self._enter(stream)
        self._point(rows if travels else None, table, len(parts), num_tiles)
        self._launch(request, width, stream, most_blocks)
        if known.reports:
            self._fetch_flag(request, stream)
        return Outcome([self._device.record(stream)], known.reports, self._move.ids, False, self._ready)

    # ------------------------------------------------------------------------------------------ through the ring

    def _staged(self, request: Request, ring: Ring, known: Known, parts: Sequence[Part]) -> Outcome:
        """Segment after segment through the ring, each on the stream of its place.

        Where no other call is under way, a store's first one is small, so that the link is soon in use, and a load's last
        one, so that little is left to do behind it.
        """
        device, cache, move = self._device, request.plan.cache, request.move
        width = math.gcd(WIDEST_VECTOR_BYTES, request.planes.granule_bytes)
        most = segment_bytes(ring.place_bytes, _num_bytes(request, parts), request.idle)
        keeps = known.may_skip and self._stores
        self._describe(request, width, [], keeps)
        streams: dict[int, None] = {}
        row_bytes, num_layers = request.planes.token_bytes, len(request.plan.planes)
        small = LEAST_SEGMENT_BYTES if request.idle else 0
        edges = (small, 0) if self._stores else (0, small)
        segments = cut(parts, cache.kv_size, num_layers, row_bytes, most, move.tile_tokens, *edges)
        for segment in segments:
            place = ring.next()
            if place.stream not in streams:
                streams[place.stream] = None
                self._enter(place.stream)
            if not self._stores:
                self._copy(segment, place, to_home=False)
            self._point(segment.rows, 0, len(segment.parts), segment.num_tiles)
            into = self._move
            into.base_address, into.first_plane, into.num_planes = (
                place.address,
                segment.first_plane,
                segment.num_planes,
            )
            if keeps:  # before the gather, which it may overwrite where it has to copy
                self._keep(request, segment, place)
            self._launch(request, width, place.stream, STAGED_BLOCKS)
            if self._stores:
                self._copy(segment, place, to_home=True)
        pageable = request.idle and device.mapped(parts[0][0]) is None  # a copy of such memory leaves the link idle
        if not known.reports:
            return Outcome([device.record(stream) for stream in streams], False, self._move.ids, pageable, self._ready)
        last, *others = streams
        for stream in others:
            device.wait(last, device.record(stream))
        self._fetch_flag(request, last)
        return Outcome([device.record(last)], True, self._move.ids, pageable, self._ready)

    def _keep(self, request: Request, segment: Segment, place: Place) -> None:
        """Let skipped rows of a place be what they are at home: by a kernel that reaches there, else all by a copy."""
        homes = self._mapped(segment.parts)
        if homes is None:
            self._copy(segment, place, to_home=False)
            return
        rows, _ = chunk_rows(homes, request.move.tile_tokens)
        self._homes.chunks[: len(rows)] = rows
        width = math.gcd(WIDEST_VECTOR_BYTES, request.planes.granule_bytes, granule_bytes(homes))
        self._device.launch(f"keep_{width}", place.stream, self._keep_arguments, STAGED_BLOCKS)

    def _copy(self, segment: Segment, place: Place, to_home: bool) -> None:
        """The bytes of a segment, between their homes and its place."""
        device, (place_address, stream) = self._device, place
        for copy in segment.copies:
            home, near, width = copy.home, place_address + copy.packed, copy.width
            target, source = (home, near) if to_home else (near, home)
            if copy.height == 1:
                device.copy(target, source, width, stream, copy.seams)
            else:
                pitches = (copy.home_pitch, copy.packed_pitch) if to_home else (copy.packed_pitch, copy.home_pitch)
                device.copy_rows(target, pitches[0], source, pitches[1], width, copy.height, stream)


def too_narrow(request: Request, width: int) -> StrideError:
    """Why keys cannot be rotated on the way."""
    return StrideError(
        f"rotation: keys of {request.plan.cache.dtype} at addresses that are multiples of {width} byte only"
    )


def _num_bytes(request: Request, parts: Sequence[Part]) -> int:
    num_planes = len(request.plan.planes) * request.plan.cache.kv_size
    return sum([part[3] for part in parts]) * num_planes * request.planes.token_bytes
