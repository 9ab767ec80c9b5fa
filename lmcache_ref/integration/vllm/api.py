"""The part of vLLM that the connectors are made of, imported once, with one clear error when it is not there.

Which dialect of the connector API the installed vLLM speaks is read off its base class, not off a version number.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
except ImportError as error:
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    raise ImportError(
        f"the LMCache connector needs vLLM 0.8.5 or later, with its V1 connector API and what vLLM itself needs; found "
        f"{f'vLLM {version}' if version else 'no vLLM'}, and importing the API failed: {error}"
    ) from error

from .request_tracker import StepWork

__all__ = ["IS_085", "KVConnectorBase_V1", "KVConnectorRole", "LMCacheConnectorMetadata", "SupportsHMA", "refuse_gaps"]

#: vLLM 0.9 gave connectors `request_finished`, and the match its second value
IS_085 = not hasattr(KVConnectorBase_V1, "request_finished")


class _NoHMA:
    """Stands in for `SupportsHMA` in a vLLM that has none."""


SupportsHMA: Any = getattr(base, "SupportsHMA", _NoHMA)


class LMCacheConnectorMetadata(StepWork, KVConnectorMetadata):
    """One step's work, as vLLM passes it from the scheduler to the workers."""


def refuse_gaps(connector: type) -> None:
    """ImportError when the installed vLLM wants methods that `connector` has not: a version it cannot work with."""
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        raise ImportError(f"this vLLM's connector API wants {', '.join(missing)}, which {connector.__name__} has not")
