"""A connector with an engine of its own, in host memory, for tests of what stands above connectors."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..metadata import LMCacheMetadata
from .vllm_paged import VLLMPagedMemGPUConnectorV2


class MockGPUConnector(VLLMPagedMemGPUConnectorV2):
    """`VLLMPagedMemGPUConnectorV2` over pages it owns: `kvcaches`, one `[2, NB, BS, NH, HS]` (MLA `[NB, BS, HS]`) a layer.

    `kvcaches` and `slot_mapping` may be left out of every call: its own pages, and token t in slot t. num_blocks,
    block_size: how large its pages are (block_size: else the hint `tokens_per_block`, else 16).
    """

    def __init__(
        self, *args: Any, num_heads: int = 1, num_blocks: int = 64, block_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if self.hidden_dim_size % num_heads:
            raise ArgumentError(f"hidden_dim_size {self.hidden_dim_size} does not divide by num_heads {num_heads}")
        head_size = self.hidden_dim_size // num_heads
        block_size = block_size or self.layout_hints.get("tokens_per_block", 16)
        shape = (
            (num_blocks, block_size, head_size) if self.use_mla else (2, num_blocks, block_size, num_heads, head_size)
        )
        dtype = self.dtype or torch.bfloat16
        self.kvcaches = [torch.zeros(shape, dtype=dtype) for _ in range(self.num_layers)]
        self.layout_hints["layout"] = "NL_X_NB_BS_HS" if self.use_mla else "NL_X_TWO_NB_BS_NH_HS"
        self.initialize_kvcaches_ptr(kvcaches=self.kvcaches)

    @classmethod
    def from_metadata(cls, metadata: LMCacheMetadata, *args: Any, **options: Any) -> MockGPUConnector:
        """Pages shaped like the model's."""
        return super().from_metadata(metadata, *args, num_heads=metadata.kv_shape[3], **options)

    def slot_mapping(self, kwargs: Any) -> torch.Tensor:
        """`kwargs["slot_mapping"]`, else token t in slot t."""
        if kwargs.get("slot_mapping") is None:
            return torch.arange(self.kv_cache({}).num_slots)
        return super().slot_mapping(kwargs)
