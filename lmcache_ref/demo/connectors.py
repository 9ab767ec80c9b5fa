"""How the demo drives each connector: one record says which layouts it takes and how to build, store and load.

Adding a connector to the demo is adding a record to CONNECTORS. Paged memory and the model are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..connectors import (
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)
from ..connectors.base import ConnectorBase, PagedConnector
from ..connectors.layerwise import LayerwiseConnector
from ..errors import ArgumentError
from ..layouts import KV_LAYOUTS, Layout
from ..memory import MemoryAllocator, MemoryFormat, MemoryObj
from ..metadata import LMCacheMetadata
from ..rope import RotarySpec

CHUNK_TOKENS = 32
#: instead of a connector's name: every one of CONNECTORS
ALL = "all"

Spans = Sequence[tuple[int, int]]


class Sizes(NamedTuple):
    """Sizes of one paged cache; with MLA NH is 1 and HS the latent width. BS is None where layers differ in it."""

    NL: int
    BS: int | None
    NH: int
    HS: int


class Engine(NamedTuple):
    """What an engine tells the connector that it builds."""

    layout: Layout
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    rope: RotarySpec


@dataclass(frozen=True)
class DemoConnector:
    """One connector. `spans` are `(start, end)` of each chunk in tokens of the request.

    accepts(layout): whether its engine can have it. build(engine): the connector.
    allocate(connector, allocator, spans, dtype): its memory objects, in its own nesting; the engine's tensors are known.
    store, load(connector, objects, spans, kvcaches=, slot_mapping=): the bytes are final when `store` returns.
    row(objects, layer, k, chunk, token): the stored row `[D]` of a chunk's token, a view, by plain indexing.
    extras: rows of the demo beside the layouts, keys of `run.extra_exhibits`.
    """

    accepts: Callable[[Layout], bool]
    build: Callable[[Engine], Any]
    allocate: Callable[[Any, MemoryAllocator, Spans, torch.dtype], Any]
    store: Callable[..., None]
    load: Callable[..., None]
    row: Callable[[Any, int, int, int, int], torch.Tensor]
    extras: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ the records


def whole_model(connector_class: type[PagedConnector]) -> DemoConnector:
    """The record of a connector that moves all layers at once, one object `[2 or 1, NL, T, D]` a chunk."""
    return DemoConnector(
        accepts=lambda layout: connector_class.engine in layout.engines,
        build=lambda engine: build_paged(connector_class, engine),
        allocate=allocate_whole,
        store=store_whole,
        load=load_whole,
        row=lambda objects, layer, k, chunk, token: objects[chunk].tensor[k, layer, token],
    )


def grouped(connector_class: type[VLLMPagedMemGPUConnectorV3]) -> DemoConnector:
    """The record of a connector that moves all layers at once, with one tensor a group of like layers in an object.

    Where there are several groups, the demo's layers belong to them in turn.
    """

    def build(engine: Engine) -> VLLMPagedMemGPUConnectorV3:
        NL, _, NH, HS = engine.sizes
        kv_shape = (NL, 1 if engine.layout.is_mla else 2, CHUNK_TOKENS, NH, HS)
        metadata = LMCacheMetadata("demo", 1, 1, 0, 0, engine.dtype, kv_shape, engine.layout.is_mla)
        return connector_class(metadata, engine.device, layout_hints=engine_hints(engine, connector_class))

    def row(objects: Any, layer: int, k: int, chunk: int, token: int) -> torch.Tensor:
        groups = len(objects[chunk].metadata.shapes)
        return objects[chunk].get_tensor(layer % groups)[k, layer // groups, token]

    return replace(
        whole_model(connector_class),  # type: ignore[arg-type]
        build=build,
        allocate=allocate_grouped,
        row=row,
        extras=("mixed",),
    )


def layerwise(connector_class: type[LayerwiseConnector]) -> DemoConnector:
    """The record of generators, one object `[T, 2, D]` a layer and chunk, with MLA `[T, D]`."""

    def row(objects: Any, layer: int, k: int, chunk: int, token: int) -> torch.Tensor:
        tensor = objects[layer][chunk].tensor
        return tensor[token].view(-1, tensor.shape[-1])[k]

    return replace(
        whole_model(connector_class), allocate=allocate_layerwise, store=store_layerwise, load=load_layerwise, row=row
    )


def blending(connector_class: type[VLLMBufferLayerwiseGPUConnector]) -> DemoConnector:
    """The record of generators, one object `[2, T, D]` a layer and chunk, that know how keys were rotated."""
    takes = layerwise(connector_class)
    return replace(
        takes,
        accepts=lambda layout: takes.accepts(layout) and not layout.is_mla,
        build=lambda engine: build_paged(connector_class, engine, device=engine.device, rope=engine.rope),
        row=lambda objects, layer, k, chunk, token: objects[layer][chunk].tensor[k, token],
        extras=("blend",),
    )


# ------------------------------------------------------------------------------------------------ building


def build_paged(connector_class: type[PagedConnector], engine: Engine, **options: Any) -> PagedConnector:
    """A connector over one kind of layers."""
    NL, _, NH, HS = engine.sizes
    hints = engine_hints(engine, connector_class)
    return connector_class(NH * HS, NL, dtype=engine.dtype, use_mla=engine.layout.is_mla, layout_hints=hints, **options)


def engine_hints(engine: Engine, connector_class: type[ConnectorBase]) -> dict[str, Any]:
    """What the connector's engine would state of the layout: sizes and its memory order, by the order's own name where
    that is the layout's; for a layout that this engine does not hand out, sizes and the layout's name."""
    layout, sizes = engine.layout, engine.sizes
    hints: dict[str, Any] = {"head_dim": sizes.HS}
    if sizes.BS is not None:
        hints["tokens_per_block"] = sizes.BS
    if not layout.is_mla:
        hints["num_kv_heads"] = sizes.NH
    if connector_class.engine in layout.engines:
        orders = [order for order in KV_LAYOUTS if layout.stands_in(order)]
        return {**hints, "kv_layout": layout.name if layout.name in orders else orders[0]}
    return {**hints, "layout": layout.name}


# ------------------------------------------------------------------------------------------------ objects


def allocate_whole(connector: Any, allocator: MemoryAllocator, spans: Spans, dtype: torch.dtype) -> list[MemoryObj]:
    """One object a chunk; its format is left for the connector to say."""
    return [new_object(allocator, connector.get_shape(end - start), dtype) for start, end in spans]


def allocate_grouped(connector: Any, allocator: MemoryAllocator, spans: Spans, dtype: torch.dtype) -> list[MemoryObj]:
    """One object a chunk, one tensor in it for each group."""
    dtypes = connector.metadata.get_dtypes()
    return [new_object(allocator, connector.get_shapes(end - start), dtypes) for start, end in spans]


def allocate_layerwise(
    connector: Any, allocator: MemoryAllocator, spans: Spans, dtype: torch.dtype
) -> list[list[MemoryObj]]:
    """`objects[layer][chunk]`."""
    return [allocate_whole(connector, allocator, spans, dtype) for _ in range(connector.num_layers)]


def new_object(allocator: MemoryAllocator, shapes: Any, dtypes: Any) -> MemoryObj:
    """One object of no format yet."""
    obj = allocator.allocate(shapes, dtypes, MemoryFormat.UNDEFINED)
    assert obj is not None, "the demo's own pool is too small"
    return obj


# ------------------------------------------------------------------------------------------------ moving


def store_whole(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """Paged memory to objects, all chunks in one call."""
    connector.batched_from_gpu(objects, *starts_and_ends(spans), **engine)


def load_whole(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """Objects to paged memory, all chunks in one call."""
    connector.batched_to_gpu(objects, *starts_and_ends(spans), **engine)


def load_whole_in_two(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """The first chunk, then the others with a mapping that starts at their first token."""
    for part in (slice(0, 1), slice(1, None)):
        load_whole(connector, objects[part], spans[part], **mapped_from(spans[part][0][0], **engine))


def store_layerwise(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """Paged memory to objects, a layer a step, NL+1 steps."""
    steps = connector.batched_from_gpu(objects, *starts_and_ends(spans), sync=True, **engine)
    run_steps(steps, [None] * (len(objects) + 1))


def load_layerwise(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """Objects to paged memory: `next`, each layer's objects sent, `next`."""
    steps = connector.batched_to_gpu(*starts_and_ends(spans), sync=True, **engine)
    run_steps(steps, [None, *objects, None])


