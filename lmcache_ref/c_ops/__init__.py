"""Upstream's module surface (`lmcache.c_ops` of LMCache 0.4.x) over the selected backend: put it in place of upstream's
module and the real LMCache runs on our backends, on the CPU too, and on every row of the layout table.

Names, arguments and ids are upstream's. The functions are thin doors: each says which memory it was given, and the
backend that `get_backend(device=...)` selects moves it. Upstream's entropy coder (`calculate_cdf`, `encode_fast_new`,
`decode_fast_new`, `decode_fast_prefsum`) is not here.
"""

from .copies import batched_memcpy, lmcache_memcpy_async
from .enums import EngineKVFormat, GPUKVFormat, PageBufferShapeDesc, TransferDirection
from .host_memory import (
    alloc_numa_ptr,
    alloc_pinned_numa_ptr,
    alloc_pinned_ptr,
    alloc_shm_pinned_ptr,
    free_numa_ptr,
    free_pinned_numa_ptr,
    free_pinned_ptr,
    free_shm_pinned_ptr,
)
from .pointers import get_gpu_pci_bus_id
from .transfers import (
    load_and_reshape_flash,
    multi_layer_block_kv_transfer,
    multi_layer_kv_transfer,
    multi_layer_kv_transfer_unilateral,
    reshape_and_cache_back_flash,
    rotary_embedding_k_fused,
    single_layer_kv_transfer,
    single_layer_kv_transfer_sgl,
)

H2D = TransferDirection.H2D
D2H = TransferDirection.D2H

__all__ = [
    "D2H",
    "H2D",
    "EngineKVFormat",
    "GPUKVFormat",
    "PageBufferShapeDesc",
    "TransferDirection",
    "alloc_numa_ptr",
    "alloc_pinned_numa_ptr",
    "alloc_pinned_ptr",
    "alloc_shm_pinned_ptr",
    "batched_memcpy",
    "free_numa_ptr",
    "free_pinned_numa_ptr",
    "free_pinned_ptr",
    "free_shm_pinned_ptr",
    "get_gpu_pci_bus_id",
    "lmcache_memcpy_async",
    "load_and_reshape_flash",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "reshape_and_cache_back_flash",
    "rotary_embedding_k_fused",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]
