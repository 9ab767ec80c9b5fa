"""What is known about the engine and its model before any tensor is seen: ranks, layers, sizes, dtype.

`LMCacheMetadata` answers one question for allocators and connectors, the shapes and dtypes of an object for T
tokens. The engine's tensors are read elsewhere (discovery), which may hand the layer groups it found to here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from .errors import ArgumentError, LayoutError


class EngineType(str, Enum):
    """The inference engines. `EngineType("SGLang")` reads a name in any case, and a member as itself."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    MOCK = "mock"

    @classmethod
    def _missing_(cls, value: object) -> EngineType:
        """Called by Enum for a value that is none of the above. ArgumentError when it is no engine's name."""
        name = value.lower() if isinstance(value, str) else None
        for member in cls:
            if member.value == name:
                return member
        known = ", ".join(member.value for member in cls)
        raise ArgumentError(f"engine: {value!r} is unknown; known: {known}") from None


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose caches are alike: one tensor `[kv, NL, T, D]` of a memory object, D = NH*HS.

    `layer_indices` are places in the engine's list of caches. `kv` is 2 for K and V, 1 for MLA. BS,
    tokens per block, is None where it is not known.
    """

    layer_indices: tuple[int, ...]
    kv: int
    NH: int
    HS: int
    dtype: torch.dtype
    BS: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_indices", tuple(self.layer_indices))
        if not self.layer_indices or len(set(self.layer_indices)) != len(self.layer_indices):
            raise ArgumentError(f"layer_indices: {self.layer_indices}; allowed: at least one layer, none twice")
        for layer in self.layer_indices:
            _require_int("layer_indices", layer, least=0)
        _require_kv("kv", self.kv)
        for name in ("NH", "HS") if self.BS is None else ("NH", "HS", "BS"):
            _require_int(name, getattr(self, name), least=1)
        _require_dtype("dtype", self.dtype)

    def shape(self, num_tokens: int) -> torch.Size:
        """[kv, NL, T, D] for T = `num_tokens`."""
        return torch.Size((self.kv, len(self.layer_indices), num_tokens, self.NH * self.HS))

    def agrees_with(self, other: LayerGroup) -> bool:
        """Whether the two say the same; a BS that one of them does not know contradicts nothing."""
        same_bs = self.BS is None or other.BS is None or self.BS == other.BS
        return same_bs and _signature(self) == _signature(other)


@dataclass
class LMCacheMetadata:
    """One worker's view of the model. ArgumentError names the constructor argument that is wrong.

    `kv_shape` = (NL, 2 or 1, tokens per chunk, NH, HS) describes models whose layers are all alike; for the
    others there are layer groups, given as `kv_layer_groups_manager` (also later, or filled later) or through
    `set_layer_groups`. `chunk_size` (tokens) is what `get_shapes` goes by. Ranks are not compared with world
    sizes, and `kv_shape` not with the groups or `chunk_size`: engines fill them in their own ways.
    """

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    role: str | None = None
    served_model_name: str | None = None
    chunk_size: int = 256
    kv_layer_groups_manager: Any = None
    engine_id: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None
    _layer_groups: tuple[LayerGroup, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str):
            raise ArgumentError(f"model_name: {self.model_name!r}; allowed: a string")
        for name, least in (
            ("world_size", 1),
            ("local_world_size", 1),
            ("worker_id", 0),
            ("local_worker_id", 0),
        ):
            _require_int(name, getattr(self, name), least)
        _require_int("chunk_size", self.chunk_size, least=1)
        _require_dtype("kv_dtype", self.kv_dtype)
        if not isinstance(self.kv_shape, Sequence) or len(self.kv_shape) != 5:
            raise ArgumentError(f"kv_shape: {self.kv_shape!r}; allowed: (NL, 2 or 1, tokens per chunk, NH, HS)")
        for size in self.kv_shape:
            _require_int("kv_shape", size, least=1)
        _require_kv("kv_shape[1]", self.kv_shape[1])
        if not isinstance(self.use_mla, bool):
            raise ArgumentError(f"use_mla: {self.use_mla!r}; allowed: True or False")
        if self.use_mla and self.kv_shape[1] != 1:
            raise ArgumentError(f"use_mla: True, but kv_shape[1] is {self.kv_shape[1]}; allowed with MLA: 1")
        NL, kv, T, NH, HS = self.kv_shape
        self.kv_shape = (NL, kv, T, NH, HS)

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that were given or set; none as long as nobody knows them."""
        self._settle_given()
        return self._layer_groups

    def set_layer_groups(self, groups: Sequence[LayerGroup]) -> None:
        """State the groups, as discovered. The known ones again are legal; any others: LayoutError."""
        if not isinstance(groups, Sequence) or not groups or {type(g) for g in groups} != {LayerGroup}:
            raise ArgumentError(f"groups: {groups!r}; allowed: a list of LayerGroup, at least one")
        self._settle_given()
        self._settle(tuple(groups))

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """[kv, NL, T, D] of each group, T = `num_tokens` or else chunk_size; one group when none is known."""
        tokens = self.chunk_size if num_tokens is None else num_tokens
        _require_int("num_tokens", tokens, least=0)
        return [group.shape(tokens) for group in self._groups_or_whole_model()]

    def get_dtypes(self) -> list[torch.dtype]:
        """The dtype of each group, in the order of `get_shapes`."""
        return [group.dtype for group in self._groups_or_whole_model()]

    def get_num_groups(self) -> int:
        return len(self._groups_or_whole_model())

    def is_first_rank(self) -> bool:
        return self.worker_id == 0

    def _groups_or_whole_model(self) -> tuple[LayerGroup, ...]:
        NL, kv, _, NH, HS = self.kv_shape
        return self.layer_groups or (LayerGroup(tuple(range(NL)), kv, NH, HS, self.kv_dtype),)

    def _settle_given(self) -> None:
        given = _groups_of_manager(self.kv_layer_groups_manager)
        if given:
            self._settle(given)

    def _settle(self, groups: tuple[LayerGroup, ...]) -> None:
        layers = [layer for group in groups for layer in group.layer_indices]
        if len(set(layers)) != len(layers):
            raise LayoutError(f"layer groups: a layer is in two groups: {groups}")
        known = self._layer_groups or groups
        if len(known) != len(groups) or not all(a.agrees_with(b) for a, b in zip(known, groups, strict=True)):
            raise LayoutError(f"layer groups: known {known}, but now {groups}")
        self._layer_groups = known


