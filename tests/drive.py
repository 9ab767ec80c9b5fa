"""How a test drives each connector: one record each, an engine's memory built with einops, objects, expected buffers.

Nothing here uses the library's planes, views or slot arithmetic: an expected value is looked up, token by token, in
logical arrays `[NL, TWO, NB*BS, NH, HS]` (the cache) and `[TWO, NL, T, NH, HS]` (the request). No test lives here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange

from helpers import addressed, untouched, words
from lmcache_ref.connectors import (
    MockGPUConnector,
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    TRTLLMGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache_ref.layouts import KV_LAYOUTS, LAYOUTS, Layout
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat, MemoryObj
from lmcache_ref.metadata import EngineType, LMCacheMetadata

GUARD_ELEMENTS = 64
POOL_BYTES = 1 << 15
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Driven:
    """One connector. kv, mla: its object's axes and format, for K and V or one plane; None: it refuses that.
    per_layer: generators, one object a layer and chunk."""

    make: Any
    engine: EngineType
    per_layer: bool
    kv: tuple[str, MemoryFormat]
    mla: tuple[str, MemoryFormat] | None

    @property
    def blends(self) -> bool:
        """Whether it works in a buffer: always staged, ascending chunks, gaps written as zeros."""
        return self.make is VLLMBufferLayerwiseGPUConnector


_WHOLE = ("two nl t (nh hs)", MemoryFormat.KV_2LTD)
_MLA = ("1 nl t (1 hs)", MemoryFormat.KV_MLA_FMT)
_T2D = ("t two (nh hs)", MemoryFormat.KV_T2D)
_MLA_LAYER = ("t (1 hs)", MemoryFormat.KV_MLA_FMT)
CONNECTORS = {
    "V2": Driven(VLLMPagedMemGPUConnectorV2, EngineType.VLLM, False, _WHOLE, _MLA),
    "V3": Driven(VLLMPagedMemGPUConnectorV3, EngineType.VLLM, False, _WHOLE, _MLA),
    "layerwise": Driven(VLLMPagedMemLayerwiseGPUConnector, EngineType.VLLM, True, _T2D, _MLA_LAYER),
    "buffer": Driven(
        VLLMBufferLayerwiseGPUConnector, EngineType.VLLM, True, ("two t (nh hs)", MemoryFormat.KV_2TD), None
    ),
    "sglang": Driven(SGLangGPUConnector, EngineType.SGLANG, False, _WHOLE, _MLA),
    "sglang-layerwise": Driven(SGLangLayerwiseGPUConnector, EngineType.SGLANG, True, _T2D, _MLA_LAYER),
    "trtllm": Driven(TRTLLMGPUConnector, EngineType.TRTLLM, False, _WHOLE, None),
    "mock": Driven(MockGPUConnector, EngineType.MOCK, False, _WHOLE, _MLA),
}
LAYERWISE = [name for name, driven in CONNECTORS.items() if driven.per_layer]


@dataclass(frozen=True)
class Sizes:
    """Lengths of the axes; different and none 2, so that only the right reading fits. CHUNK: tokens a staging buffer
    holds."""

    NL: int = 3
    NB: int = 7
    BS: int = 4
    NH: int = 5
    HS: int = 8
    CHUNK: int = 4


@dataclass(frozen=True)
class EngineLayout:
    """What an engine hands out: memory as `row` has it; `shown`: the axes of the tensors where they stand in another
    order than in memory (a permuted view), and the order that the engine states then."""

    row: Layout
    shown: str | None = None
    order: str | None = None

    @property
    def name(self) -> str:
        return self.row.name + ("-permuted" if self.shown else "")

    def hints(self, engine: EngineType, sizes: Sizes) -> dict[str, Any]:
        """What an engine states: its memory order and BS; for an engine without a row of its own, the row."""
        if engine not in self.row.engines:
            return {"layout": self.row.name}
        named = self.row.name if self.row.name in KV_LAYOUTS else None
        order = self.order or named or next(order for order in KV_LAYOUTS if self.row.stands_in(order))
        return {"kv_layout": order, "tokens_per_block": 1 if "nbbs" in self.row.names else sizes.BS}


#: vLLM's logical shapes over another memory order: FlashAttention HND, FlashInfer HND, the fused one as NHD
PERMUTED = (
    EngineLayout(LAYOUTS["NL_X_TWO_NB_NH_BS_HS"], "two nb bs nh hs", "HND"),
    EngineLayout(LAYOUTS["NL_X_NB_TWO_NH_BS_HS"], "nb two bs nh hs", "HND"),
    EngineLayout(LAYOUTS["NL_X_NB_BS_NH_TWO_HS"], "nb nh bs (two hs)", "NHD"),
)


def accepted_layouts(name: str) -> list[EngineLayout]:
    """Every layout the connector's engine hands out, and the mock's own two."""
    driven = CONNECTORS[name]
    if driven.engine is EngineType.MOCK:
        return [EngineLayout(LAYOUTS["NL_X_TWO_NB_BS_NH_HS"]), EngineLayout(LAYOUTS["NL_X_NB_BS_HS"])]
    rows = [EngineLayout(row) for row in LAYOUTS.values() if driven.engine in row.engines]
    rows += PERMUTED if driven.engine is EngineType.VLLM else ()
    return [layout for layout in rows if driven.mla or not layout.row.is_mla]


class Bench:
    """One connector on one layout: engine memory, an object pool, and what both must hold afterwards."""

    def __init__(
        self,
        name: str,
        layout: EngineLayout | str | None = None,
        *,
        use_gpu: bool = False,
        sizes: Sizes | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        allocator: Any = None,
        **options: Any,
    ):
        self.driven = CONNECTORS[name]
        layout = EngineLayout(LAYOUTS[layout]) if isinstance(layout, str) else layout or accepted_layouts(name)[0]
        self.layout, self.sizes, self.dtype, self.device = layout, sizes or Sizes(), dtype, device
        self.mla = layout.row.is_mla
        self.pattern, self.fmt = self.driven.mla if self.mla else self.driven.kv  # type: ignore[misc]
        self.NL, self.TWO, self.NH = self.sizes.NL, 1 if self.mla else 2, 1 if self.mla else self.sizes.NH
        self.num_slots = self.sizes.NB * self.sizes.BS
        self.connector = self._build(use_gpu or self.driven.blends, options)
        self.allocator = allocator or HostMemoryAllocator(POOL_BYTES, align_bytes=64)
        self.word = words(torch.empty(0, dtype=dtype)).dtype
        self.logical_shape = (self.NL, self.TWO, self.num_slots, self.NH, self.sizes.HS)
        self.engine, self.kvcaches = self._engine()
        self.allocator.pool.copy_(untouched(self.allocator.total_bytes, torch.uint8))

    def _build(self, use_gpu: bool, options: dict[str, Any]) -> Any:
        sizes = self.sizes
        metadata = LMCacheMetadata(
            "model", 1, 1, 0, 0, self.dtype, (self.NL, self.TWO, sizes.CHUNK, self.NH, sizes.HS), use_mla=self.mla
        )
        if self.driven.engine is EngineType.MOCK:
            options = {"num_blocks": sizes.NB, "block_size": sizes.BS, **options}
        else:
            options = {"layout_hints": self.layout.hints(self.driven.engine, sizes), **options}
        return self.driven.make.from_metadata(metadata, use_gpu=use_gpu, device=self.device, **options)

    # ---------------------------------------------------------------------------------------- the engine's memory

    def _engine(self) -> tuple[list[torch.Tensor], Any]:
        """Flat buffers of sentinels, and the engine's tensors, views of them."""
        if self.driven.engine is EngineType.MOCK:
            for tensor in self.connector.kvcaches:
                tensor.view(-1).view(torch.uint8).fill_(untouched(1, torch.uint8).item())
            return [tensor.view(-1) for tensor in self.connector.kvcaches], None
        shapes = self._leaves(torch.empty(self.logical_shape, device="meta"))
        lengths, leaf = shapes[0], shapes[1][0].shape
        stride = leaf.numel() + GUARD_ELEMENTS
        flat = untouched(GUARD_ELEMENTS + math.prod(lengths) * stride, self.dtype).to(self.device)
        self._places = [(GUARD_ELEMENTS + i * stride, leaf) for i in range(math.prod(lengths))]
        tensors = [self._shown(flat[at : at + leaf.numel()].view(leaf)) for at, leaf in self._places]
        return [flat], _nest(tensors, lengths)

    def _leaves(self, logical: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """List lengths, and what each tensor holds in memory order."""
        row, sizes = self.layout.row, self.sizes
        source = f"nl {'1' if self.mla else 'two'} (nb bs) {'1' if self.mla else 'nh'} hs"
        target = " ".join((*row.nesting, row.pattern)).replace("nbbs", "(nb bs)")
        whole = rearrange(logical, f"{source} -> {target}", nb=sizes.NB, bs=sizes.BS)
        lengths = list(whole.shape[: len(row.nesting)])
        return lengths, list(whole.reshape(-1, *whole.shape[len(row.nesting) :]))

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout.shown is None:
            return tensor
        names = [re.sub(r"\W", "", text) for text in (self.layout.row.pattern, self.layout.shown)]
        assert sorted(names[0]) == sorted(names[1])
        one_word = [text.replace("(two hs)", "twohs") for text in (self.layout.row.pattern, self.layout.shown)]
        return rearrange(tensor, f"{one_word[0]} -> {one_word[1]}")

    def engine_holding(self, logical: torch.Tensor) -> list[torch.Tensor]:
        """What the flat buffers are when the cache holds `logical`, integers `[NL, TWO, NB*BS, NH, HS]`."""
        leaves = self._leaves(logical)[1]
        if self.driven.engine is EngineType.MOCK:
            return [leaf.reshape(-1).view(self.dtype) for leaf in leaves]
        flat = words(untouched(self.engine[0].numel(), self.dtype))
        for (at, _), leaf in zip(self._places, leaves, strict=True):
            flat[at : at + leaf.numel()] = leaf.reshape(-1)
        return [flat.view(self.dtype)]

    def put_engine(self, logical: torch.Tensor) -> None:
        """Let the cache hold `logical`."""
        for flat, wanted in zip(self.engine, self.engine_holding(logical), strict=True):
            flat.copy_(wanted)

    def cache_values(self, first: int = 0) -> torch.Tensor:
        """A logical cache whose elements are their own address."""
        return words(addressed(math.prod(self.logical_shape), self.dtype, first)).view(self.logical_shape)

    def untouched_cache(self) -> torch.Tensor:
        """A logical cache of sentinels."""
        return words(untouched(math.prod(self.logical_shape), self.dtype)).view(self.logical_shape)

    # ---------------------------------------------------------------------------------------- the objects

    def request_values(self, tokens: int, first: int = 30000) -> torch.Tensor:
        """Logical chunks `[TWO, NL, T, NH, HS]` whose elements are their own address."""
        shape = (self.TWO, self.NL, tokens, self.NH, self.sizes.HS)
        return words(addressed(math.prod(shape), self.dtype, first)).view(shape)

    def allocate(self, spans: Spans, fmt: MemoryFormat | None = MemoryFormat.UNDEFINED) -> list[list[MemoryObj]]:
        """`objects[call][chunk]`: one call, or one for each layer. fmt: None is the right one."""
        calls = self.NL if self.driven.per_layer else 1
        objects = []
        for _ in range(calls):
            objects.append([])
            for start, end in spans:
                obj = self.allocator.allocate(
                    self.connector.get_shape(end - start), self.dtype, self.fmt if fmt is None else fmt
                )
                assert obj is not None, "the test's pool is too small"
                objects[-1].append(obj)
        return objects

    def pieces(self, values: torch.Tensor, spans: Spans) -> list[list[torch.Tensor]]:
        """What the objects of `allocate(spans)` hold when the request's tokens hold `values`."""
        parts = values.split(1, dim=1) if self.driven.per_layer else [values]
        axes = "two 1" if self.driven.per_layer else "two nl"
        axes = axes.replace("two", "1") if self.mla else axes
        source = f"{axes} t {'1' if self.mla else 'nh'} hs"
        target = self.pattern.replace("(1 hs)", "hs")
        return [[rearrange(part[:, :, s:e], f"{source} -> {target}") for s, e in spans] for part in parts]

    def pool_holding(self, objects: list[list[MemoryObj]], values: torch.Tensor, spans: Spans) -> torch.Tensor:
        """What the pool is when the objects hold `values` and nobody wrote anything else."""
        pool = untouched(self.allocator.total_bytes, torch.uint8)
        for row, pieces in zip(objects, self.pieces(values, spans), strict=True):
            for obj, piece in zip(row, pieces, strict=True):
                at, raw = obj.metadata.address, piece.contiguous().view(-1).view(torch.uint8)
                pool[at : at + raw.numel()] = raw
        return pool

    def put_objects(self, objects: list[list[MemoryObj]], values: torch.Tensor, spans: Spans) -> None:
        """Let the objects hold `values`, in the connector's format, cached at the positions of `spans`."""
        self.allocator.pool.copy_(self.pool_holding(objects, values, spans))
        for row in objects:
            for obj, (start, end) in zip(row, spans, strict=True):
                obj.metadata.fmt = self.fmt
                obj.metadata.cached_positions = torch.arange(start, end)

    # ---------------------------------------------------------------------------------------- the calls

    def kwargs(self, slots: torch.Tensor | None, **more: Any) -> dict[str, Any]:
        """The keyword arguments of a call."""
        given = {"kvcaches": self.kvcaches, "slot_mapping": slots, **({"sync": True} if self.driven.per_layer else {})}
        return {**given, **more}

    def store(self, objects: list[list[MemoryObj]], spans: Spans, slots: torch.Tensor, **more: Any) -> None:
        """The whole store; the generators' yields are counted."""
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        if not self.driven.per_layer:
            self.connector.batched_from_gpu(objects[0], starts, ends, **self.kwargs(slots, **more))
            return
        yields = sum(1 for _ in self.connector.batched_from_gpu(objects, starts, ends, **self.kwargs(slots, **more)))
        assert yields == self.NL + 1

    def load(self, objects: list[list[MemoryObj]], spans: Spans, slots: torch.Tensor, **more: Any) -> None:
        """The whole load; the generators' yields are counted."""
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        if not self.driven.per_layer:
            self.connector.batched_to_gpu(objects[0], starts, ends, **self.kwargs(slots, **more))
            return
        generator = self.connector.batched_to_gpu(starts, ends, **self.kwargs(slots, **more))
        next(generator)
        for row in objects:
            generator.send(row)
        next(generator)
        assert next(generator, "ended") == "ended"

    # ---------------------------------------------------------------------------------------- what must come of it

    def stored(self, logical: torch.Tensor, values: torch.Tensor, spans: Spans, slots: list[int]) -> torch.Tensor:
        """The request's tokens after a store into objects that held `values`."""
        values = values.clone()
        for token in tokens_of(spans):
            if slots[token] >= 0:
                values[:, :, token] = logical[:, :, slots[token]].transpose(0, 1)
        return values

    def loaded(
        self, logical: torch.Tensor, values: torch.Tensor, spans: Spans, slots: list[int], skip: int = 0
    ) -> torch.Tensor:
        """The cache after a load of the request's tokens. A connector that blends writes zeros to the gaps."""
        logical = logical.clone()
        inside = tokens_of(spans)
        written = range(spans[0][0], spans[-1][1]) if self.driven.blends and spans else inside
        for token in written:
            if slots[token] >= 0 and token >= skip:
                row = values[:, :, token] if token in inside else torch.zeros_like(values[:, :, token])
                logical[:, :, slots[token]] = row.transpose(0, 1)
        return logical


def tokens_of(spans: Spans) -> list[int]:
    """The tokens of all chunks."""
    return [token for start, end in spans for token in range(start, end)]


def _nest(leaves: list[torch.Tensor], lengths: Sequence[int]) -> Any:
    if not lengths:
        return leaves[0]
    step = len(leaves) // lengths[0]
    return [_nest(leaves[i : i + step], lengths[1:]) for i in range(0, len(leaves), step)]
