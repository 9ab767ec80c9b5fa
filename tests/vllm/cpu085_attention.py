"""Paged attention in plain torch for vLLM 0.8.5, one query token at a time.

A token's result depends on its own query and on the keys and values before it, never on what else is in the batch: so
a request computes the same bits whether its prompt came whole, in parts, or out of a cache.
"""

from __future__ import annotations

import torch
from vllm.attention.backends.abstract import AttentionImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder


class Builder(FlashAttentionMetadataBuilder):
    def use_cascade_attention(self, *args, **kwargs) -> bool:
        return False


class PlainAttention(AttentionImpl):
    """The K and V axis of the cache is axis `kv_axis`."""

    kv_axis = 0

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, *args, **kwargs) -> None:
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None):
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        keys, values = kv_cache.unbind(self.kv_axis)
        count, block_size = attn_metadata.num_actual_tokens, keys.shape[1]
        slots = attn_metadata.slot_mapping[:count]
        keys[slots // block_size, slots % block_size] = key[:count]
        values[slots // block_size, slots % block_size] = value[:count]
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for index, length in enumerate(lengths):
            blocks = attn_metadata.block_table[index, : -(-length // block_size)].long()
            past_keys = keys[blocks].flatten(0, 1).float()
            past_values = values[blocks].flatten(0, 1).float()
            first = length - (starts[index + 1] - starts[index])
            for row, position in enumerate(range(first, length), start=starts[index]):
                end = position + 1
                output[row] = self.attend(query[row], past_keys[:end], past_values[:end]).to(output.dtype)
        return output

    def attend(self, query, keys, values):
        """One query `[NH, HS]` over keys and values `[tokens, KV heads, HS]`."""
        grouped = query.float().unflatten(0, (self.num_kv_heads, -1))
        scores = torch.matmul(grouped, keys.permute(1, 2, 0)) * self.scale
        return torch.matmul(scores.softmax(-1), values.permute(1, 0, 2)).flatten(0, 1)


class PlainAttentionKVSecond(PlainAttention):
    kv_axis = 1


class FABackend(FlashAttentionBackend):
    """Caches `[2, NB, BS, NH, HS]`, as FlashAttention's."""

    @staticmethod
    def get_name() -> str:
        return "PLAIN_TORCH"

    @staticmethod
    def get_impl_cls():
        return PlainAttention

    @staticmethod
    def get_builder_cls():
        return Builder


class FIBackend(FABackend):
    """Caches `[NB, 2, BS, NH, HS]`, as FlashInfer's."""

    @staticmethod
    def get_impl_cls():
        return PlainAttentionKVSecond

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
