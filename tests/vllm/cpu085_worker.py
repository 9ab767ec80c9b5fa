"""vLLM 0.8.5's own GPU worker and model runner on the CPU: only what asks CUDA for something is answered otherwise."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized
from vllm.model_executor import set_random_seed
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker


class PlainTorchRunner(GPUModelRunner):
    def __init__(self, vllm_config, device) -> None:
        with mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1)):
            super().__init__(vllm_config, device)
        self.use_cuda_graph = self.cascade_attn_enabled = False


class PlainTorchWorker(Worker):
    def init_device(self) -> None:
        torch.cuda.synchronize = lambda *args, **kwargs: None
        self.device = torch.device("cpu")
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, backend="gloo"
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        ensure_kv_transfer_initialized(self.vllm_config)
        set_random_seed(self.model_config.seed)
        self.model_runner = PlainTorchRunner(self.vllm_config, self.device)

    def load_model(self) -> None:
        super().load_model()
        # On platforms that are not vLLM's own a layer calls its attention directly and leaves the connector's hooks out;
        # with this it goes the way it goes on a GPU.
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            layer.use_direct_call = False

    def determine_available_memory(self) -> int:
        return int(os.environ.get("CPU085_KV_BYTES", 64 << 20))

    def compile_or_warm_up_model(self) -> None:
        set_random_seed(self.model_config.seed)