def _groups_of_manager(manager: Any) -> tuple[LayerGroup, ...]:
    """The groups of a `kv_layer_groups_manager`; none without one, or while it knows none itself."""
    if manager is None:
        return ()
    try:
        return tuple(_group_of_descriptor(group) for group in manager.kv_layer_groups or ())
    except AttributeError as error:
        raise ArgumentError(f"kv_layer_groups_manager: {manager!r} cannot be read: {error}") from error


def _group_of_descriptor(group: Any) -> LayerGroup:
    """LayerGroup of an object with `layer_indices`, `shape_desc`, `dtype`. LayoutError when they disagree."""
    desc = group.shape_desc
    found = LayerGroup(tuple(group.layer_indices), desc.kv_size, desc.nh, desc.hs, group.dtype, desc.bs)
    stated = (desc.nl, desc.element_size)
    counted = (len(found.layer_indices), found.dtype.itemsize)
    if stated != counted:
        raise LayoutError(
            f"kv_layer_groups_manager: shape_desc says (nl, element_size) = {stated}, but layer_indices and "
            f"dtype make it {counted}: {found}"
        )
    return found


def _signature(group: LayerGroup) -> tuple[object, ...]:
    return group.layer_indices, group.kv, group.NH, group.HS, group.dtype


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{name}: {value!r}; allowed: integers from {least} on")


def _require_kv(name: str, value: object) -> None:
    _require_int(name, value, least=1)
    if value not in (1, 2):
        raise ArgumentError(f"{name}: {value!r}; allowed: 2 (K and V) or 1 (one plane)")


def _require_dtype(name: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        raise ArgumentError(f"{name}: {value!r}; allowed: a torch.dtype")
