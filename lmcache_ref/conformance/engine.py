"""The memory a case works on: an engine's tensors and the chunks, built from logical arrays.

The logical cache is `[NL, TWO, NB, BS, NH, HS]`, the logical chunks of a request `[TWO, layers, T, NH, HS]`, both of
integers as wide as the dtype. einops turns them into what the row names; the pieces are laid into one buffer of
sentinels, with guard bands and padding, and it is always the whole buffer that is compared. Nothing here uses the
library's planes or views.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange

from ..layouts import Layout
from .cases import ChunkFormat, axis_names

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: every byte of memory that nobody has written
SENTINEL_BYTE = 0x5C
#: elements at either end of a buffer and between two pieces; 64 of them keep a piece aligned to 64 bytes
GUARD_ELEMENTS = 64


def sentinel(width_bytes: int) -> int:
    """The value of an element of `width_bytes` bytes that nobody has written."""
    return int.from_bytes(bytes([SENTINEL_BYTE] * width_bytes), "little")


@lru_cache(maxsize=64)
def addresses(shape: tuple[int, ...], width_bytes: int, seed: int) -> torch.Tensor:
    """Integers that are a hash of their own flat index and `seed`. Shared between callers: never write into it.

    No element is the sentinel, and one row (last axis) is like no other. Wide words hold NaNs of any payload, as
    half, bfloat16, float32 or float64, and -0.0; single bytes take all values.
    """
    mixed = torch.arange(math.prod(shape), dtype=torch.int64) + (seed << 40)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = 8 * width_bytes
    value = mixed.clone()
    if width_bytes > 1:
        draw = (mixed >> 7) & 63
        exponents = {16: (0x7C00, 0x7F80), 32: (0x7F800000,), 64: (0x7FF << 52,)}[bits]
        for number, exponent in enumerate(exponents):
            value = torch.where((draw >= 8 * number) & (draw < 8 * number + 8), value | exponent, value)
        value = torch.where(draw == 63, torch.tensor(-1 << (bits - 1)), value)
    value = value.view(torch.uint8).view(-1, 8)[:, :width_bytes].contiguous().view(WORDS[width_bytes])[:, 0]
    return torch.where(value == sentinel(width_bytes), value ^ 1, value).view(shape)


@dataclass(frozen=True)
class Geometry:
    """How pieces lie in their buffer. lead_elements: offset of the first beyond its guard. outer_pad_elements: between
    two entries of the outermost axis. inner_pad_elements: the same for every other axis but the last. descending: the
    first piece lies last."""

    name: str
    lead_elements: int
    outer_pad_elements: int
    inner_pad_elements: int
    descending: bool


#: blocks aligned and nearly dense, as engines have them; then everything off by one, padded, backwards
GEOMETRIES = (Geometry("dense", 0, 16, 0, False), Geometry("odd", 1, 3, 1, True))


class Buffer:
    """Places for pieces of the given shapes inside one flat buffer."""

    def __init__(self, shapes: Sequence[torch.Size], geometry: Geometry):
        places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        offset = GUARD_ELEMENTS + geometry.lead_elements
        for shape in reversed(shapes) if geometry.descending else shapes:
            strides, extent = [1], shape[-1]
            for axis in reversed(range(len(shape) - 1)):
                extent += geometry.inner_pad_elements if axis else geometry.outer_pad_elements
                strides.insert(0, extent)
                extent *= max(1, shape[axis])
            places.append((shape, tuple(strides), offset))
            offset += -(-extent // GUARD_ELEMENTS) * GUARD_ELEMENTS + GUARD_ELEMENTS
        self._places = places[::-1] if geometry.descending else places
        self.num_elements = offset

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a flat buffer, views of it."""
        return [memory.as_strided(shape, strides, offset) for shape, strides, offset in self._places]

    def filled(self, pieces: Iterable[torch.Tensor], nobody: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat buffer with `pieces` in their places and `nobody` everywhere else."""
        memory = torch.full((self.num_elements,), nobody, dtype=dtype)
        for view, piece in zip(self.views(memory), pieces, strict=True):
            view.copy_(piece)
        return memory


class EngineMemory:
    """An engine's tensors for one row of the table: `list_lengths`, outermost first, of tensors of `tensor_shape`."""

    axes = ("nl", "two", "nb", "bs", "nh", "hs")

    def __init__(self, row: Layout, sizes: Mapping[str, int], geometry: Geometry):
        self.shape = tuple(sizes[axis] for axis in self.axes)
        self._pattern = engine_pattern(row)
        nested = rearrange(torch.empty(self.shape, device="meta"), self._pattern).shape
        self.list_lengths, self.tensor_shape = nested[: len(row.nesting)], nested[len(row.nesting) :]
        self._buffer = Buffer([self.tensor_shape] * math.prod(self.list_lengths), geometry)

    def filled(self, logical: torch.Tensor, nobody: int) -> torch.Tensor:
        """The whole buffer when the cache holds `logical` `[NL, TWO, NB, BS, NH, HS]`; `nobody` around it."""
        return self._buffer.filled(
            rearrange(logical, self._pattern).reshape(-1, *self.tensor_shape), nobody, logical.dtype
        )

    def tensors(self, memory: torch.Tensor) -> Any:
        """What the engine hands out, views of the flat buffer `memory`: a tensor, a list or nested lists."""
        return _nest(iter(self._buffer.views(memory)), self.list_lengths)


class ChunkMemory:
    """The chunks of a request: `tensors(memory)[call][chunk]`, where a one-layer format needs one call per layer."""

    axes = ("two", "nl", "t", "nh", "hs")

    def __init__(self, chunk: ChunkFormat, shape: Sequence[int], spans: Sequence[tuple[int, int]], geometry: Geometry):
        """shape: of the logical chunks, `[TWO, layers, T, NH, HS]`. spans: the tokens `[start, end)` of each chunk."""
        self.shape = tuple(shape)
        self._chunk, self._spans = chunk, tuple(spans)
        self._buffer = Buffer([piece.shape for piece in self._pieces(torch.empty(self.shape, device="meta"))], geometry)

    def filled(self, logical: torch.Tensor, nobody: int) -> torch.Tensor:
        """The whole buffer when the chunks hold `logical`; `nobody` around them. Gap tokens are nowhere."""
        return self._buffer.filled(self._pieces(logical), nobody, logical.dtype)

    def tensors(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """The chunks of each call, views of the flat buffer `memory`."""
        views, chunks = self._buffer.views(memory), len(self._spans)
        calls = 1 if self._chunk.whole_model else self.shape[1]
        return [views[call * chunks : (call + 1) * chunks] for call in range(calls)]

    def _pieces(self, logical: torch.Tensor) -> Iterator[torch.Tensor]:
        """Chunk after chunk; for a one-layer format those of layer 0, then those of layer 1 ..."""
        parts = [logical] if self._chunk.whole_model else logical.split(1, dim=1)
        source = "two nl t nh hs" if self._chunk.whole_model else "two 1 t nh hs"
        for part, (start, end) in itertools.product(parts, self._spans):
            yield rearrange(part[:, :, start:end], f"{source} -> {self._chunk.pattern}")


def engine_pattern(row: Layout) -> str:
    """einops pattern from the logical cache to the row: list levels first, flat slots as `(nb bs)`."""
    names = axis_names(row)
    source = ["1" if axis in ("two", "nh") and axis not in names else axis for axis in EngineMemory.axes]
    words = re.findall(r"\([^)]*\)|\S+", " ".join((*row.nesting, row.pattern)))
    target = ["(nb bs)" if word == "nbbs" else word.replace("nbbs", "nb bs") for word in words]
    return f"{' '.join(source)} -> {' '.join(target)}"


def _nest(leaves: Iterator[torch.Tensor], lengths: Sequence[int]) -> Any:
    if not lengths:
        return next(leaves)
    return [_nest(leaves, lengths[1:]) for _ in range(lengths[0])]
