"""Store and load of one plan: which launch and which copy runs on which stream, and what waits for what.

Everything about streams, events and staging is here and in `holdings.py`, spoken in the verbs of `device.py`; nothing else
decides an order.
Host chunks go through a ring of staging memory: a store gathers a segment in one short launch, then the copy engines
carry it off; a load is the reverse. Chunks on the device are moved by one launch on the current stream.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lmcache_ref.errors import SlotRangeError
from lmcache_ref.plan import TransferPlan, check_slots, validating
from lmcache_ref.transfer import Transfer

from ..descriptors import (
    WIDEST_VECTOR_BYTES,
    WORDS_PER_CHUNK,
    WORDS_PER_PLANE,
    Move,
    PlaneTable,
    PlaneTables,
    chunk_table,
    vector_bytes,
)
from ..environment import staging_bytes, zero_copy_bytes
from .holdings import NO_BAD_TOKEN, WORD_BYTES, Blocks, CudaTransfer, Ring, Slots, Uploaded
from .segments import Home, Segment, cut, home_words, homes_of, staged_words

COPY_STREAMS = 2  # a direction: one copy starts while the other ends
STAGED_BLOCKS = 66  # thread blocks of a staged launch: a short burst on half the multiprocessors of an H200
ZERO_COPY_BLOCKS = 16
BLOCKS_PER_MULTIPROCESSOR = 8  # of a launch on device memory only
WARPS_PER_BLOCK = 8
TILE_BYTES = 16 << 10  # of one plane, moved by a warp at a stretch
LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, LEAST_SEGMENT_BYTES = 32 << 20, 16 << 20, 4 << 20
SMALL_ROW_BYTES = 512  # rows up to this use small segments
SEGMENTS_PER_CALL = 4  # at least, where that leaves LEAST_SEGMENT_BYTES each: the two stages overlap
FLAG_WORDS = 2  # the first bad token, and one word to keep what follows aligned to 16 bytes

logger = logging.getLogger(__name__)


class Issue(NamedTuple):
    """A segment ready to go. Addresses on the device: its place in the ring, its table of chunks, and the table of where they
    are at home (None: kernels cannot reach them). keep_width: bytes of the vectors to use there."""

    segment: Segment
    place: int
    table: int
    num_tiles: int
    homes_table: int | None
    keep_width: int


class Call(NamedTuple):
    """What the segments of one call share. width: bytes of a vector. keeps: rows in staging must hold what they had."""

    move: Any
    width: int
    slots: Slots
    uploaded: Uploaded
    ring: Ring
    keeps: bool


class Lane:
    """One direction on one device: its streams, its ring, its transfers under way. Threads take turns."""

    def __init__(self, device: Any, operation: str, blocks: Blocks):
        self._device, self._operation, self._blocks = device, operation, blocks
        self._tables = PlaneTables()
        self._kernels = device.new_stream(urgent=True)
        self._copies = [device.new_stream() for _ in range(COPY_STREAMS)]
        self._turn = 0  # which copy stream is next
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
            homes = homes_of(plan)
            if not homes:
                return Transfer()
            slots = self.look_at_slots(plan)
            if not on_host:
                return self._direct(plan, slots, None)
            if plan.num_bytes <= zero_copy_bytes():
                mapped = [self._device.mapped(home.address) for home in homes]
                if None not in mapped:
                    return self._direct(plan, slots, [address or 0 for address in mapped])
            return self._staged(plan, slots, homes)

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

    def _begun(self, plan: TransferPlan, slots: Slots, uploaded: Uploaded, events: Sequence[Any]) -> CudaTransfer:
        cache = plan.cache
        counted = f"NB*BS = {cache.num_blocks}*{cache.block_size} = {cache.num_slots}" if slots.reports else None
        transfer = CudaTransfer(self._device, self._blocks, events, uploaded, counted, (plan, self._ring))
        self._under_way.append(transfer)
        return transfer

    # ------------------------------------------------------------------------------------------ descriptors

    def _upload(self, plan: TransferPlan, slots: Slots, words: array[int], stream: int) -> Uploaded:
        """Bring tables to the device on `stream`, and slots: those of the host too, others on the current stream."""
        device, values = self._device, plan.slots
        num_bytes, slots_bytes = len(words) * WORD_BYTES, len(values) * WORD_BYTES
        block = self._blocks.take(num_bytes + slots_bytes)
        device.write(block.pinned.address, words.buffer_info()[0], num_bytes)
        slots_address = block.device.address + num_bytes
        if slots.on_device:
            values = values.to(plan.cache.device).contiguous()
            device.copy(
                slots_address, values.data_ptr(), slots_bytes, device.current()
            )  # the caller may overwrite them
        else:
            values = values.contiguous()
            device.write(block.pinned.address + num_bytes, values.data_ptr(), slots_bytes)
            num_bytes += slots_bytes
        device.copy(block.device.address, block.pinned.address, num_bytes, stream)
        return Uploaded(block, slots_address)

    def _fetch_flag(self, slots: Slots, uploaded: Uploaded, stream: int) -> None:
        """Bring the first bad token to the host, behind the last kernel."""
        if slots.reports:
            self._device.copy(uploaded.block.pinned.address, uploaded.block.device.address, WORD_BYTES, stream)

    # ------------------------------------------------------------------------------------------ one launch

    def _direct(self, plan: TransferPlan, slots: Slots, mapped: Sequence[int] | None) -> Transfer:
        """One launch on the current stream. mapped: the chunks' addresses where they are not the device's own memory."""
        device, current = self._device, self._device.current()
        planes, first_layer = self._tables.find(plan)
        tile_tokens = _tile_tokens(planes)
        chunks = chunk_table(plan, tile_tokens)
        for i, address in enumerate(mapped or ()):
            chunks.words[i * WORDS_PER_CHUNK] = address
        width = math.gcd(vector_bytes(planes, chunks), *(mapped or ()))
        words = _table_words(plan, planes, first_layer)
        table = len(words)
        words.extend(chunks.words)
        uploaded = self._upload(plan, slots, words, current)
        move = _described(plan, planes, uploaded, tile_tokens, width)
        move.chunks = uploaded.block.device.address + table * WORD_BYTES
        move.num_chunks, move.num_tiles = chunks.num_chunks, chunks.num_tiles
        most = ZERO_COPY_BLOCKS if mapped else BLOCKS_PER_MULTIPROCESSOR * device.num_multiprocessors
        items = chunks.num_tiles * move.num_layers * move.kv_size
        device.launch(f"{self._operation}_{width}", current, move, min(most, -(-items // WARPS_PER_BLOCK)))
        self._fetch_flag(slots, uploaded, current)
        return self._begun(plan, slots, uploaded, [device.record(current)])

    # ------------------------------------------------------------------------------------------ through the ring

    def _staged(self, plan: TransferPlan, slots: Slots, homes: list[Home]) -> Transfer:
        """Segment after segment through the ring."""
        planes, first_layer = self._tables.find(plan)
        token_bytes = planes.piece_bytes * planes.pieces_per_token
        kv_size, num_layers = plan.cache.kv_size, len(plan.planes)
        most = staging_bytes()
        call_bytes = sum(home.num_tokens for home in homes) * num_layers * kv_size * token_bytes
        segments = cut(homes, kv_size, num_layers, token_bytes, segment_bytes(most, token_bytes, kv_size, call_bytes))
        ring = self._ring_of(max(most, *(segment.num_bytes for segment in segments)))
        tile_tokens = _tile_tokens(planes)
        words = _table_words(plan, planes, first_layer)
        keeps = slots.may_skip and self._operation == "gather"
        issues = []
        for segment in segments:
            place, table = ring.place(segment.num_bytes), len(words)
            num_tiles = staged_words(segment, place, tile_tokens, words)
            homes_table, keep_width = self._homes(segment, planes, tile_tokens, words) if keeps else (None, 0)
            issues.append(Issue(segment, place, table, num_tiles, homes_table, keep_width))
        if self._device.mapped(homes[0].address) is None:
            _say_that_memory_is_pageable()
        first = self._kernels if self._operation == "gather" else self._copies[self._turn]
        uploaded = self._upload(plan, slots, words, first)
        width = math.gcd(WIDEST_VECTOR_BYTES, planes.granule_bytes)
        move = _described(plan, planes, uploaded, tile_tokens, width)
        run = self._store if self._operation == "gather" else self._load
        events = run(issues, Call(move, width, slots, uploaded, ring, keeps))
        return self._begun(plan, slots, uploaded, events)

    def _store(self, issues: list[Issue], call: Call) -> list[Any]:
        """Gather each segment on one stream, carry it off on others. Returns the events that end it."""
        device, kernels, ring = self._device, self._kernels, call.ring
        device.wait(kernels, device.record(device.current()))
        ends: dict[int, Any] = {}
        for issue in issues:
            ring.claim(device, kernels, issue.place, issue.segment.num_bytes)
            _point(call, issue)
            if call.keeps and issue.homes_table is None:
                self._copy(issue, kernels, to_home=False)
            elif issue.homes_table is not None:
                homes = call.uploaded.block.device.address + issue.homes_table * WORD_BYTES
                device.launch(f"keep_{issue.keep_width}", kernels, call.move, STAGED_BLOCKS, homes)
            device.launch(f"gather_{call.width}", kernels, call.move, STAGED_BLOCKS)
            stream = self._next_copy_stream()
            device.wait(stream, device.record(kernels))
            self._copy(issue, stream, to_home=True)
            ends[stream] = device.record(stream)
            ring.release(issue.place, issue.segment.num_bytes, stream, ends[stream])
        self._fetch_flag(call.slots, call.uploaded, kernels)
        return [*ends.values(), *([device.record(kernels)] if call.slots.reports else [])]

    def _load(self, issues: list[Issue], call: Call) -> list[Any]:
        """Bring each segment on one of the copy streams, scatter it on another stream. Returns the event that ends it."""
        device, kernels, ring = self._device, self._kernels, call.ring
        ready = device.record(device.current())
        started: set[int] = set()
        for number, issue in enumerate(issues):
            stream = self._next_copy_stream()
            if stream not in started:  # chunks may be written there; and through the first copy, pages are read there
                device.wait(stream, ready)
                started.add(stream)
            ring.claim(device, stream, issue.place, issue.segment.num_bytes)
            self._copy(issue, stream, to_home=False)
            device.wait(kernels, device.record(stream))
            _point(call, issue)
            device.launch(f"scatter_{call.width}", kernels, call.move, STAGED_BLOCKS)
            if number == len(issues) - 1:
                self._fetch_flag(call.slots, call.uploaded, kernels)
            end = device.record(kernels)
            ring.release(issue.place, issue.segment.num_bytes, kernels, end)
        return [end]

    def _copy(self, issue: Issue, stream: int, to_home: bool) -> None:
        """The pieces of a segment, between their homes and its place."""
        copy, copy_rows = self._device.copy, self._device.copy_rows
        for home, packed, offset in issue.segment.pieces:
            for home_offset, packed_offset, width, height, home_pitch, packed_pitch in packed.copies:
                home_end, place_end = home.address + home_offset, issue.place + offset + packed_offset
                target, source = (home_end, place_end) if to_home else (place_end, home_end)
                if height == 1:
                    copy(target, source, width, stream)
                    continue
                pitches = (home_pitch, packed_pitch) if to_home else (packed_pitch, home_pitch)
                copy_rows(target, pitches[0], source, pitches[1], width, height, stream)

    def _next_copy_stream(self) -> int:
        stream = self._copies[self._turn]
        self._turn = (self._turn + 1) % COPY_STREAMS
        return stream

    def _homes(
        self, segment: Segment, planes: PlaneTable, tile_tokens: int, words: array[int]
    ) -> tuple[int | None, int]:
        """The table of where a segment's pieces are at home, and the vector width there; (None, 0) if out of reach."""
        mapped = [self._device.mapped(piece.home.address) for piece in segment.pieces]
        if None in mapped:
            return None, 0
        addresses = [address or 0 for address in mapped]
        strides = [stride for piece in segment.pieces for stride in piece.home[1:4]]
        table = len(words)
        home_words(segment, addresses, tile_tokens, words)
        return table, math.gcd(WIDEST_VECTOR_BYTES, planes.granule_bytes, *addresses, *strides)

    def _ring_of(self, num_bytes: int) -> Ring:
        """The ring; a new one when another size is asked for, after the last user of the old one."""
        ring = self._ring
        if ring is None or ring.memory.num_bytes != num_bytes:
            for transfer in self._under_way:
                transfer.finish()
            ring = self._ring = Ring(self._device.device_memory(num_bytes))
        return ring


