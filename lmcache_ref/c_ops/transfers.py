"""The transfer functions: each names the memory it was given, then hands one batch to the selected backend.

Every function is checked before anything moves, runs on the current stream of the paged memory's device, and returns
when later work on that stream is ordered behind it. Chunks on the host are final once the stream is synchronised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backends import get_backend
from ..errors import ArgumentError, ChunkError, LayoutError
from ..kv_cache import PagedKVCache
from ..memory import MemoryFormat
from ..plan import checked_slots
from ..rope import RotarySpec
from ..transfer import gather, scatter
from .caches import Known, checked_count, paged_cache
from .enums import PageBufferShapeDesc, TransferDirection, checked_direction, row_of
from .pointers import device_of, tensor_at

#: what raw memory of so many bytes an element is seen as: the move does not convert
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def multi_layer_kv_transfer(
    key_value: torch.Tensor,
    key_value_ptrs: Any,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device | str,
    page_buffer_size: int,
    direction: TransferDirection,
    gpu_kv_format: Any,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
) -> None:
    """Move one chunk, all layers.

    key_value: `[2, NL, T, D]`, for MLA `[1, NL, T, D]`, host or device; written by D2H, except rows of skipped tokens.
    key_value_ptrs: int64 pointers to tight memory of key_value's dtype, in the order of the format's lists, or the
    tensors, in the engine's own shapes or flattened; written by H2D. slot_mapping: integers `[T]`, negative: skipped.
    page_buffer_size: NB*BS. block_size: BS, head_size: HS; needed with pointers where the format has an axis between
    blocks and tokens, or between heads and the head. skip_prefix_n_tokens: leading tokens that are not moved, in
    both directions.

    Raises ArgumentError, LayoutError, ChunkError, DtypeError SlotError or SkipPrefixError.
    """
    check_tensor("key_value", key_value, (4,))
    num_planes, num_layers, _, hidden_dim_size = key_value.shape
    known = Known(num_layers, hidden_dim_size, page_buffer_size, block_size, head_size)
    row = row_of(gpu_kv_format, num_planes)
    cache = paged_cache("key_value_ptrs", key_value_ptrs, row, known, key_value.dtype, paged_memory_device)
    fmt = MemoryFormat.KV_MLA_FMT if row.is_mla else MemoryFormat.KV_2LTD
    _move(direction, cache, slot_mapping, [key_value], fmt, token_axis=2, skip=skip_prefix_n_tokens)


def multi_layer_kv_transfer_unilateral(
    key_value: torch.Tensor,
    key_value_ptrs: Any,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device | str,
    page_buffer_size: int,
    direction: TransferDirection,
    gpu_kv_format: Any,
) -> None:
    """`multi_layer_kv_transfer` where K and V are tensors of their own: `[K0 .. K(NL-1), V0 .. V(NL-1)]`, or MLA.

    Raises LayoutError for a format that keeps K and V of a layer in one tensor.
    """
    check_tensor("key_value", key_value, (4,))
    row = row_of(gpu_kv_format, key_value.shape[0])
    if not row.is_mla and "two" not in (axis for level in row.levels for axis in level):
        raise LayoutError(f"gpu_kv_format: {row} keeps K and V of a layer in one tensor; use multi_layer_kv_transfer")
    multi_layer_kv_transfer(
        key_value, key_value_ptrs, slot_mapping, paged_memory_device, page_buffer_size, direction, gpu_kv_format
    )


def single_layer_kv_transfer(
    lmc_key_value_cache: torch.Tensor,
    vllm_key_value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    direction: TransferDirection,
    gpu_kv_format: Any,
    token_major: bool = False,
) -> None:
    """Move one layer of one chunk.

    lmc_key_value_cache: `[2, T, D]`, with `token_major` `[T, 2, D]`, for MLA `[T, D]`. vllm_key_value_cache: the layer's
    tensor, any strides. slot_mapping: integers `[T]`, negative: skipped. Raises as `multi_layer_kv_transfer` does.
    """
    chunk = check_tensor("lmc_key_value_cache", lmc_key_value_cache, (2, 3))
    row = row_of(gpu_kv_format, 1 if chunk.dim() == 2 else 2)
    known = Known(num_layers=1, hidden_dim_size=chunk.shape[-1])
    layer = check_tensor("vllm_key_value_cache", vllm_key_value_cache, None)
    cache = paged_cache("vllm_key_value_cache", [layer], row, known, chunk.dtype, None)
    _move_layer(direction, cache, slot_mapping, chunk, token_major)


def single_layer_kv_transfer_sgl(
    lmc_key_value_cache: torch.Tensor,
    sgl_key_cache: torch.Tensor,
    sgl_value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    direction: TransferDirection,
    token_major: bool = False,
) -> None:
    """`single_layer_kv_transfer` where the layer's K and V are two tensors, `[NB, BS, NH, HS]` or `[NBBS, NH, HS]`."""
    chunk = check_tensor("lmc_key_value_cache", lmc_key_value_cache, (3,))
    cache = _two_tensors("sgl_key_cache", sgl_key_cache, "sgl_value_cache", sgl_value_cache)
    _move_layer(direction, cache, slot_mapping, chunk, token_major)


