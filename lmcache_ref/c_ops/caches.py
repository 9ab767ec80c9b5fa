"""The planes behind what upstream's callers hand over: raw pointers, or tensors in the engine's or flattened shapes.

A pointer carries no strides, so memory behind it is tight, up to a stated stride between blocks. Rows, axes and
planes are the layout table's and discovery's; nothing here moves anything.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..discovery import build_planes, check_leaves, measure, strides_fall
from ..errors import ArgumentError, LayoutError
from ..kv_cache import PagedKVCache
from ..layouts import Layout
from .pointers import indexed, tensor_at, values_of


@dataclass(frozen=True)
class Known:
    """What a call states about the paged memory.

    num_layers: NL. hidden_dim_size: D in elements. page_buffer_size: NB*BS. block_size: BS. head_size: HS. The last
    three are 0 where the call does not say. block_stride_elems: elements from block to block, 0 where tight.
    """

    num_layers: int
    hidden_dim_size: int
    page_buffer_size: int = 0
    block_size: int = 0
    head_size: int = 0
    block_stride_elems: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, checked_count(name, value))
        if not self.num_layers or not self.hidden_dim_size:
            raise ArgumentError(f"NL = {self.num_layers}, D = {self.hidden_dim_size}: both must be at least 1")
        if self.block_size and self.page_buffer_size % self.block_size:
            given = f"page_buffer_size {self.page_buffer_size}"
            raise ArgumentError(f"block_size: {self.block_size} does not divide {given}")
        if self.head_size and self.hidden_dim_size % self.head_size:
            raise ArgumentError(f"head_size: {self.head_size} does not divide D = {self.hidden_dim_size}")


def checked_count(name: str, value: Any) -> int:
    """`value` as an int of 0 or more; ArgumentError naming the argument."""
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ArgumentError(f"{name} must be an int >= 0, got {value!r}")
    return count


def merged(row: Layout, *, blocks: bool = True) -> Layout:
    """`row` with neighbouring axes joined: nh and hs to D, with `blocks` nb and bs to flat slots; axes `1` left out.

    Tight memory is the same under both names, and fewer sizes have to be known.
    """
    pattern = re.sub(r"\bnh hs\b", "hs", " ".join(row.pattern.split()))
    pattern = re.sub(r"(?<!\S)1 ", "", pattern)
    return replace(row, pattern=re.sub(r"\bnb bs\b", "nbbs", pattern) if blocks else pattern)


def paged_cache(
    name: str, source: Any, row: Layout, known: Known, dtype: torch.dtype, device: torch.device | str | None
) -> PagedKVCache:
    """The planes of `source`, the argument called `name`: an int64 tensor of pointers on any device, or tensors.

    row: how the memory is laid out. dtype: of the memory behind pointers. device: where it is; tensors know it
    themselves and must agree. Raises ArgumentError, LayoutError or StrideError.
    """
    if isinstance(source, torch.Tensor) and source.dim() == 1:
        if source.dtype != torch.int64:
            raise ArgumentError(f"{name} must be int64 pointers or a list of tensors, got 1-D {source.dtype}")
        if device is None:
            raise ArgumentError(f"{name}: pointers need the device of the memory")
        return _from_pointers(name, values_of(source), row, known, dtype, indexed(device))
    return _from_tensors(name, _tensors(name, source), row, known, device)


def _check_count(name: str, what: str, count: int, row: Layout, known: Known) -> tuple[int, ...]:
    """The lengths of the row's list levels; LayoutError when `count` is not what they hold."""
    sizes = {"nl": known.num_layers, "two": 2, "1": 1}
    lengths = tuple(math.prod(sizes[axis] for axis in level) for level in row.levels)
    if count != math.prod(lengths):
        raise LayoutError(
            f"{name}: {count} {what}, but {row} with NL = {known.num_layers} has {math.prod(lengths)} tensors"
        )
    return lengths


# ------------------------------------------------------------------------------------------------ tensors


def _tensors(name: str, source: Any) -> list[torch.Tensor]:
    """The tensors of a nested list, in list order."""
    if isinstance(source, torch.Tensor):
        return [source]
    if not isinstance(source, Sequence) or isinstance(source, str) or not source:
        raise ArgumentError(f"{name} must be int64 pointers or a list of tensors, got {type(source).__name__}")
    return [tensor for item in source for tensor in _tensors(name, item)]


