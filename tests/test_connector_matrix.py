"""Every connector x every layout its engine hands out x chunk pattern x staging, storing and loading, and the skipped prefix.

Whole buffers are compared, engine and pool, what must stay included. What is expected comes from `drive.py`. Staging is
the connector's own on the reference; everything else runs on the backend that is asked for.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from drive import CONNECTORS, Bench, Spans, accepted_layouts
from helpers import assert_same
from lmcache_ref.backends import register_backend, unregister_backend, use_backend
from lmcache_ref.rope import rerotate
from lmcache_ref.transfer import reference_gather, reference_scatter

PATTERNS = {
    "aligned": [(0, 4), (4, 8), (8, 12)],
    "ragged": [(0, 8), (8, 16), (16, 19)],
    "gaps": [(1, 5), (7, 8), (12, 18)],
    "descending": [(12, 18), (7, 8), (1, 5)],
    "one-token": [(6, 7)],
    "no-token": [(3, 3)],
    "no-chunk": [],
}
#: `vllm_cached_tokens`: not given, none, within a chunk, between two, more than there are
SKIPS = (None, 0, 3, 8, 99)
#: NB*BS = 28 slots, each used once; token 2, 13 and 17 have none
SLOTS = [5, 0, -1, 27, 11, 2, 19, 8, 1, 26, 14, 3, 22, -7, 9, 4, 20, -1, 13, 7]

CASES = [
    (name, layout, use_gpu, pattern)
    for name, driven in CONNECTORS.items()
    for layout in accepted_layouts(name)
    for use_gpu in ([True] if driven.blends else [False, True])
    for pattern in PATTERNS
    if not (driven.blends and pattern == "descending")
]


def test_there_are_as_many_cases_as_there_should_be():
    """VLLM 16 rows and 3 permuted views; SGLang 8; TensorRT-LLM 2; the mock's 2. The buffer connector: no MLA, always
    staged, no descending chunks."""
    rows = {
        "V2": 19,
        "V3": 19,
        "layerwise": 19,
        "buffer": 18,
        "sglang": 8,
        "sglang-layerwise": 8,
        "trtllm": 2,
        "mock": 2,
    }
    assert {name: len(accepted_layouts(name)) for name in CONNECTORS} == rows
    assert len(CASES) == (19 * 3 + 8 * 2 + 2 + 2) * 2 * 7 + 18 * 6
    assert len({case_id(*case) for case in CASES}) == len(CASES)


def case_id(name, layout, use_gpu, pattern):
    return f"{name}-{layout.name}-{'staged' if use_gpu else 'direct'}-{pattern}"


@pytest.fixture(autouse=True)
def the_connector_stages(request):
    """Where a case is staged, by the connector: a backend may bring its own staging, the reference does not."""
    callspec = getattr(request.node, "callspec", None)
    with use_backend("reference") if callspec and callspec.params.get("use_gpu") else nullcontext():
        yield


@pytest.mark.parametrize(("name", "layout", "use_gpu", "pattern"), CASES, ids=[case_id(*case) for case in CASES])
def test_store_and_load(name, layout, use_gpu, pattern):
    store_and_load(Bench(name, layout, use_gpu=use_gpu), PATTERNS[pattern])


def store_and_load(bench: Bench, spans: Spans) -> None:
    """Store the spans and load them under every skip; whole buffers compared each time."""
    slots, objects = torch.tensor(SLOTS), bench.allocate(spans)
    cache, nothing = bench.cache_values(), bench.request_values(len(SLOTS)).fill_(bench.untouched_cache().view(-1)[0])
    bench.put_engine(cache)
    bench.store(objects, spans, slots)
    stored = bench.stored(cache, nothing, spans, SLOTS)
    assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, spans), "the pool after a store")
    compare_engine(bench, cache, "after a store")
    assert all(obj.metadata.fmt == bench.fmt for row in objects for obj in row)

    values, blank = bench.request_values(len(SLOTS)), bench.untouched_cache()
    bench.put_objects(objects, values, spans)
    for skip in SKIPS:
        bench.put_engine(blank)
        bench.load(objects, spans, slots, **({} if skip is None else {"vllm_cached_tokens": skip}))
        compare_engine(bench, bench.loaded(blank, values, spans, SLOTS, skip or 0), f"after a load, skip {skip}")
    assert_same(bench.allocator.pool, bench.pool_holding(objects, values, spans), "the pool after loads")

    bench.connector.reap()
    assert bench.connector.buffers.in_use == 0
    assert all(obj.get_ref_count() == 1 for row in objects for obj in row)


def compare_engine(bench: Bench, logical: torch.Tensor, when: str) -> None:
    __tracebackhide__ = True
    for number, (flat, wanted) in enumerate(zip(bench.engine, bench.engine_holding(logical), strict=True)):
        assert_same(flat, wanted, f"the engine's buffer {number} {when}")


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name != "mock"])
@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
def test_objects_of_one_call_may_be_fp8_or_its_storage(name, use_gpu):
    """Every code survives, whichever dtype comes first."""
    fp8, raw = torch.float8_e4m3fn, torch.uint8
    spans = PATTERNS["aligned"][:2]
    for of_cache, of_objects in ((fp8, (fp8, raw)), (fp8, (raw, fp8)), (raw, (raw, fp8)), (raw, (fp8, raw))):
        bench = Bench(name, use_gpu=use_gpu, dtype=of_cache)
        objects = bench.allocate(spans)
        for row in objects:
            for obj, dtype in zip(row, of_objects, strict=True):
                obj.metadata.dtypes = [dtype]
        cache, blank = bench.cache_values(), bench.request_values(len(SLOTS)).fill_(bench.untouched_cache().view(-1)[0])
        bench.put_engine(cache)
        bench.store(objects, spans, torch.tensor(SLOTS))
        stored = bench.stored(cache, blank, spans, SLOTS)
        assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, spans), "the pool after a store")
        bench.put_engine(bench.untouched_cache())
        bench.load(objects, spans, torch.tensor(SLOTS))
        compare_engine(bench, bench.loaded(bench.untouched_cache(), stored, spans, SLOTS), "after a load")


@pytest.mark.parametrize("name", ["V2", "V3"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_model_decides_which_axis_of_one_pool_is_the_layers(name, order):
    """An engine that states only how heads and tokens stand; the connector knows NL and D from the metadata."""
    kv_layout = "HND" if order.index("H") < order.index("N") else "NHD"
    bench = Bench(name, order, layout_hints={"kv_layout": kv_layout})
    assert bench.layout.row.name == order
    cache, spans = bench.cache_values(), PATTERNS["gaps"]
    bench.put_engine(cache)
    objects = bench.allocate(spans)
    bench.store(objects, spans, torch.tensor(SLOTS))
    blank = bench.request_values(len(SLOTS)).fill_(bench.untouched_cache().view(-1)[0])
    stored = bench.stored(cache, blank, spans, SLOTS)
    assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, spans), "the pool")


# A test of the test: a connector that goes wrong is seen


class Broken:
    """The reference with one fault."""

    gather, rerotate = staticmethod(reference_gather), staticmethod(rerotate)

    def __init__(self, fault: str):
        self.fault = fault

    def scatter(self, plan):
        changes = {
            "one slot off": {"slots": torch.where(plan.slots < 0, plan.slots, (plan.slots + 1) % plan.cache.num_slots)},
            "a layer twice": {"planes": (plan.planes[0], *plan.planes[:-1])},
            "beyond the prefix": {"skip_prefix_n_tokens": 0},
            "negative slots too": {"slots": torch.where(plan.slots == -7, 23, plan.slots)},
            "into the pool": {},
        }
        assert len(changes) == 5
        if self.fault == "into the pool":
            plan.spans[0].chunk[..., -1].zero_()
        return reference_scatter(replace(plan, **changes[self.fault]))


@pytest.mark.parametrize(
    "fault", ["one slot off", "a layer twice", "beyond the prefix", "negative slots too", "into the pool"]
)
def test_a_wrong_connector_is_seen(fault):
    register_backend("broken", Broken(fault))
    try:
        with use_backend("broken"), pytest.raises(AssertionError, match=r"the engine.s buffer|the pool after"):
            test_store_and_load("V2", accepted_layouts("V2")[0], False, "ragged")
    finally:
        unregister_backend("broken")
