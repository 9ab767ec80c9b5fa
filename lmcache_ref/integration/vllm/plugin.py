"""Makes the connector known to vLLM by its name, in every process of vLLM, where this package is installed.

The entry point `vllm.general_plugins` calls `register`. vLLM 0.8.5 has no other way to name a connector of a package.
"""

from __future__ import annotations

import contextlib

NAME = "LMCacheConnectorV1Dynamic"
MODULE = "lmcache_ref.integration.vllm.lmcache_connector_v1"


def register() -> None:
    """Register the class under `NAME`; nothing happens when the name is taken, or in a vLLM without the V1 API."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):  # plugins may be loaded more than once
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
