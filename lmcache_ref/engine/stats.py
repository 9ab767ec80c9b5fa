"""What an engine has done since it was made, as numbers; nothing is decided by them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts are totals since the engine was made, unless the line says `now`."""

    lookups: int = 0
    lookup_tokens: int = 0  # asked for
    hit_tokens: int = 0  # promised by lookups
    stores: int = 0
    stored_chunks: int = 0
    stored_tokens: int = 0
    retrieves: int = 0
    retrieved_tokens: int = 0
    failed_loads: int = 0  # chunks that a connector refused to load
    evictions: int = 0  # chunks, from host memory
    disk_evictions: int = 0  # files, for the byte limit
    disk_drops: int = 0  # files, damaged, unreadable or of another model
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> chunks not stored, or not written
    host_chunks: int = 0  # now
    host_used_bytes: int = 0  # now
    host_free_bytes: int = 0  # now
    disk_chunks: int = 0  # now
    disk_used_bytes: int = 0  # now
    pinned_requests: int = 0  # now
