"""A cache engine over an inference engine's memory whose every byte is known: what tests of the engine share.

The keys and values of a token follow from the tokens before it, so whatever a hit brings back can be checked. Slots are
looked up in plain views; no address arithmetic of the library is used. No test lives here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from helpers import SENTINEL_BYTE, assert_same
from lmcache_ref.connectors import CreateGPUConnector
from lmcache_ref.engine import CacheEngine, LMCacheEngineConfig
from lmcache_ref.metadata import EngineType, LayerGroup, LMCacheMetadata

NL, NB, BS, NH, HS = 3, 12, 4, 2, 8
SLOTS = NB * BS
CHUNK = 4
PAGE_BYTES = 4096  # what the smallest object takes from a pool
GIB = 1 << 30


@dataclass(frozen=True)
class Kind:
    """Which connector, over which memory. layers: of each layer (planes, heads, head size, dtype)."""

    engine: EngineType
    flags: dict[str, bool]
    layers: tuple[tuple[int, int, int, torch.dtype], ...] = ((2, NH, HS, torch.bfloat16),) * NL
    groups: tuple[LayerGroup, ...] = ()  # what V3 will find
    split_kv: bool = False  # K and V are tensors of their own

    @property
    def layerwise(self) -> bool:
        return self.flags.get("use_layerwise", False)

    @property
    def mla(self) -> bool:
        return all(kv == 1 for kv, *_ in self.layers)

    @property
    def chunk_pages(self) -> int:
        """Pages of a pool that a chunk takes: every object of these tests fits one."""
        return NL if self.layerwise else 1


_MLA = ((1, 1, 24, torch.bfloat16),) * NL
_MIXED = ((2, 2, 8, torch.bfloat16), (1, 1, 13, torch.uint8), (2, 2, 8, torch.bfloat16))
_GROUPS = (
    LayerGroup((0, 2), 2, 2, 8, torch.bfloat16, BS),
    LayerGroup((1,), 1, 1, 13, torch.uint8, BS),
)
VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG
KINDS = {
    "mock": Kind(EngineType.MOCK, {}),
    "V2": Kind(VLLM, {}),
    "V2-fp8": Kind(VLLM, {}, ((2, NH, HS, torch.float8_e4m3fn),) * NL),
    "V2-mla": Kind(VLLM, {}, _MLA),
    "V3": Kind(VLLM, {"use_gpu_connector_v3": True}),
    "V3-groups": Kind(VLLM, {"use_gpu_connector_v3": True}, _MIXED, _GROUPS),
    "layerwise": Kind(VLLM, {"use_layerwise": True}),
    "layerwise-mla": Kind(VLLM, {"use_layerwise": True}, _MLA),
    "buffer": Kind(VLLM, {"use_layerwise": True, "enable_blending": True}),
    "sglang": Kind(SGLANG, {}, split_kv=True),
    "sglang-layerwise": Kind(SGLANG, {"use_layerwise": True}, split_kv=True),
}
LAYERWISE = [name for name, kind in KINDS.items() if kind.layerwise]


class Memory:
    """An inference engine's paged memory. `planes[layer][kv]`: its bytes, `[slots, bytes of a row]`."""

    def __init__(self, kind: Kind, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """tensors: one a layer, where somebody else has made them."""
        self.kind = kind
        if kind.split_kv:
            made = [[torch.empty(SLOTS, nh, hs, dtype=dtype) for _, nh, hs, dtype in kind.layers] for _ in range(2)]
            self.kvcaches: Any = made
            rows = [[made[k][layer] for k in range(2)] for layer in range(NL)]
        else:
            self.kvcaches = tensors or [self._pages(*layer) for layer in kind.layers]
            rows = [list(t) if kv == 2 else [t] for t, (kv, *_) in zip(self.kvcaches, kind.layers, strict=True)]
        self.planes = [[plane.view(SLOTS, -1).view(torch.uint8) for plane in row] for row in rows]
        self.blank()

    @staticmethod
    def _pages(kv: int, heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((2, NB, BS, heads, head_size) if kv == 2 else (NB, BS, head_size), dtype=dtype)

    def blank(self) -> None:
        for row in self.planes:
            for plane in row:
                plane.fill_(SENTINEL_BYTE)

    def rows(self, tokens: Sequence[int]) -> list[list[torch.Tensor]]:
        """What each plane holds for the tokens, uint8 `[T, bytes of a row]`: a function of each token's prefix."""
        prefixes, state = [], b""
        for token in tokens:
            state = hashlib.sha256(state + token.to_bytes(8, "big")).digest()
            prefixes.append(state)
        return [
            [
                torch.frombuffer(
                    bytearray(b"".join(_row(p, layer, k, plane.shape[1]) for p in prefixes)) or bytearray(1),
                    dtype=torch.uint8,
                )[: len(tokens) * plane.shape[1]].view(len(tokens), plane.shape[1])
                for k, plane in enumerate(row)
            ]
            for layer, row in enumerate(self.planes)
        ]

    def write(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        """As if the model had computed the tokens into the slots."""
        for planes, rows in zip(self.planes, self.rows(tokens), strict=True):
            for plane, row in zip(planes, rows, strict=True):
                plane[slots] = row

    def check(self, tokens: Sequence[int], slots: torch.Tensor, loaded: torch.Tensor) -> None:
        """The loaded tokens' slots hold their rows, everything else is blank."""
        __tracebackhide__ = True
        for layer, (planes, rows) in enumerate(zip(self.planes, self.rows(tokens), strict=True)):
            for k, (plane, row) in enumerate(zip(planes, rows, strict=True)):
                expected = torch.full_like(plane, SENTINEL_BYTE)
                expected[slots[loaded]] = row[loaded]
                assert_same(plane.reshape(-1), expected.reshape(-1), f"layer {layer}, plane {k}")


def _row(prefix: bytes, layer: int, k: int, length: int) -> bytes:
    return hashlib.shake_128(prefix + bytes([layer, k])).digest(length)


class World:
    """One engine, its connector and its memory; `restart` makes them anew over the same folder."""

    def __init__(self, kind: str = "V2", *, folder: Any = None, host_chunks: int = 64, seed: int = 0, **config: Any):
        self.kind = KINDS[kind]
        self.random = random.Random(seed)
        settings = {
            "chunk_size": CHUNK,
            "max_local_cpu_size": host_chunks * self.kind.chunk_pages * PAGE_BYTES / GIB,
            **self.kind.flags,
            **({} if folder is None else {"local_disk": str(folder), "max_local_disk_size": 1.0}),
            **config,
        }
        self.config = LMCacheEngineConfig(**settings)
        self._make()

    def _make(self) -> None:
        kv, heads, head_size, dtype = self.kind.layers[0]
        shape = (NL, kv, CHUNK, heads, head_size)
        self.metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, dtype, shape, use_mla=self.kind.mla, chunk_size=CHUNK)
        if self.kind.groups:
            self.metadata.set_layer_groups(self.kind.groups)
        hints = {} if self.kind.engine is EngineType.MOCK else {"kv_layout": "NHD"}
        self.connector = CreateGPUConnector(self.config, self.metadata, self.kind.engine, layout_hints=hints)
        owned = getattr(self.connector, "kvcaches", None)
        self.memory = Memory(self.kind, [tensor[:, : SLOTS // tensor.shape[2]] for tensor in owned] if owned else None)
        self.engine = CacheEngine(self.config, self.metadata, self.connector)
        if self.kind.groups:
            self.connector.initialize_kvcaches_ptr(kvcaches=self.memory.kvcaches)

    def restart(self) -> None:
        self.engine.close()
        self._make()

    def slots(self, tokens: Sequence[int]) -> torch.Tensor:
        """Slots for the tokens, all different, in no order."""
        return torch.tensor(self.random.sample(range(SLOTS), len(tokens)), dtype=torch.int64)

    def kwargs(self, slots: torch.Tensor, memory: Memory | None = None, **more: Any) -> dict[str, Any]:
        kvcaches = {} if self.kind.engine is EngineType.MOCK else {"kvcaches": (memory or self.memory).kvcaches}
        return {"slot_mapping": slots, **kvcaches, **({"sync": True} if self.kind.layerwise else {}), **more}

    def store(self, tokens: Sequence[int], **more: Any) -> int:
        """The model computes the tokens somewhere, and the engine stores them."""
        slots = self.slots(tokens)
        self.memory.write(tokens, slots)
        return self.engine.store(tokens, **self.kwargs(slots), **more)

    def retrieve(self, tokens: Sequence[int], mask: torch.Tensor | None = None, **more: Any) -> int:
        """Load into blank memory, check every byte of it; returns how many tokens were loaded, after the masked."""
        slots = self.slots(tokens)
        self.memory.blank()
        loaded = self.engine.retrieve(tokens, mask, **self.kwargs(slots), **more)
        self.check(tokens, slots, loaded, mask)
        return int(loaded.sum())

    def check(
        self, tokens: Sequence[int], slots: torch.Tensor, loaded: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        __tracebackhide__ = True
        first = 0 if mask is None else len(tokens) - int(mask.sum())
        assert loaded.dtype == torch.bool and loaded.tolist() == [
            first <= t < first + int(loaded.sum()) for t in range(len(tokens))
        ]
        self.memory.check(tokens, slots, loaded)

    def check_books(self) -> None:
        """Nobody holds anything: the pool has the chunks of the host tier and nothing else."""
        host = self.engine.storage.host
        self.engine.flush()
        assert host.allocator.memcheck()
        chunks = list(host._chunks.values())
        assert [(obj.get_ref_count(), obj.is_pinned) for chunk in chunks for obj in chunk.objects] == [
            (1, False) for chunk in chunks for _ in chunk.objects
        ]
        assert host.allocator.used_bytes == sum(chunk.size_bytes for chunk in chunks)
        assert self.engine.stats().pinned_requests == 0 and not self.engine._being_stored


def masked(tokens: Sequence[int], skipped: int) -> torch.Tensor:
    """A mask whose first `skipped` tokens are left alone."""
    return torch.arange(len(tokens)) >= skipped
