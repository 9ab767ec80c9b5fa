"""LMCache's GPU connectors: names, arguments and meaning as its users know them; the bodies are our own."""

from .factory import CreateGPUConnector, need_gpu_interm_buffer
from .interface import GPUConnectorInterface
from .mock import MockGPUConnector
from .sglang import SGLangGPUConnector, SGLangLayerwiseGPUConnector
from .trtllm import TRTLLMGPUConnector
from .vllm_blend import VLLMBufferLayerwiseGPUConnector
from .vllm_layerwise import VLLMPagedMemLayerwiseGPUConnector
from .vllm_paged import VLLMPagedMemGPUConnectorV2, VLLMPagedMemGPUConnectorV3

__all__ = [
    "CreateGPUConnector",
    "GPUConnectorInterface",
    "MockGPUConnector",
    "SGLangGPUConnector",
    "SGLangLayerwiseGPUConnector",
    "TRTLLMGPUConnector",
    "VLLMBufferLayerwiseGPUConnector",
    "VLLMPagedMemGPUConnectorV2",
    "VLLMPagedMemGPUConnectorV3",
    "VLLMPagedMemLayerwiseGPUConnector",
    "need_gpu_interm_buffer",
]
