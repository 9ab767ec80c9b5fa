"""Store and load of one plan on one device: whose turn it is, what a call gets hold of, and when it lets go of it.

Which launch and which copy comes when is `steps.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections import deque
from functools import lru_cache
from typing import Any

import torch

from lmcache_ref.errors import BackendError, SlotError, SlotRangeError, StrideError
from lmcache_ref.plan import TransferPlan, check_slots, validating
from lmcache_ref.transfer import Transfer

from ..descriptors import (
    CHUNKS_IN_BATCH,
    WORDS_PER_CHUNK,
    WORDS_PER_PLANE,
    PlaneTable,
    PlaneTables,
    describe_rotation_on_the_way,
    whole_move,
)
from ..environment import staging_bytes, zero_copy_bytes
from .device import TYPE_NAMES
from .holdings import FLAG_WORDS, WORD_BYTES, Block, Blocks, CudaTransfer, KeptSlots, Resident, Ring
from .native import CompiledSteps, steps_of
from .segments import ALIGN_BYTES
from .steps import Outcome, Request, Rotated, Steps

PLACES = 2  # that the ring is divided into: one is filled while the other is emptied
TILE_BYTES = 32 << 10  # of one plane, moved by a thread block at a stretch
TILE_ROWS = 256  # LMC_ROWS_KNOWN of transfer.cu

logger = logging.getLogger(__name__)


class Lane:
    """One direction on one device: its streams, its ring, its transfers under way. Threads take turns.

    library: of the compiled steps; None: they are taken in Python.
    """

    def __init__(self, device: Any, operation: str, blocks: Blocks, library: ctypes.CDLL | None = None):
        self._device, self._operation, self._blocks = device, operation, blocks
        self._tables = PlaneTables()
        self._streams = [device.new_stream(urgent=True) for _ in range(PLACES + 1)]  # the last one brings descriptors
        self.steps: Steps | CompiledSteps = steps_of(device, operation, self._streams, library)
        self.zero_copy_bytes = 0  # calls up to here reach host memory by kernels; found by `calibration.py`
        self._ring: Ring | None = None
        self._kept: KeptSlots | None = None
        self._under_way: deque[CudaTransfer] = deque()
        self._lock = threading.Lock()

    def move(self, plan: TransferPlan, on_host: bool) -> Transfer:
        """Move a plan whose chunks are all in host memory, or all in this device's. Raises before anything is moved."""
        if self._device.is_capturing():
            raise BackendError(f"{self._operation}: a transfer cannot be captured in a CUDA graph")
        with self._lock:
            self._reap()
            checked = validating()
            if checked:
                check_slots(plan, duplicates=self._operation == "scatter")
            request = self._request(plan, on_host, checked)
            try:
                outcome = self.steps.run(request)
            except (SlotError, StrideError):  # before anything was queued
                self._blocks.give_back(request.block)
                raise
            except BaseException:  # there will be no handle, and what was begun still uses the caller's memory
                self._wait_for_streams()
                with contextlib.suppress(Exception):  # where the device is broken, nobody will read a flag
                    self._blocks.reset(request.block)
                self._blocks.give_back(request.block)
                raise
            if outcome is None:
                self._blocks.give_back(request.block)
                return Transfer()
            return self._begun(request, outcome)

    def check(self, plan: TransferPlan) -> None:
        """Check what the host can see of the slots without waiting, all of it under LMCACHE_VALIDATE=1. Raises SlotError."""
        strict = validating()
        if strict or not self._device.holds(plan.slots):
            check_slots(plan, duplicates=strict and self._operation == "scatter")

    def release(self) -> None:
        """Give staging back, after its last user; the next call takes it again."""
        with self._lock:
            for transfer in self._under_way:
                transfer.finish()
            self._ring = None

    # ------------------------------------------------------------------------------------------ begin and end

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

    def _begun(self, request: Request, outcome: Outcome) -> CudaTransfer:
        counted = None
        if outcome.reports:
            cache = request.plan.cache
            counted = f"NB*BS = {cache.num_blocks}*{cache.block_size} = {cache.num_slots}"
        if outcome.pageable:
            _say_that_memory_is_pageable()
        if outcome.ready is not None and _slots_follow_flags(request.plan, request.slots_on_device):
            if self._kept is not None:
                self._blocks.give_back(self._kept.block)
            self._kept = self._keep_slots(request, outcome.ready)
        transfer = CudaTransfer(self._device, self._blocks, request, outcome, counted)
        self._under_way.append(transfer)
        return transfer

    def _wait_for_streams(self) -> None:
        """Make the host wait for all that this lane's streams and the current one were given, errors aside."""
        with self._device.guard():
            for stream in (*self._streams, self._device.current()):
                try:
                    self._device.synchronize(self._device.record(stream))
                except Exception as error:  # the device is broken; what broke it is already on its way to the caller
                    logger.debug("after a failed call: %s", error)

    # ------------------------------------------------------------------------------------------ what a call gets

    def _request(self, plan: TransferPlan, on_host: bool, checked: bool) -> Request:
        device, slots = self._device, plan.slots
        planes, first_layer = self._tables.find(plan)
        move = self._whole_move(plan, planes, first_layer)
        on_device = device.holds(slots)
        if on_device and slots.device != plan.cache.device:
            slots = slots.to(plan.cache.device)
        if not slots.is_contiguous():
            slots = slots.contiguous()
        num_slots = slots.numel()
        asked = zero_copy_bytes()
        zero_copy = self.zero_copy_bytes if asked is None else asked
        ring = self._ring_of(plan.cache.kv_size * len(plan.planes) * planes.token_bytes) if on_host else None
        words_before = FLAG_WORDS + (0 if plan.rotation is None else 2 * num_slots)
        kept = self._kept_slots(slots) if _slots_follow_flags(plan, on_device) else None
        if kept is None:
            chunk_words = WORDS_PER_CHUNK * len(plan.spans) if len(plan.spans) > CHUNKS_IN_BATCH else 0
            block = self._blocks.take((words_before + chunk_words + num_slots) * WORD_BYTES)
        else:
            block = self._blocks.share(kept.block)
        return Request(
            plan=plan,
            planes=planes,
            move=move,
            slots=slots,
            slots_on_device=on_device,
            checked=checked,
            in_use=kept is not None and kept.least >= 0 and kept.most < plan.cache.num_slots,
            ring=ring,
            zero_copy_bytes=zero_copy,
            block=block,
            words_before=words_before,
            rotated=None if plan.rotation is None else self._describe_rotation(plan, block),
            kept=None if kept is None else kept.ready,
            idle=not self._under_way,
        )

    def _kept_slots(self, slots: torch.Tensor) -> KeptSlots | None:
        """The slots of an earlier call, if they are the same."""
        kept, num_slots = self._kept, slots.numel()
        if kept is None or kept.num_slots != num_slots:
            return None
        if kept.fixed is slots:
            return kept
        address = kept.block.pinned.address + FLAG_WORDS * WORD_BYTES
        return kept if self._device.same(address, slots.data_ptr(), num_slots * WORD_BYTES) else None

    def _keep_slots(self, request: Request, ready: Any) -> KeptSlots:
        slots, fixed = request.slots, request.plan.slots_fixed
        least, most = map(int, torch.aminmax(slots)) if fixed else (-1, -1)
        return KeptSlots(self._blocks.share(request.block), len(slots), ready, slots if fixed else None, least, most)

    def _whole_move(self, plan: TransferPlan, planes: PlaneTable, first_layer: int) -> ctypes.Structure:
        """The batch of a plan but for what changes from call to call; kept with the table of planes."""
        if planes.resident is None:
            with self._device.guard():
                planes.resident = Resident(self._device.constant(planes.words))
        key = len(plan.planes), first_layer
        move = planes.resident.moves.get(key)
        if move is None:
            move = planes.resident.moves[key] = whole_move(plan, planes, tile_tokens_of(planes))
            skipped_bytes = first_layer * plan.cache.kv_size * WORDS_PER_PLANE * WORD_BYTES
            move.planes = planes.resident.memory.address + skipped_bytes
        return move

    def _describe_rotation(self, plan: TransferPlan, block: Block) -> Rotated:
        """How keys are rotated on the way; old positions, then new ones, go behind the flags of a block."""
        assert plan.rotation is not None
        rope, num_bytes, offset = plan.rotation.rope, len(plan.slots) * WORD_BYTES, FLAG_WORDS * WORD_BYTES
        for positions in (plan.rotation.old_positions, plan.rotation.new_positions):
            self._device.write(block.pinned.address + offset, positions.data_ptr(), num_bytes)
            offset += num_bytes
        with self._device.guard():
            table = self._device.table(rope)
        old = block.device.address + FLAG_WORDS * WORD_BYTES
        rotation = describe_rotation_on_the_way(plan.cache, old, old + num_bytes, table, rope.is_neox)
        rotation.bad_token = block.device.address + WORD_BYTES
        return Rotated(f"scatter_rotated_{TYPE_NAMES[plan.cache.dtype]}_{TYPE_NAMES[table.dtype]}", rotation)

    def _ring_of(self, least_bytes: int) -> Ring:
        """The ring, its places of at least so many bytes; a new one when another size is asked for, after the last user
        of the old one."""
        place_bytes = max(staging_bytes() // PLACES // ALIGN_BYTES, -(-least_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        ring = self._ring
        if ring is None or ring.place_bytes != place_bytes:
            for transfer in self._under_way:
                transfer.finish()
            with self._device.guard():
                memory = self._device.device_memory(PLACES * place_bytes)
            ring = self._ring = Ring(memory, place_bytes, self._streams[:PLACES])
        return ring


def _slots_follow_flags(plan: TransferPlan, slots_on_device: bool) -> bool:
    """Whether a block that is brought for a plan has slots of the host right behind its flags, as kept ones have to be."""
    return not slots_on_device and plan.rotation is None and len(plan.spans) <= CHUNKS_IN_BATCH


def tile_tokens_of(planes: PlaneTable) -> int:
    """Tokens of a tile: TILE_BYTES of rows, and no more of them than a thread block keeps in mind."""
    return max(1, min(TILE_BYTES // planes.token_bytes, TILE_ROWS // planes.pieces_per_token))


@lru_cache(maxsize=1)
def _say_that_memory_is_pageable() -> None:
    logger.warning("chunks in pageable host memory: copies are slower and make the host wait; PinMemoryAllocator pins")
