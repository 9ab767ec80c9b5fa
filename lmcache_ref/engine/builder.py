"""Engines by name: where the scheduler and the worker of one process find the same cache engine."""

from __future__ import annotations

import threading

from ..connectors.interface import GPUConnectorInterface
from ..errors import ArgumentError
from ..metadata import LMCacheMetadata
from .cache_engine import CacheEngine
from .config import LMCacheEngineConfig


class CacheEngineBuilder:
    """The engines of this process, by instance id. Thread-safe."""

    _engines: dict[str, CacheEngine] = {}  # noqa: RUF012 - one registry for the process is the point
    _lock = threading.Lock()

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        gpu_connector: GPUConnectorInterface,
    ) -> CacheEngine:
        """The engine of that name, made if there is none. ArgumentError when it was made for another config or worker.

        An engine that exists keeps the connector it was made with.
        """
        with cls._lock:
            engine = cls._engines.get(instance_id)
            if engine is None:
                engine = cls._engines[instance_id] = CacheEngine(config, metadata, gpu_connector)
            elif engine.config != config or not engine.serves(metadata):
                raise ArgumentError(f"instance_id: {instance_id!r} is an engine with another config or metadata")
            return engine

    @classmethod
    def get(cls, instance_id: str) -> CacheEngine | None:
        """The engine of that name, if there is one."""
        with cls._lock:
            return cls._engines.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the engine of that name and forget it; nothing happens when there is none."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, None)
        if engine is not None:
            engine.close()
