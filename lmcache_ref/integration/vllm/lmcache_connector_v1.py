"""The connector class for vLLM from 0.9 to today; under vLLM 0.8.5, `LMCacheConnectorV1Dynamic` here is the class for that.

Nothing is decided here: every call goes to `LMCacheConnectorV1Impl`. What an older vLLM does not call does no harm.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .api import IS_085, KVConnectorBase_V1, KVConnectorRole, LMCacheConnectorMetadata, SupportsHMA, refuse_gaps
from .request_tracker import StepWork
from .vllm_v1_adapter import LMCacheConnectorV1Impl

_BASE_TAKES = inspect.signature(KVConnectorBase_V1.__init__).parameters


class LMCacheConnectorV1(KVConnectorBase_V1, SupportsHMA):
    """The match is `(tokens, False)`: loads are done before the step computes, saves when `wait_for_save` returns.

    Models with one KV cache group are served, whether or not vLLM's hybrid manager is on; with several, construction
    fails with the option to set.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        known = {"vllm_config": vllm_config, "role": role, "kv_cache_config": kv_cache_config}
        super().__init__(**{name: value for name, value in known.items() if name in _BASE_TAKES})
        self._lmcache_engine = LMCacheConnectorV1Impl(
            vllm_config,
            role,
            self,
            kv_cache_config=kv_cache_config,
            metadata_type=LMCacheConnectorMetadata,
            reports_failures=hasattr(KVConnectorBase_V1, "get_block_ids_with_load_errors"),
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer, Python runs between the layers: a graph over the whole model would leave it out."""
        return LMCacheConnectorV1Impl.is_layerwise(extra_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A chunk that was not stored is a later miss, no more."""
        return False

    # ------------------------------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._lmcache_engine.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._lmcache_engine.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._lmcache_engine.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._lmcache_engine.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._lmcache_engine.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is ever under way between steps."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._lmcache_engine.get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        self._lmcache_engine.shutdown()

    # ------------------------------------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._lmcache_engine.get_num_new_matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._lmcache_engine.update_state_after_alloc(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        return self._lmcache_engine.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._lmcache_engine.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may go at once: what was to be stored has been."""
        self._lmcache_engine.request_finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)


LMCacheConnectorV1Dynamic: type[KVConnectorBase_V1] = LMCacheConnectorV1
if IS_085:
    from .lmcache_connector_v1_085 import LMCacheConnectorV1_085

    LMCacheConnectorV1Dynamic = LMCacheConnectorV1_085
else:
    refuse_gaps(LMCacheConnectorV1)
