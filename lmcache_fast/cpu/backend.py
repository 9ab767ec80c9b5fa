"""The operations of the backend `cpu`: describe the batch, make one call into the compiled sources.

A call returns when the bytes are final, so every transfer is a finished one. Slots are always checked first.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from lmcache_ref import rope as spec
from lmcache_ref.errors import BackendError
from lmcache_ref.plan import ChunkSpan, TransferPlan, check_slots, refuse_rotation, validating
from lmcache_ref.rope import RotarySpec
from lmcache_ref.transfer import Transfer

from ..descriptors import PlaneTables, chunk_table, describe_move, describe_rotation, describe_rotation_on_the_way
from ..environment import source_folder
from .compile import load_library

TILE_TOKENS = 256  # of one plane, moved by one thread at a stretch
ONE_THREAD_BYTES = 256 << 10  # below it, waking other threads costs more than it saves
STREAM_BYTES = 4 << 20  # where streaming stores overtake others, even when the targets were in the caches before
TYPE_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}


class CpuBackend:
    """gather, scatter and rerotate as `lmcache_ref.backends.OPERATIONS` wants them. Thread-safe."""

    def __init__(self, library: ctypes.CDLL):
        self._move, self._rotate = library.lmcache_fast_move, library.lmcache_fast_rotate
        self._scatter_rotated = library.lmcache_fast_scatter_rotated
        for function, structs, integers in ((self._move, 1, 3), (self._rotate, 1, 3), (self._scatter_rotated, 2, 4)):
            function.argtypes = [*[ctypes.c_void_p] * structs, *[ctypes.c_int] * integers]
            function.restype = ctypes.c_int64
        self._plane_tables = PlaneTables()

    def gather(self, plan: TransferPlan) -> Transfer:
        """Engine to chunks; see `lmcache_ref.gather`. Chunks on another device go through a host copy."""
        refuse_rotation(plan)
        on_host = _with_host_chunks(plan)
        self._transfer(on_host, scatter=False)
        for span, host_span in zip(plan.spans, on_host.spans, strict=True):
            if span is not host_span:
                span.chunk.copy_(host_span.chunk)
        return Transfer()

    def scatter(self, plan: TransferPlan) -> Transfer:
        """Chunks to engine; see `lmcache_ref.scatter`. Duplicate slots are looked for under LMCACHE_VALIDATE=1."""
        if validating():
            check_slots(plan, duplicates=True)
        self._transfer(_with_host_chunks(plan), scatter=True)
        return Transfer()

    def rerotate(
        self, keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, rope: RotarySpec
    ) -> None:
        """Keys to new positions, in place; see `lmcache_ref.rope.rerotate`, whose bits these are."""
        spec.check_keys(keys, rope)
        _require_host("keys", keys.device)
        old = spec.checked_positions("old_positions", old_positions, len(keys), rope).cpu().contiguous()
        new = spec.checked_positions("new_positions", new_positions, len(keys), rope).cpu().contiguous()
        table = _table(rope)
        rotation = describe_rotation(keys, old, new, table, rope.is_neox)
        types = TYPE_NUMBERS[keys.dtype], TYPE_NUMBERS[table.dtype]
        bad_token = self._rotate(ctypes.byref(rotation), *types, _threads(keys.numel() * keys.element_size()))
        if bad_token >= 0:
            spec.rerotate(keys, old_positions, new_positions, rope)  # nothing was written; this says what is wrong
            raise AssertionError(f"the kernel refused token {bad_token}, the specification did not")

    def _transfer(self, plan: TransferPlan, scatter: bool) -> None:
        _require_host("the KV cache", plan.cache.device)
        chunks = chunk_table(plan, TILE_TOKENS)
        if chunks.num_tiles == 0:
            return
        slots = plan.slots.cpu().contiguous()
        planes, first_layer = self._plane_tables.find(plan)
        move = describe_move(plan, slots, planes, first_layer, chunks, TILE_TOKENS)
        num_bytes = plan.num_bytes
        streams = num_bytes >= STREAM_BYTES
        if plan.rotation is None:
            bad_token = self._move(ctypes.byref(move), scatter, streams, _threads(num_bytes))
        else:
            bad_token = self._move_rotated(plan, move, streams, _threads(num_bytes))
        if bad_token >= 0:
            check_slots(plan, duplicates=False)  # nothing was moved; this says what is wrong
            raise AssertionError(f"the kernel refused the slot of token {bad_token}, the specification did not")

    def _move_rotated(self, plan: TransferPlan, move: ctypes.Structure, streams: bool, threads: int) -> int:
        assert plan.rotation is not None
        old, new, rope = plan.rotation.old_positions, plan.rotation.new_positions, plan.rotation.rope
        table = _table(rope)
        rotation = describe_rotation_on_the_way(plan.cache, old.data_ptr(), new.data_ptr(), table, rope.is_neox)
        types = TYPE_NUMBERS[plan.cache.dtype], TYPE_NUMBERS[table.dtype]
        moved = self._scatter_rotated(ctypes.byref(move), ctypes.byref(rotation), *types, streams, threads)
        return int(moved)


def load() -> CpuBackend:
    """The backend, compiled if it is not in the cache. Raises BackendError with the compiler's log."""
    csrc = source_folder()
    headers = [csrc / "address.h", csrc / "rotate.h"]
    return CpuBackend(load_library("host", [csrc / "host.cpp"], headers))


def _table(rope: RotarySpec) -> torch.Tensor:
    """On the host, rows contiguous."""
    table = rope.cos_sin_cache.detach().cpu()
    return table if table.stride(1) == 1 else table.contiguous()


def _threads(num_bytes: int) -> int:
    return torch.get_num_threads() if num_bytes >= ONE_THREAD_BYTES else 1


def _require_host(what: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise BackendError(f"backend 'cpu' moves host memory, {what} is on {device}")


def _with_host_chunks(plan: TransferPlan) -> TransferPlan:
    """The plan itself, or with copies in host memory of the chunks that are elsewhere."""
    if plan.on_host:
        return plan
    spans = (span if span.tensor.is_cpu else ChunkSpan(span.chunk.cpu(), span.start, span.end) for span in plan.spans)
    return replace(plan, spans=tuple(spans))
