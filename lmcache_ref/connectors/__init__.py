"""LMCache's GPU connectors: names, arguments and meaning as its users know them; the bodies are this project's own."""

from .interface import GPUConnectorInterface
from .vllm_paged import VLLMPagedMemGPUConnectorV2

__all__ = ["GPUConnectorInterface", "VLLMPagedMemGPUConnectorV2"]
