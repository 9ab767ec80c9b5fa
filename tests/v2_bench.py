"""A small vLLM engine, connectors that fit it, and what their objects must hold. No test lives here."""

from __future__ import annotations

import torch

from engines import engine_of, first, new_object
from helpers import addressed
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2
from lmcache_ref.memory import MemoryFormat

K2 = MemoryFormat.KV_2LTD
ENGINE = engine_of(2, (2, 5, 4, 3, 8), None, {}, first(4))  # 20 slots, D = 24
SLOTS = torch.tensor([5, 0, 19, 2, 8, 11, 3, 14, 9, 1])


def connector(**options) -> VLLMPagedMemGPUConnectorV2:
    return VLLMPagedMemGPUConnectorV2(24, 2, **options)


def memory(first: int = 0) -> torch.Tensor:
    return addressed(ENGINE.num_elements, torch.float16, first)


def expected_object(flat: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The flat elements of the object that holds these slots, by plain indexing."""
    kv = ENGINE.tensors(flat)
    rows = [[[ENGINE.token(kv, layer, k, s).reshape(-1) for s in slots] for layer in range(2)] for k in range(2)]
    return torch.stack([torch.stack([torch.stack(tokens) for tokens in layers]) for layers in rows]).reshape(-1)


def half(tokens: int, like: VLLMPagedMemGPUConnectorV2 | None = None):
    return new_object(like or connector(), tokens, torch.float16)
