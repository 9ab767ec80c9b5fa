"""Fused kernels behind lmcache_ref's backend registry: the reference's bits, near the hardware's limit.

The entry point `lmcache_ref.backends` calls `register`; lmcache_ref itself never imports this package.
Nothing here moves a byte: kernels and launches live in the subpackages.
"""

from __future__ import annotations


def register() -> None:
    """Register the backends of this package. Neither this nor the import touches a GPU or a compiler."""
