"""Connectors that move all layers of a chunk at once: their calls, and the one for layers that are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..memory import MemoryFormat, MemoryObj
from ..plan import TransferPlan
from .base import ConnectorBase, PagedConnector, nvtx
from .checks import check_objects, check_spans


class AllLayersConnector(ConnectorBase):
    """The calls of a connector whose objects hold all layers; `plans` says what one of them moves.

    Streams: storing sees everything the current stream wrote before the call and returns when the objects' bytes are
    final; after loading, later work on the current stream sees the slots. Objects may be released on return.
    """

    fmt: MemoryFormat
    chunk_size: int | None = None  # tokens of the staging buffer

    def plans(
        self, objects: Any, starts: Any, ends: Any, kwargs: dict[str, Any], *, loading: bool
    ) -> Sequence[TransferPlan]:
        """What to hand to the backend, one call each; everything checked, nothing moved."""
        raise AssertionError("every connector plans its moves")

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load one object into the slots of tokens `[start, end)`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store the slots of tokens `[start, end)` into one object; its bytes are final on return."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    @nvtx
    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load chunks in any order, with gaps. Writes the slots of their tokens, except skipped ones (negative slot,
        below `vllm_cached_tokens`)."""
        plans = self.plans(memory_objs, starts, ends, kwargs, loading=True)
        self.run_all("scatter", plans, memory_objs or (), "wait", staging_tokens=self.chunk_size)

    @nvtx
    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Store chunks in any order, with gaps. Writes the objects, except rows of negative slot, and their format."""
        plans = self.plans(memory_objs, starts, ends, kwargs, loading=False)
        self.run_all("gather", plans, memory_objs, "synchronize", staging_tokens=self.chunk_size)
        for obj in memory_objs:
            obj.metadata.fmt = self.fmt


class WholeModelConnector(AllLayersConnector, PagedConnector):
    """Object `[2, NL, T, D]` `KV_2LTD`, with MLA `[1, NL, T, D]` `KV_MLA_FMT`.

    `use_gpu=True` needs `chunk_size`, `dtype` and `device`. Loading takes `vllm_cached_tokens`: tokens of the request
    below it are not written. Streams as in `AllLayersConnector`.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **options: Any) -> None:
        super().__init__(hidden_dim_size, num_layers, use_gpu, **options)
        self.fmt = MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_2LTD
        self.require("chunk_size", "dtype", "device")

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[2 or 1, NL, T, D]`."""
        return torch.Size([self.kv_size, self.num_layers, num_tokens, self.hidden_dim_size])

    def first_mapped_token(self, kwargs: dict[str, Any]) -> int:
        """The request's token that `slot_mapping[0]` belongs to when loading."""
        return 0

    def plans(
        self, objects: Any, starts: Any, ends: Any, kwargs: dict[str, Any], *, loading: bool
    ) -> Sequence[TransferPlan]:
        """One plan for all layers of all chunks."""
        offset = self.first_mapped_token(kwargs) if loading else 0
        cache, slots = self.kv_cache(kwargs), self.slot_mapping(kwargs)
        check_spans(starts, ends, len(slots), offset)
        tensors = check_objects(objects, starts, ends, self.fmt, self.get_shape, loading=loading)
        plan = TransferPlan.build(
            cache,
            slots,
            tensors,
            fmt=self.fmt,
            starts=[start - offset for start in starts],
            skip_prefix_n_tokens=max(0, self.cached_tokens(kwargs) - offset) if loading else 0,
        )
        return [plan]
