"""Connectors that move one layer at a time, so that moving and computing overlap: generators, one step a layer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..backends import Operations, get_backend
from ..errors import ArgumentError, ChunkError, DtypeError
from ..kv_cache import PagedKVCache
from ..memory import MemoryFormat, MemoryObj
from ..plan import TransferPlan, check_slot_values, validating
from ..transfer import Transfer
from .base import PagedConnector
from .checks import check_objects, check_spans, positive_int, required_bool
from .object_lists import SameKind

StoreGenerator = Generator[None, None, None]
LoadGenerator = Generator[None, "Sequence[MemoryObj] | None", None]


class LayerwiseCall:
    """What one generator captured at its first `next`: planes, slots, spans, backend; and its unfinished transfers."""

    def __init__(
        self, connector: LayerwiseConnector, starts: Any, ends: Any, kwargs: dict[str, Any], *, loading: bool
    ) -> None:
        self.connector = connector
        self.cache: PagedKVCache = connector.kv_cache(kwargs)
        slots = connector.slot_mapping(kwargs)
        self.slots = slots.clone() if slots.is_cpu else slots  # an engine may fill its mapping anew between two layers
        offset = connector.first_mapped_token(kwargs) if loading else 0
        check_spans(starts, ends, len(self.slots), offset)
        self.starts = [start - offset for start in starts]
        self.ends = [end - offset for end in ends]
        self.skip = max(0, connector.cached_tokens(kwargs) - offset) if loading else 0
        self.backend: Operations = get_backend(device=self.cache.device)
        self.pending: list[Transfer] = []
        self._kind: SameKind | None = None  # of the first list of objects
        self._waited: list[Transfer] = []  # by the stream, which says nothing of what went wrong on the device
        connector.check_call(self)
        if not self.slots.is_cuda or validating():
            spans = connector.moved_spans(self, loading=loading)
            check_slot_values(self.cache, self.slots, spans, self.skip, duplicates=loading)

    def plan(self, objects: Any, layer: int, *, loading: bool) -> TransferPlan:
        """One layer of all chunks, checked. ChunkError, DtypeError or ArgumentError name layer and object."""
        connector = self.connector
        if self._kind is not None and isinstance(objects, list):
            known = self._kind.plan(objects, self.cache, layer, connector.fmt if loading else None)
            if known is not None:
                return known
        try:
            shape_of = connector.get_shape
            tensors = check_objects(objects, self.starts, self.ends, connector.fmt, shape_of, loading=loading)
            plan = TransferPlan.build(
                self.cache,
                self.slots,
                tensors,
                fmt=connector.fmt,
                layers=layer,
                starts=self.starts,
                skip_prefix_n_tokens=self.skip,
            )
            plan = replace(plan, slots_fixed=self.slots.is_cpu)
        except (ArgumentError, ChunkError, DtypeError) as error:
            raise type(error)(f"layer {layer}: {error}") from None
        if self._kind is None and objects:
            self._kind = SameKind(objects, plan)
        return plan

    def sent(self, objects: Sequence[MemoryObj] | None) -> Sequence[MemoryObj]:
        """The list a caller sent for one layer; without chunks there is nothing to send."""
        return [] if objects is None and not self.starts else objects  # type: ignore[return-value]

    def move(self, operation: str, plan: TransferPlan, objects: Sequence[MemoryObj]) -> None:
        """Start moving one layer of all chunks; the transfer is pending until `settle`."""
        self.pending.append(self.connector.run(operation, plan, objects, backend=self.backend))

    def settle(self, how: str, keep: int = 0) -> None:
        """`wait` for or `synchronize` all pending transfers but the `keep` newest, oldest first."""
        count = max(0, len(self.pending) - keep)
        ready, self.pending = self.pending[:count], self.pending[count:]
        self._waited += ready if how == "wait" else []
        self.connector.settle(ready, how)

    def abandon(self) -> None:
        """On every way out: no transfer of this call is left running over buffers or objects. An error that ends the call
        speaks for all of its transfers; none of theirs is left for a later call to raise."""
        if isinstance(sys.exc_info()[1], Exception):
            with contextlib.suppress(Exception):
                self.connector.settle(self._waited, "synchronize")
        self.settle("synchronize")


class LayerwiseConnector(PagedConnector):
    """One object for each layer and chunk: `[T, 2, D]` `KV_T2D`, with MLA `[T, D]` `KV_MLA_FMT`.

    `use_gpu=True` needs `dtype` and `device`. buffer_tokens: how many tokens one call may move (default: the slots of
    one layer); checked where `use_gpu` asks for a buffer.

    Both directions are generators. Arguments and spans are checked at the first `next` (on store the objects too), a
    sent list of objects before its layer moves. `close()` or an exception at any yield returns every buffer and
    reference. Generators of one connector may be interleaved.
    """

    per_layer_format = MemoryFormat.KV_T2D

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = False,
        *,
        buffer_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(hidden_dim_size, num_layers, use_gpu, **options)
        self.fmt = MemoryFormat.KV_MLA_FMT if self.use_mla else self.per_layer_format
        self.buffer_tokens = None if buffer_tokens is None else positive_int("buffer_tokens", buffer_tokens)
        self.require("dtype", "device")

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[T, 2, D]`, with MLA `[T, D]`."""
        return torch.Size([num_tokens, *([] if self.use_mla else [2]), self.hidden_dim_size])

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Refused: an object holds one layer, and this call does not say which."""
        raise ArgumentError(f"{type(self).__name__} loads through batched_to_gpu(starts, ends, ...) only")

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Refused: an object holds one layer, and this call does not say which."""
        raise ArgumentError(
            f"{type(self).__name__} stores through batched_from_gpu(memory_objs, starts, ends, ...) only"
        )

    def batched_from_gpu(
        self, memory_objs: Sequence[Sequence[MemoryObj]], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> StoreGenerator:
        """Store; `memory_objs[layer][chunk]`. Needs `sync`. Yields NL+1 times.

        After yield i the copy of layer i is under way, after yield i+1 it is final on the host (`sync=False`: all are
        final at the last yield only). Writes the objects, except rows of negative slot, and their format.
        """
        sync = self.reads_sync(kwargs)
        call = LayerwiseCall(self, starts, ends, kwargs, loading=False)
        if not isinstance(memory_objs, Sequence) or len(memory_objs) != self.num_layers:
            given = len(memory_objs) if isinstance(memory_objs, Sequence) else type(memory_objs).__name__
            raise ChunkError(f"memory_objs must be one list for each of the {self.num_layers} layers, got {given}")
        plans = [call.plan(objects, layer, loading=False) for layer, objects in enumerate(memory_objs)]
        try:
            for plan, objects in zip(plans, memory_objs, strict=True):
                call.move("gather", plan, objects)
                for obj, start, end in zip(objects, starts, ends, strict=True):
                    self.describe(obj, start, end)
                if sync:
                    call.settle("synchronize", keep=1)
                yield
            call.settle("synchronize")
            yield
        finally:
            call.abandon()

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> LoadGenerator:  # type: ignore[override]
        """Load; `next`, then `send(objects of the layer)` NL times, then `next`. Needs `sync`. Yields NL+2 times.

        When the `send` of layer i+1 (or the last `next`) returns, later work on the current stream sees layer i
        (`sync=False`: all layers, at the last yield only). Objects may be released when `send` returns.
        """
        sync = self.reads_sync(kwargs)
        call = LayerwiseCall(self, starts, ends, kwargs, loading=True)
        try:
            for layer in range(self.num_layers):
                objects = call.sent((yield))
                call.move("scatter", call.plan(objects, layer, loading=True), objects)
                if sync:
                    call.settle("wait", keep=1)
            yield
            call.settle("wait")
            yield
        finally:
            call.abandon()

    # ------------------------------------------------------------------------------------------ where engines differ

    def reads_sync(self, kwargs: dict[str, Any]) -> bool:
        """The `sync` argument; required."""
        return required_bool(kwargs, "sync")

    def first_mapped_token(self, kwargs: dict[str, Any]) -> int:
        """The request's token that `slot_mapping[0]` belongs to when loading."""
        return 0

    def describe(self, obj: MemoryObj, start: int, end: int) -> None:
        """Write what the object now is into its metadata."""
        obj.metadata.fmt = self.fmt

    def moved_spans(self, call: LayerwiseCall, *, loading: bool) -> list[tuple[int, int]]:
        """The ranges of tokens whose slots the call uses."""
        return list(zip(call.starts, call.ends, strict=True))

    def check_call(self, call: LayerwiseCall) -> None:
        """The call fits the buffer; else ChunkError before the first yield."""
        tokens = sum(call.ends) - sum(call.starts)
        limit = self.buffer_tokens or call.cache.num_slots
        if self.use_gpu and tokens > limit:
            raise ChunkError(f"the call moves {tokens} tokens, the buffer holds {limit} (buffer_tokens)")
