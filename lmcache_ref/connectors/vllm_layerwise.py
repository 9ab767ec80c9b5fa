"""vLLM, layer by layer, straight between objects and pages."""

from __future__ import annotations

from .layerwise import LayerwiseConnector


class VLLMPagedMemLayerwiseGPUConnector(LayerwiseConnector):
    """Object for each layer and chunk: `[T, 2, D]` `KV_T2D`, with MLA `[T, D]` `KV_MLA_FMT`.

    Chunks may come in any order and leave gaps; each uses its own slots. With and without `use_gpu` the result is the
    same. Protocol and errors as in `LayerwiseConnector`.
    """
