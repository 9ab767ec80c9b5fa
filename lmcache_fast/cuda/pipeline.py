"""Store and load of one plan: which launch and which copy runs on which stream, and what waits for what.

Everything about streams, events and staging is here and in `holdings.py`, spoken in the verbs of `device.py`; nothing else
decides an order.
Host chunks go through a ring of staging memory: a store gathers a segment in one short launch, then the copy engines
carry it off; a load is the reverse. Each place of the ring has a stream of its own, so that nothing inside a call needs an
event: while one place is copied, another one is gathered. Chunks on the device are moved by one launch on the current stream.
Where keys are re-rotated on the way, each launch is two: one for keys, one for values.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from lmcache_ref.errors import SlotRangeError, StrideError
from lmcache_ref.plan import TransferPlan, check_slots, validating
from lmcache_ref.transfer import Transfer

from ..descriptors import (
    CHUNKS_IN_BATCH,
    WIDEST_VECTOR_BYTES,
    WORDS_PER_PLANE,
    Batch,
    Homes,
    Part,
    PlaneTable,
    PlaneTables,
    chunk_rows,
    describe_rotation_on_the_way,
    granule_bytes,
    moved_parts,
    whole_move,
)
from ..environment import staging_bytes, zero_copy_bytes
from .device import TYPE_NAMES, Arguments
from .holdings import NO_BAD_TOKEN, WORD_BYTES, Blocks, Call, CudaTransfer, Place, Ring, Rotated, Slots, Uploaded
from .segments import ALIGN_BYTES, LEAST_SEGMENT_BYTES, Segment, cut, segment_bytes

STAGED_BLOCKS = 528  # thread blocks of a staged launch: a short burst, on half the threads of an H200
ZERO_COPY_BLOCKS = 32  # enough to keep the link full; more would take multiprocessors away from the model
MOST_BLOCKS = (1 << 31) - 1  # of a launch on device memory only: a unit each
PLANES_PER_UNIT = 4
PLACES = 2  # that the ring is divided into: one is filled while the other is emptied
TILE_BYTES = 32 << 10  # of one plane, moved by a thread block at a stretch
TILE_ROWS = 256  # LMC_ROWS_KNOWN of transfer.cu
FLAG_WORDS = 2  # the first bad token, and the first that cannot be rotated, which the checks of a plan rule out

logger = logging.getLogger(__name__)


class Lane:
    """One direction on one device: its streams, its ring, its transfers under way. Threads take turns."""

    def __init__(self, device: Any, operation: str, blocks: Blocks):
        self._device, self._operation, self._blocks = device, operation, blocks
        self._tables = PlaneTables()
        self._streams = [device.new_stream(urgent=True) for _ in range(PLACES)]
        self._batch, self._homes = Batch(), Homes()  # of the next launch; copied by it
        self._move, self._chunks = self._batch.move, self._batch.chunks  # parts of the batch
        self._arguments, self._keep_arguments = Arguments(self._batch), Arguments(self._batch, self._homes)
        self.zero_copy_bytes = 0  # calls up to here reach host memory by kernels; found by `calibration.py`
        self._ring: Ring | None = None
        self._under_way: deque[CudaTransfer] = deque()
        self._lock = threading.Lock()

    def look_at_slots(self, plan: TransferPlan) -> Slots:
        """Check what the host can see without waiting, all of it under LMCACHE_VALIDATE=1. Raises SlotError."""
        strict = validating()
        if strict:
            check_slots(plan, duplicates=self._operation == "scatter")
        if self._device.holds(plan.slots):
            return Slots(on_device=True, reports=not strict, may_skip=True)
        least, most = torch.aminmax(plan.slots)
        if int(most) >= plan.cache.num_slots:
            check_slots(plan, duplicates=False)  # says which, if it is a slot that is used
        return Slots(on_device=False, reports=False, may_skip=int(least) < 0)

    def move(self, plan: TransferPlan, on_host: bool) -> Transfer:
        """Move a plan whose chunks are all in host memory, or all in this device's. Raises before anything is moved."""
        with self._lock, self._device.guard():
            self._reap()
            num_tokens = plan.num_moved_tokens
            if num_tokens == 0:
                return Transfer()
            planes, first_layer = self._tables.find(plan)
            if not on_host:
                return self._direct(plan, planes, first_layer, list(moved_parts(plan)), MOST_BLOCKS)
            num_bytes = num_tokens * len(plan.planes) * plan.cache.kv_size * planes.token_bytes
            asked = zero_copy_bytes()
            if num_bytes <= (self.zero_copy_bytes if asked is None else asked):
                mapped = self._mapped(list(moved_parts(plan)))
                if mapped is not None:
                    return self._direct(plan, planes, first_layer, mapped, ZERO_COPY_BLOCKS, self._streams[0])
            return self._staged(plan, planes, first_layer, num_bytes)

    def _reap(self) -> None:
        """Forget transfers that are done, oldest first. Raises the first error that nobody has asked for; those of the
        others, mostly the same request's, go with it."""
        errors = []
        while self._under_way and self._under_way[0].done():
            try:
                self._under_way.popleft().raise_error()
            except SlotRangeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _begun(self, call: Call, events: Sequence[Any]) -> CudaTransfer:
        cache = call.plan.cache
        counted = f"NB*BS = {cache.num_blocks}*{cache.block_size} = {cache.num_slots}" if call.slots.reports else None
        transfer = CudaTransfer(self._device, self._blocks, events, call.uploaded, counted, (call.plan, self._ring))
        self._under_way.append(transfer)
        return transfer

    # ------------------------------------------------------------------------------------------ descriptors

    def _describe(
        self, plan: TransferPlan, slots: Slots, planes: PlaneTable, first_layer: int, width: int, chunks: list[int],
        stream: int,
    ) -> Call:  # fmt: skip
        """Bring the tables of a call to the device on `stream`, and fill in the batch but for its chunks."""
        if plan.rotation is not None and width % plan.cache.dtype.itemsize:
            raise StrideError(
                f"rotation: keys of {plan.cache.dtype} at addresses that are multiples of {width} byte only"
            )
        words_per_layer = plan.cache.kv_size * WORDS_PER_PLANE
        words = array("q", (NO_BAD_TOKEN, NO_BAD_TOKEN))
        words.extend(planes.words[first_layer * words_per_layer : (first_layer + len(plan.planes)) * words_per_layer])
        planes_end = len(words)
        words.extend(chunks)
        chunks_end = len(words)
        if plan.rotation is not None:
            for positions in (plan.rotation.old_positions, plan.rotation.new_positions):
                words.frombytes(ctypes.string_at(positions.data_ptr(), len(positions) * WORD_BYTES))
        uploaded = self._upload(plan, slots, words, planes_end, stream)
        tile_tokens = tile_tokens_of(planes)
        move = whole_move(plan, planes, tile_tokens)
        move.planes, move.ids = uploaded.planes_address, uploaded.slots_address
        move.bad_token, move.planes_per_unit = uploaded.block.device.address, PLANES_PER_UNIT
        self._batch.move = move
        keeps = slots.may_skip and self._operation == "gather"
        rotated = None if plan.rotation is None else self._describe_rotation(plan, uploaded, chunks_end)
        return Call(plan, slots, planes, uploaded, f"{self._operation}_{width}", tile_tokens, keeps, rotated)

    def _describe_rotation(self, plan: TransferPlan, uploaded: Uploaded, words_before: int) -> Rotated:
        """How keys are rotated on the way; old positions, then new ones, are behind so many words of the tables."""
        assert plan.rotation is not None
        rope, base = plan.rotation.rope, uploaded.block.device.address
        old, table = base + words_before * WORD_BYTES, self._device.table(rope)
        new = old + len(plan.slots) * WORD_BYTES
        rotation = describe_rotation_on_the_way(plan.cache, old, new, table, rope.is_neox)
        rotation.bad_token = base + WORD_BYTES
        kernel = f"scatter_rotated_{TYPE_NAMES[plan.cache.dtype]}_{TYPE_NAMES[table.dtype]}"
        return Rotated(kernel, Arguments(self._batch, rotation))

    def _upload(self, plan: TransferPlan, slots: Slots, words: array[int], planes_end: int, stream: int) -> Uploaded:
        """Bring tables to the device on `stream`, and slots: those of the host too, others on the current stream. `stream`
        is then behind all that the current stream was given."""
        device, values, current = self._device, plan.slots, self._device.current()
        num_bytes, slots_bytes = len(words) * WORD_BYTES, len(values) * WORD_BYTES
        block = self._blocks.take(num_bytes + slots_bytes)
        device.write(block.pinned.address, words.buffer_info()[0], num_bytes)
        base = block.device.address
        slots_address = base + num_bytes
        if slots.on_device:
            values = values.to(plan.cache.device).contiguous()
            device.copy(slots_address, values.data_ptr(), slots_bytes, current)  # the caller may overwrite them
        else:
            values = values.contiguous()
            device.write(block.pinned.address + num_bytes, values.data_ptr(), slots_bytes)
            num_bytes += slots_bytes
        if stream != current:
            device.wait(stream, device.record(current))
        device.copy(base, block.pinned.address, num_bytes, stream)
        return Uploaded(block, base + FLAG_WORDS * WORD_BYTES, base + planes_end * WORD_BYTES, slots_address)

    def _fetch_flag(self, call: Call, stream: int) -> None:
        """Bring the first bad token to the host, behind the last kernel."""
        block = call.uploaded.block
        self._device.copy(block.pinned.address, block.device.address, WORD_BYTES, stream)

    def _mapped(self, parts: Sequence[Part]) -> list[Part] | None:
        """Parts of chunks by the addresses that kernels have for them; None if some are out of reach."""
        addresses = [self._device.mapped(part[0]) for part in parts]
        if None in addresses:
            return None
        return [(address or 0, *part[1:]) for address, part in zip(addresses, parts, strict=True)]

    # ------------------------------------------------------------------------------------------ one launch

    def _direct(
        self,
        plan: TransferPlan,
        planes: PlaneTable,
        first_layer: int,
        parts: list[Part],
        most_blocks: int,
        stream: int | None = None,
    ) -> Transfer:
        """One launch, on the current stream unless another one is given."""
        device, slots = self._device, self.look_at_slots(plan)
        stream = device.current() if stream is None else stream
        tile_tokens = tile_tokens_of(planes)
        rows, num_tiles = chunk_rows(parts, tile_tokens)
        width = math.gcd(WIDEST_VECTOR_BYTES, planes.granule_bytes, granule_bytes(parts))
        travels = len(parts) <= CHUNKS_IN_BATCH
        call = self._describe(plan, slots, planes, first_layer, width, [] if travels else rows, stream)
        self._point(rows if travels else None, call.uploaded.chunks_address, len(parts), num_tiles)
        units = num_tiles * -(-len(plan.planes) * plan.cache.kv_size // PLANES_PER_UNIT)
        if call.rotated is None:
            device.launch(call.kernel, stream, self._arguments, min(most_blocks, units))
        else:
            self._launch_rotated(call, call.rotated, stream, min(most_blocks, units))
        if slots.reports:
            self._fetch_flag(call, stream)
        return self._begun(call, [device.record(stream)])

    def _launch_rotated(self, call: Call, rotated: Rotated, stream: int, num_blocks: int) -> None:
        """The planes of the batch in two launches, where it has both: keys are rotated, values only moved."""
        move, num_layers = self._move, len(call.plan.planes)
        first, end = move.first_plane, move.first_plane + move.num_planes
        if first < num_layers:
            move.num_planes = min(end, num_layers) - first
            self._device.launch(rotated.kernel, stream, rotated.arguments, num_blocks)
        if end > num_layers:
            move.first_plane = max(first, num_layers)
            move.num_planes = end - move.first_plane
            self._device.launch(call.kernel, stream, self._arguments, num_blocks)

    def _point(self, rows: list[int] | None, table: int, num_chunks: int, num_tiles: int) -> None:
        """Let the batch have these chunks: rows that travel with the launch, or a table on the device."""
        move = self._move
        move.num_chunks, move.num_tiles, move.chunks = num_chunks, num_tiles, 0 if rows is not None else table
        if rows is not None:
            self._chunks[: len(rows)] = rows

    # ------------------------------------------------------------------------------------------ through the ring

    def _staged(self, plan: TransferPlan, planes: PlaneTable, first_layer: int, num_bytes: int) -> Transfer:
        """Segment after segment through the ring. The first one is small, so that the link is soon in use, and it is on its
        way to staging, where nobody sees it, while the host looks at the slots."""
        device, kv_size, num_layers = self._device, plan.cache.kv_size, len(plan.planes)
        ring = self._ring_of(kv_size * num_layers * planes.token_bytes)
        most, tile_tokens = segment_bytes(ring.place_bytes, num_bytes), tile_tokens_of(planes)
        segments = cut(
            moved_parts(plan), kv_size, num_layers, planes.token_bytes, most, tile_tokens, LEAST_SEGMENT_BYTES
        )
        segment, place = next(segments), ring.next()
        streams: dict[int, None] = {place.stream: None}
        call = None
        try:
            width, stores = math.gcd(WIDEST_VECTOR_BYTES, planes.granule_bytes), self._operation == "gather"
            begun = self._mapped(segment.parts) is not None
            if not begun:
                _say_that_memory_is_pageable()
            if stores and begun:
                unseen = Slots(device.holds(plan.slots), reports=False, may_skip=False)
                call = self._describe(plan, unseen, planes, first_layer, width, [], place.stream)
                self._describe_segment(segment, place)
                self._launch(call, place)
            elif begun:
                device.wait(place.stream, device.record(device.current()))
                self._copy(segment, place, to_home=False)
            slots = self.look_at_slots(plan)
            if call is None:
                call = self._describe(plan, slots, planes, first_layer, width, [], place.stream)
            call = call._replace(slots=slots, keeps=slots.may_skip and stores)
            return self._begun(call, self._run(call, segment, place, segments, ring, streams, begun))
        except BaseException:  # there will be no handle, and what was begun still uses the caller's memory
            for stream in streams:
                with contextlib.suppress(Exception):
                    device.synchronize(device.record(stream))
            if call is not None:
                self._blocks.give_back(call.uploaded.block)
            raise

    def _run(
        self,
        call: Call,
        segment: Segment | None,
        place: Place,
        segments: Iterator[Segment],
        ring: Ring,
        streams: dict[int, None],
        begun: bool,
    ) -> list[Any]:
        """Each segment on the stream of its place, from `segment` in `place` on. begun: the first half of that is under way,
        and kernels reach all of its chunks. Fills `streams` with those used; returns the events that end the call."""
        device, stores = self._device, self._operation == "gather"
        ready = device.record(place.stream)
        while segment is not None:
            if not stores and not begun:
                self._copy(segment, place, to_home=False)
            if not (stores and begun):
                self._describe_segment(segment, place)
            if call.keeps:  # before the gather, which it may overwrite where it has to copy
                self._keep(call, segment, place)
            if not (stores and begun):
                self._launch(call, place)
            if stores:
                self._copy(segment, place, to_home=True)
            segment, begun = next(segments, None), False
            if segment is not None:
                place = ring.next()
                if place.stream not in streams:
                    streams[place.stream] = device.wait(place.stream, ready)
        if not call.slots.reports:
            return [device.record(stream) for stream in streams]
        last, *others = streams
        for stream in others:
            device.wait(last, device.record(stream))
        self._fetch_flag(call, last)
        return [device.record(last)]

    def _launch(self, call: Call, place: Place) -> None:
        """Move what the batch describes between the pages and a place."""
        if call.rotated is None:
            self._device.launch(call.kernel, place.stream, self._arguments, STAGED_BLOCKS)
        else:
            self._launch_rotated(call, call.rotated, place.stream, STAGED_BLOCKS)

    def _describe_segment(self, segment: Segment, place: Place) -> None:
        """Let the batch be a segment in a place."""
        self._point(segment.rows, 0, len(segment.parts), segment.num_tiles)
        move = self._move
        move.base_address, move.first_plane, move.num_planes = place.address, segment.first_plane, segment.num_planes

    def _keep(self, call: Call, segment: Segment, place: Place) -> None:
        """Let skipped rows of a place be what they are at home: by a kernel that reaches there, else all by a copy."""
        homes = self._mapped(segment.parts)
        if homes is None:
            self._copy(segment, place, to_home=False)
            return
        rows, _ = chunk_rows(homes, call.tile_tokens)
        self._homes.chunks[: len(rows)] = rows
        width = math.gcd(WIDEST_VECTOR_BYTES, call.planes.granule_bytes, granule_bytes(homes))
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

    def release(self) -> None:
        """Give staging back, after its last user; the next call takes it again."""
        with self._lock:
            for transfer in self._under_way:
                transfer.finish()
            self._ring = None

    def _ring_of(self, least_bytes: int) -> Ring:
        """The ring, its places of at least so many bytes; a new one when another size is asked for, after the last user
        of the old one."""
        place_bytes = max(staging_bytes() // PLACES // ALIGN_BYTES, -(-least_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        ring = self._ring
        if ring is None or ring.place_bytes != place_bytes:
            for transfer in self._under_way:
                transfer.finish()
            memory = self._device.device_memory(PLACES * place_bytes)
            ring = self._ring = Ring(memory, place_bytes, self._streams)
        return ring


def tile_tokens_of(planes: PlaneTable) -> int:
    """Tokens of a tile: TILE_BYTES of rows, and no more of them than a thread block keeps in mind."""
    return max(1, min(TILE_BYTES // planes.token_bytes, TILE_ROWS // planes.pieces_per_token))


@lru_cache(maxsize=1)
def _say_that_memory_is_pageable() -> None:
    logger.warning("chunks in pageable host memory: copies are slower and make the host wait; PinMemoryAllocator pins")
