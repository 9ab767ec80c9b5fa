"""Connectors that are broken on purpose: the demo shows each as broken, by an error that says where.

A control that changes nothing fails too.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from demo_rows import FLAT, FLAT_MLA, MLA, PER_LAYER, demo_one, sglang, sglang_layerwise
from lmcache_ref.connectors import (
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache_ref.demo import CONNECTORS, connectors, trip
from lmcache_ref.rope import RotarySpec


class V3SwapsOnStore(VLLMPagedMemGPUConnectorV3):
    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
        for obj in memory_objs:
            obj.tensor.copy_(obj.tensor.flip(0))


class V3ForgetsTheLastGroup(VLLMPagedMemGPUConnectorV3):
    """Right where there is one group."""

    def plans(self, *args, loading, **kwargs):
        plans = super().plans(*args, loading=loading, **kwargs)
        return plans[:-1] if loading and len(plans) > 1 else plans


class V3ExchangesGroups(VLLMPagedMemGPUConnectorV3):
    """Stores and loads, both wrong alike: the pages cannot show it."""

    def read_engine(self, kvcaches):
        return super().read_engine(kvcaches)[::-1]


def stores_zeros_in_the_last_layer(base):
    class StoresZerosInTheLastLayer(base):
        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
            yield from super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
            memory_objs[-1][-1].tensor.zero_()

    return StoresZerosInTheLastLayer


def loads_the_first_layer_everywhere(base):
    class LoadsTheFirstLayerEverywhere(base):
        def batched_to_gpu(self, starts, ends, **kwargs):
            steps = super().batched_to_gpu(starts, ends, **kwargs)
            next(steps)
            first = yield
            steps.send(first)
            for _ in range(self.num_layers - 1):
                yield
                steps.send(first)
            yield
            next(steps)
            yield

    return LoadsTheFirstLayerEverywhere


def yields_once_too_few(base):
    class YieldsOnceTooFew(base):
        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
            steps = super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
            yield from itertools.islice(steps, self.num_layers)
            next(steps)

    return YieldsOnceTooFew


def yields_once_too_often(base):
    class YieldsOnceTooOften(base):
        def batched_to_gpu(self, starts, ends, **kwargs):
            yield from super().batched_to_gpu(starts, ends, **kwargs)
            yield

    return YieldsOnceTooOften


class SGLangNextSlot(SGLangGPUConnector):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, *, slot_mapping, **kwargs):
        super().batched_to_gpu(memory_objs, starts, ends, slot_mapping=slot_mapping.roll(1), **kwargs)


class SGLangWithoutOffset(SGLangGPUConnector):
    def first_mapped_token(self, kwargs):
        return 0


class SGLangLayerwiseWithoutOffset(SGLangLayerwiseGPUConnector):
    def first_mapped_token(self, kwargs):
        return 0


class BlendsWithoutRotating(VLLMBufferLayerwiseGPUConnector):
    def _rotation(self, old, new):
        return None


class BlendsOnePositionOff(VLLMBufferLayerwiseGPUConnector):
    def _rotation(self, old, new):
        return super()._rotation(old, torch.where(old == new, new, new + 1))


class BlendsWithTheOtherPairing(VLLMBufferLayerwiseGPUConnector):
    def __init__(self, *args, rope, **options):
        super().__init__(*args, rope=RotarySpec(rope.cos_sin_cache, not rope.is_neox), **options)


class BlendsWithTheUnroundedTable(VLLMBufferLayerwiseGPUConnector):
    """Closer to the mathematics than the model is; a rounding or two away from its keys."""

    def __init__(self, *args, rope, **options):
        angles = torch.atan2(*rope.cos_sin_cache.float().chunk(2, dim=1)[::-1])
        super().__init__(*args, rope=RotarySpec(torch.cat((angles.cos(), angles.sin()), dim=1)), **options)


class BlendsWithAFullGap(VLLMBufferLayerwiseGPUConnector):
    def _rotate(self, call, buffer, rotation):
        super()._rotate(call, buffer, rotation)
        buffer[1, call.ends[0] - call.starts[0]] = 1


class BlendsTheValuesToo(VLLMBufferLayerwiseGPUConnector):
    def _rotation(self, old, new):
        self.moved = old, new
        return super()._rotation(old, new)

    def _rotate(self, call, buffer, rotation):
        super()._rotate(call, buffer, rotation)
        values = buffer[1].view(-1, call.cache.num_heads, call.cache.head_size)
        call.backend.rerotate(values, *self.moved, self.rope)


STORED, PAGES = "stored rows hold other bytes", "bytes of paged memory are not what the load should leave"
KEYS = "elements of moved keys are more than one rounding away"
LAST_ROWS = f"8 {STORED}, the first is layer 3, K, token 96"
OUTSIDE = "ChunkError: chunk 1: [64, 96) is outside slot_mapping, which covers tokens [0, 68)"
FEW, OFTEN = "yielded 4 times, expected 5", "yielded 7 times, expected 6"
L, B, S = VLLMPagedMemLayerwiseGPUConnector, VLLMBufferLayerwiseGPUConnector, SGLangLayerwiseGPUConnector
BROKEN = [
    (connectors.grouped, V3SwapsOnStore, PER_LAYER, STORED),
    (connectors.grouped, V3ForgetsTheLastGroup, "mixed", PAGES),
    (connectors.grouped, V3ExchangesGroups, "mixed", STORED),
    (connectors.layerwise, stores_zeros_in_the_last_layer(L), PER_LAYER, LAST_ROWS),
    (connectors.layerwise, loads_the_first_layer_everywhere(L), MLA, PAGES),
    (connectors.layerwise, yields_once_too_few(L), PER_LAYER, FEW),
    (connectors.layerwise, yields_once_too_often(L), PER_LAYER, OFTEN),
    (connectors.blending, stores_zeros_in_the_last_layer(B), PER_LAYER, STORED),
    (connectors.blending, loads_the_first_layer_everywhere(B), PER_LAYER, PAGES),
    (connectors.blending, yields_once_too_few(B), PER_LAYER, FEW),
    (connectors.blending, yields_once_too_often(B), PER_LAYER, OFTEN),
    (connectors.blending, BlendsWithoutRotating, "blend", KEYS),
    (connectors.blending, BlendsOnePositionOff, "blend", KEYS),
    (connectors.blending, BlendsWithTheOtherPairing, "blend", KEYS),
    (connectors.blending, BlendsWithTheUnroundedTable, "blend", KEYS),
    (connectors.blending, BlendsWithAFullGap, "blend", PAGES),
    (connectors.blending, BlendsTheValuesToo, "blend", PAGES),
    (sglang, SGLangNextSlot, FLAT, PAGES),
    (sglang, SGLangWithoutOffset, FLAT, OUTSIDE),
    (sglang_layerwise, stores_zeros_in_the_last_layer(S), FLAT_MLA, STORED),
    (sglang_layerwise, loads_the_first_layer_everywhere(S), FLAT, PAGES),
    (sglang_layerwise, SGLangLayerwiseWithoutOffset, FLAT, OUTSIDE),
    (sglang_layerwise, yields_once_too_few(S), FLAT, FEW),
]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "broken", "row", "error"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_connector_is_shown_as_broken(monkeypatch, record, broken, row, error):
    monkeypatch.setitem(CONNECTORS, "Broken", record(broken))
    result = demo_one(row, "Broken")
    assert not result.ok
    assert error in result.error


@pytest.mark.parametrize("broken", [V3ForgetsTheLastGroup, V3ExchangesGroups])
def test_only_the_mixed_row_shows_groups_gone_wrong(monkeypatch, broken):
    monkeypatch.setitem(CONNECTORS, "Broken", connectors.grouped(broken))
    assert demo_one(PER_LAYER, "Broken").ok


@pytest.mark.parametrize("broken", [BlendsWithoutRotating, BlendsOnePositionOff, BlendsTheValuesToo])
def test_only_the_blend_row_shows_rotation_gone_wrong(monkeypatch, broken):
    monkeypatch.setitem(CONNECTORS, "Broken", connectors.blending(broken))
    assert demo_one(PER_LAYER, "Broken").ok


@pytest.mark.parametrize(
    ("connector", "row", "error"),
    [
        ("SGLangLayerwiseGPUConnector", FLAT, "a flipped bit of a stored key changed no logit"),
        ("VLLMBufferLayerwiseGPUConnector", "blend", "a flipped bit of a stored key left all keys within one rounding"),
    ],
)
def test_a_control_that_changes_nothing_fails(monkeypatch, connector, row, error):
    monkeypatch.setattr(trip, "flip_sign_of_greatest", lambda row: None)
    result = demo_one(row, connector)
    assert (result.ok, result.control_differs, result.error) == (False, False, error)
