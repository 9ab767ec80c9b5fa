"""The operations of the backend `cuda`: which device, which chunks go which way. Order and staging are the pipeline's."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmcache_ref import rope as spec
from lmcache_ref.errors import BackendError, SlotError
from lmcache_ref.plan import ChunkSpan, TransferPlan, refuse_rotation
from lmcache_ref.rerotation import check_undoing
from lmcache_ref.rope import RotarySpec
from lmcache_ref.transfer import Transfer

from ..descriptors import describe_rotation
from ..environment import STAGING_BYTES, ZERO_COPY_BYTES, staging_bytes, zero_copy_bytes
from . import native
from .calibration import Calibration, calibrate
from .device import THREADS, TYPE_NAMES, Arguments, CudaDevice
from .holdings import Blocks
from .pipeline import Lane

ROTATE_BLOCKS_PER_MULTIPROCESSOR = 8


class Several(Transfer):
    """Transfers of one call as one."""

    def __init__(self, parts: Sequence[Transfer]):
        self._parts = parts

    def wait(self) -> None:
        """Make the current stream wait for all; raise the first of the errors already known."""
        self._each("wait")

    def synchronize(self) -> None:
        """Make the host wait for all; raise the first thing that went wrong on the device."""
        self._each("synchronize")

    def done(self) -> bool:
        """Whether all bytes have arrived."""
        return all([part.done() for part in self._parts])

    def _each(self, how: str) -> None:
        """One that fails does not spare the others."""
        errors = []
        for part in self._parts:
            try:
                getattr(part, how)()
            except SlotError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Engine:
    """One device and its lanes. device: a `CudaDevice`, or one with the same verbs. library: as a `Lane` takes it."""

    def __init__(self, device: Any, library: ctypes.CDLL | None = None):
        self.device = device
        with device.guard():
            self.lanes = {name: Lane(device, name, Blocks(device), library) for name in ("gather", "scatter")}

    def move(self, operation: str, plan: TransferPlan) -> Transfer:
        """Host chunks through the ring, those on the device in one launch."""
        lane = self.lanes[operation]
        holds = self.device.holds
        kinds = [holds(span.tensor) for span in plan.spans]
        if True not in kinds or False not in kinds:
            return lane.move(plan, on_host=True not in kinds)
        lane.check(plan)  # the slots of all chunks, before any of them moves
        parts = [replace(plan, spans=_pick(plan, kinds, kind)) for kind in (True, False)]
        near = lane.move(parts[0], on_host=False)
        try:
            return Several([near, lane.move(parts[1], on_host=True)])
        except BaseException:  # there will be no handle, and the caller may do with all chunks what it likes
            with contextlib.suppress(SlotError):
                near.synchronize()
            raise


class CudaBackend:
    """gather, scatter and rerotate as `lmcache_ref.backends.OPERATIONS` wants them. Thread-safe."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._calibrations: dict[int, Calibration] = {}
        self._no_bad_token: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def gather(self, plan: TransferPlan) -> Transfer:
        """Engine to chunks; see `lmcache_ref.gather`. The host does not wait, but for chunks in pageable memory."""
        refuse_rotation(plan)
        engine = self._engine("the KV cache", plan.cache.device)
        if plan.on_host:
            return engine.lanes["gather"].move(plan, on_host=True)
        near = _near(plan)
        transfer = engine.move("gather", near)
        if near is not plan:
            transfer.synchronize()
            for span, near_span in zip(plan.spans, near.spans, strict=True):
                if span is not near_span:
                    span.chunk.copy_(near_span.chunk)
        return transfer

    def scatter(self, plan: TransferPlan) -> Transfer:
        """Chunks to engine; see `lmcache_ref.scatter`. Duplicate slots are looked for under LMCACHE_VALIDATE=1."""
        engine = self._engine("the KV cache", plan.cache.device)
        if plan.on_host:
            return engine.lanes["scatter"].move(plan, on_host=True)
        return engine.move("scatter", _near(plan))

    def rerotate(
        self, keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, rope: RotarySpec
    ) -> None:
        """Keys to new positions, in place, on the current stream; see `lmcache_ref.rope.rerotate`, whose bits these are.

        Positions on the host are checked there; those on a device make the host wait.
        """
        spec.check_keys(keys, rope)
        device = self._engine("keys", keys.device).device
        with torch.no_grad(), device.guard():
            old = spec.checked_positions("old_positions", old_positions, len(keys), rope)
            new = spec.checked_positions("new_positions", new_positions, len(keys), rope)
            check_undoing(old, new, rope, keys.dtype)
            if keys.numel() == 0:
                return
            old, new = old.contiguous().to(keys.device), new.contiguous().to(keys.device)
            table = device.table(rope)
            table.record_stream(torch.cuda.current_stream(device.index))  # `rope` may be gone before the kernel has run
            rotation = describe_rotation(keys, old, new, table, rope.is_neox)
            rotation.bad_token = self._unused_flag(device.index).data_ptr()
            num_threads = rotation.num_tokens * rotation.num_pairs
            num_blocks = min(ROTATE_BLOCKS_PER_MULTIPROCESSOR * device.num_multiprocessors, -(-num_threads // THREADS))
            kernel = f"rotate_{TYPE_NAMES[keys.dtype]}_{TYPE_NAMES[table.dtype]}"
            device.launch(kernel, device.current(), Arguments(rotation), num_blocks)

    def _engine(self, what: str, where: torch.device) -> Engine:
        if where.type != "cuda":
            raise BackendError(f"backend 'cuda' moves memory of CUDA devices, {what} is on {where}")
        index = torch.cuda.current_device() if where.index is None else where.index
        engine = self._engines.get(index)
        if engine is None:
            with self._lock:
                engine = self._engines.get(index)
                if engine is None:
                    engine = Engine(CudaDevice(index), native.load()[0])
                    if zero_copy_bytes() is None:
                        self._calibrations[index] = calibrate(engine)
                    self._engines[index] = engine
        return engine

    def facts(self) -> dict[str, str]:
        """What was settled for this machine, for `lmcache-ref doctor`."""
        library, reason = native.load()
        found = {
            "staging": f"{staging_bytes() >> 20} MiB a direction ({STAGING_BYTES})",
            "steps of a call": f"in Python, which takes longer: {reason}" if library is None else "compiled",
        }
        for index in self._engines:
            known = self._calibrations.get(index)
            ways = [f"{name} up to {size >> 10} KiB" for name, size in known.zero_copy_bytes.items()] if known else []
            said = f"{', '.join(ways)}, measured" if known else f"up to {zero_copy_bytes() or 0} bytes"
            found[f"zero copy on cuda:{index}"] = f"{said} ({ZERO_COPY_BYTES} sets it)"
        return found

    def _unused_flag(self, index: int) -> torch.Tensor:
        """A word that the kernel would write a bad token to; there is none, all were checked."""
        if index not in self._no_bad_token:
            self._no_bad_token[index] = torch.full((1,), -1, dtype=torch.int64, device=torch.device("cuda", index))
        return self._no_bad_token[index]


def load() -> CudaBackend:
    """The backend, its kernels compiled for the current device. Raises BackendError with NVRTC's log."""
    backend = CudaBackend()
    backend._engine("the KV cache", torch.device("cuda"))
    return backend


def _pick(plan: TransferPlan, kinds: list[bool], kind: bool) -> tuple[ChunkSpan, ...]:
    return tuple(span for span, its_kind in zip(plan.spans, kinds, strict=True) if its_kind == kind)


def _near(plan: TransferPlan) -> TransferPlan:
    """The plan itself, or with copies of the chunks that are on another device; torch orders these copies."""
    here = plan.cache.device
    if all(span.tensor.is_cpu or span.tensor.device == here for span in plan.spans):
        return plan
    spans = (
        span
        if span.tensor.is_cpu or span.tensor.device == here
        else ChunkSpan(span.chunk.to(here), span.start, span.end)
        for span in plan.spans
    )
    return replace(plan, spans=tuple(spans))