def _from_tensors(
    name: str, leaves: list[torch.Tensor], row: Layout, known: Known, device: torch.device | str | None
) -> PagedKVCache:
    """Tensors in the shapes of the row, or flattened: `[2, NB*BS, D]`, `[NB, 2, BS, D]`, `[NB*BS, D]`, ..."""
    lengths = _check_count(name, "tensors", len(leaves), row, known)
    leaves = [_in_row_order(row, leaf) for leaf in leaves]
    check_leaves(leaves)
    if device is not None and leaves[0].device != indexed(device):
        raise ArgumentError(f"paged_memory_device: {device}, but {name} is on {leaves[0].device}")
    shapes = [candidate for candidate in (row, merged(row)) if len(candidate.axes) == leaves[0].dim()]
    if not shapes:
        raise LayoutError(f"{name}: shape {tuple(leaves[0].shape)} is neither {row} nor [{merged(row).pattern}]")
    hints = {
        "num_layers": known.num_layers,
        "hidden_dim_size": known.hidden_dim_size,
        "tokens_per_block": known.block_size,
        "head_dim": known.head_size if "nh" in shapes[0].names else 0,
    }
    stated = {hint: value for hint, value in hints.items() if value}
    try:
        sizes = measure(shapes[0], tuple(leaves[0].shape), lengths, stated)
    except LayoutError as why:
        shape = tuple(leaves[0].shape)
        raise LayoutError(f"{name}: shape {shape} as {row.name} [{shapes[0].pattern}]: {why}") from why
    num_slots = sizes["nb"] * sizes["bs"]
    if known.page_buffer_size not in (0, num_slots):
        raise ArgumentError(f"page_buffer_size: {known.page_buffer_size}, but {name} has NB*BS = {num_slots} slots")
    return PagedKVCache(build_planes(shapes[0], leaves, sizes), row)


def _in_row_order(row: Layout, leaf: torch.Tensor) -> torch.Tensor:
    """`leaf` with its axes as the row names them. A row that is no engine's logical order names the order in memory,
    so axes shown in another order are put into that of their strides."""
    if strides_fall(leaf) or row.logical_in:
        return leaf
    strides = leaf.stride()
    return leaf.permute(sorted(range(leaf.dim()), key=lambda axis: -strides[axis]))


# ------------------------------------------------------------------------------------------------ pointers


def _from_pointers(
    name: str, pointers: tuple[int, ...], row: Layout, known: Known, dtype: torch.dtype, device: torch.device
) -> PagedKVCache:
    """Tight memory behind each pointer; where the row needs BS or HS and the call does not say it, ArgumentError."""
    _check_count(name, "pointers", len(pointers), row, known)
    shape = merged(row, blocks=not known.block_stride_elems)
    if not known.page_buffer_size:
        raise ArgumentError("page_buffer_size: 0 slots; memory behind pointers needs NB*BS")
    for axis, argument in (("bs", "block_size"), ("nh", "head_size")):
        if axis in shape.names and not getattr(known, argument):
            raise ArgumentError(f"{argument} is missing; {row} needs it where only pointers are given")
    in_blocks = ("nb",) in shape.axes
    if not in_blocks and known.block_stride_elems not in (0, known.block_size * known.hidden_dim_size):
        raise ArgumentError(f"block_stride_elems: {known.block_stride_elems}, but {row} has no axis of blocks")
    return _raw_cache(name, pointers, row, shape, known, dtype, device)


@functools.lru_cache(maxsize=64)
def _raw_cache(
    name: str, pointers: tuple[int, ...], row: Layout, shape: Layout, known: Known, dtype: torch.dtype, device: Any
) -> PagedKVCache:
    """Planes over raw memory: a function of its arguments alone, so callers that repeat a call get the same object."""
    block_size = known.block_size if "bs" in shape.names else 1
    head_size = known.head_size if "nh" in shape.names else known.hidden_dim_size
    sizes = {
        "nl": known.num_layers,
        "two": 2,
        "nb": known.page_buffer_size // block_size,
        "nbbs": known.page_buffer_size,
        "bs": block_size,
        "nh": known.hidden_dim_size // head_size,
        "hs": head_size,
        "1": 1,
    }
    lengths, strides = _raw_strides(shape, sizes, known.block_stride_elems)
    span = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1
    leaves = []
    for index, pointer in enumerate(pointers):
        memory = tensor_at(f"{name}[{index}]", pointer, span, dtype, device)
        leaves.append(memory.as_strided(lengths, strides, memory.storage_offset()))
    return PagedKVCache(build_planes(shape, leaves, sizes), row)


def _raw_strides(
    shape: Layout, sizes: Mapping[str, int], block_stride_elems: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and strides, in elements, of the tensor axes of tight memory, blocks `block_stride_elems` apart."""
    lengths = tuple(math.prod(sizes[axis] for axis in group) for group in shape.axes)
    strides: list[int] = []
    extent = 1
    for group, length in zip(reversed(shape.axes), reversed(lengths), strict=True):
        if group == ("nb",) and block_stride_elems:
            if block_stride_elems < extent:
                raise ArgumentError(f"block_stride_elems: {block_stride_elems}; a block has {extent} elements")
            extent = block_stride_elems
        strides.insert(0, extent)
        extent *= length
    return lengths, tuple(strides)
