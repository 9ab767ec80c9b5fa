"""Host memory in front of an optional disk, as the cache engine sees them: one place where chunks are.

What comes from the disk is brought to host memory first, what is stored is written behind. Tokens, requests and
connectors are not known here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from .chunk import Chunk
from .config import LMCacheEngineConfig
from .disk import DiskTier
from .tiers import HostTier
from .tokens import CacheKey
from .writer import BackgroundWriter


class Storage:
    """Host memory in front of an optional disk. Thread-safe.

    skipped: why chunks were not kept, or not written, and how often.
    """

    def __init__(self, config: LMCacheEngineConfig, scope: str) -> None:
        self.host = HostTier(config.max_local_cpu_bytes)
        self.keep_in_host = config.local_cpu
        self.skipped: Counter[str] = Counter()
        self.disk: DiskTier | None = None
        self.writer: BackgroundWriter | None = None
        self._promoting = threading.Lock()
        if config.local_disk is not None:
            self.disk = DiskTier(config.local_disk, scope, config.max_local_disk_bytes, self.host.allocate)
            # Chunks that wait hold host memory; where it is a cache, half of it stays one.
            limit_bytes = config.max_local_cpu_bytes // (2 if self.keep_in_host else 1)
            self.writer = BackgroundWriter(self.disk, limit_bytes, self._drop_if_transient)

    def contains(self, key: CacheKey) -> bool:
        return self.host.contains(key) or (self.disk is not None and self.disk.contains(key))

    def hold(self, key: CacheKey) -> Chunk | None:
        """The chunk in host memory, verified, with a reference for the caller; read from the disk if need be."""
        chunk = self.host.get(key)
        if chunk is not None or self.disk is None or not self.disk.contains(key):
            return chunk
        with self._promoting:  # two requests for one chunk read it once
            chunk = self.host.get(key)
            if chunk is None:
                chunk = self.disk.get(key)
                if chunk is not None:  # a store may have been faster; what is pinned must be what others find
                    chunk = self.host.keep(key, chunk)
            return chunk

    def publish(self, key: CacheKey, chunk: Chunk) -> None:
        """From now on `chunk` is found under `key`; the caller's reference goes over to the tiers."""
        self.host.put(key, chunk)
        if self.writer is not None and not self.writer.submit(key, chunk):
            self.skipped["disk_queue_full"] += 1
        self.release(key, chunk)

    def release(self, key: CacheKey, chunk: Chunk) -> None:
        """Give back a reference from `hold`."""
        chunk.release()
        self._drop_if_transient(key)

    def unpin(self, key: CacheKey, chunk: Chunk) -> None:
        """Undo one `chunk.pin()`."""
        chunk.unpin()
        self._drop_if_transient(key)

    def drop(self, key: CacheKey) -> None:
        """Forget the chunk everywhere."""
        self.host.remove(key)
        if self.disk is not None:
            self.disk.remove(key)

    def touch(self, keys: Sequence[CacheKey]) -> None:
        """The chunks of one request were used, given from its beginning on."""
        self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def flush(self) -> None:
        """Return when all that was published is on the disk, or was skipped."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Write what waits, then let everything go. What is on the disk stays."""
        if self.writer is not None:
            self.writer.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()

    def _drop_if_transient(self, key: CacheKey) -> None:
        """Without `local_cpu` a chunk leaves host memory when nobody needs it there any more."""
        if not self.keep_in_host:
            self.host.remove_idle(key)
