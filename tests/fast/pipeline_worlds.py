"""What the tests of the pipeline's order move on a simulated device: a cache, chunks, a rotation. No test lives here."""

from __future__ import annotations

import torch
from simulated import SimulatedDevice

from lmcache_fast.cuda.backend import Engine
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rerotation import Rerotation
from lmcache_ref.rope import RotarySpec, rotary_table
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter

NL, NB, BS, D, CHUNK = 2, 12, 4, 8, 4  # int16: a row is 16 bytes, a chunk 256
CHUNK_BYTES = 2 * NL * CHUNK * D * 2
SLOTS = torch.randperm(NB * BS, generator=torch.Generator().manual_seed(3))[: 6 * CHUNK]
OTHERS = torch.tensor(sorted(set(range(NB * BS)) - set(SLOTS.tolist())))
FILL = 0x5C
ROPE = RotarySpec(rotary_table(96, 6))


class World:
    """A cache, pools of chunks, and a device; what the reference would have made of them."""

    def __init__(self, device: SimulatedDevice, num_pools: int = 2, chunk_tokens: int = CHUNK, num_chunks: int = 6):
        self.device, self.engine = device, Engine(device, device.library)
        values = torch.arange(NL * 2 * NB * BS * D, dtype=torch.int16)
        self.memory = values.view(NL, 2, NB, BS, 1, D).clone()
        self.cache = PagedKVCache(tuple(tuple(self.memory[layer, kv] for kv in range(2)) for layer in range(NL)))
        shape = (num_pools, num_chunks, 2, NL, chunk_tokens, D)
        self.pools = (torch.arange(torch.Size(shape).numel(), dtype=torch.int16) + 20000).view(shape)
        device.register(self.memory)
        device.register(self.pools)

    def plan(self, pool: int, slots: torch.Tensor = SLOTS, skip: int = 0) -> TransferPlan:
        chunks = list(self.pools[pool])
        return TransferPlan.build(
            self.cache, slots, chunks, fmt=MemoryFormat.KV_2LTD, skip_prefix_n_tokens=skip
        )  # fmt: skip

    def rotated_plan(self, pool: int, slots: torch.Tensor = SLOTS, skip: int = 0) -> TransferPlan:
        """The same bytes as keys and values of two bytes; every fourth key stays where it is."""
        pages, chunks = self.memory.view(torch.bfloat16), self.pools[pool].view(torch.bfloat16)
        cache = PagedKVCache(tuple(tuple(pages[layer, kv] for kv in range(2)) for layer in range(NL)))
        old, new = torch.arange(len(slots)), torch.arange(len(slots)) * 2
        old[::4] = new[::4]
        rotation = Rerotation(old, new, ROPE)
        return TransferPlan.build(
            cache, slots, list(chunks), fmt=MemoryFormat.KV_2LTD, skip_prefix_n_tokens=skip, rotation=rotation
        )  # fmt: skip

    def gathered(self, plan: TransferPlan, pool: int) -> torch.Tensor:
        """What the reference gathers into a pool; nothing is changed."""
        before = self.pools[pool].clone()
        try:
            reference_gather(plan)
            return self.pools[pool].clone()
        finally:
            self.pools[pool].copy_(before)

    def scattered(self, plan: TransferPlan) -> torch.Tensor:
        before = self.memory.clone()
        try:
            reference_scatter(plan)
            return self.memory.clone()
        finally:
            self.memory.copy_(before)

    def store(self, plan: TransferPlan) -> Transfer:
        return self.engine.move("gather", plan)

    def load(self, plan: TransferPlan) -> Transfer:
        return self.engine.move("scatter", plan)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(got, expected), f"{what}: {int((got != expected).sum())} elements differ"


def fill_chunks(world: World) -> None:
    """The current stream writes what they hold to the chunks, late."""
    final = world.pools.clone()
    world.device.work(lambda: world.pools.copy_(final), [], [world.pools])
