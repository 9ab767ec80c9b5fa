"""`LMCacheConnectorV1Impl`: what every version's connector class delegates to, the scheduler's half or a worker's.

It builds the half that its role asks for out of the configuration; the halves do the work. Importing this imports no
vLLM, and the scheduler's half never does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any

import torch

from ...connectors import CreateGPUConnector
from ...engine.builder import CacheEngineBuilder
from ...engine.cache_engine import CacheEngine
from ...errors import ArgumentError
from ...metadata import EngineType
from . import model_facts
from .lookup import LookupServer, WorkersLookup, remove_dead_sockets, worker_address, worker_name
from .request_tracker import SavePolicy, StepWork
from .scheduler_side import SchedulerSide
from .worker_side import WorkerSide

logger = logging.getLogger("vllm.lmcache_ref")

ROLES = {"kv_producer": (False, True), "kv_consumer": (True, False), "kv_both": (True, True)}  # loads, saves
NO_WORK = StepWork()


class LMCacheConnectorV1Impl:
    """One connector of vLLM: role SCHEDULER or WORKER. The other role's methods are not for calling.

    parent: vLLM's connector object; the step's metadata comes from it. kv_cache_config: given by vLLM from 0.11.1 on.
    metadata_type: what `build_connector_meta` makes. reports_failures: whether this vLLM asks which blocks failed to load
    and computes them again. Raises ArgumentError for a configuration that cannot work.
    """

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        parent: Any,
        *,
        kv_cache_config: Any = None,
        metadata_type: Callable[[], StepWork] = StepWork,
        reports_failures: bool = False,
    ) -> None:
        self._parent = parent
        self.vllm_config = vllm_config
        self.config = model_facts.engine_config(vllm_config)
        kv_role = getattr(vllm_config.kv_transfer_config, "kv_role", None) or "kv_both"
        if kv_role not in ROLES:
            raise ArgumentError(f"kv_role: {kv_role!r}; allowed: {', '.join(ROLES)}")
        self.loads, self.saves = ROLES[kv_role]
        model_facts.refuse_unsupported(vllm_config, kv_cache_config)
        self.block_size = model_facts.block_size(vllm_config, kv_cache_config)
        self.engine_id = model_facts.engine_id(vllm_config, self.config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self.lmcache_engine: CacheEngine | None = None
        self._close: Callable[[], None] = lambda: None
        if role.name == "SCHEDULER":
            self.scheduler = self._scheduler_side(metadata_type)
        else:
            self._start_worker(reports_failures)

    @staticmethod
    def is_layerwise(extra_config: Mapping[str, Any]) -> bool:
        """Whether the environment or vLLM's `kv_connector_extra_config` asks for loads and stores layer by layer."""
        return model_facts.engine_config_of(extra_config).use_layerwise

    def _scheduler_side(self, metadata_type: Callable[[], StepWork]) -> SchedulerSide:
        config = self.config
        policy = SavePolicy(
            config.chunk_size, config.save_decode_cache, config.save_unfull_chunk, config.skip_last_n_tokens
        )
        lookup = WorkersLookup(
            self.engine_id,
            self.vllm_config.parallel_config.world_size,
            transport=config.lookup_transport,
            url=config.lookup_url,
            timeout_s=config.lookup_timeout_ms / 1000,
        )
        return SchedulerSide(
            policy,
            lookup,
            block_size=self.block_size,
            loads=self.loads,
            saves=self.saves,
            metadata_type=metadata_type,
        )

    def _start_worker(self, reports_failures: bool) -> None:
        """Make the cache, and make it known to the scheduler."""
        metadata = model_facts.metadata(self.vllm_config, self.config, "worker")
        engine_lays_out = hasattr(self._parent, "register_kv_caches")
        if engine_lays_out:
            model_facts.refuse_packed_blocks(self.vllm_config, self.config, self.block_size)
        hints = model_facts.layout_hints(self.vllm_config, engine_lays_out=engine_lays_out)
        connector = CreateGPUConnector(self.config, metadata, EngineType.VLLM, hints)
        name = worker_name(self.engine_id, metadata.worker_id)
        self.lmcache_engine = CacheEngineBuilder.get_or_create(name, self.config, metadata, connector)
        self.worker = WorkerSide(
            self.lmcache_engine,
            block_size=self.block_size,
            layerwise=self.config.use_layerwise,
            one_load_at_a_time=self.config.enable_blending,
            saves=self.saves,
            # One worker of several that reports would leave the others with chunks computed from its bad blocks.
            reports_failures=reports_failures and metadata.world_size == 1,
            on_caches=self._read_caches,
        )
        server = None
        if model_facts.scheduler_may_be_elsewhere(self.vllm_config, self.config):
            remove_dead_sockets()
            server = LookupServer(
                worker_address(self.engine_id, metadata.worker_id, self.config.lookup_url), self.lmcache_engine
            )
        # vLLM 0.8.5 never calls `shutdown`. Finalizers of multiprocessing run at the end of child processes too.
        self._close = Finalize(None, close_worker, (self.worker, server, name), exitpriority=1)
        logger.info(
            "LMCache: %s, chunks of %d tokens, %s GiB of host memory",
            type(connector).__name__,
            self.config.chunk_size,
            self.config.max_local_cpu_size,
        )

    def _read_caches(self) -> None:
        """The engine's tensors are there, and so is its model: read both, so that what is wrong shows at once."""
        assert self.worker is not None and self.lmcache_engine is not None
        connector: Any = self.lmcache_engine.connector
        if self.config.enable_blending:
            connector.rope = model_facts.model_rope()
        connector.initialize_kvcaches_ptr(kvcaches=self.worker.kv_caches)

    # ------------------------------------------------------------------------------------------ worker

    def _worker(self) -> WorkerSide:
        """The worker's half, told which step is under way."""
        if self.worker is None:
            raise ArgumentError("role: SCHEDULER; this method is the worker's")
        has_metadata = getattr(self._parent, "has_connector_metadata", None)
        bound = has_metadata is None or has_metadata()
        self.worker.begin(self._parent._get_connector_metadata() if bound else NO_WORK)
        return self.worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The engine's tensors by layer name, in the order of the layers. LayoutError when they cannot be read."""
        assert self.worker is not None
        self.worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the step's requests need; after it (layer by layer: after `wait_for_layer_load`) later work on the
        current stream sees the slots. KVLoadError when that fails and vLLM takes no report of failed blocks."""
        self._worker().start_load_kv(forward_context, kwargs.get("attn_metadata"))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker().wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any = None, attn_metadata: Any = None, **kwargs: Any) -> None:
        """The layer is computed. Its tensors are those known from the forward context or the registration."""
        self._worker().save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """What the step's requests have to store is in host memory when this returns."""
        self._worker().wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.get_block_ids_with_load_errors()

    # ------------------------------------------------------------------------------------------ scheduler

    def _scheduler(self) -> SchedulerSide:
        if self.scheduler is None:
            raise ArgumentError("role: WORKER; this method is the scheduler's")
        return self.scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return self._scheduler().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, num_external_tokens: int) -> None:
        self._scheduler().update_state_after_alloc(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        return self._scheduler().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler().update_connector_output(connector_output)

    def request_finished(self, request: Any) -> None:
        self._scheduler().forget(request.request_id)

    # ------------------------------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Give back pins and memory, write what waits for the disk. May be called twice."""
        if self.scheduler is not None:
            self.scheduler.close()
        self._close()


def close_worker(worker: WorkerSide, server: LookupServer | None, name: str) -> None:
    """End a worker's half: nobody asks any more, then the cache goes."""
    if server is not None:
        server.close()
    worker.close()
    CacheEngineBuilder.destroy(name)
