"""What a `VllmConfig` says of the model, the worker and the KV cache, in this project's terms; and what it must not say.

The objects of vLLM are asked for what they have, whatever their version. Importing this imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...engine.config import LMCacheEngineConfig
from ...errors import ArgumentError
from ...metadata import LMCacheMetadata
from ...rope import RotarySpec
from .utils import calculate_local_rank_and_world_size

EXTRA_PREFIX = "lmcache."


def engine_config(vllm_config: Any) -> LMCacheEngineConfig:
    """The environment's settings with those of vLLM's `kv_connector_extra_config` over them."""
    return engine_config_of(getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None) or {})


def engine_config_of(extra_config: Mapping[str, Any]) -> LMCacheEngineConfig:
    """The environment's settings with those of `extra_config` over them.

    `lmcache.<key>` is a key of `LMCacheEngineConfig`, and ArgumentError names it when it is not; a bare key counts
    where it is one, for that mapping has other readers too.
    """
    config = LMCacheEngineConfig.from_env()
    known = set(vars(config))
    prefixed = {key.removeprefix(EXTRA_PREFIX): key for key in extra_config if key.startswith(EXTRA_PREFIX)}
    values = {key: value for key, value in extra_config.items() if key in known}
    return config.updated(values | {key: extra_config[name] for key, name in prefixed.items()})


def engine_id(vllm_config: Any, config: LMCacheEngineConfig) -> str:
    """The same text in the scheduler and in all workers of one engine, and in no other engine."""
    transfer = vllm_config.kv_transfer_config
    name = getattr(transfer, "engine_id", None) or getattr(vllm_config, "instance_id", None) or "engine"
    rank = getattr(vllm_config.parallel_config, "data_parallel_rank", 0)
    return f"{config.lmcache_instance_id}:{name}:{rank}"


def scheduler_may_be_elsewhere(vllm_config: Any, config: LMCacheEngineConfig) -> bool:
    """Whether a worker has to answer a scheduler of another process; vLLM's `uni` executor has both in one."""
    executor = getattr(vllm_config.parallel_config, "distributed_executor_backend", None)
    return config.lookup_transport == "zmq" or (config.lookup_transport == "auto" and executor != "uni")


def block_size(vllm_config: Any, kv_cache_config: Any = None) -> int:
    """Tokens a block, of the one KV cache group."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    return int(groups[0].kv_cache_spec.block_size if groups else vllm_config.cache_config.block_size)


def refuse_packed_blocks(vllm_config: Any, config: LMCacheEngineConfig, tokens_per_block: int) -> None:
    """ArgumentError for chunks that would cut a block of vLLM's CPU backend.

    That backend packs the keys of a block for its kernels: a token has no row of its own, only whole blocks can move.
    """
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) != "cpu":
        return
    if config.enable_blending:
        raise ArgumentError("enable_blending: True; allowed on a CPU, where vLLM's keys have no rows to rotate: False")
    if config.chunk_size % tokens_per_block or config.save_unfull_chunk:
        raise ArgumentError(
            f"chunk_size: {config.chunk_size}, save_unfull_chunk: {config.save_unfull_chunk}; allowed on a CPU, where "
            f"only whole blocks can move: multiples of the block size {tokens_per_block}, and False"
        )


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any = None) -> None:
    """ArgumentError for an engine whose blocks do not hold every token of a request in every worker."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ArgumentError(f"{name}: {getattr(parallel, name)}; this connector needs 1: workers share out tokens")
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    if len(groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ArgumentError(
            f"the model has {len(groups)} KV cache groups ({kinds}), this connector serves one: "
            f"run vLLM with --disable-hybrid-kv-cache-manager"
        )
    for group in groups:
        if "Mamba" in type(group.kv_cache_spec).__name__:
            raise ArgumentError("the model keeps a recurrent state (Mamba), which has no tokens to cache")


def cache_dtype(vllm_config: Any) -> torch.dtype:
    """The dtype of the KV cache's tensors; vLLM keeps fp8 in uint8."""
    name = vllm_config.cache_config.cache_dtype
    if name == "auto":
        dtype = vllm_config.model_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))
    plain = {"half": torch.float16, "float": torch.float32, "fp8_inc": torch.float8_e4m3fn}
    dtype = plain.get(name, getattr(torch, str(name), None))
    return dtype if isinstance(dtype, torch.dtype) else torch.uint8


def metadata(vllm_config: Any, config: LMCacheEngineConfig, role: str) -> LMCacheMetadata:
    """The worker's metadata: NH is that of one tensor parallel rank, NL that of one pipeline stage."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    mla = bool(getattr(model, "use_mla", False))
    local_rank, local_world_size = calculate_local_rank_and_world_size(vllm_config)
    heads = 1 if mla else model.get_num_kv_heads(parallel)
    shape = (model.get_num_layers(parallel), 1 if mla else 2, config.chunk_size, heads, model.get_head_size())
    return LMCacheMetadata(
        model_name=model.model,
        world_size=parallel.world_size,
        local_world_size=local_world_size,
        worker_id=parallel.rank,
        local_worker_id=local_rank,
        kv_dtype=cache_dtype(vllm_config),
        kv_shape=shape,
        use_mla=mla,
        role=role,
        served_model_name=_first(getattr(model, "served_model_name", None)),
        chunk_size=config.chunk_size,
        engine_id=engine_id(vllm_config, config),
        kv_connector_extra_config=getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None),
    )


def _first(names: Any) -> str | None:
    return names[0] if isinstance(names, (list, tuple)) and names else names or None


def layout_hints(vllm_config: Any, *, engine_lays_out: bool) -> dict[str, Any]:
    """What vLLM states of its tensors' memory order.

    engine_lays_out: whether this vLLM has a say in the order; vLLM 0.8.5 has not, and keeps NHD in blocks as it says.
    """
    if not engine_lays_out:
        return {"kv_layout": "NHD", "tokens_per_block": vllm_config.cache_config.block_size}
    resolved = getattr(vllm_config.cache_config, "get_resolved_kv_cache_layout", None)
    if resolved is not None:  # vLLM 0.30 on
        return {"kv_layout": resolved().name}
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cpu":
        return {"kv_layout": "HND"}  # whatever the function below says
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout
    except ImportError:
        return {}
    return {"kv_layout": get_kv_cache_layout()}


def model_rope() -> RotarySpec:
    """How the model of this process rotates its keys: read from its own rotary module.

    vLLM keeps the modules it made in one table. ArgumentError when there is none, several that differ, or one that one
    table indexed by one position does not describe: blending cannot move those keys.
    """
    from vllm.model_executor.layers import rotary_embedding

    modules = list({id(module): module for module in getattr(rotary_embedding, "_ROPE_DICT", {}).values()}.values())
    if len(modules) != 1:
        names = ", ".join(type(module).__name__ for module in modules) or "none"
        raise ArgumentError(f"enable_blending: the model has {len(modules)} rotary modules ({names}); allowed: one")
    return RotarySpec.from_module(modules[0])
