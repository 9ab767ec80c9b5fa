"""The cache engine: which tokens have their KV cache stored, where it is kept, and how it comes back.

Needs nothing but the core to run from memory and disk; PyYAML (extra `engine`) only to read a configuration file.
"""

from .builder import CacheEngineBuilder
from .cache_engine import CacheEngine, LMCacheEngine
from .config import LMCacheEngineConfig
from .stats import EngineStats
from .tokens import CacheKey

__all__ = [
    "CacheEngine",
    "CacheEngineBuilder",
    "CacheKey",
    "EngineStats",
    "LMCacheEngine",
    "LMCacheEngineConfig",
]
