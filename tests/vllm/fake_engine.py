"""An inference engine of a few lines around the connector's two halves: blocks, steps, and a model that checks its KV.

Keys and values of a token are numbers made from all tokens before it, the layer, and K or V. Before the model "computes"
a layer it looks up every slot that it was told is computed already: a wrong, missing or misplaced load shows at once.
Free blocks hold sentinels. Nothing here uses the library's slot arithmetic.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm_fakes import FakeRequest, Scheduled, scheduler_output

from lmcache_ref.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

SENTINEL = -0x1112
NL, NH, HS = 3, 2, 4
INSTANCES = itertools.count()

# layout -> (shape of a layer's cache, view [NB, BS, NH, HS] of plane k)
LAYOUTS = {
    "FA": (lambda NB, BS: (2, NB, BS, NH, HS), lambda cache, k: cache[k]),
    "FI": (lambda NB, BS: (NB, 2, BS, NH, HS), lambda cache, k: cache[:, k]),
    "fused": (lambda NB, BS: (NB, NH, BS, 2 * HS), lambda cache, k: cache.movedim(1, 2)[..., k * HS : (k + 1) * HS]),
    "MLA": (lambda NB, BS: (NB, BS, HS), lambda cache, k: cache[:, :, None]),
}


def vllm_config(
    *, block_size: int, mla: bool = False, role: str = "kv_both", extra: dict | None = None, **parallel: Any
) -> SimpleNamespace:
    """What a connector reads of vLLM's configuration."""
    return SimpleNamespace(
        instance_id=f"fake-{next(INSTANCES)}",
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(
            **{"rank": 0, "world_size": 1, "distributed_executor_backend": "uni"} | parallel
        ),
        model_config=SimpleNamespace(
            model="fake/model",
            dtype=torch.float16,
            use_mla=mla,
            get_num_layers=lambda parallel: NL,
            get_num_kv_heads=lambda parallel: 1 if mla else NH,
            get_head_size=lambda: HS,
        ),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cuda"),
    )


class Parent085:
    """vLLM 0.8.5's connector object: the metadata it was bound to."""

    metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


class Parent032(Parent085):
    """A current vLLM's: it registers caches, and says whether it is bound."""

    def has_connector_metadata(self) -> bool:
        return self.metadata is not None

    def register_kv_caches(self, kv_caches: Any) -> None: ...


def connector(
    role: str, config: Any, dialect: str = "0.8.5", **options: Any
) -> tuple[LMCacheConnectorV1Impl, Parent085]:
    parent = Parent032() if dialect == "0.32" else Parent085()
    options = {"reports_failures": dialect == "0.32"} | options
    return LMCacheConnectorV1Impl(config, SimpleNamespace(name=role), parent, **options), parent


