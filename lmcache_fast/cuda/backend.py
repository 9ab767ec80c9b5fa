"""The operations of the backend `cuda`: which device, which chunks go which way. Order and staging are the pipeline's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmcache_ref import rope as spec
from lmcache_ref.errors import BackendError
from lmcache_ref.plan import ChunkSpan, TransferPlan
from lmcache_ref.rope import RotarySpec
from lmcache_ref.transfer import Transfer

from ..descriptors import describe_rotation
from .device import THREADS, Arguments, CudaDevice
from .holdings import Blocks
from .pipeline import Lane

ROTATE_BLOCKS_PER_MULTIPROCESSOR = 8
TYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Several(Transfer):
    """Transfers of one call as one."""

    def __init__(self, parts: Sequence[Transfer]):
        self._parts = parts

    def wait(self) -> None:
        """Make the current stream wait for all; raise the errors already known."""
        for part in self._parts:
            part.wait()

    def synchronize(self) -> None:
        """Make the host wait for all; raise what went wrong on the device."""
        for part in self._parts:
            part.synchronize()

    def done(self) -> bool:
        """Whether all bytes have arrived."""
        return all([part.done() for part in self._parts])


class Engine:
    """One device and its lanes. device: a `CudaDevice`, or one with the same verbs."""

    def __init__(self, device: Any):
        self.device = device
        with device.guard():
            self.lanes = {operation: Lane(device, operation, Blocks(device)) for operation in ("gather", "scatter")}

    def move(self, operation: str, plan: TransferPlan) -> Transfer:
        """Host chunks through the ring, those on the device in one launch."""
        lane = self.lanes[operation]
        kinds = [self.device.holds(span.tensor) for span in plan.spans]
        if len(set(kinds)) <= 1:
            return lane.move(plan, on_host=not any(kinds))
        with self.device.guard():
            lane.look_at_slots(plan)  # of all chunks, before any of them moves
        parts = [replace(plan, spans=_pick(plan, kinds, kind)) for kind in (True, False)]
        return Several([lane.move(part, on_host) for part, on_host in zip(parts, (False, True), strict=True)])


class CudaBackend:
    """gather, scatter and rerotate as `lmcache_ref.backends.OPERATIONS` wants them. Thread-safe."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._tables: weakref.WeakKeyDictionary[RotarySpec, dict[Any, tuple[torch.Tensor, bool]]]
        self._tables = weakref.WeakKeyDictionary()
        self._no_bad_token: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def gather(self, plan: TransferPlan) -> Transfer:
        """Engine to chunks; see `lmcache_ref.gather`. The host does not wait, but for chunks in pageable memory."""
        engine = self._engine("the KV cache", plan.cache.device)
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
        return self._engine("the KV cache", plan.cache.device).move("scatter", _near(plan))

    def rerotate(
        self, keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, rope: RotarySpec
    ) -> None:
        """Keys to new positions, in place, on the current stream; see `lmcache_ref.rope.rerotate`, whose bits these are.

        Positions on the host are checked there; those on a device make the host wait.
        """
        spec.check_keys(keys, rope)
        device = self._engine("keys", keys.device).device
        with torch.no_grad(), device.guard():
            old, new = (
                _checked(name, positions, keys, rope)
                for name, positions in (("old_positions", old_positions), ("new_positions", new_positions))
            )
            compute_dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
            table, invertible = self._table(rope, keys.device, compute_dtype)
            if not invertible:
                _check_invertible(table.to(compute_dtype), old, new)
            if keys.numel() == 0:
                return
            old, new = old.to(keys.device), new.to(keys.device)
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
                    engine = self._engines[index] = Engine(CudaDevice(index))
        return engine

    def _table(self, rope: RotarySpec, device: torch.device, compute_dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """The table on a device, rows contiguous, and whether every rotation in it can be undone; kept."""
        known = self._tables.setdefault(rope, {})
        found = known.get((device, compute_dtype))
        if found is None:
            table = rope.cos_sin_cache.detach().to(device)
            table = table if table.stride(1) == 1 else table.contiguous()
            norm = _norms(table.to(compute_dtype))
            found = known[device, compute_dtype] = (table, bool(((norm > 0) & norm.isfinite()).all()))
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


def _checked(name: str, positions: torch.Tensor, keys: torch.Tensor, rope: RotarySpec) -> torch.Tensor:
    """Positions as the specification checks them, contiguous; those of the host are checked, and stay, there."""
    on_host = isinstance(positions, torch.Tensor) and positions.device.type == "cpu"
    like = torch.empty(keys.shape[0], 0, 0) if on_host else keys
    return spec.checked_positions(name, positions, like, rope).contiguous()


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """n = cos*cos + sin*sin, each operation rounded, `[rows, pair]`."""
    cos, sin = rows.chunk(2, dim=1)
    return cos * cos + sin * sin


def _check_invertible(table: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    moved = (old != new).nonzero().squeeze(1)
    spec._check_invertible(_norms(table[old[moved].to(table.device)]).unsqueeze(1), old, moved)
