"""What is moved: a cache, chunks in host memory and on the device, and the plans between them; one `Setting` at a time.

Who moves is `movers.py`, whether the bits are right `checks.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..kv_cache import PagedKVCache
from ..memory import PAGE_BYTES, MemoryAllocator, MemoryFormat, MemoryObj
from ..plan import TransferPlan
from .shapes import CHUNK_TOKENS, Shape, make_cache

SPARE_BLOCKS = 1.25  # blocks of the cache for each that is used


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    shape: Shape
    order: str
    block_size: int
    tokens: int

    @property
    def num_bytes(self) -> int:
        """Of all tokens, all layers, K and V."""
        return self.shape.bytes_per_token * self.tokens

    @property
    def chunk_sizes(self) -> list[int]:
        """Tokens of each chunk; the last one may be shorter."""
        return [min(CHUNK_TOKENS, self.tokens - start) for start in range(0, self.tokens, CHUNK_TOKENS)]

    @property
    def host_bytes(self) -> int:
        """Host memory that a `Setting` may take: chunks to store to, chunks to load from, and one object a layer."""
        objects = len(self.chunk_sizes) * (2 + self.shape.NL)
        return 3 * self.num_bytes + objects * PAGE_BYTES

    def __str__(self) -> str:
        return f"{self.shape.name} {self.order} block {self.block_size} tokens {self.tokens}"


@dataclass(frozen=True, eq=False)
class Job:
    """Chunks `[TWO, NL, T, D]` and the slots, int64 `[tokens]`, that they go to or come from.

    which: of the two sets of slots. near: the chunks are in the cache's memory, not across a link. plan: what is checked.
    turns: that plan or, of several chunks, two with some more slots, which nobody uses, in turn. Requests differ in their
    slots, and a backend may know those of the call before, also of another job's.
    """

    cache: PagedKVCache
    chunks: Sequence[torch.Tensor]
    slots: torch.Tensor
    which: int
    near: bool
    plan: TransferPlan
    turns: Iterator[TransferPlan]

    @classmethod
    def build(
        cls, cache: PagedKVCache, chunks: Sequence[torch.Tensor], slots: torch.Tensor, which: int, near: bool
    ) -> Job:
        """The job with its plan."""
        plan = _plan(cache, chunks, slots)
        more = () if len(chunks) == 1 else (1, 2) if near else (3, 4)
        turns = [_plan(cache, chunks, and_more(slots, count)) for count in more] or [plan]
        return cls(cache, chunks, slots, which, near, plan, itertools.cycle(turns))

    def planned(self) -> TransferPlan:
        """A new plan, of the one whose turn it is."""
        return _plan(self.cache, self.chunks, next(self.turns).slots)

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes


class Setting:
    """One case in memory: a cache with two sets of slots in random blocks, and the jobs, each made when first asked for.

    store: to host chunks, from slot set 0. load: from host chunks, to set 1. near: set 0 and chunks on the cache's device.
    slots_on: the device of the slot mapping. far: host memory is across a link. expected: what the chunks of every job
    hold when all is well.
    """

    def __init__(self, case: Case, device: torch.device, host: MemoryAllocator, slots_on: str, far: bool):
        self.case, self.device, self.far, self._host = case, device, far, host
        self._objects: list[MemoryObj] = []
        shape, block_size, tokens = case.shape, case.block_size, case.tokens
        blocks_each = -(-tokens // block_size)
        num_blocks = int(2 * blocks_each * SPARE_BLOCKS) + 1
        self.cache, self.tensors = make_cache(shape, case.order, num_blocks, block_size, device, seed=0)
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        first = (0, blocks_each * block_size)
        self.slots = [slots[start : start + tokens].to(torch.device(slots_on)) for start in first]
        self.fmt = MemoryFormat.KV_MLA_FMT if shape.kv == 1 else MemoryFormat.KV_2LTD
        self.layer_fmt = MemoryFormat.KV_MLA_FMT if shape.kv == 1 else MemoryFormat.KV_T2D
        self.expected = self._on_device(random=True)

    @functools.cached_property
    def store(self) -> Job:
        return self._job(self._in_host(), 0, near=not self.far)

    @functools.cached_property
    def load(self) -> Job:
        return self._job(self._in_host(), 1, near=not self.far)

    @functools.cached_property
    def near(self) -> Job:
        return self._job(self._on_device(), 0, near=True)

    @functools.cached_property
    def store_one(self) -> Job:
        """The first chunk of `store`, as a request of its own."""
        return self._first_of(self.store)

    @functools.cached_property
    def load_one(self) -> Job:
        """The first chunk of `load`, as a request of its own."""
        return self._first_of(self.load)

    @functools.cached_property
    def light(self) -> Job:
        """As many chunks as `near`, of one token each: next to nothing to move."""
        count = len(self.case.chunk_sizes)
        chunks = [self._empty(1, self.device) for _ in range(count)]
        return Job.build(self.cache, chunks, self.slots[0][:count], 0, near=True)

    @functools.cached_property
    def layers(self) -> list[list[MemoryObj]]:
        """`[layer][chunk]`: one object each in host memory, `[T, 2, D]`, with MLA `[T, D]`."""
        kv = [] if self.case.shape.kv == 1 else [2]
        width = self.case.shape.NH * self.case.shape.HS
        return [
            [self._allocate([size, *kv, width], self.layer_fmt) for size in self.case.chunk_sizes]
            for _ in range(self.case.shape.NL)
        ]

    def whole(self, operation: str) -> Job:
        """What a layerwise connector is compared with: `store` or `load`, in one memory `near`."""
        if not self.far:
            return self.near
        return self.store if operation == "gather" else self.load

    def close(self) -> None:
        """Give the host memory back."""
        self._host.batched_free(self._objects)
        self._objects = []

    def _job(self, chunks: Sequence[torch.Tensor], which: int, near: bool) -> Job:
        return Job.build(self.cache, chunks, self.slots[which], which, near)

    def _first_of(self, job: Job) -> Job:
        first = list(job.chunks[:1])
        return Job.build(self.cache, first, job.slots[: first[0].shape[2]], job.which, job.near)

    def _chunk_shape(self, size: int) -> list[int]:
        shape = self.case.shape
        return [shape.kv, shape.NL, size, shape.NH * shape.HS]

    def _empty(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(self._chunk_shape(size), dtype=self.case.shape.dtype, device=device)

    def _on_device(self, random: bool = False) -> list[torch.Tensor]:
        chunks = [self._empty(size, self.device) for size in self.case.chunk_sizes]
        for chunk in chunks if random else []:
            chunk.view(torch.uint8).random_()
        return chunks

    def _in_host(self) -> list[torch.Tensor]:
        """Chunks that hold what is expected."""
        objects = [self._allocate(self._chunk_shape(size), self.fmt) for size in self.case.chunk_sizes]
        chunks = [obj.get_tensor(0) for obj in objects]
        for chunk, expected in zip(chunks, self.expected, strict=True):
            chunk.view(torch.uint8).copy_(expected.view(torch.uint8))
        return chunks

    def _allocate(self, shape: Sequence[int], fmt: MemoryFormat) -> MemoryObj:
        obj = self._host.allocate(torch.Size(shape), self.case.shape.dtype, fmt)
        assert obj is not None, "Case.host_bytes is what a setting takes"
        self._objects.append(obj)
        return obj


def and_more(slots: torch.Tensor, count: int) -> torch.Tensor:
    """A slot mapping that is some tokens longer."""
    return torch.cat([slots, slots[:count]])


def _plan(cache: PagedKVCache, chunks: Sequence[torch.Tensor], slots: torch.Tensor) -> TransferPlan:
    fmt = MemoryFormat.KV_MLA_FMT if cache.kv_size == 1 else MemoryFormat.KV_2LTD
    return TransferPlan.build(cache, slots, chunks, fmt=fmt)
