"""The disk tier: one file for each chunk in a folder of the worker's own, and a byte limit.

What a file looks like is in `chunk_file.py`. Files that are not ours are left alone and never served.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ArgumentError
from .chunk import Chunk, ChunkLayout
from .chunk_file import TEMPORARY, DamagedFileError, file_bytes, read_chunk, remove_if_abandoned, write_chunk
from .tiers import Tier
from .tokens import CacheKey

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
OURS = re.compile(r"([0-9a-f]{64})" + re.escape(SUFFIX))
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class DiskTier(Tier):
    """Chunks as files `<folder>/<scope>/<chunk hash>.safetensors`, together at most `limit_bytes`.

    Finds what an earlier process left. A damaged file is deleted with a warning when it is asked for. allocate: where
    a chunk that is read gets its memory. ArgumentError when the folder cannot be made or read. Processes of
    different scopes may share `folder`; each counts its own files.
    """

    def __init__(
        self, folder: str, scope: str, limit_bytes: int, allocate: Callable[[ChunkLayout], Chunk | None]
    ) -> None:
        self.folder = Path(folder) / scope
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self.drops = 0  # files found damaged or unreadable
        self.skipped: Counter[str] = Counter()  # why chunks were not written
        self._allocate = allocate
        self._sizes_bytes: OrderedDict[str, int] = OrderedDict()  # chunk hash -> file; least recently used first
        self._read: set[str] = set()  # since they were last touched
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise ArgumentError(f"local_disk: {folder!r} cannot be used: {error}") from None

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._sizes_bytes)

    def contains(self, key: CacheKey) -> bool:
        return key.chunk_hash in self._sizes_bytes

    def get(self, key: CacheKey) -> Chunk | None:
        """The chunk, read and verified; None also when there is no host memory for it, and then its file stays."""
        with self._lock:
            if key.chunk_hash not in self._sizes_bytes:
                return None
        path = self._path(key.chunk_hash)
        try:
            chunk = read_chunk(path, key, self._allocate)
        except (DamagedFileError, OSError) as error:
            if isinstance(error, FileNotFoundError) and not self._lost(key):
                return None
            logger.warning("%s is dropped: %s", path, error)
            self.drops += 1
            self.remove(key)
            return None
        self._read.add(key.chunk_hash)
        return chunk

    def put(self, key: CacheKey, chunk: Chunk) -> bool:
        """Write the chunk, unless it is there. False, counted in `skipped`, when it is larger than the limit or the disk
        refuses it."""
        if self.contains(key):
            return False
        size_bytes = file_bytes(key, chunk)
        if size_bytes > self.limit_bytes:
            self._skip("disk_limit", f"a chunk of {size_bytes} bytes exceeds max_local_disk_size")
            return False
        with self._writing:
            self._make_room(size_bytes)
            try:
                write_chunk(self._path(key.chunk_hash), key, chunk)
            except OSError as error:
                self._skip("disk_full" if error.errno in NO_SPACE else "disk_error", str(error))
                return False
            with self._lock:
                self._add(key.chunk_hash, size_bytes)
        return True

    def remove(self, key: CacheKey) -> None:
        with self._lock:
            self._remove(key.chunk_hash)

    def touch(self, keys: Sequence[CacheKey]) -> None:
        """The files that were read say so too: the order of use survives a restart."""
        with self._lock:
            for chunk_hash in (key.chunk_hash for key in reversed(keys) if self.contains(key)):
                self._sizes_bytes.move_to_end(chunk_hash)
                if chunk_hash in self._read:
                    self._read.remove(chunk_hash)
                    with contextlib.suppress(OSError):
                        now = time.time_ns()  # finer than what the file system would take
                        os.utime(self._path(chunk_hash), ns=(now, now))

    def close(self) -> None:
        """Nothing is held in this process: the files stay."""

    def _path(self, chunk_hash: str) -> Path:
        return self.folder / f"{chunk_hash}{SUFFIX}"

    def _lost(self, key: CacheKey) -> bool:
        """Whether a file that was not found should be there; else it was given up since it was asked for."""
        with self._lock:
            return self.contains(key) and not self._path(key.chunk_hash).exists()

    def _add(self, chunk_hash: str, size_bytes: int) -> None:
        self._used_bytes += size_bytes - self._sizes_bytes.pop(chunk_hash, 0)
        self._sizes_bytes[chunk_hash] = size_bytes

    def _remove(self, chunk_hash: str) -> None:
        if chunk_hash in self._sizes_bytes:
            self._used_bytes -= self._sizes_bytes.pop(chunk_hash)
            self._read.discard(chunk_hash)
            with contextlib.suppress(OSError):
                os.unlink(self._path(chunk_hash))

    def _make_room(self, size_bytes: int) -> None:
        """Delete the least recently used files until `size_bytes` more fit."""
        with self._lock:
            while self._sizes_bytes and self._used_bytes + size_bytes > self.limit_bytes:
                self._remove(next(iter(self._sizes_bytes)))
                self.evictions += 1

    def _skip(self, reason: str, message: str) -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] == 1:  # the first says what is wrong, the rest are counted
            logger.warning("%s: chunks are not written: %s", self.folder, message)

    def _scan(self) -> None:
        """Know the files that are there, in the order of their last use; clean up after killed writers."""
        found, foreign = [], []
        for entry in os.scandir(self.folder):
            ours = OURS.fullmatch(entry.name)
            if ours and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, ours[1], status.st_size))
            elif OURS.match(entry.name) and entry.name.endswith(TEMPORARY):
                remove_if_abandoned(Path(entry.path))
            else:
                foreign.append(entry.name)
        if foreign:
            logger.warning("%s: not of this cache, left alone: %s", self.folder, ", ".join(sorted(foreign)[:5]))
        for _, chunk_hash, size_bytes in sorted(found):
            self._add(chunk_hash, size_bytes)
        self._make_room(0)
