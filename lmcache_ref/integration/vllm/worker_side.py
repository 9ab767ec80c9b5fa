"""A worker's half of the connector: loads and stores what a step's metadata says, whole or layer by layer.

It owns no cache and knows no scheduler. What failed to load is never stored, and never computed with unnoticed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import LMCacheRefError
from .layer_steps import LayerLoads, LayerSaves, Load, Save
from .request_tracker import LoadSpec, RequestWork, SaveSpec, StepWork

logger = logging.getLogger("vllm.lmcache_ref")


class KVLoadError(LMCacheRefError, RuntimeError):
    """Tokens that were promised to vLLM could not be loaded, and this vLLM cannot be told to compute them."""


class WorkerSide:
    """State of one worker between vLLM's calls. Not thread-safe: the model's thread calls it.

    engine: a `CacheEngine`. block_size: tokens a block. reports_failures: whether vLLM asks for the blocks that failed
    to load; if not, a failure raises KVLoadError. on_caches: called with the caches when they are first known.
    """

    def __init__(
        self,
        engine: Any,
        *,
        block_size: int,
        layerwise: bool = False,
        one_load_at_a_time: bool = False,
        saves: bool = True,
        reports_failures: bool = False,
        on_caches: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.block_size = block_size
        self.layerwise = layerwise
        self.one_load_at_a_time = one_load_at_a_time
        self.saves = saves
        self.reports_failures = reports_failures
        self.on_caches = on_caches
        self._caches: dict[str, torch.Tensor] = {}  # by layer name, in the order of the layers
        self._registered = False
        self._step = StepWork()  # the one that is under way
        self._loads_started = self._saved = True
        self._layer_loads: LayerLoads | None = None
        self._layer_saves: LayerSaves | None = None
        self._unloaded: set[str] = set()  # requests of the step whose load is not over, or failed
        self._failed: set[str] = set()  # those of them that failed
        self._failed_blocks: set[int] = set()  # to report
        self._bad_blocks: set[int] = set()  # reported, and the scheduler does not know it yet

    # ------------------------------------------------------------------------------------------ the engine's tensors

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches, by layer name. A forward context is not asked for them any more."""
        self._take(dict(kv_caches))
        self._registered = True

    def _read_forward_context(self, forward_context: Any) -> None:
        """vLLM 0.8.5: a layer's cache is in a list, one for each virtual engine; from 0.19 on it is the tensor."""
        caches = {}
        for name, layer in forward_context.no_compile_layers.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, (list, tuple)) and cache:
                cache = cache[getattr(forward_context, "virtual_engine", 0)]
            if isinstance(cache, torch.Tensor) and cache.numel():
                caches[name] = cache
        self._take(caches)

    def _take(self, caches: dict[str, torch.Tensor]) -> None:
        first = not self._caches and bool(caches)
        self._caches = caches
        if first:
            self.on_caches()

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """The caches, one a layer."""
        return list(self._caches.values())

    # ------------------------------------------------------------------------------------------ the step

    def begin(self, metadata: Any) -> None:
        """Note which step is under way: the one that `metadata` belongs to. Called first by every hook."""
        if metadata is self._step:
            return
        self._close_layers()
        self._step = metadata
        works = self._works()
        self._bad_blocks -= getattr(metadata, "known_failures", set())
        self._unloaded = {work.request_id for work in works if work.load}
        self._failed = set()
        self._loads_started = self._saved = False

    def _works(self) -> list[RequestWork]:
        return getattr(self._step, "requests", [])

    def _kwargs(self, work: RequestWork, num_tokens: int, num_slots: int) -> dict[str, Any]:
        """What store and retrieve hand to the connector; tokens from `num_slots` on have no slot."""
        blocks = torch.tensor(work.block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:num_slots]
        slots = torch.nn.functional.pad(slots, (0, num_tokens - num_slots), value=-1)
        return {"kvcaches": self.kv_caches, "slot_mapping": slots}

    def _mask(self, num_tokens: int, skipped: int) -> torch.Tensor:
        """False for the whole chunks among the first `skipped` tokens."""
        chunk_size = self.engine.config.chunk_size
        mask = torch.ones(num_tokens, dtype=torch.bool)
        mask[: skipped // chunk_size * chunk_size] = False
        return mask

    # ------------------------------------------------------------------------------------------ loading

    def start_load_kv(self, forward_context: Any, attn_metadata: Any = None) -> None:
        """Load what the step needs; layer by layer, only start. A second call in one step does nothing.

        Without attention metadata and without registered caches nothing happens: a profile run; the load comes later.
        """
        if not self._registered:
            if attn_metadata is None and getattr(forward_context, "attn_metadata", None) is None:
                return
            self._read_forward_context(forward_context)
        if self._loads_started:
            return
        self._loads_started = True
        loads = [(work, work.load) for work in self._works() if work.load]
        if self.layerwise:
            self._layer_loads = LayerLoads(list(self._caches), self.one_load_at_a_time)
            for work, load in loads:
                self._start_layers(work, load)
            return
        for work, load in loads:
            self._load(work, load)

    def _load(self, work: RequestWork, load: LoadSpec) -> None:
        kwargs = self._kwargs(work, load.hit_tokens, load.end_token)
        mask = self._mask(load.hit_tokens, load.vllm_cached_tokens)
        try:
            loaded = self.engine.retrieve(
                work.token_ids[: load.hit_tokens], mask, vllm_cached_tokens=load.vllm_cached_tokens, **kwargs
            )
        except Exception as error:
            self._load_ended(work, load, None, error)
        else:
            self._load_ended(work, load, loaded)

    def _start_layers(self, work: RequestWork, load: LoadSpec) -> None:
        assert self._layer_loads is not None
        kwargs = self._kwargs(work, load.hit_tokens, load.end_token)
        generator = self.engine.retrieve_layer(
            work.token_ids[: load.hit_tokens],
            self._mask(load.hit_tokens, load.vllm_cached_tokens),
            vllm_cached_tokens=load.vllm_cached_tokens,
            sync=True,
            **kwargs,
        )
        self._layer_loads.start(Load(generator, lambda loaded, error: self._load_ended(work, load, loaded, error)))

    def _load_ended(
        self, work: RequestWork, load: LoadSpec, loaded: torch.Tensor | None, error: Exception | None = None
    ) -> None:
        """Give the pins back; report the blocks of tokens that are not loaded, or raise.

        loaded: bool `[hit_tokens]`; None when nothing is.
        """
        self.engine.release(work.request_id)
        first, end = load.vllm_cached_tokens, load.end_token
        missing = [token for token in range(first, end) if loaded is None or not loaded[token]]
        if not missing:
            self._unloaded.discard(work.request_id)
            return
        self._failed.add(work.request_id)
        blocks = {work.block_ids[token // self.block_size] for token in missing}
        text = (
            f"request {work.request_id}: {len(missing)} of the tokens [{first}, {end}) were not loaded, from token "
            f"{missing[0]} on" + (f": {error}" if error else "")
        )
        if not self.reports_failures:
            raise KVLoadError(text) from error
        logger.error("%s; vLLM is told of %d blocks", text, len(blocks))
        self._failed_blocks |= blocks
        self._bad_blocks |= blocks

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Later work on the current stream sees the layer's loaded slots."""
        if self._layer_loads is not None:
            self._layer_loads.advance(layer_name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that failed to load since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # ------------------------------------------------------------------------------------------ storing

    def save_kv_layer(self, layer_name: str) -> None:
        """The layer's slots are written: layer by layer, its copy starts. More layers than there are: nothing."""
        if not (self.layerwise and self.saves and self._caches) or self._saved:
            return
        if self._layer_saves is None:
            saves = [self._layer_save(work, work.save) for work in self._works() if work.save]
            self._layer_saves = LayerSaves(list(self._caches), saves)
        self._layer_saves.advance(layer_name)

    def _layer_save(self, work: RequestWork, save: SaveSpec) -> Save:
        kwargs = self._kwargs(work, save.end_token, save.end_token)
        generator = self.engine.store_layer(*self._tokens_to_store(work, save), sync=True, **kwargs)
        return Save(generator, lambda at_end: self._may_store(work, at_end))

    def wait_for_save(self) -> None:
        """Store what the step has computed; final when this returns. Without anything to store, or again: nothing.

        vLLM 0.8.5 calls this also when the model failed, in a `finally`: then the slots are not to be trusted.
        """
        if self._saved or not self._caches:
            return
        self._saved = True
        if sys.exc_info()[0] is not None:
            self._close_layers()
            return
        if self._layer_loads is not None:
            self._layer_loads.finish()
        if self.layerwise:
            if self._layer_saves is not None:
                self._layer_saves.finish()
        elif self.saves:
            for work in self._works():
                if work.save and self._may_store(work):
                    kwargs = self._kwargs(work, work.save.end_token, work.save.end_token)
                    self.engine.store(*self._tokens_to_store(work, work.save), **kwargs)
        self._close_layers()

    def _tokens_to_store(self, work: RequestWork, save: SaveSpec) -> tuple[list[int], torch.Tensor]:
        return work.token_ids[: save.end_token], self._mask(save.end_token, save.skip_leading_tokens)

    def _may_store(self, work: RequestWork, at_end: bool = True) -> bool:
        """Whether the step computes with the right slots: no load failed, of the request or of one that shares its
        blocks; at its end also: none is missing."""
        not_right = self._unloaded if at_end else self._failed
        return work.request_id not in not_right and self._bad_blocks.isdisjoint(work.block_ids)

    # ------------------------------------------------------------------------------------------ the end

    def _close_layers(self) -> None:
        for layers in (self._layer_loads, self._layer_saves):
            if layers is not None:
                layers.close()
        self._layer_loads = self._layer_saves = None

    def close(self) -> None:
        """Drop what is under way. May be called twice."""
        self._close_layers()
