"""The connector class for vLLM 0.8.5; under a later vLLM, `LMCacheConnectorV1Dynamic` here is the class for that one.

Nothing is decided here: every call goes to `LMCacheConnectorV1Impl`.
"""

from __future__ import annotations

from typing import Any

import torch

from .api import IS_085, KVConnectorBase_V1, KVConnectorRole, LMCacheConnectorMetadata, refuse_gaps
from .request_tracker import StepWork
from .vllm_v1_adapter import LMCacheConnectorV1Impl


class LMCacheConnectorV1_085(KVConnectorBase_V1):
    """vLLM 0.8.5: the match is a plain int, caches come with the forward context, a failed load cannot be reported."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._lmcache_engine = LMCacheConnectorV1Impl(vllm_config, role, self, metadata_type=LMCacheConnectorMetadata)

    # ------------------------------------------------------------------------------------------ worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._lmcache_engine.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._lmcache_engine.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._lmcache_engine.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._lmcache_engine.wait_for_save()

    def shutdown(self) -> None:
        """This vLLM never calls it; the end of the process does."""
        self._lmcache_engine.shutdown()

    # ------------------------------------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return self._lmcache_engine.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, num_external_tokens: int) -> None:
        self._lmcache_engine.update_state_after_alloc(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        return self._lmcache_engine.build_connector_meta(scheduler_output)


LMCacheConnectorV1Dynamic: type[KVConnectorBase_V1] = LMCacheConnectorV1_085
if IS_085:
    refuse_gaps(LMCacheConnectorV1_085)
else:
    from .lmcache_connector_v1 import LMCacheConnectorV1

    LMCacheConnectorV1Dynamic = LMCacheConnectorV1
