"""The steps of `steps.py`, compiled: csrc/steps.cpp behind the same interface, the same verbs with the same arguments.

The structs mirror csrc/steps.cpp field by field. Where there is no C++ compiler, the steps are taken in Python: the same
bytes, and some hundred microseconds of the host more in a call of 32 chunks.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lmcache_ref.errors import BackendError
from lmcache_ref.plan import check_slots

from ..cpu.compile import load_library
from ..descriptors import struct_of_words
from ..environment import source_folder
from . import steps
from .segments import ALIGN_BYTES, LEAST_SEGMENT_BYTES, LONGEST_PITCH_BYTES, SEGMENTS_PER_CALL
from .steps import (
    MOST_BLOCKS,
    PLANES_PER_UNIT,
    RESIDENT_BLOCKS,
    STAGED_BLOCKS,
    ZERO_COPY_BLOCKS,
    Outcome,
    Request,
    Steps,
    too_narrow,
)

WIDTHS = (1, 2, 4, 8, 16)
NOTHING, BAD_SLOT, NARROW = 1, 2, 3  # what `lmcache_fast_steps` returns; 0: done; below 0: what a verb has failed with

LaneWords = struct_of_words(
    "LaneWords",
    f"verbs stores {' '.join(f'kernel_{width}' for width in WIDTHS)} {' '.join(f'keep_{width}' for width in WIDTHS)} "
    "event bringing staged_blocks zero_copy_blocks most_blocks resident_blocks planes_per_unit slots_in_batch "
    "align_bytes least_segment_bytes segments_per_call longest_pitch_bytes",
)
CallWords = struct_of_words(
    "CallWords",
    "move spans num_spans skip_prefix granule_bytes slots num_slots slots_on_device checked in_use pinned near words_before "
    "current place_0 stream_0 place_1 stream_1 place_bytes turn zero_copy_bytes rotated_kernel rotation key_bytes kept idle "
    "ready end_0 end_1 num_ends reports pageable width brought slots_address",
)
_GIVEN = struct.Struct("29q")  # of CallWords: those that a call is given; the others come back
_NO_PLACES = (0, 0, 0, 0)

logger = logging.getLogger(__name__)


class CompiledSteps:
    """The steps of one direction on one device; one call at a time. See `Steps`."""

    def __init__(self, device: Any, operation: str, streams: Sequence[int], library: ctypes.CDLL):
        self._device = device
        self._run, verbs = device.native(library)
        self._event = device.new_event()
        kernels = [device.function(f"{name}_{width}") for name in (operation, "keep") for width in WIDTHS]
        self._lane = LaneWords(
            verbs,
            operation == "gather",
            *kernels,
            self._event.handle,
            streams[-1],
            *(STAGED_BLOCKS, ZERO_COPY_BLOCKS, MOST_BLOCKS, RESIDENT_BLOCKS, PLANES_PER_UNIT, steps.SLOTS_THAT_TRAVEL),
            *(ALIGN_BYTES, LEAST_SEGMENT_BYTES, SEGMENTS_PER_CALL, LONGEST_PITCH_BYTES),
        )
        self._call = CallWords()
        self._lane_address, self._call_address = ctypes.addressof(self._lane), ctypes.addressof(self._call)

    def run(self, request: Request) -> Outcome | None:
        """Set a call going; see `Steps.run`. The device need not be current."""
        device, plan, slots, ring, rotated, call = (
            self._device,
            request.plan,
            request.slots,
            request.ring,
            request.rotated,
            self._call,
        )
        spans = plan.span_words
        ends, ready = (device.new_event(), device.new_event()), device.new_event()
        places: tuple[int, ...] = _NO_PLACES
        if ring is not None:
            first, second = ring.places
            places = (*first, *second)
        _GIVEN.pack_into(
            call,
            0,
            ctypes.addressof(request.move),
            spans.buffer_info()[0],
            len(plan.spans),
            plan.skip_prefix_n_tokens,
            request.planes.granule_bytes,
            slots.data_ptr(),
            slots.numel(),
            request.slots_on_device,
            request.checked,
            request.in_use,
            request.block.pinned.address,
            request.block.device.address,
            request.words_before,
            device.current(),
            *places,
            0 if ring is None else ring.place_bytes,
            0 if ring is None else ring.turn,
            request.zero_copy_bytes,
            0 if rotated is None else device.function(rotated.kernel),
            0 if rotated is None else ctypes.addressof(rotated.rotation),
            plan.cache.dtype.itemsize,
            -1 if request.kept is None else request.kept.handle,
            request.idle,
            ready.handle,
            ends[0].handle,
            ends[1].handle,
        )
        call.num_ends = call.reports = call.pageable = call.brought = 0
        status = self._run(self._lane_address, self._call_address)
        if ring is not None:
            ring.turn = call.turn
        if status:
            return self._not_done(request, status)
        return Outcome(
            ends[: call.num_ends],
            bool(call.reports),
            call.slots_address,
            bool(call.pageable),
            ready if call.brought else None,
        )

    def _not_done(self, request: Request, status: int) -> Outcome | None:
        """None where there was nothing to do; raises what was wrong."""
        if status == NOTHING:
            return None
        if status == NARROW:
            raise too_narrow(request, self._call.width)
        if status == BAD_SLOT:
            check_slots(request.plan, duplicates=False)  # says which
            raise AssertionError("csrc/steps.cpp refused a slot that the specification allows")
        self._device.raise_native(status)
        raise AssertionError(f"csrc/steps.cpp returned {status}")


@lru_cache(maxsize=1)
def load() -> tuple[ctypes.CDLL | None, str]:
    """The compiled steps, or None and why there are none; said once."""
    csrc = source_folder()
    try:
        headers = [csrc / name for name in ("segments.h", "driver.h", "batch.h", "rotate.h", "address.h")]
        library = load_library("steps", [csrc / "steps.cpp"], headers, ["-ldl"])
    except BackendError as error:
        logger.warning("calls are prepared in Python, which takes longer: %s", error)
        return None, str(error)
    for name in ("lmcache_fast_steps", "lmcache_fast_steps_on_gpu"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
    library.lmcache_fast_driver_verbs.argtypes = [ctypes.c_int64]
    library.lmcache_fast_driver_verbs.restype = ctypes.c_void_p
    return library, ""


def steps_of(device: Any, operation: str, streams: Sequence[int], library: ctypes.CDLL | None) -> Steps | CompiledSteps:
    """Compiled where there is a library, else in Python."""
    if library is None:
        return Steps(device, operation, streams)
    return CompiledSteps(device, operation, streams, library)
