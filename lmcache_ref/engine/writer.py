"""A thread that writes chunks behind the back of those who store them. What a tier does with a chunk is its business."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .chunk import Chunk
from .tiers import Tier
from .tokens import CacheKey

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """A thread that puts chunks into a tier, one after the other.

    At most `limit_bytes` of chunks wait (one chunk always may): they hold host memory. done: called with the key
    after each, whatever came of it.
    """

    def __init__(self, tier: Tier, limit_bytes: int, done: Callable[[CacheKey], None]) -> None:
        self._tier, self._limit_bytes, self._done = tier, limit_bytes, done
        self._waiting: deque[tuple[CacheKey, Chunk]] = deque()  # the first is being written
        self._waiting_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, key: CacheKey, chunk: Chunk) -> bool:
        """Write the chunk later; it is held until then. False when too much waits, or after `close`."""
        with self._changed:
            full = self._waiting and self._waiting_bytes + chunk.size_bytes > self._limit_bytes
            if full or self._closed:
                return False
            self._waiting.append((key, chunk.hold()))
            self._waiting_bytes += chunk.size_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-disk-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self) -> None:
        """Return when nothing waits any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Write what waits, then end the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                key, chunk = self._waiting[0]
            try:
                self._tier.put(key, chunk)
            except Exception:
                logger.exception("chunk %s could not be written", key)
            chunk.release()
            self._done(key)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= chunk.size_bytes
                self._changed.notify_all()
