"""The models whose caches are moved in the benchmark, and the engine layouts they lie in. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kv_cache import PagedKVCache
from ..metadata import EngineType

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """One model's cache on one rank. kv: 2 for K and V, 1 for MLA. HS in elements."""

    name: str
    NL: int
    kv: int
    NH: int
    HS: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """All layers, K and V."""
        return self.NL * self.kv * self.NH * self.HS * self.dtype.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", 32, 2, 8, 128, torch.bfloat16),
        Shape("llama3-70b-tp8", 80, 2, 1, 128, torch.bfloat16),
        Shape("deepseek-v3-mla", 61, 1, 1, 576, torch.bfloat16),
        Shape("llama3-8b-fp8", 32, 2, 8, 128, torch.float8_e4m3fn),
    )
}

#: what a layout is called in the table -> the row it is, for K and V; MLA has one row
LAYOUTS_BY_ORDER = {
    "NHD": "NL_X_TWO_NB_BS_NH_HS",
    "HND": "NL_X_TWO_NB_NH_BS_HS",
    "fused": "NL_X_NB_NH_BS_TWO_HS",
}
MLA_LAYOUT = "NL_X_NB_BS_HS"
NO_ORDER = "-"  # of MLA, which has one plane and one head


def layout_hints(shape: Shape, order: str, block_size: int) -> dict[str, Any]:
    """What says, beyond doubt, how the tensors of `make_cache` are to be read."""
    row = MLA_LAYOUT if shape.kv == 1 else LAYOUTS_BY_ORDER[order]
    return {"layout": row, "num_kv_heads": shape.NH, "tokens_per_block": block_size, "head_dim": shape.HS}


def make_cache(
    shape: Shape, order: str, num_blocks: int, block_size: int, device: torch.device, seed: int
) -> tuple[PagedKVCache, list[torch.Tensor]]:
    """A cache of random bytes in the given memory order, and the engine's tensors behind it (one a layer)."""
    sizes = {
        "NHD": (2, num_blocks, block_size, shape.NH, shape.HS),
        "HND": (2, num_blocks, shape.NH, block_size, shape.HS),
        "fused": (num_blocks, shape.NH, block_size, 2 * shape.HS),
    }
    size = (num_blocks, block_size, shape.HS) if shape.kv == 1 else sizes[order]
    generator = torch.Generator(device=device).manual_seed(seed)
    nbytes = shape.dtype.itemsize
    tensors = [
        torch.randint(0, 256, (*size[:-1], size[-1] * nbytes), dtype=torch.uint8, device=device, generator=generator)
        for _ in range(shape.NL)
    ]
    tensors = [tensor.view(shape.dtype) for tensor in tensors]
    return PagedKVCache.from_engine(tensors, EngineType.VLLM, layout_hints(shape, order, block_size)), tensors
