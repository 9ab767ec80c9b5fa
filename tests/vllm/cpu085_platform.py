"""A vLLM 0.8.5 platform for machines without a GPU: attention in plain torch, everything else vLLM's own.

vLLM finds it through the entry point `vllm.platform_plugins`, which `run_engine.py` writes. `CPU085_LAYOUT` = FA | FI
puts the K and V axis of a layer's cache first or second; `CPU085_KV_BYTES` is the memory for the caches.
"""

from __future__ import annotations

import os

import torch
from vllm.platforms.interface import Platform, PlatformEnum


def register() -> str:
    """The entry point: where the platform's class is."""
    return "cpu085_platform.PlainTorchPlatform"


def register_connector() -> None:
    """The entry point for general plugins, run in every process: makes the connector under test known by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "RecordingConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("RecordingConnector", "recording_connector", "RecordingConnector")


class PlainTorchPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    simple_compile_backend = "eager"

    @classmethod
    def get_attn_backend_cls(cls, *args, **kwargs) -> str:
        return f"cpu085_attention.{os.environ.get('CPU085_LAYOUT', 'FA')}Backend"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 1 << 34

    @classmethod
    def get_current_memory_usage(cls, device=None) -> float:
        return 0.0

    @classmethod
    def is_async_output_supported(cls, enforce_eager) -> bool:
        return False

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def inference_mode(cls):
        return torch.no_grad()

    @classmethod
    def supports_v1(cls, model_config) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        vllm_config.model_config.enforce_eager = True
        vllm_config.compilation_config.level = 0
        vllm_config.compilation_config.cudagraph_capture_sizes = []
        vllm_config.cache_config.block_size = vllm_config.cache_config.block_size or 16
        vllm_config.parallel_config.worker_cls = "cpu085_worker.PlainTorchWorker"
