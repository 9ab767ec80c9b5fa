"""The interface of a place where chunks are kept, and the first of them: host memory. Nothing here knows of requests."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from ..memory import PinMemoryAllocator
from .chunk import Chunk, ChunkLayout
from .tokens import CacheKey


class Tier(ABC):
    """One place for chunks. Thread-safe."""

    @abstractmethod
    def contains(self, key: CacheKey) -> bool:
        """Whether a chunk is known here; a `get` may still find it damaged."""

    @abstractmethod
    def get(self, key: CacheKey) -> Chunk | None:
        """The chunk in host memory, with a reference for the caller; None when it is not here, or was damaged."""

    @abstractmethod
    def put(self, key: CacheKey, chunk: Chunk) -> bool:
        """Keep the chunk; the caller keeps its own reference. False when that is not possible or not needed."""

    @abstractmethod
    def remove(self, key: CacheKey) -> None:
        """Keep the chunk no longer; nothing happens when it is not here."""

    @abstractmethod
    def touch(self, keys: Sequence[CacheKey]) -> None:
        """The chunks of one request were used. Of one request, the end is given up before the beginning."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything held in this process."""


class HostTier(Tier):
    """Pinned host memory of exactly `size_bytes`. What somebody else holds or has pinned is never evicted."""

    def __init__(self, size_bytes: int) -> None:
        self.allocator = PinMemoryAllocator(size_bytes)
        self.evictions = 0
        self._chunks: OrderedDict[CacheKey, Chunk] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._chunks)

    def contains(self, key: CacheKey) -> bool:
        with self._lock:
            return key in self._chunks

    def get(self, key: CacheKey) -> Chunk | None:
        with self._lock:
            chunk = self._chunks.get(key)
            return None if chunk is None else chunk.hold()

    def put(self, key: CacheKey, chunk: Chunk) -> bool:
        with self._lock:
            if key in self._chunks:
                return False
            self._chunks[key] = chunk.hold()
            return True

    def keep(self, key: CacheKey, chunk: Chunk) -> Chunk:
        """Keep the chunk, unless there is one already; the one that is here, with the caller's reference, which the other one
        loses."""
        with self._lock:
            if self.put(key, chunk):
                return chunk
            chunk.release()
            return self._chunks[key].hold()

    def remove(self, key: CacheKey) -> None:
        with self._lock:
            chunk = self._chunks.pop(key, None)
            if chunk is not None:
                chunk.release()

    def remove_idle(self, key: CacheKey) -> None:
        """`remove`, unless somebody holds the chunk."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.can_evict:
                self.remove(key)

    def touch(self, keys: Sequence[CacheKey]) -> None:
        with self._lock:
            for key in reversed(keys):
                if key in self._chunks:
                    self._chunks.move_to_end(key)

    def allocate(self, layout: ChunkLayout) -> Chunk | None:
        """Memory for a chunk, evicting others until it fits; None when what is left is in use."""
        if layout.tensor_bytes > self.allocator.total_bytes:
            return None
        with self._lock:
            while True:
                objects = self.allocator.batched_allocate(layout.shapes, layout.dtypes, layout.num_objects, layout.fmt)
                if objects is not None:
                    return Chunk(objects)
                idle = next((key for key, chunk in self._chunks.items() if chunk.can_evict), None)
                if idle is None:
                    return None
                self.remove(idle)
                self.evictions += 1

    def close(self) -> None:
        with self._lock:
            for key in list(self._chunks):
                self.remove(key)
            self.allocator.close()