def load_and_reshape_flash(
    key_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_idx: int,
) -> None:
    """Engine to chunk: key_value `[2, NL, T, D]`, of which layer `layer_idx` is written, from key_cache and value_cache
    `[NB, BS, NH, HS]`."""
    _flash(TransferDirection.D2H, key_value, key_cache, value_cache, slot_mapping, layer_idx)


def reshape_and_cache_back_flash(
    key_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_idx: int,
) -> None:
    """Chunk to engine: the inverse of `load_and_reshape_flash`; key_cache and value_cache are written."""
    _flash(TransferDirection.H2D, key_value, key_cache, value_cache, slot_mapping, layer_idx)


def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: Any,
    lmcache_objects_ptrs: Sequence[int],
    block_ids: torch.Tensor,
    device: torch.device | str,
    direction: TransferDirection,
    shape_desc: PageBufferShapeDesc,
    lmcache_chunk_size: int,
    gpu_kv_format: Any,
    skip_prefix_n_blocks: int = 0,
) -> None:
    """Move whole blocks between paged memory and many objects, each tight `[kv_size, NL, lmcache_chunk_size, D]`.

    paged_buffer_ptrs_tensor: as key_value_ptrs of `multi_layer_kv_transfer`, on `device`. lmcache_objects_ptrs:
    addresses of host or device memory. block_ids: integers `[objects * blocks per object]`, one object after the other,
    negative: skipped. shape_desc: sizes of the paged memory; its elements are moved as they are.
    skip_prefix_n_blocks: leading entries of block_ids that are not moved. Raises as `multi_layer_kv_transfer` does.
    """
    desc, word = shape_desc, _WORDS.get(shape_desc.element_size)
    if word is None:
        raise ArgumentError(f"shape_desc.element_size: {desc.element_size!r}; allowed: {', '.join(map(str, _WORDS))}")
    known = Known(desc.nl, desc.nh * desc.hs, desc.nb * desc.bs, desc.bs, desc.hs, desc.block_stride_elems)
    row = row_of(gpu_kv_format, desc.kv_size)
    if desc.kv_size != (1 if row.is_mla else 2):
        raise ArgumentError(f"shape_desc.kv_size: {desc.kv_size}, but {row} has {1 if row.is_mla else 2}")
    cache = paged_cache("paged_buffer_ptrs_tensor", paged_buffer_ptrs_tensor, row, known, word, device)
    if cache.dtype.itemsize != desc.element_size:
        raise ArgumentError(f"shape_desc.element_size: {desc.element_size}, but the paged memory is {cache.dtype}")
    chunk_tokens = checked_count("lmcache_chunk_size", lmcache_chunk_size)
    pointers = list(lmcache_objects_ptrs)
    blocks = checked_slots(torch.as_tensor(block_ids))
    if len(blocks) * desc.bs != len(pointers) * chunk_tokens:
        held = f"{len(pointers)} objects of {chunk_tokens} tokens"
        raise ArgumentError(f"block_ids: {len(blocks)} blocks of {desc.bs} tokens do not fill {held}")
    shape = (desc.kv_size, desc.nl, chunk_tokens, desc.nh * desc.hs)
    numel = desc.kv_size * desc.nl * chunk_tokens * desc.nh * desc.hs
    names = [f"lmcache_objects_ptrs[{index}]" for index in range(len(pointers))]
    objects = [
        tensor_at(name, pointer, numel, cache.dtype, device_of(pointer)).view(shape)
        for name, pointer in zip(names, pointers, strict=True)
    ]
    slots = (blocks[:, None] * desc.bs + torch.arange(desc.bs, device=blocks.device)).flatten()
    fmt = MemoryFormat.KV_MLA_FMT if row.is_mla else MemoryFormat.KV_2LTD
    skip = checked_count("skip_prefix_n_blocks", skip_prefix_n_blocks) * desc.bs
    _move(direction, cache, slots, objects, fmt, token_axis=2, skip=skip)