@dataclass
class FakeEngine:
    """`dialect` is the shape of the calls; `settings` go into `kv_connector_extra_config`.

    At most `max_running` requests run; a step computes at most `budget` tokens. When blocks run out the newest request is
    preempted.
    """

    dialect: str = "0.8.5"
    layout: str = "FA"
    num_blocks: int = 40
    block_size: int = 4
    role: str = "kv_both"
    budget: int = 30
    max_running: int = 3
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        extra = {"chunk_size": 8, "max_local_cpu_size": 0.001} | self.settings
        self.mla = self.layout == "MLA"
        config = vllm_config(
            block_size=self.block_size,
            mla=self.mla,
            role=self.role,
            extra={f"lmcache.{key}": value for key, value in extra.items()},
        )
        if self.layout == "fused":
            config.cache_config.get_resolved_kv_cache_layout = lambda: SimpleNamespace(name="LBHNC")
        self.worker, self.parent = connector("WORKER", config, self.dialect)
        self.scheduler, _ = connector("SCHEDULER", config, self.dialect)
        shape, self.plane = LAYOUTS[self.layout]
        self.caches = {
            f"model.layers.{layer}.attn": torch.full(
                shape(self.num_blocks, self.block_size), SENTINEL, dtype=torch.int16
            )
            for layer in range(NL)
        }
        tensors = {name: cache.view(torch.float16) for name, cache in self.caches.items()}
        layers = {
            name: SimpleNamespace(kv_cache=[cache] if self.dialect == "0.8.5" else cache)
            for name, cache in tensors.items()
        }
        layers["model.mlp"] = SimpleNamespace()  # a layer without a cache
        self.context = SimpleNamespace(no_compile_layers=layers, virtual_engine=0, attn_metadata=object())
        if self.dialect == "0.32":
            self.worker.register_kv_caches(tensors)
        self.random = random.Random(self.seed)
        self.free = list(range(self.num_blocks))
        self.random.shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.hits: dict[str, list[int]] = {}
        self.reported: list[set[int]] = []  # failed blocks, step by step

    @property
    def cache(self):
        return self.worker.lmcache_engine

    # ------------------------------------------------------------------------------------------ the model

    def content(self, tokens: list[int], layer: int, k: int) -> torch.Tensor:
        """KV of the last of `tokens`: int16 `[NH, HS]`, never a sentinel."""
        digest = hashlib.sha256(repr((tokens, layer, k)).encode()).digest()
        heads = 1 if self.mla else NH
        return torch.frombuffer(bytearray(digest[: heads * HS * 2]), dtype=torch.int16).view(heads, HS)

    def slot(self, layer: int, k: int, request: FakeRequest, position: int) -> torch.Tensor:
        cache = list(self.caches.values())[layer]
        block = self.blocks[request.request_id][position // self.block_size]
        return self.plane(cache, k)[block, position % self.block_size]

    def compute_layer(self, layer: int, scheduled: dict[str, int], bad: set[int]) -> None:
        """Check what is computed already, except in blocks that were reported, and write what is new."""
        for request in self.running:
            new = scheduled.get(request.request_id, 0)
            for position in range(request.num_computed_tokens + new if new else 0):
                for k in range(1 if self.mla else 2):
                    slot = self.slot(layer, k, request, position)
                    expected = self.content(request.all_token_ids[: position + 1], layer, k)
                    if position >= request.num_computed_tokens:
                        slot.copy_(expected)
                    elif self.blocks[request.request_id][position // self.block_size] not in bad:
                        assert torch.equal(slot, expected), f"{request.request_id} layer {layer} token {position}"

    # ------------------------------------------------------------------------------------------ the scheduler

    def add(self, request_id: str, prompt: list[int], num_tokens: int = 1) -> None:
        self.waiting.append(FakeRequest(request_id, prompt, max_tokens=num_tokens))

    def take(self, request: FakeRequest, num_tokens: int) -> list[int] | None:
        """More blocks, so that the request has room for so many tokens; None when there are not enough."""
        have = self.blocks.setdefault(request.request_id, [])
        need = -(-num_tokens // self.block_size) - len(have)
        if need > len(self.free):
            return None
        fresh = [self.free.pop() for _ in range(max(0, need))]
        have += fresh
        return fresh

    def give(self, request: FakeRequest) -> None:
        for block in self.blocks.pop(request.request_id):
            for cache in self.caches.values():
                for k in range(1 if self.mla else 2):
                    self.plane(cache, k)[block].fill_(SENTINEL)
            self.free.insert(0, block)

    def schedule(self) -> tuple[list, list[Scheduled]]:
        new, cached, budget = [], [], self.budget
        for request in list(self.running):
            tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            if request not in self.running or not tokens:
                continue
            while (fresh := self.take(request, request.num_computed_tokens + tokens)) is None:
                victim = self.running.pop()
                self.give(victim)
                victim.num_computed_tokens = 0
                self.preempted.add(victim.request_id)
                self.waiting.insert(0, victim)
                cached = [one for one in cached if one.request is not victim]
                if victim is request:
                    break
            else:
                budget -= tokens
                cached.append(Scheduled(request, tokens, fresh))
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            hit = self.scheduler.get_num_new_matched_tokens(request, 0)
            assert self.scheduler.get_num_new_matched_tokens(request, 0) == hit < request.num_tokens
            tokens = min(budget, request.num_tokens - hit)
            fresh = self.take(request, hit + tokens)
            if fresh is None:
                break
            self.scheduler.update_state_after_alloc(request, hit)
            self.hits.setdefault(request.request_id, []).append(hit)
            request.num_computed_tokens = hit
            self.running.append(self.waiting.pop(0))
            budget -= tokens
            if request.request_id in self.preempted:
                self.preempted.remove(request.request_id)
                cached.append(Scheduled(request, tokens, fresh, resumed=True))
            else:
                new.append((request, tokens, fresh))
        return new, cached

    def step(self) -> Any:
        """One step of everything; returns the metadata."""
        new, cached = self.schedule()
        output = scheduler_output(self.dialect, new, cached, self.finished)
        self.finished = set()
        metadata = self.parent.metadata = self.scheduler.build_connector_meta(output)
        if output.num_scheduled_tokens:
            self.forward(output.num_scheduled_tokens, bool(any(work.load for work in metadata.requests)))
        failed = self.worker.get_block_ids_with_load_errors() if self.dialect == "0.32" else set()
        self.parent.metadata = None if self.dialect == "0.32" else object()
        self.reported.append(failed)
        self.after(output.num_scheduled_tokens, failed)
        return metadata

    def forward(self, scheduled: dict[str, int], has_loads: bool) -> None:
        """The hooks in vLLM's order; without loads 0.32 calls `start_load_kv` after the model."""
        late = self.dialect == "0.32" and not has_loads
        if not late:
            self.worker.start_load_kv(self.context)
        try:
            for layer, name in enumerate(self.caches):
                self.worker.wait_for_layer_load(name)
                self.compute_layer(layer, scheduled, self.worker.worker._bad_blocks | self.unloaded_blocks())
                self.worker.save_kv_layer(name, self.caches[name], object())
            if late:
                self.worker.start_load_kv(self.context)
        finally:
            self.worker.wait_for_save()

    def unloaded_blocks(self) -> set[int]:
        """Blocks of loads that failed in this step without having been reported yet; tests of failures override it."""
        return set()

    def after(self, scheduled: dict[str, int], failed: set[int]) -> None:
        """Sample, finish, or go back to the first block that failed."""
        if failed:
            self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=failed))
        for request in list(self.running):
            if request.request_id not in scheduled:
                continue
            bad = [place for place, block in enumerate(self.blocks[request.request_id]) if block in failed]
            if bad:
                request.num_computed_tokens = bad[0] * self.block_size
                continue
            request.num_computed_tokens += scheduled[request.request_id]
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens - request.num_prompt_tokens == request.max_tokens - 1:
                    self.running.remove(request)
                    self.give(request)
                    self.finished.add(request.request_id)
                    if self.dialect == "0.32":
                        self.scheduler.request_finished(request)
                else:
                    request.decode(self.random.randrange(50))

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left; returns the hits of each request."""
        while self.waiting or self.running or self.finished:
            self.step()
        return self.hits

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
