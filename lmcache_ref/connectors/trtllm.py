"""TensorRT-LLM: whole-model chunks out of one cross-layer HND pool."""

from __future__ import annotations

from ..metadata import EngineType
from .whole_model import WholeModelConnector


class TRTLLMGPUConnector(WholeModelConnector):
    """Object `[2, NL, T, D]` `KV_2LTD`; `kvcaches` is the pool `[NB, NL, 2, NH, BS, HS]`, or flat `[NB, NL, 2, NH*BS*HS]`.

    The flat pool needs `num_kv_heads` or `head_dim` as a hint (`from_metadata` knows them). Otherwise as
    `WholeModelConnector`.
    """

    engine = EngineType.TRTLLM
