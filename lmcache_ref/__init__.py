"""The executable specification of LMCache's GPU connectors: torch and einops only, any device."""

from .backends import get_backend, register_backend, use_backend
from .discovery import discover
from .kv_cache import PagedKVCache
from .layouts import LAYOUTS, register_layout
from .transfer import Transfer, gather, scatter

__version__ = "0.1.0"

__all__ = [
    "LAYOUTS",
    "PagedKVCache",
    "Transfer",
    "discover",
    "gather",
    "get_backend",
    "register_backend",
    "register_layout",
    "scatter",
    "use_backend",
]
