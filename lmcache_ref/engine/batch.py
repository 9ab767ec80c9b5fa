"""The chunks that one call of the engine works on, and the pins that outlive a call. Nothing here moves bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory import MemoryObj
from .chunk import Chunk
from .tokens import CacheKey, Span


@dataclass
class Batch:
    """Chunks in the order of their tokens, of a request of `num_tokens` tokens."""

    num_tokens: int
    spans: list[Span] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, span: Span, chunk: Chunk) -> None:
        self.spans.append(span)
        self.chunks.append(chunk)

    def pairs(self) -> list[tuple[Span, Chunk]]:
        return list(zip(self.spans, self.chunks, strict=True))

    @property
    def starts(self) -> list[int]:
        return [span.start for span in self.spans]

    @property
    def ends(self) -> list[int]:
        return [span.end for span in self.spans]

    @property
    def tokens(self) -> int:
        """How many tokens the chunks hold."""
        return sum(span.tokens for span in self.spans)

    def objects(self, layer: int = 0) -> list[MemoryObj]:
        """The object of each chunk; of a layerwise one, that of the layer."""
        return [chunk.objects[layer] for chunk in self.chunks]


class Pins:
    """What is kept from eviction for each request. unpin: how to undo a pin. Thread-safe."""

    def __init__(self, unpin: Callable[[CacheKey, Chunk], None]) -> None:
        self._unpin = unpin
        self._pinned: dict[str, dict[CacheKey, Chunk]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pinned)

    def pin(self, request_id: str, batch: Batch) -> None:
        """Pin the chunks, each once for the request however often this is called."""
        with self._lock:
            pinned = self._pinned.setdefault(request_id, {})
            for span, chunk in batch.pairs():
                chunk.pin()
                if span.key in pinned:  # by an earlier lookup; not the same chunk if it was stored anew since
                    pinned[span.key].unpin()
                pinned[span.key] = chunk

    def release(self, request_id: str) -> None:
        """Undo all pins of the request, if it has any."""
        with self._lock:
            pinned = self._pinned.pop(request_id, {})
        for key, chunk in pinned.items():
            self._unpin(key, chunk)

    def release_all(self) -> None:
        for request_id in list(self._pinned):
            self.release(request_id)


def first_unmapped(spans: list[Span], slot_mapping: Any) -> int:
    """Index of the first chunk with a negative slot, whose bytes a store would not all write; else the number of chunks.

    slot_mapping: a tensor, or a list of them; anything else is left for the connector to refuse.
    """
    unmapped: set[int] = set()
    for slots in slot_mapping if isinstance(slot_mapping, (list, tuple)) else [slot_mapping]:
        if isinstance(slots, torch.Tensor) and slots.ndim == 1:
            unmapped.update((slots < 0).nonzero().flatten().tolist())
    if not unmapped:
        return len(spans)
    whole = (unmapped.isdisjoint(range(span.start, span.end)) for span in spans)
    return next((index for index, is_whole in enumerate(whole) if not is_whole), len(spans))
