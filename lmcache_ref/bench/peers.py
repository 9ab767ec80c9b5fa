"""Upstream's own transfer function, as a runner beside ours. It is loaded from where the user has it, never shipped."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..bits import is_fp8
from ..errors import ArgumentError
from ..kv_cache import PagedKVCache

FALLBACK = "non_cuda_equivalents.py"

#: rows that upstream's fallback can read -> how it wants one layer's tensor, and the number of the format
_FLAT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NL_X_TWO_NB_BS_NH_HS": lambda tensor: tensor.flatten(1, 2).flatten(2),  # [2, NB*BS, D]
    "NL_X_NB_BS_HS": lambda tensor: tensor.flatten(0, 1),  # [NB*BS, D]
}


def load_fallback(path: str | Path) -> Any:
    """The module `lmcache/non_cuda_equivalents.py` under `path` (an unpacked wheel, or a site-packages folder).

    It wants numba and lmcache's device globals; where they are absent, empty stand-ins let it load (its transfer
    functions use neither). Raises ArgumentError when the file is not there.
    """
    files = [Path(path) / FALLBACK, Path(path) / "lmcache" / FALLBACK]
    file = next((candidate for candidate in files if candidate.is_file()), None)
    if file is None:
        raise ArgumentError(f"upstream: no {FALLBACK} at {path}; give the folder of an unpacked lmcache wheel")
    stand_ins: dict[str, dict[str, Any]] = {
        "numba": {"njit": lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda call: call},
        "lmcache": {"torch_dev": torch.cuda, "torch_device_type": "cpu"},
    }
    added = []
    for name, attributes in stand_ins.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
            added.append(name)
    try:
        spec = importlib.util.spec_from_file_location("lmcache_upstream_fallback", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for name in added:
            del sys.modules[name]


def upstream_move(
    module: Any, cache: PagedKVCache, tensors: list[torch.Tensor], slots: torch.Tensor, chunks: list[torch.Tensor]
) -> Callable[[str], None] | None:
    """`move("gather" | "scatter")` by upstream, one call a chunk as its connectors do; None for a layout it refuses."""
    assert cache.layout is not None
    flatten = _FLAT.get(cache.layout.name)
    if flatten is None:
        return None
    if is_fp8(cache.dtype):  # its indexing has no fp8; the same bytes as uint8 are what it moves
        tensors, chunks = ([tensor.view(torch.uint8) for tensor in group] for group in (tensors, chunks))
    flat = [flatten(tensor) for tensor in tensors]
    kv_format = module.GPUKVFormat(cache.layout.upstream_id)
    directions = {"gather": module.TransferDirection.D2H, "scatter": module.TransferDirection.H2D}

    def move(operation: str) -> None:
        first = 0
        for chunk in chunks:
            part = slots[first : first + chunk.shape[2]]
            first += chunk.shape[2]
            module.multi_layer_kv_transfer(
                chunk, flat, part, cache.device, cache.num_slots, directions[operation], kv_format, cache.block_size
            )

    return move
