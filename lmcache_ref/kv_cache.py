"""`PagedKVCache`: an engine's paged memory as `planes[layer][kv]`, four-dimensional views that never copy.

This is all that the specification and the backends know of an engine. How the planes are found is `discovery.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .discovery import Planes, check_strides, discover
from .errors import LayoutError
from .layouts import Layout
from .metadata import EngineType


@dataclass(frozen=True)
class PagedKVCache:
    """The planes of an engine's KV cache.

    planes: `planes[layer][kv]`, each a strided `[NB, BS, NH, HS]` view over the engine's memory, HS of stride 1. One
    plane a layer is MLA, two are K and V. Slot `s` is `plane[s // BS, s % BS]`.
    layout: the row it was read by; None when the planes were given by hand.

    Raises LayoutError when planes differ in shape, dtype or device, StrideError when one cannot be addressed.
    """

    planes: Planes
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if not self.planes or not self.planes[0]:
            raise LayoutError("a KV cache needs at least one layer with one plane")
        first = self.planes[0][0]
        for layer, row in enumerate(self.planes):
            if len(row) != len(self.planes[0]):
                raise LayoutError(f"layer {layer} has {len(row)} planes, layer 0 has {len(self.planes[0])}")
            for kv, plane in enumerate(row):
                name = f"plane [layer {layer}, kv {kv}]"
                if plane.dim() != 4:
                    raise LayoutError(f"{name} has shape {tuple(plane.shape)}, expected [NB, BS, NH, HS]")
                if (plane.shape, plane.dtype, plane.device) != (first.shape, first.dtype, first.device):
                    raise LayoutError(
                        f"{name} is {tuple(plane.shape)} {plane.dtype} on {plane.device}, the first is "
                        f"{tuple(first.shape)} {first.dtype} on {first.device}"
                    )
                check_strides(plane, name)
            if len(row) == 2 and row[0].data_ptr() == row[1].data_ptr() and row[0].numel():
                raise LayoutError(f"layer {layer}: K and V are the same memory")

    @classmethod
    def from_engine(
        cls, kv_caches: Any, engine: EngineType | str, hints: Mapping[str, Any] | None = None
    ) -> PagedKVCache:
        """The planes of an engine's own tensors, by `discover(kv_caches, engine, hints)`; same errors."""
        layout, planes = discover(kv_caches, engine, hints)
        return cls(planes, layout)

    @classmethod
    def from_vllm(cls, kv_caches: Any, **hints: Any) -> PagedKVCache:
        """`from_engine(kv_caches, "vllm", hints)`: one tensor a layer, or one cross-layer tensor."""
        return cls.from_engine(kv_caches, EngineType.VLLM, hints)

    @classmethod
    def from_sglang(cls, kv_caches: Any, **hints: Any) -> PagedKVCache:
        """`from_engine(kv_caches, "sglang", hints)`: K and V lists, flat or nested, or one MLA list."""
        return cls.from_engine(kv_caches, EngineType.SGLANG, hints)

    @classmethod
    def from_trtllm(cls, kv_caches: Any, **hints: Any) -> PagedKVCache:
        """`from_engine(kv_caches, "trtllm", hints)`: the pool `[NB, NL, 2, NH*BS*HS]` needs `num_kv_heads` and
        `tokens_per_block`, or `head_dim`."""
        return cls.from_engine(kv_caches, EngineType.TRTLLM, hints)

    @functools.cached_property
    def chunk_readings(self) -> dict[Any, Any]:
        """What `TransferPlan.build` has found about chunks of this cache: their shape, stride, dtype, format and number of
        layers -> how they are seen."""
        return {}

    # sizes, all in the units of their axis
    @property
    def num_layers(self) -> int:
        """NL."""
        return len(self.planes)

    @property
    def kv_size(self) -> int:
        """2 (K and V) or 1 (MLA)."""
        return len(self.planes[0])

    @property
    def num_blocks(self) -> int:
        """NB."""
        return self.planes[0][0].shape[0]

    @property
    def block_size(self) -> int:
        """BS, tokens a block."""
        return self.planes[0][0].shape[1]

    @property
    def num_heads(self) -> int:
        """NH."""
        return self.planes[0][0].shape[2]

    @property
    def head_size(self) -> int:
        """HS, elements."""
        return self.planes[0][0].shape[3]

    @property
    def hidden_dim_size(self) -> int:
        """D = NH*HS, elements."""
        return self.num_heads * self.head_size

    @property
    def num_slots(self) -> int:
        """NB*BS: slots run from 0 up to here."""
        return self.num_blocks * self.block_size

    @property
    def dtype(self) -> torch.dtype:
        """dtype of every plane."""
        return self.planes[0][0].dtype

    @property
    def device(self) -> torch.device:
        """Device of every plane."""
        return self.planes[0][0].device

    def select_layers(self, layers: Sequence[int]) -> Planes:
        """The planes of `layers`, in that order."""
        return tuple(self.planes[layer] for layer in layers)

    def __repr__(self) -> str:
        name = self.layout.name if self.layout else "planes"
        return (
            f"PagedKVCache({name}, NL={self.num_layers}, kv={self.kv_size}, NB={self.num_blocks}, "
            f"BS={self.block_size}, NH={self.num_heads}, HS={self.head_size}, {self.dtype}, {self.device})"
        )
