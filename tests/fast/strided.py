"""Planes and chunks at any strides, by numbers alone: no layout, no pattern, nothing of the library's discovery.

A `World` is one cache and the chunks of one request in two flat buffers; the same world can be built again, bit for bit,
for another backend. Which memory is compared is always the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from helpers import addressed, assert_same, untouched
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan

GUARD_ELEMENTS = 32


@dataclass(frozen=True)
class Sizes:
    """Lengths of the axes of a cache."""

    NL: int
    TWO: int
    NB: int
    BS: int
    NH: int
    HS: int

    @property
    def D(self) -> int:
        return self.NH * self.HS

    @property
    def block(self) -> int:
        return self.BS * self.D

    @property
    def plane(self) -> int:
        return self.NB * self.block


@dataclass(frozen=True)
class Place:
    """Where a plane starts, and the strides of NB, BS and NH; all in elements."""

    start: int
    strides: tuple[int, int, int]


Geometry = Callable[[Sizes, int, int], Place]  # sizes, layer, kv


def _nhd(s: Sizes, layer: int, kv: int) -> Place:
    return Place((layer * s.TWO + kv) * s.plane, (s.block, s.D, s.HS))


def _hnd(s: Sizes, layer: int, kv: int) -> Place:
    return Place((layer * s.TWO + kv) * s.plane, (s.block, s.HS, s.BS * s.HS))


def _kv_in_block(s: Sizes, layer: int, kv: int) -> Place:
    return Place(layer * s.TWO * s.plane + kv * s.block, (s.TWO * s.block, s.D, s.HS))


def _layers_in_block(s: Sizes, layer: int, kv: int) -> Place:
    return Place((layer * s.TWO + kv) * s.block, (s.NL * s.TWO * s.block, s.HS, s.BS * s.HS))


def _fused(s: Sizes, layer: int, kv: int) -> Place:
    return Place(layer * s.TWO * s.plane + kv * s.HS, (s.TWO * s.block, s.TWO * s.D, s.TWO * s.HS))


def _heads_outermost(s: Sizes, layer: int, kv: int) -> Place:
    return Place((layer * s.TWO + kv) * s.plane, (s.BS * s.HS, s.HS, s.NB * s.BS * s.HS))


def _descending(s: Sizes, layer: int, kv: int) -> Place:
    return Place(((s.NL - 1 - layer) * s.TWO + s.TWO - 1 - kv) * s.plane, (s.block, s.D, s.HS))


def _off_by_one(s: Sizes, layer: int, kv: int) -> Place:
    return Place(1 + (layer * s.TWO + kv) * s.plane, (s.block, s.D, s.HS))


def _padded_blocks(s: Sizes, layer: int, kv: int) -> Place:
    block = s.block + 16
    return Place((layer * s.TWO + kv) * s.NB * block, (block, s.D, s.HS))


def _padded_slots(s: Sizes, layer: int, kv: int) -> Place:
    slot = s.D + 1
    return Place((layer * s.TWO + kv) * s.NB * s.BS * slot, (s.BS * slot, slot, s.HS))


def _padded_heads(s: Sizes, layer: int, kv: int) -> Place:
    head = s.HS + 4
    return Place((layer * s.TWO + kv) * s.NB * s.BS * s.NH * head, (s.BS * s.NH * head, s.NH * head, head))


def _unlike_layers(s: Sizes, layer: int, kv: int) -> Place:
    """Layer by layer another geometry, side by side."""
    geometry = (_nhd, _hnd, _padded_blocks)[layer % 3]
    inside = geometry(s, 0, kv)
    return Place(layer * s.TWO * (s.plane + 16 * s.NB) + inside.start, inside.strides)


GEOMETRIES: dict[str, Geometry] = {
    "nhd": _nhd,
    "hnd": _hnd,
    "kv_in_block": _kv_in_block,
    "layers_in_block": _layers_in_block,
    "fused": _fused,
    "heads_outermost": _heads_outermost,
    "descending": _descending,
    "off_by_one": _off_by_one,
    "padded_blocks": _padded_blocks,
    "padded_slots": _padded_slots,
    "padded_heads": _padded_heads,
    "unlike_layers": _unlike_layers,
}


@dataclass(frozen=True)
class Format:
    """A chunk format: the axes of its tensor, and how many layers and planes it holds."""

    fmt: MemoryFormat
    axes: str
    one_layer: bool
    planes: int


FORMATS = {
    "KV_2LTD": Format(MemoryFormat.KV_2LTD, "KLTD", False, 2),
    "KV_T2D": Format(MemoryFormat.KV_T2D, "TKD", True, 2),
    "KV_2TD": Format(MemoryFormat.KV_2TD, "KTD", True, 2),
    "KV_MLA_FMT": Format(MemoryFormat.KV_MLA_FMT, "KLTD", False, 1),
    "KV_MLA_FMT_TD": Format(MemoryFormat.KV_MLA_FMT, "TD", True, 1),
}


@dataclass(frozen=True)
class Request:
    """Which tokens go where: `slots[token]`, chunks as `[start, end)`, the skipped prefix, one layer for some formats."""

    slots: Sequence[int]
    spans: Sequence[tuple[int, int]]
    skip: int = 0
    layer: int = 0


@dataclass(frozen=True)
class Case:
    """One cache, one chunk format, one request. chunk_pad: elements after each row of a chunk, and before the first."""

    sizes: Sizes
    dtype: torch.dtype
    geometry: Geometry
    format: Format
    request: Request
    chunk_pad: int = 0


@dataclass
class World:
    """A case in real memory. `gathers`: the cache holds addresses and the chunks sentinels; else the other way round."""

    case: Case
    gathers: bool
    cache_memory: torch.Tensor = field(init=False)
    chunk_memory: torch.Tensor = field(init=False)
    cache: PagedKVCache = field(init=False)
    chunks: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._build_cache()
        self._build_chunks()

    def _build_cache(self) -> None:
        s, case = self.case.sizes, self.case
        places = [[case.geometry(s, layer, kv) for kv in range(s.TWO)] for layer in range(s.NL)]
        lengths = (s.NB, s.BS, s.NH)
        end = max(
            place.start + sum((n - 1) * stride for n, stride in zip(lengths, place.strides, strict=True)) + s.HS
            for row in places
            for place in row
        )
        self.cache_memory = self._memory(end + 2 * GUARD_ELEMENTS, self.gathers)
        self.cache = PagedKVCache(
            tuple(
                tuple(
                    self.cache_memory.as_strided(
                        (s.NB, s.BS, s.NH, s.HS), (*place.strides, 1), GUARD_ELEMENTS + place.start
                    )
                    for place in row
                )
                for row in places
            )
        )

    def _build_chunks(self) -> None:
        s, case = self.case.sizes, self.case
        row = s.D + case.chunk_pad
        num_layers = 1 if case.format.one_layer else s.NL
        starts, length = [], GUARD_ELEMENTS + case.chunk_pad
        for start, end in case.request.spans:
            starts.append(length)
            length += s.TWO * num_layers * (end - start) * row + GUARD_ELEMENTS
        self.chunk_memory = self._memory(length, not self.gathers)
        self.chunks = []
        for (start, end), offset in zip(case.request.spans, starts, strict=True):
            sizes = {"K": s.TWO, "L": num_layers, "T": end - start, "D": s.D}
            shape, strides, stride = [], [], row
            for axis in reversed(case.format.axes):
                shape.insert(0, sizes[axis])
                strides.insert(0, 1 if axis == "D" else stride)
                stride *= 1 if axis == "D" else sizes[axis]
            self.chunks.append(self.chunk_memory.as_strided(shape, strides, offset))

    def _memory(self, num_elements: int, is_source: bool) -> torch.Tensor:
        return addressed(num_elements, self.case.dtype) if is_source else untouched(num_elements, self.case.dtype)

    def plan(self) -> TransferPlan:
        request = self.case.request
        return TransferPlan.build(
            self.cache,
            torch.tensor(request.slots, dtype=torch.int64),
            self.chunks,
            fmt=self.case.format.fmt,
            layers=request.layer if self.case.format.one_layer else None,
            starts=[start for start, _ in request.spans],
            skip_prefix_n_tokens=request.skip,
        )


def assert_same_worlds(got: World, expected: World, what: str) -> None:
    """Both buffers, whole, hold the same bits."""
    __tracebackhide__ = True
    assert_same(got.cache_memory, expected.cache_memory, f"{what}: the cache")
    assert_same(got.chunk_memory, expected.chunk_memory, f"{what}: the chunks")


#: (NH, HS, dtype): rows of 2048, 256, 92, 66, 33, 6, 132, 656, 1, 24, 1152, 17 bytes, in pieces as small as one byte
ROWS = (
    (8, 128, torch.bfloat16),
    (1, 128, torch.float16),
    (1, 46, torch.bfloat16),
    (2, 33, torch.uint8),
    (1, 33, torch.uint8),
    (1, 3, torch.float16),
    (1, 132, torch.uint8),
    (1, 656, torch.uint8),
    (1, 1, torch.uint8),
    (3, 1, torch.float64),
    (1, 576, torch.bfloat16),
    (17, 1, torch.float8_e4m3fn),
    (4, 8, torch.float32),
)

#: three chunks of a request, an empty one among them, one slot skipped, a gap; the first two tokens are a skipped prefix
REQUEST = Request(
    slots=(2, 9, 4, -1, 0, 11, 7, 5, 20, 13, 6, 1), spans=((0, 5), (5, 5), (6, 7), (8, 12)), skip=2, layer=1
)