def segment_bytes(staging: int, token_bytes: int, kv_size: int, call_bytes: int) -> int:
    """How much to move at a stretch: small enough to overlap within a call, large enough to keep the link full."""
    small = token_bytes <= SMALL_ROW_BYTES or kv_size == 1
    most = min(SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES, staging // SEGMENTS_PER_CALL)
    return max(1, min(most, max(LEAST_SEGMENT_BYTES, -(-call_bytes // SEGMENTS_PER_CALL))))


def lanes_per_row(vectors: int) -> int:
    """Neighbouring threads that share a row: as many as there is work for, with at most one in five idle."""
    lanes = 32
    while lanes > 1 and vectors < 0.8 * lanes * -(-vectors // lanes):
        lanes //= 2
    return lanes


def _tile_tokens(planes: PlaneTable) -> int:
    return max(1, min(64, TILE_BYTES // (planes.piece_bytes * planes.pieces_per_token)))


def _table_words(plan: TransferPlan, planes: PlaneTable, first_layer: int) -> array[int]:
    """The flag, then the planes of the plan's layers; tables of chunks follow."""
    words = array("q", (NO_BAD_TOKEN, 0))
    words_per_layer = plan.cache.kv_size * WORDS_PER_PLANE
    words.extend(planes.words[first_layer * words_per_layer : (first_layer + len(plan.planes)) * words_per_layer])
    return words


def _described(
    plan: TransferPlan, planes: PlaneTable, uploaded: Uploaded, tile_tokens: int, width: int
) -> ctypes.Structure:
    """The struct Move of a call, but for its chunks."""
    block_size = plan.cache.block_size
    return Move(
        planes=uploaded.block.device.address + FLAG_WORDS * WORD_BYTES,
        ids=uploaded.slots_address,
        bad_token=uploaded.block.device.address,
        num_layers=len(plan.planes),
        kv_size=plan.cache.kv_size,
        num_ids=plan.cache.num_slots,
        tokens_per_id=1,
        block_size=block_size,
        block_shift=block_size.bit_length() - 1 if block_size.bit_count() == 1 else -1,
        pieces_per_token=planes.pieces_per_token,
        piece_bytes=planes.piece_bytes,
        tile_tokens=tile_tokens,
        lanes_per_row=lanes_per_row(planes.piece_bytes // width),
    )


def _point(call: Call, issue: Issue) -> None:
    """Let the struct of a call describe a segment."""
    call.move.chunks = call.uploaded.block.device.address + issue.table * WORD_BYTES
    call.move.num_chunks, call.move.num_tiles = len(issue.segment.pieces), issue.num_tiles


@lru_cache(maxsize=1)
def _say_that_memory_is_pageable() -> None:
    logger.warning("chunks in pageable host memory: copies are slower and make the host wait; PinMemoryAllocator pins")
