"""The abstract connector: what a cache engine may ask of every one of them. No moving happens here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..memory import MemoryObj


class GPUConnectorInterface(ABC):
    """Moves tokens between memory objects and an engine's paged KV cache.

    Keyword arguments of every transfer: `kvcaches` (the engine's tensors; the newest given wins), `slot_mapping`
    (int64 `[tokens of the request]`), and what the connector's own docstring adds.
    """

    @abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load: write the object's tokens, `[start, end)` of the request, into the engine's slots."""

    @abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store: write the engine's slots of tokens `[start, end)` into the object and set its format."""

    @abstractmethod
    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> Any:
        """Load many chunks. A generator in the layerwise connectors, called there as `(starts, ends, **kwargs)`."""

    @abstractmethod
    def batched_from_gpu(self, memory_objs: Any, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> Any:
        """Store many chunks. A generator in the layerwise connectors, with `memory_objs[layer][chunk]`."""

    @abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of the object that holds `num_tokens` tokens."""

    @abstractmethod
    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Take `kvcaches` if given; a later list replaces an earlier one."""
