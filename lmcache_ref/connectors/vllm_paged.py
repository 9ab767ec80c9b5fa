"""vLLM, all layers at once: V2 for models whose layers are alike, V3 for models whose layers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..discovery import merged_hints
from ..errors import ArgumentError, ChunkError, LayoutError
from ..groups import CacheGroup, read_groups
from ..memory import MemoryFormat
from ..metadata import LMCacheMetadata
from ..plan import TransferPlan, check_slots, checked_slots, validating
from .checks import check_object, check_spans
from .whole_model import AllLayersConnector, WholeModelConnector


class VLLMPagedMemGPUConnectorV2(WholeModelConnector):
    """Whole-model chunks: object `[2, NL, T, D]` `KV_2LTD`, with MLA `[1, NL, T, D]` `KV_MLA_FMT`.

    `kvcaches`: one tensor a layer, all alike, or one cross-layer tensor. Everything else as in `WholeModelConnector`.
    """


class VLLMPagedMemGPUConnectorV3(AllLayersConnector):
    """Layers may differ in (K and V or one plane, NH, HS, BS, dtype); equal ones form a group.

    Groups are ordered by their first layer and fixed from the first `kvcaches` on (or by the metadata). An object holds
    one tensor a group, `[kv, layers of the group, T, D of the group]`; its format is `KV_MLA_FMT` when
    `metadata.use_mla`, else `KV_2LTD`. `slot_mapping` is one tensor, or a list with one for each group.
    Loading takes `vllm_cached_tokens`. Streams as in `VLLMPagedMemGPUConnectorV2`.
    """

    def __init__(
        self,
        metadata: LMCacheMetadata,
        device: torch.device | str | None = None,
        use_gpu: bool = False,
        layout_hints: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if use_gpu and device is None:
            raise ArgumentError("use_gpu=True needs device")
        self.metadata = metadata
        self.device = None if device is None else torch.device(device)
        self.use_gpu = bool(use_gpu)
        self.layout_hints = merged_hints(layout_hints, {})
        self.fmt = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self._answered: list[torch.Size] | None = None  # what get_shapes said before the groups were known

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        layout_hints: Mapping[str, Any] | None = None,
    ) -> VLLMPagedMemGPUConnectorV3:
        """The connector for a model; same as the constructor."""
        return cls(metadata, device, use_gpu, layout_hints)

    def get_shapes(self, num_tokens: int) -> list[torch.Size]:
        """`[kv, layers of the group, T, D of the group]` of each group.

        Before the first `kvcaches`, and without groups in the metadata, this is the one group of `metadata.kv_shape`; an
        engine that then turns out to have others is a LayoutError.
        """
        if not self.metadata.layer_groups:
            self._answered = self.metadata.get_shapes(0)
        return self.metadata.get_shapes(num_tokens)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The one group's shape; LayoutError when there are several."""
        shapes = self.get_shapes(num_tokens)
        if len(shapes) != 1:
            raise LayoutError(f"the object has {len(shapes)} tensors, one for each layer group: use get_shapes()")
        return shapes[0]

    def read_engine(self, kvcaches: Any) -> list[CacheGroup]:
        """The planes of each group. Raises LayoutError when the groups are not the ones known."""
        groups = read_groups(kvcaches, self.engine, self.layout_hints, self.metadata)
        if self._answered is not None and [group.layers.shape(0) for group in groups] != self._answered:
            raise LayoutError(
                f"get_shapes() was asked before the groups were known and answered {self._answered}; the engine's layers "
                f"form {[group.layers for group in groups]}: call initialize_kvcaches_ptr(kvcaches=...) first"
            )
        self.metadata.set_layer_groups([group.layers for group in groups])
        return groups

    def plans(
        self, objects: Any, starts: Any, ends: Any, kwargs: dict[str, Any], *, loading: bool
    ) -> list[TransferPlan]:
        """One checked plan for each group; nothing moved."""
        groups: list[CacheGroup] = self.kv_cache(kwargs)
        mappings = self._slot_mappings(kwargs, len(groups))
        check_spans(starts, ends, min(len(slots) for slots in mappings))
        if not isinstance(objects, Sequence) or len(objects) != len(starts):
            raise ChunkError(f"memory_objs must be a list of {len(starts)} objects, as starts")
        for index, (obj, start, end) in enumerate(zip(objects, starts, ends, strict=True)):
            self._check(obj, f"memory_objs[{index}]", end - start, loading)
        plans = [
            TransferPlan.build(
                group.cache,
                slots,
                [obj.get_tensor(index) for obj in objects],
                fmt=MemoryFormat.KV_MLA_FMT if group.layers.kv == 1 else MemoryFormat.KV_2LTD,
                starts=starts,
                skip_prefix_n_tokens=self.cached_tokens(kwargs) if loading else 0,
            )
            for index, (group, slots) in enumerate(zip(groups, mappings, strict=True))
        ]
        for plan in (
            plans if len(plans) > 1 else []
        ):  # no group may move before every group's slots are known to be good
            if not plan.slots.is_cuda or validating():
                check_slots(plan, duplicates=loading)
        return plans

    def _check(self, obj: Any, name: str, tokens: int, loading: bool) -> None:
        check_object(obj, name, self.fmt, loading=loading)
        shapes, wanted = list(obj.metadata.shapes), self.metadata.get_shapes(tokens)
        if shapes != wanted:
            raise ChunkError(
                f"{name} has shapes {[tuple(s) for s in shapes]}; {tokens} tokens are {[tuple(s) for s in wanted]}"
            )

    def _slot_mappings(self, kwargs: dict[str, Any], num_groups: int) -> list[torch.Tensor]:
        """One mapping for each group; a single tensor serves all."""
        given = kwargs.get("slot_mapping")
        if not isinstance(given, (list, tuple)):
            return [self.slot_mapping(kwargs)] * num_groups
        if len(given) != num_groups:
            raise ArgumentError(f"slot_mapping is a list of {len(given)}, there are {num_groups} layer groups")
        return [checked_slots(slots) for slots in given]