def load_layerwise_in_two(connector: Any, objects: Any, spans: Spans, **engine: Any) -> None:
    """The first chunk, then the others with a mapping that starts at their first token."""
    for part in (slice(0, 1), slice(1, None)):
        objects_of_part = [layer[part] for layer in objects]
        load_layerwise(connector, objects_of_part, spans[part], **mapped_from(spans[part][0][0], **engine))


def starts_and_ends(spans: Spans) -> tuple[list[int], list[int]]:
    """The spans as the two lists that connectors take."""
    return [start for start, _ in spans], [end for _, end in spans]


def mapped_from(token: int, *, slot_mapping: torch.Tensor, **engine: Any) -> dict[str, Any]:
    """The arguments with a mapping whose first slot is that of `token`."""
    return {**engine, "slot_mapping": slot_mapping[token:], "offset": token}


def run_steps(steps: Generator[None, Any, None], sent: Sequence[Any]) -> None:
    """Send one value a step, None being `next`, and run to the end. RuntimeError when the generator yields another
    number of times."""
    for count, value in enumerate(sent):
        try:
            steps.send(value)
        except StopIteration:
            raise RuntimeError(f"the generator yielded {count} times, expected {len(sent)}") from None
    more = sum(1 for _ in steps)
    if more:
        raise RuntimeError(f"the generator yielded {len(sent) + more} times, expected {len(sent)}")


#: name -> how the demo drives it. V2 shows the whole table: a layout of no engine, or of another, it takes by name.
CONNECTORS: dict[str, DemoConnector] = {
    "VLLMPagedMemGPUConnectorV2": replace(whole_model(VLLMPagedMemGPUConnectorV2), accepts=lambda layout: True),
    "VLLMPagedMemGPUConnectorV3": grouped(VLLMPagedMemGPUConnectorV3),
    "VLLMPagedMemLayerwiseGPUConnector": layerwise(VLLMPagedMemLayerwiseGPUConnector),
    "VLLMBufferLayerwiseGPUConnector": blending(VLLMBufferLayerwiseGPUConnector),
    "SGLangGPUConnector": replace(whole_model(SGLangGPUConnector), load=load_whole_in_two),
    "SGLangLayerwiseGPUConnector": replace(layerwise(SGLangLayerwiseGPUConnector), load=load_layerwise_in_two),
}


def find_connectors(name: str) -> dict[str, DemoConnector]:
    """The record called `name`, or with ALL every one; ArgumentError lists the known names."""
    if name == ALL:
        return dict(CONNECTORS)
    if name not in CONNECTORS:
        known = ", ".join([*CONNECTORS, ALL])
        raise ArgumentError(f"connector: {name!r} is unknown to the demo; known: {known}")
    return {name: CONNECTORS[name]}
