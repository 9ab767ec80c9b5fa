"""SGLang: K and V lists, flat or nested, with or without pages, or one MLA list; loading may bring a partial mapping."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError
from ..metadata import EngineType
from .layerwise import LayerwiseConnector
from .whole_model import WholeModelConnector


class _PartialMapping:
    """`offset` on load: `slot_mapping[0]` is token `offset` of the request; earlier chunks are a ChunkError."""

    engine = EngineType.SGLANG

    def first_mapped_token(self, kwargs: dict[str, Any]) -> int:
        offset = kwargs.get("offset", 0)
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            raise ArgumentError(f"offset must be an int >= 0, got {offset!r}")
        return offset


class SGLangGPUConnector(_PartialMapping, WholeModelConnector):
    """Whole-model chunks: object `[2, NL, T, D]` `KV_2LTD`, with MLA `[1, NL, T, D]` `KV_MLA_FMT`.

    `kvcaches`: K layers and V layers, `[NBBS, NH, HS]` or `[NB, BS, NH, HS]` each. Loading takes `offset`: the mapping
    starts at that token; storing takes the full mapping. Otherwise as `WholeModelConnector`.
    """


class SGLangLayerwiseGPUConnector(_PartialMapping, LayerwiseConnector):
    """Object for each layer and chunk: `[T, 2, D]` `KV_T2D`, with MLA `[T, D]` `KV_MLA_FMT`.

    Loading takes `offset` as `SGLangGPUConnector` does. Protocol and errors as in `LayerwiseConnector`.
    """
