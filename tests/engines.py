"""Engines for the cases from the field: one flat buffer, its tensors, and the place of one token in plain indexing.

`stored` and `loaded` move through `VLLMPagedMemGPUConnectorV2` and compare whole buffers. No test lives here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from helpers import addressed, assert_same, untouched
from lmcache_ref.backends import use_backend
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2
from lmcache_ref.memory import HostMemoryAllocator, MemoryObj

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(params=["direct", "staged", "staged by the connector"])
def use_gpu(request) -> Iterator[bool]:
    """Whether to stage; a backend may bring its own staging, which the reference does not."""
    pinned = use_backend("reference") if request.param == "staged by the connector" else contextlib.nullcontext()
    with pinned:
        yield request.param != "direct"


class Engine(NamedTuple):
    """tensors(flat): what the engine hands out of its buffer. token(tensors, layer, kv, slot): the [NH, HS] of one token."""

    num_elements: int
    tensors: Callable[[torch.Tensor], Any]
    token: Callable[[Any, int, int, int], torch.Tensor]
    NL: int
    D: int
    mla: bool = False
    hints: dict[str, Any] | None = None

    def connector(self, dtype: torch.dtype, use_gpu: bool = False, device: str = "cpu", chunk_size: int = 4, **hints):
        return VLLMPagedMemGPUConnectorV2(
            self.D,
            self.NL,
            use_gpu,
            chunk_size=chunk_size,
            dtype=dtype,
            device=device,
            use_mla=self.mla,
            layout_hints={**(self.hints or {}), **hints},
        )


def new_object(connector: VLLMPagedMemGPUConnectorV2, tokens: int, dtype: torch.dtype) -> MemoryObj:
    """An object of a pool of its own, full of sentinels."""
    shape = connector.get_shape(tokens)
    obj = HostMemoryAllocator(max(16, shape.numel() * dtype.itemsize)).allocate(shape, dtype, connector.fmt)
    obj.raw_tensor.fill_(0xEE)
    return obj


def stored(engine: Engine, connector, flat: torch.Tensor, slots: list[int], dtype: torch.dtype) -> MemoryObj:
    """The object that `from_gpu` makes of the tokens of `slots`, compared with plain indexing."""
    obj, before = new_object(connector, len(slots), dtype), flat.clone()
    expected = untouched(obj.tensor.numel(), dtype).view(obj.tensor.shape)
    tensors = engine.tensors(flat)
    for layer, kv, (row, slot) in itertools.product(range(engine.NL), range(len(expected)), enumerate(slots)):
        if slot >= 0:
            expected[kv, layer, row] = engine.token(tensors, layer, kv, slot).reshape(-1).view(dtype).cpu()
    connector.from_gpu(obj, 0, len(slots), kvcaches=tensors, slot_mapping=torch.tensor(slots, dtype=torch.int64))
    assert_same(obj.tensor.reshape(-1), expected.reshape(-1), "the object")
    assert_same(flat, before, "the engine's memory, which storing only reads")
    assert obj.metadata.fmt is connector.fmt
    return obj


def loaded(engine: Engine, connector, obj: MemoryObj, slots: list[int], device: str, **given) -> torch.Tensor:
    """The engine's memory after `to_gpu` into sentinels, compared with plain indexing."""
    flat, expected = (untouched(engine.num_elements, connector.dtype).to(device) for _ in range(2))
    theirs, content = engine.tensors(expected), obj.tensor.view(connector.dtype).to(device)
    skip = given.get("vllm_cached_tokens", 0)
    for layer, kv, (row, slot) in itertools.product(range(engine.NL), range(len(content)), enumerate(slots)):
        if slot >= 0 and row >= skip:
            place = engine.token(theirs, layer, kv, slot)
            place[:] = content[kv, layer, row].view(place.shape)
    mapping = torch.tensor(slots, dtype=torch.int64)
    connector.to_gpu(obj, 0, len(slots), kvcaches=engine.tensors(flat), slot_mapping=mapping, **given)
    assert_same(flat, expected, "the engine's whole memory")
    return flat


def round_trip(
    engine: Engine, dtype=torch.float16, slots=(5, 0, 11, 2), use_gpu=False, device="cpu", **hints
) -> MemoryObj:
    """Store and load, both compared; the object."""
    connector = engine.connector(dtype, use_gpu, device, **hints)
    obj = stored(engine, connector, addressed(engine.num_elements, dtype).to(device), list(slots), dtype)
    loaded(engine, connector, obj, list(slots), device)
    return obj


def engine_of(NL, shape, order=None, hints=None, token=None, mla=False) -> Engine:
    """One tensor a layer: memory of `shape`, shown with its axes in `order`; `token` is where the tensor has one."""
    per_layer = torch.Size(shape).numel()

    def tensors(flat):
        layers = [flat[per_layer * i : per_layer * (i + 1)].view(shape) for i in range(NL)]
        return [layer.permute(order) if order else layer for layer in layers]

    probe = token(tensors(torch.empty(NL * per_layer, device="meta")), 0, 0, 0)
    return Engine(NL * per_layer, tensors, token, NL, probe.numel(), mla, hints)


def first(BS: int):
    """[2, NB, BS, NH, HS]."""
    return lambda kv, layer, k, slot: kv[layer][k, slot // BS, slot % BS]


def second(BS: int):
    """[NB, 2, BS, NH, HS]."""
    return lambda kv, layer, k, slot: kv[layer][slot // BS, k, slot % BS]
