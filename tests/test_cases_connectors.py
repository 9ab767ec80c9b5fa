"""Cases from the field that concern connectors: prefixes, chunks, mappings, hints, lists that change.

Each under its number in the list of cases. 9 and 10 are in `test_layer_groups.py`, 24 and 26 in `test_generators.py`, 37 in
`test_ordering.py`, 28 and 29 in `test_blend.py`, those on a GPU in `test_connectors_gpu.py`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drive import CONNECTORS, LAYERWISE, Bench, Sizes, accepted_layouts
from helpers import addressed, assert_same
from lmcache_ref.errors import ArgumentError, ChunkError
from lmcache_ref.metadata import LMCacheMetadata
from steps import Open

STAGING = [
    (name, use_gpu) for name, driven in CONNECTORS.items() for use_gpu in ([True] if driven.blends else [False, True])
]
every_connector = pytest.mark.parametrize(
    ("name", "use_gpu"), STAGING, ids=[f"{name}-{'staged' if use_gpu else 'direct'}" for name, use_gpu in STAGING]
)


def sentinels(bench: Bench, tokens: int) -> torch.Tensor:
    """A request whose objects nobody has written."""
    return bench.request_values(tokens).fill_(bench.untouched_cache().view(-1)[0])


# Prefixes, chunks, mappings


@every_connector
@pytest.mark.parametrize("cached", [0, 8, 9, 12, 15, 16, 20])
def test_case_14_prefix_overlap(name, use_gpu, cached):
    """An object of tokens 8..15; slots of tokens below `cached` keep the sentinel, past the end nothing is written."""
    slots = [11, 3, 0, 27, 14, 9, 2, 22, 7, 1, 26, 13, 19, 5, 24, 6]
    bench = Bench(name, use_gpu=use_gpu, sizes=Sizes(CHUNK=8))
    spans = [(8, 16)]
    objects, values = bench.allocate(spans), bench.request_values(16)
    bench.put_objects(objects, values, spans)
    bench.load(objects, spans, torch.tensor(slots), vllm_cached_tokens=cached)
    written = {slots[token] for token in range(max(8, cached), 16)}
    blank = bench.untouched_cache()
    expected = bench.loaded(blank, values, spans, slots, cached)
    assert {s for s in range(28) if not torch.equal(expected[:, :, s], blank[:, :, s])} == written
    for flat, wanted in zip(bench.engine, bench.engine_holding(expected), strict=True):
        assert_same(flat, wanted, f"the engine, {cached} cached")


@pytest.mark.parametrize("name", ["layerwise", "sglang-layerwise"])
def test_case_16_with_and_without_a_buffer_the_result_is_the_same(name):
    spans, slots = [(0, 4), (4, 8), (8, 11)], torch.tensor([5, 0, 9, 27, 11, 2, 19, 8, 1, 26, 14])
    results = []
    for use_gpu in (False, True):
        bench = Bench(name, use_gpu=use_gpu)
        objects = bench.allocate(spans)
        bench.put_engine(bench.cache_values())
        bench.store(objects, spans, slots)
        bench.put_engine(bench.untouched_cache())
        bench.load(objects, spans, slots)
        results.append((bench.allocator.pool, bench.engine[0]))
    assert_same(results[0][0], results[1][0], "the pools")
    assert_same(results[0][1], results[1][1], "the engines")


SGLANG = [(name, layout) for name in ("sglang", "sglang-layerwise") for layout in accepted_layouts(name)]


@pytest.mark.parametrize(("name", "layout"), SGLANG, ids=[f"{name}-{layout.name}" for name, layout in SGLANG])
@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
def test_case_17_a_partial_mapping(name, layout, use_gpu):
    """T = 8, offset 2, mapping 20..25: token 2 goes to slot 20 ... token 7 to slot 25."""
    bench = Bench(name, layout, use_gpu=use_gpu)
    spans, slots = [(2, 4), (4, 6), (6, 8)], [-1, -1, 20, 21, 22, 23, 24, 25]
    objects, values = bench.allocate(spans), bench.request_values(8)
    bench.put_objects(objects, values, spans)
    partial = torch.arange(20, 26)
    for cached in (0, 2, 3, 7, 9):
        bench.put_engine(bench.untouched_cache())
        bench.load(objects, spans, partial, offset=2, vllm_cached_tokens=cached)
        wanted = bench.engine_holding(bench.loaded(bench.untouched_cache(), values, spans, slots, cached))
        assert_same(bench.engine[0], wanted[0], f"the engine, {cached} cached")

    cache = bench.cache_values()
    bench.put_engine(cache)
    bench.store(objects, spans, torch.tensor(slots), offset=2)  # storing has the full mapping, whatever offset says
    stored = bench.stored(cache, values, spans, slots)
    assert_same(bench.allocator.pool, bench.pool_holding(objects, stored, spans), "the pool")


@pytest.mark.parametrize("name", ["sglang", "sglang-layerwise"])
def test_case_17_what_a_partial_mapping_cannot_mean(name):
    bench = Bench(name)
    refused = {
        "starts before it": (
            [(0, 2)],
            2,
            ChunkError,
            r"\[0, 2\) is outside slot_mapping, which covers tokens \[2, 8\)",
        ),
        "straddles it": ([(1, 4)], 2, ChunkError, r"\[1, 4\) is outside"),
        "beyond it": ([(6, 9)], 2, ChunkError, r"\[6, 9\) is outside"),
        "negative": ([(2, 4)], -1, ArgumentError, "offset must be an int >= 0, got -1"),
        "no number": ([(2, 4)], "2", ArgumentError, "offset must be an int >= 0, got '2'"),
    }
    for what, (spans, offset, error, message) in refused.items():
        objects = bench.allocate(spans)
        bench.put_objects(objects, bench.request_values(9), spans)
        with pytest.raises(error, match=message):
            bench.load(objects, spans, torch.arange(20, 26), offset=offset)
        assert_same(bench.engine[0], bench.engine_holding(bench.untouched_cache())[0], what)
    assert issubclass(ChunkError, ValueError) and issubclass(ArgumentError, ValueError)


@every_connector
@pytest.mark.parametrize("spans", [[], [(0, 0)], [(3, 3), (9, 9)]], ids=str)
def test_case_19_nothing_to_do_is_nothing_done(name, use_gpu, spans):
    """All yields come (`store` and `load` count them); also with an empty mapping, and without one slot in it."""
    bench = Bench(name, use_gpu=use_gpu)
    for mapping in ([], [5, 7, 9], [-1] * 9):
        if spans and spans[-1][1] > len(mapping):
            continue
        objects = bench.allocate(spans)
        before = bench.allocator.pool.clone()
        bench.store(objects, spans, torch.tensor(mapping, dtype=torch.int64))
        bench.load(objects, spans, torch.tensor(mapping, dtype=torch.int64))
        assert_same(bench.allocator.pool, before, "the pool")
        for flat, wanted in zip(bench.engine, bench.engine_holding(bench.untouched_cache()), strict=True):
            assert_same(flat, wanted, "the engine")


# Calls after one another


@every_connector
def test_case_22_stores_and_loads_of_two_requests_alternate(name, use_gpu):
    """Four rounds; each loads what the other request stored in the round before, at the same tokens."""
    bench = Bench(name, use_gpu=use_gpu)
    spans = [(0, 3), (3, 5)]
    mappings = [[5, 0, 9, 27, 11], [2, 19, 8, 1, 26]]
    cache = bench.cache_values()
    bench.put_engine(cache)
    objects = [bench.allocate(spans), bench.allocate(spans)]
    held = [None, None]
    for turn in range(8):
        mine = turn % 2
        bench.store(objects[mine], spans, torch.tensor(mappings[mine]))
        held[mine] = bench.stored(cache, sentinels(bench, 5), spans, mappings[mine])
        if turn:
            bench.load(objects[1 - mine], spans, torch.tensor(mappings[mine]))
            cache = bench.loaded(cache, held[1 - mine], spans, mappings[mine])
    for flat, wanted in zip(bench.engine, bench.engine_holding(cache), strict=True):
        assert_same(flat, wanted, "the engine")


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name != "mock"])
def test_case_23_the_newest_list_of_caches_is_used(name):
    """Given to the call or to `initialize_kvcaches_ptr`, left out afterwards, and the first list once more."""
    bench, spans, slots = Bench(name), [(0, 3)], torch.tensor([5, 0, 9])
    first, first_flat = bench.kvcaches, bench.engine[0]
    (second_flat,), second = bench._engine()
    objects, values = bench.allocate(spans), bench.request_values(3)
    bench.put_objects(objects, values, spans)
    loaded = bench.engine_holding(bench.loaded(bench.untouched_cache(), values, spans, slots.tolist()))[0]
    blank = bench.engine_holding(bench.untouched_cache())[0]
    use, leave = (lambda k: {"kvcaches": k}), {"kvcaches": None}
    turns = [(use(first), 0), (use(second), 1), (leave, 1), (use(first), 0), (leave, 0)]
    for kwargs, which in turns:
        first_flat.copy_(blank)
        second_flat.copy_(blank)
        bench.load(objects, spans, slots, **kwargs)
        assert_same((first_flat, second_flat)[which], loaded, "the list that was given last")
        assert_same((first_flat, second_flat)[1 - which], blank, "the other list")
    bench.connector.initialize_kvcaches_ptr(kvcaches=second)
    bench.connector.initialize_kvcaches_ptr()
    bench.load(objects, spans, slots, kvcaches=None)
    assert_same(second_flat, loaded, "the list given to initialize_kvcaches_ptr")


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name != "mock"])
def test_without_any_caches_the_argument_is_named(name):
    bench = Bench(name)
    for missing in ["kvcaches", "slot_mapping", *(["sync"] if name in ("layerwise", "sglang-layerwise") else [])]:
        objects = bench.allocate([(0, 1)])
        bench.put_objects(objects, bench.request_values(1), [(0, 1)])
        for call in (bench.store, bench.load):
            with pytest.raises(ValueError, match=f"{missing} is missing"):
                call(objects, [(0, 1)], torch.tensor([3]), **{missing: None})


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("kind", ["store", "load"])
def test_case_27_more_calls_than_layers_do_nothing(name, kind):
    bench = Bench(name, sizes=Sizes(NH=3, HS=4))
    opened = Open(bench, kind, [(1, 3)])
    opened.finish()
    bench.connector.reap()
    never = Open(bench, kind, [(1, 3)])
    pool, engine = bench.allocator.pool.clone(), bench.engine[0].clone()
    for _ in range(2):
        with pytest.raises(StopIteration):
            opened.generator.send(opened.objects[0]) if kind == "load" else next(opened.generator)
        opened.generator.close()
    never.generator.close()
    assert_same(bench.allocator.pool, pool, "the pool")
    assert_same(bench.engine[0], engine, "the engine")
    assert bench.connector.buffers.in_use == 0


# Hints


@pytest.mark.parametrize("name", ["V2", "V3", "layerwise", "buffer"])
def test_case_38_one_head_behind_hnd_and_two_heads_fused(name):
    """`[2, NB, 16, 1, 128]` with HND and D = 128 has BS = 16, NH = 1; fused `[NB, 2, 16, 128]` with D = 128 has NH = 2,
    BS = 16, HS = 64."""
    plain = [addressed(2 * 3 * 16 * 128, torch.bfloat16, 900 * i).view(2, 3, 16, 1, 128) for i in range(2)]
    fused = [addressed(3 * 2 * 16 * 128, torch.bfloat16, 700 * i).view(3, 2, 16, 128) for i in range(2)]
    slots = [0, 17, 47, 16, 3]
    rows = {
        "plain": torch.stack([layer.flatten(1, 2)[:, slots].flatten(2) for layer in plain], 1),
        "fused": torch.stack(
            [
                torch.stack([layer[s // 16, :, s % 16].view(2, 2, 64).transpose(0, 1).flatten(1) for s in slots], 1)
                for layer in fused
            ],
            1,
        ),
    }
    heads = {"plain": (1, 128), "fused": (2, 64)}
    for (what, layers), hints in itertools.product((("plain", plain), ("fused", fused)), ({"kv_layout": "HND"}, {})):
        if what == "plain" and not hints:
            continue
        shape = (2, 2, 256, *heads[what])
        bench = Bench(name, sizes=Sizes(NL=2, NH=heads[what][0], HS=heads[what][1]))
        bench.connector = CONNECTORS[name].make.from_metadata(
            LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, shape),
            use_gpu=name == "buffer",
            device="cpu",
            layout_hints=hints,
        )
        bench.kvcaches = layers
        objects = bench.allocate([(0, 5)])
        bench.store(objects, [(0, 5)], torch.tensor(slots))
        logical = rows[what].unflatten(-1, heads[what])
        wanted = bench.pool_holding(objects, logical.view(torch.int16), [(0, 5)])
        assert_same(bench.allocator.pool, wanted, f"{what} with {hints}")


@every_connector
def test_one_thread_stores_while_another_loads(name, use_gpu):
    """Two requests without a common slot; each thread's results are right every time, and nothing is held afterwards."""
    bench = Bench(name, use_gpu=use_gpu)
    cache, mapping = bench.cache_values(), {"store": [5, 0, 9, 27, 11, 2], "load": [1, 7, 3, 14, 20, 8]}
    spans, values = [(0, 3), (4, 6)], bench.request_values(6)
    bench.put_engine(cache)
    loaded, stored = bench.allocate(spans), bench.allocate(spans)
    bench.put_objects(loaded, values, spans)
    wanted = bench.pieces(bench.stored(cache, torch.zeros_like(values), spans, mapping["store"]), spans)
    wrong, barrier = [], threading.Barrier(2)

    def store() -> None:
        barrier.wait()
        for turn in range(15):
            for row in stored:
                for obj in row:
                    obj.raw_tensor.zero_()
            bench.store(stored, spans, torch.tensor(mapping["store"]))
            for row, pieces in zip(stored, wanted, strict=True):
                for obj, piece in zip(row, pieces, strict=True):
                    if not torch.equal(obj.tensor.view(piece.dtype), piece):
                        wrong.append(f"store {turn}")

    def load() -> None:
        barrier.wait()
        for _ in range(15):
            bench.load(loaded, spans, torch.tensor(mapping["load"]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(store), pool.submit(load)]:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    expected = bench.engine_holding(bench.loaded(cache, values, spans, mapping["load"]))
    for flat, whole in zip(bench.engine, expected, strict=True):
        assert_same(flat, whole, "the engine")
    bench.connector.reap()
    assert bench.connector.buffers.in_use == 0
    assert {obj.get_ref_count() for row in (*stored, *loaded) for obj in row} == {1}
