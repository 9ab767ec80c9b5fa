"""How the demo drives connectors: steps, chunks, groups, threads, and the raw lines of the mixed row.

Whether a connector is right is in `test_demo_connectors.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from demo_rows import FLAT, PER_LAYER, demo_one, sglang, sglang_layerwise
from lmcache_ref.connectors import SGLangGPUConnector, SGLangLayerwiseGPUConnector, VLLMPagedMemGPUConnectorV3
from lmcache_ref.demo import CONNECTORS, connectors, model, run_demo, trip
from lmcache_ref.demo.raw import mixed_raw


@pytest.mark.parametrize(("sent", "yields"), [(5, 4), (5, 6), (1, 0), (1, 3)])
def test_steps_are_counted(sent, yields):
    def steps():
        for _ in range(yields):
            yield

    with pytest.raises(RuntimeError, match=f"yielded {yields} times, expected {sent}"):
        connectors.run_steps(steps(), [None] * sent)


def test_steps_send_in_order_and_run_to_the_end():
    seen = []

    def steps():
        for _ in range(3):
            seen.append((yield))
        seen.append("end")

    connectors.run_steps(steps(), [None, "layer 0", "layer 1"])
    assert seen == ["layer 0", "layer 1", None, "end"]


@pytest.mark.parametrize(
    ("record", "base"), [(sglang, SGLangGPUConnector), (sglang_layerwise, SGLangLayerwiseGPUConnector)]
)
def test_sglang_loads_the_later_chunks_by_a_partial_mapping(monkeypatch, record, base):
    calls = []

    class Listens(base):
        def batched_to_gpu(self, *args, **kwargs):
            calls.append((*args[-2:], kwargs["offset"], len(kwargs["slot_mapping"]), kwargs.get("sync")))
            return super().batched_to_gpu(*args, **kwargs)

    monkeypatch.setitem(CONNECTORS, "Listens", record(Listens))
    assert demo_one(FLAT, "Listens").ok
    sync = True if record is sglang_layerwise else None
    first, others = ([0], [32], 0, 100, sync), ([32, 64, 96], [64, 96, 100], 32, 68, sync)
    assert calls == [first, others] * (1 + 1 + trip.MORE_TIMES)  # the control, for good, for the clock


def test_the_mixed_model_has_two_groups_and_the_others_one(monkeypatch):
    seen = []

    class Listens(VLLMPagedMemGPUConnectorV3):
        def read_engine(self, kvcaches):
            groups = super().read_engine(kvcaches)
            seen.append([(group.layers.layer_indices, group.layers.BS) for group in groups])
            return groups

    monkeypatch.setitem(CONNECTORS, "Listens", connectors.grouped(Listens))
    assert [result.ok for result in run_demo(["mixed", PER_LAYER], "Listens")] == [True, True]
    assert seen == [[((0, 2), 16), ((1, 3), 8)], [((0, 1, 2, 3), 16)]]


def test_the_mixed_raw_lines_against_numbers_written_by_hand():
    raw = mixed_raw(NL=2, NB=3, BS=4, NH=2, HS=2)
    kv = raw.allocate(0, torch.int64, "cpu")
    assert [tuple(layer.shape) for layer in kv] == [(2, 3, 4, 2, 2), (6, 2, 2, 2, 2)]
    for layer in kv:
        layer.copy_(torch.arange(layer.numel()).view(layer.shape))
    assert raw.row(kv, 0, 1, 6).tolist() == [[72, 73], [74, 75]]  # 1*48 + 1*16 + 2*4
    assert raw.row(kv, 1, 1, 7).tolist() == [[60, 61], [62, 63]]  # 3*16 + 1*8 + 1*4
    places = list(itertools.product(range(2), range(2), range(12)))
    for place in places:
        raw.row(kv, *place)[:] = -1
    assert all(bool((layer == -1).all()) for layer in kv)


@pytest.mark.parametrize("connector", ["VLLMPagedMemGPUConnectorV2", "VLLMPagedMemLayerwiseGPUConnector"])
def test_connectors_have_the_threads_that_the_caller_has(monkeypatch, connector):
    seen = []
    record = CONNECTORS[connector]

    def load(*args, **kwargs):
        seen.append(torch.get_num_threads())
        record.load(*args, **kwargs)

    monkeypatch.setitem(CONNECTORS, "Listens", connectors.replace(record, load=load))
    with model.threads(3):
        assert demo_one(PER_LAYER, "Listens").ok
        assert torch.get_num_threads() == 3
    assert set(seen) == {3} and len(seen) == 2 + trip.MORE_TIMES
