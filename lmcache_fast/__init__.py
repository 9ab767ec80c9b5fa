"""Fused kernels behind lmcache_ref's backend registry: the reference's bits, near the hardware's limit.

The entry point `lmcache_ref.backends` calls `register`; lmcache_ref itself never imports this package.
Nothing here moves a byte: kernels and launches live in the subpackages.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the backends of this package. Neither this nor the import touches a GPU or a compiler."""
    from lmcache_ref.backends import register_backend

    whole = {"stages": True, "rotates": True}
    register_backend("cpu", _load_cpu, devices=("cpu",), unavailable=_cpu_unavailable, speed=10, **whole)
    register_backend("cuda", _load_cuda, devices=("cuda",), unavailable=_cuda_unavailable, speed=20, **whole)


def _load_cpu() -> Any:
    from .cpu.backend import load

    return load()


def _cpu_unavailable() -> str | None:
    from .cpu.compile import unavailable

    return unavailable()


def _load_cuda() -> Any:
    from .cuda.backend import load

    return load()


def _cuda_unavailable() -> str | None:
    from .cuda.compile import unavailable

    return unavailable()
