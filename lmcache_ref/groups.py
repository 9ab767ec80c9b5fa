"""Layer groups: an engine whose layers differ, read as several `PagedKVCache`s of layers that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .discovery import discover, merged_hints
from .errors import LayoutError
from .kv_cache import PagedKVCache
from .layouts import Layout
from .metadata import EngineType, LayerGroup, LMCacheMetadata


@dataclass(frozen=True)
class CacheGroup:
    """Which layers, and their planes."""

    layers: LayerGroup
    cache: PagedKVCache


def read_groups(
    kvcaches: Any, engine: EngineType, hints: Mapping[str, Any], metadata: LMCacheMetadata
) -> list[CacheGroup]:
    """Group the layers by (kv, NH, HS, BS, dtype), in order of each group's first layer.

    Sizes that the metadata's groups state are hints for reading; without groups, layers that all look alike are those of
    `metadata.kv_shape`. Raises LayoutError when a layer has no reading or several, when the number of cache tensors is
    not the expected one, or when planes of one group differ in NB.
    """
    if isinstance(kvcaches, torch.Tensor):
        known = metadata.layer_groups or (_whole_model(metadata),)
        stated = {"num_layers": sum(len(group.layer_indices) for group in known), **_stated(known[0])}
        layout, planes = discover(kvcaches, engine, merged_hints(hints, stated))
        layers = {index: (layout, row) for index, row in enumerate(planes)}
    else:
        tensors = list(kvcaches.values() if isinstance(kvcaches, Mapping) else kvcaches)
        layers = _read_layers(tensors, engine, hints, metadata)
    signatures: dict[tuple[Any, ...], list[int]] = {}
    for index in range(len(layers)):
        plane = layers[index][1][0]
        signature = (len(layers[index][1]), plane.shape[2], plane.shape[3], plane.shape[1], plane.dtype)
        signatures.setdefault(signature, []).append(index)
    groups = [
        CacheGroup(
            LayerGroup(tuple(members), kv, heads, head_size, dtype, block_size),
            PagedKVCache(tuple(layers[i][1] for i in members), layers[members[0]][0]),
        )
        for (kv, heads, head_size, block_size, dtype), members in signatures.items()
    ]
    _check_count(len(layers), groups, metadata)
    return groups


def _read_layers(
    tensors: Sequence[torch.Tensor], engine: EngineType, hints: Mapping[str, Any], metadata: LMCacheMetadata
) -> dict[int, tuple[Layout, tuple[torch.Tensor, ...]]]:
    """Each layer's row and planes. Layers of one shape, dtype and known group are read together."""
    known = {index: group for group in metadata.layer_groups for index in group.layer_indices}
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"kvcaches[{index}] is a {type(tensor).__name__}; layer groups need one tensor a layer")
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device, known.get(index)), []).append(index)
    layers: dict[int, tuple[Layout, tuple[torch.Tensor, ...]]] = {}
    for (_, _, _, group), members in alike.items():
        group = group or (_whole_model(metadata) if len(alike) == 1 else None)
        stated = {} if group is None else _stated(group)
        layout, planes = discover([tensors[index] for index in members], engine, merged_hints(hints, stated))
        layers.update({index: (layout, row) for index, row in zip(members, planes, strict=True)})
    return layers


def _whole_model(metadata: LMCacheMetadata) -> LayerGroup:
    NL, kv, _, NH, HS = metadata.kv_shape
    return LayerGroup(tuple(range(NL)), kv, NH, HS, metadata.kv_dtype)


def _stated(group: LayerGroup) -> dict[str, Any]:
    """What a known group says about its layers' tensors, as hints."""
    known = {"use_mla": group.kv == 1, "num_kv_heads": group.NH, "head_dim": group.HS, "dtype": group.dtype}
    return known if group.BS is None else {**known, "tokens_per_block": group.BS}


def _check_count(found: int, groups: Sequence[CacheGroup], metadata: LMCacheMetadata) -> None:
    """As many cache tensors as the metadata expects: all layers, or NL of the main kind beside others (an indexer)."""
    if metadata.layer_groups:
        expected = sum(len(group.layer_indices) for group in metadata.layer_groups)
        main = expected
    else:
        expected, kv, _, heads, head_size = metadata.kv_shape
        main = sum(
            len(group.layers.layer_indices)
            for group in groups
            if (group.layers.kv, group.layers.NH * group.layers.HS) == (kv, heads * head_size)
        )
    if found != expected and (main != expected or found < expected or metadata.layer_groups):
        raise LayoutError(f"kvcaches has {found} layers, expected {expected}")
