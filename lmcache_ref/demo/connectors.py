"""How the demo drives each connector: one record says which layouts it takes and how to build, store and load.

Adding a connector to the demo is adding a record to CONNECTORS. Paged memory and the model are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..connectors import VLLMPagedMemGPUConnectorV2
from ..connectors.base import PagedConnector
from ..errors import ArgumentError
from ..layouts import KV_LAYOUTS, Layout
from ..memory import MemoryAllocator, MemoryFormat, MemoryObj

CHUNK_TOKENS = 32


class Sizes(NamedTuple):
    """Sizes of one paged cache; with MLA NH is 1 and HS the latent width."""

    NL: int
    BS: int
    NH: int
    HS: int


@dataclass(frozen=True)
class DemoConnector:
    """One connector. `spans` are `(start, end)` of each chunk in tokens of the request.

    accepts(layout): whether its engine can have it. build(layout, sizes, dtype): the connector.
    allocate(connector, allocator, spans, dtype): its memory objects, in its own nesting.
    store, load(connector, objects, spans, kvcaches=, slot_mapping=): the bytes are final when `store` returns.
    row(objects, layer, k, token): the stored row `[D]`, a view, by plain indexing into an object of CHUNK_TOKENS tokens.
    """

    accepts: Callable[[Layout], bool]
    build: Callable[[Layout, Sizes, torch.dtype], Any]
    allocate: Callable[[Any, MemoryAllocator, Sequence[tuple[int, int]], torch.dtype], Any]
    store: Callable[..., None]
    load: Callable[..., None]
    row: Callable[[Any, int, int, int], torch.Tensor]


def whole_model(connector_class: type[PagedConnector]) -> DemoConnector:
    """The record of a connector that moves all layers at once, one object `[2 or 1, NL, T, D]` a chunk."""

    def build(layout: Layout, sizes: Sizes, dtype: torch.dtype) -> PagedConnector:
        hints = engine_hints(layout, sizes, connector_class)
        width = sizes.NH * sizes.HS
        return connector_class(width, sizes.NL, dtype=dtype, use_mla=layout.is_mla, layout_hints=hints)

    return DemoConnector(
        accepts=lambda layout: True,
        build=build,
        allocate=allocate_whole,
        store=store_whole,
        load=load_whole,
        row=lambda objects, layer, k, token: objects[token // CHUNK_TOKENS].tensor[k, layer, token % CHUNK_TOKENS],
    )


def engine_hints(layout: Layout, sizes: Sizes, connector_class: type[PagedConnector]) -> dict[str, Any]:
    """What the connector's engine would state of `layout`: sizes and its memory order; for a layout that this engine
    does not hand out, sizes and the layout's name."""
    hints: dict[str, Any] = {"tokens_per_block": sizes.BS, "head_dim": sizes.HS}
    if not layout.is_mla:
        hints["num_kv_heads"] = sizes.NH
    if connector_class.engine in layout.engines:
        return {**hints, "kv_layout": next(order for order in KV_LAYOUTS if layout.stands_in(order))}
    return {**hints, "layout": layout.name}


def allocate_whole(
    connector: Any, allocator: MemoryAllocator, spans: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[MemoryObj]:
    """One object a chunk; its format is left for the connector to say."""
    objects = []
    for start, end in spans:
        obj = allocator.allocate(connector.get_shape(end - start), dtype, MemoryFormat.UNDEFINED)
        assert obj is not None, "the demo's own pool is too small"
        objects.append(obj)
    return objects


def store_whole(connector: Any, objects: Any, spans: Sequence[tuple[int, int]], **engine: Any) -> None:
    """Paged memory to objects, all chunks in one call."""
    connector.batched_from_gpu(objects, [start for start, _ in spans], [end for _, end in spans], **engine)


def load_whole(connector: Any, objects: Any, spans: Sequence[tuple[int, int]], **engine: Any) -> None:
    """Objects to paged memory, all chunks in one call."""
    connector.batched_to_gpu(objects, [start for start, _ in spans], [end for _, end in spans], **engine)


#: name -> how the demo drives it
CONNECTORS: dict[str, DemoConnector] = {
    "VLLMPagedMemGPUConnectorV2": whole_model(VLLMPagedMemGPUConnectorV2),
}


def find_connector(name: str) -> DemoConnector:
    """The record called `name`; ArgumentError lists the known ones."""
    if name not in CONNECTORS:
        raise ArgumentError(f"connector: {name!r} is unknown to the demo; known: {', '.join(CONNECTORS)}")
    return CONNECTORS[name]
