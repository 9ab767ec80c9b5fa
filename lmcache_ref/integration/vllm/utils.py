"""Where a vLLM worker runs: its device module, and its rank among the workers of its node. No connector is known here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ...errors import ArgumentError, BackendError

ACCELERATORS = ("cuda", "xpu", "hpu")


def get_vllm_torch_dev() -> tuple[ModuleType, str]:
    """The torch module of the device that vLLM runs on, and its name, such as `(torch.cuda, "cuda")`.

    vLLM's platform decides where vLLM is installed and knows its device; else the first accelerator that torch has
    available, else the CPU. BackendError for a device that torch has no module for.
    """
    name = _vllm_device_type() or next((kind for kind in ACCELERATORS if _available(kind)), "cpu")
    module = getattr(torch, name, None)
    if module is None:
        raise BackendError(f"vLLM runs on {name!r}, but this torch has no torch.{name}")
    return module, name


def calculate_local_rank_and_world_size(vllm_config: Any) -> tuple[int, int]:
    """(rank among the workers of this node, number of workers of this node).

    `vllm_config.parallel_config` has the global `rank` and `world_size`; a node holds as many workers as it has
    devices, ranks filling one node after the other. On a CPU all workers share the node. Rank 9 of 16 with 8 devices
    a node: (1, 8). ArgumentError for a rank outside the world.
    """
    parallel = vllm_config.parallel_config
    rank, world_size = parallel.rank, parallel.world_size
    if not 0 <= rank < world_size:
        raise ArgumentError(f"parallel_config.rank: {rank}; world_size is {world_size}")
    module, name = get_vllm_torch_dev()
    devices = world_size if name == "cpu" else max(1, module.device_count())
    local_world_size = min(world_size, devices)
    return rank % local_world_size, local_world_size


def _available(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and module.is_available()


def _vllm_device_type() -> str:
    """The device type of vLLM's platform; empty without vLLM, or where vLLM knows no device."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    return current_platform.device_type or ""