def rotary_embedding_k_fused(
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Move rotated keys to new positions, in place; the arithmetic is `lmcache_ref.rope.rerotate`'s.

    key: `[T, NH, HS]` or `[T, D]`, written. old_positions, new_positions: integers `[T]`. cos_sin_cache:
    `[max_position, rotary_dim]`, cosines then sines. Raises ArgumentError, DtypeError or StrideError.
    """
    check_tensor("key", key, (2, 3))
    size = checked_count("head_size", head_size)
    if size == 0 or (key.shape[-1] % size if key.dim() == 2 else key.shape[-1] != size):
        raise ArgumentError(f"head_size: {head_size}, but key has shape {tuple(key.shape)}")
    heads = key.unflatten(1, (-1, size)) if key.dim() == 2 else key
    rope = RotarySpec(cos_sin_cache, bool(is_neox))
    get_backend(device=key.device).rerotate(heads, old_positions, new_positions, rope)


# ------------------------------------------------------------------------------------------------ common parts


def check_tensor(name: str, value: Any, ranks: tuple[int, ...] | None) -> torch.Tensor:
    """`value`, or ArgumentError when it is no tensor, ChunkError when it has another number of axes."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{name} must be a tensor, got {type(value).__name__}")
    if ranks is not None and value.dim() not in ranks:
        raise ChunkError(f"{name} has shape {tuple(value.shape)}; {' or '.join(map(str, ranks))} axes are needed")
    return value


def _two_tensors(key_name: str, key: Any, value_name: str, value: Any) -> PagedKVCache:
    """One layer whose K and V are tensors of their own; flat slots are blocks of one token."""
    planes = []
    for name, tensor in ((key_name, key), (value_name, value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() not in (3, 4):
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise LayoutError(f"{name}: {shape}; [NB, BS, NH, HS] or [NBBS, NH, HS] is needed")
        planes.append(tensor if tensor.dim() == 4 else tensor.unsqueeze(1))
    return PagedKVCache((tuple(planes),))


def _flash(direction: TransferDirection, key_value: Any, key: Any, value: Any, slots: Any, layer_idx: int) -> None:
    check_tensor("key_value", key_value, (4,))
    layer = checked_count("layer_idx", layer_idx)
    if layer >= key_value.shape[1]:
        raise ArgumentError(f"layer_idx: {layer}; key_value has NL = {key_value.shape[1]}")
    cache = _two_tensors("key_cache", key, "value_cache", value)
    _move_layer(direction, cache, slots, key_value[:, layer], False)


def _move_layer(direction: Any, cache: PagedKVCache, slots: Any, chunk: torch.Tensor, token_major: bool) -> None:
    """One layer of one chunk: `[T, D]`, `[T, 2, D]` where token-major, else `[2, T, D]`."""
    if chunk.dim() == 2:
        _move(direction, cache, slots, [chunk], MemoryFormat.KV_MLA_FMT, token_axis=0)
    else:
        fmt = MemoryFormat.KV_T2D if token_major else MemoryFormat.KV_2TD
        _move(direction, cache, slots, [chunk], fmt, token_axis=0 if token_major else 1)


def _move(
    direction: Any,
    cache: PagedKVCache,
    slots: Any,
    chunks: Sequence[torch.Tensor],
    fmt: MemoryFormat,
    *,
    token_axis: int,
    skip: int = 0,
) -> None:
    """One batch to the selected backend; the current stream waits for it. The chunks take all of `slots`."""
    move = scatter if checked_direction(direction) is TransferDirection.H2D else gather
    num_tokens = sum(chunk.shape[token_axis] for chunk in chunks)
    slots = checked_slots(slots)
    if len(slots) != num_tokens:
        raise ChunkError(f"slot_mapping has {len(slots)} slots, the chunk {num_tokens} tokens")
    move(cache, slots, chunks, fmt=fmt, skip_prefix_n_tokens=skip).wait()
