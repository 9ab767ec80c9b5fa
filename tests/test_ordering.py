"""When the connectors wait: on a backend whose transfers happen as late as they may (`deferred.py`).

Storing calls return final bytes, loads are seen by later work of the stream, objects may go as soon as a call returns
(case 37), buffers are used in an order that no device can upset. Ways out of generators: `test_generators.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from deferred import deferred
from drive import CONNECTORS, LAYERWISE, Bench, Sizes
from helpers import assert_same
from lmcache_ref.backends import get_backend
from lmcache_ref.connectors.layerwise import LayerwiseCall
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rope import RotarySpec, rotary_table
from lmcache_ref.transfer import Transfer
from steps import REQUESTS, SLOTS, Open

WHOLE = [name for name in CONNECTORS if name not in LAYERWISE]
#: (use_gpu, whether the backend stages): direct, staged by the connector, staged by the backend
STAGING = {"direct": (False, False), "staged": (True, False), "backend stages": (True, True)}
WAYS = [(name, how) for name in CONNECTORS for how in STAGING if name != "buffer" or how != "direct"]
SPANS = REQUESTS[0]


def ways(*names: str):
    chosen = [way for way in WAYS if way[0] in names]
    return pytest.mark.parametrize(("name", "how"), chosen, ids=[f"{name}-{how}" for name, how in chosen])


@contextmanager
def late(name: str, how: str, **options):
    """A bench whose engine holds addresses, and the backend it runs on."""
    bench = Bench(name, use_gpu=STAGING[how][0], sizes=Sizes(NH=3, HS=4), **options)
    cache = bench.cache_values()
    bench.put_engine(cache)
    with deferred(bench.allocator.pool, stages=STAGING[how][1]) as backend:
        yield bench, backend, cache


def scribble(bench: Bench) -> int:
    """Whoever gets the free memory of the pool writes to it. Returns how many bytes those were."""
    taken = []
    for size in (4096, 64):
        while (obj := bench.allocator.allocate([size], torch.uint8)) is not None:
            obj.raw_tensor.fill_(0x11)
            taken.append(obj)
    written = sum(obj.get_size() for obj in taken)
    bench.allocator.batched_free(taken)
    return written


def layer_is_final(bench: Bench, opened: Open, cache: torch.Tensor, layer: int) -> bool:
    """Whether the layer's objects hold what the cache held."""
    values = bench.stored(cache, opened.values.clone().fill_(bench.untouched_cache().view(-1)[0]), opened.spans, SLOTS)
    pieces = bench.pieces(values, opened.spans)[layer]
    return all(
        torch.equal(obj.tensor.view(piece.dtype), piece)
        for obj, piece in zip(opened.objects[layer], pieces, strict=True)
    )


def test_there_are_as_many_ways_as_there_should_be():
    assert len(WAYS) == 8 * 3 - 1 and len(WHOLE) == 5 and len(LAYERWISE) == 3


# Storing


@ways(*WHOLE)
def test_a_store_of_whole_chunks_returns_final_bytes_and_no_reference(name, how):
    with late(name, how) as (bench, backend, cache):
        objects = bench.allocate(SPANS)
        bench.store(objects, SPANS, torch.tensor(SLOTS))
        blank = bench.request_values(len(SLOTS)).fill_(bench.untouched_cache().view(-1)[0])
        wanted = bench.pool_holding(objects, bench.stored(cache, blank, SPANS, SLOTS), SPANS)
        assert_same(bench.allocator.pool, wanted, "the pool")
        assert [obj.get_ref_count() for obj in objects[0]] == [1, 1]
        assert backend.unordered == []


@ways(*WHOLE)
def test_all_chunks_are_one_call_of_the_backend(name, how):
    if how == "staged":
        return  # part by part through one buffer
    with late(name, how) as (bench, backend, _):
        objects = bench.allocate(SPANS)
        bench.store(objects, SPANS, torch.tensor(SLOTS))
        bench.load(objects, SPANS, torch.tensor(SLOTS))
        assert (backend.count("gather"), backend.count("scatter")) == (1, 1)


@ways(*LAYERWISE)
def test_a_synchronous_store_has_layer_i_after_yield_i_plus_1(name, how):
    with late(name, how) as (bench, backend, cache):
        opened = Open(bench, "store", SPANS, sync=True)
        for yields in range(1, bench.NL + 2):
            opened.step()
            assert all(layer_is_final(bench, opened, cache, layer) for layer in range(yields - 1))
        assert backend.unordered == [] and {obj.get_ref_count() for row in opened.objects for obj in row} == {1}


@ways(*LAYERWISE)
def test_a_store_without_sync_waits_at_its_last_step_only(name, how):
    with late(name, how) as (bench, backend, cache):
        opened = Open(bench, "store", SPANS, sync=False).run(bench.NL)
        if how != "staged":  # whose one buffer serves every part
            assert backend.count("synchronize") == backend.count("wait") == 0
            assert not layer_is_final(bench, opened, cache, 0)
        opened.step()
        assert all(layer_is_final(bench, opened, cache, layer) for layer in range(bench.NL))


@ways(*LAYERWISE)
def test_after_yield_i_the_copy_of_layer_i_is_under_way(name, how):
    with late(name, how) as (bench, backend, _):
        opened, per_layer = Open(bench, "store", SPANS), 2 if how == "staged" else 1
        for yields in range(1, bench.NL + 1):
            opened.step()
            assert backend.count("gather") == per_layer * yields


# Loading


@ways(*CONNECTORS)
def test_case_37_an_object_may_go_as_soon_as_the_call_returns(name, how):
    """Released and overwritten behind a busy device: the engine gets the old bytes."""
    with late(name, how) as (bench, backend, cache):
        opened = Open(bench, "load", SPANS) if bench.driven.per_layer else None
        if opened is None:
            objects, values = bench.allocate(SPANS), bench.request_values(len(SLOTS))
            bench.put_objects(objects, values, SPANS)
            bench.load(objects, SPANS, torch.tensor(SLOTS))
            for obj in objects[0]:
                obj.ref_count_down()
            assert scribble(bench) > 0
        else:
            values = opened.values
            opened.step()
            for row in opened.objects:
                opened.step()
                for obj in row:
                    obj.ref_count_down()
                assert scribble(bench) > 0
            opened.finish()
            scribble(bench)
        wanted = bench.engine_holding(bench.loaded(cache, values, SPANS, SLOTS))
        for number, flat in enumerate(bench.engine):
            assert_same(flat.clone(), wanted[number], f"the engine's buffer {number}")
        bench.connector.reap()
        assert bench.allocator.free_bytes == bench.allocator.total_bytes
        assert backend.unordered == []


@ways("layerwise", "sglang-layerwise")
def test_a_synchronous_load_has_layer_i_when_layer_i_plus_1_is_sent(name, how):
    """What later work of the stream sees: the whole buffer, layer by layer."""
    with late(name, how) as (bench, backend, cache):
        opened = Open(bench, "load", SPANS, sync=True).run(1)
        for sent in range(1, bench.NL + 2):
            opened.step()
            seen = bench.engine[0].clone()
            at_least = bench.engine_holding(opened.expected(cache, layers=sent - 1))[0]
            at_most = bench.engine_holding(opened.expected(cache, layers=min(sent, bench.NL)))[0]
            same = [torch.equal(seen.view(torch.int16), flat.view(torch.int16)) for flat in (at_least, at_most)]
            assert any(same), f"after {sent} layers"
        assert backend.unordered == []


@ways("layerwise", "sglang-layerwise")
def test_a_load_without_sync_waits_at_its_last_step_only(name, how):
    with late(name, how) as (bench, backend, cache):
        opened = Open(bench, "load", SPANS, sync=False).run(bench.NL + 1)
        if how != "staged":
            assert backend.count("wait") == backend.count("synchronize") == 0
            assert_same(bench.engine[0].clone(), bench.engine_holding(cache)[0], "the engine before the last step")
        opened.finish()
        assert_same(bench.engine[0].clone(), bench.engine_holding(opened.expected(cache))[0], "the engine")


@ways(*CONNECTORS)
def test_a_load_makes_no_host_wait_that_it_does_not_need(name, how):
    """The host waits for a transfer only where it reuses its own staging buffer."""
    with late(name, how) as (bench, backend, _):
        objects = bench.allocate(SPANS)
        bench.put_objects(objects, bench.request_values(len(SLOTS)), SPANS)
        bench.load(objects, SPANS, torch.tensor(SLOTS))
        assert backend.count("synchronize") == (0 if how != "staged" or name == "buffer" else backend.count("scatter"))


# The two buffers of a blending load


def blending(backend, bench, opened) -> list[str]:
    """The log in words: bring, write back, rotate, wait; transfers numbered by layer."""
    words, number = [], {"bring": 0, "write": 0, "rotate": 0}
    names = {}
    for what, one in backend.log:
        if what == "rerotate":
            kind = "rotate"
        elif what == "scatter":
            kind = "write" if one.plan.cache.num_slots == bench.num_slots else "bring"
        elif what == "wait":
            words.append(f"wait {names[id(one)]}")
            continue
        else:
            continue
        name = f"{kind} {number[kind]}"
        number[kind] += 1
        if one is not None:
            names[id(one)] = name
        words.append(name)
    return words


@pytest.mark.parametrize("double", [True, False])
def test_three_stages_in_order(double):
    rope = RotarySpec(rotary_table(64, 4))
    with late("buffer", "backend stages", use_double_buffer=double, rope=rope) as (bench, backend, _):
        opened = Open(bench, "load", SPANS)
        for row in opened.objects:
            for obj in row:
                obj.metadata.cached_positions = obj.metadata.cached_positions + 7
        steps = []
        for _ in range(opened.steps):
            before = len(blending(backend, bench, opened))
            opened.step()
            steps.append(blending(backend, bench, opened)[before:])
        ahead = {
            True: [["bring 1", "write 0", "wait bring 1", "wait write 0", "rotate 1"]],
            False: [["write 0", "wait write 0", "bring 1", "wait bring 1", "rotate 1"]],
        }[double]
        third = [[word.replace("1", "2").replace("0", "1") for word in step] for step in ahead]
        assert steps == [[], ["bring 0", "wait bring 0", "rotate 0"], *ahead, *third, ["write 2", "wait write 2"]]


def test_stage_one_of_the_next_layer_does_not_disturb_the_layer_being_edited():
    """While layer i is edited, its buffer and that of layer i+1 are different memory; the edit reaches the engine."""
    with late("buffer", "backend stages") as (bench, _, cache):
        opened = Open(bench, "load", SPANS).run(1)
        places, values = [], opened.values
        for layer in range(bench.NL):
            opened.step()
            keys, _ = bench.connector.get_kv(layer)
            places.append(keys.data_ptr())
            keys[1].view(torch.int16).fill_(77)
            values[0, layer, SPANS[0][0] + 1] = 77
        opened.finish()
        assert places[0] != places[1] and places[0] == places[2]
        assert_same(bench.engine[0].clone(), bench.engine_holding(opened.expected(cache))[0], "the engine")
        bench.connector.reap()
        assert {obj.get_ref_count() for row in opened.objects for obj in row} == {1}


@pytest.mark.parametrize("double", [True, False])
def test_a_connector_that_does_not_wait_is_seen(monkeypatch, double):
    """The test of these tests."""
    rope = RotarySpec(rotary_table(64, 4))
    with late("buffer", "backend stages", use_double_buffer=double, rope=rope) as (bench, _, _):
        opened = Open(bench, "load", SPANS)
        for obj in opened.objects[0]:
            obj.metadata.cached_positions = obj.metadata.cached_positions + 7
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=r"under way|same elements"):
            patch.setattr(LayerwiseCall, "settle", lambda self, how, keep=0: None)
            opened.run()
        opened.generator.close()


def test_what_is_under_way_is_asked_in_its_order_and_all_of_it_behind_a_wait_of_the_host():
    """A transfer that is done releases its objects at once where it is the oldest of its direction, and else when the host
    has waited, or somebody asks for all. Nobody is asked twice a call."""

    class Asked(Transfer):
        finished, times = False, 0

        def done(self) -> bool:
            self.times += 1
            return self.finished

    bench = Bench("layerwise", sizes=Sizes(NH=3, HS=4))
    connector, objects = bench.connector, [obj for row in bench.allocate(SPANS) for obj in row][:6]
    transfers = [Asked() for _ in objects]
    made = iter(transfers)
    backend = replace(get_backend("reference"), gather=lambda _: next(made), scatter=lambda _: next(made))
    cache = connector.kv_cache(bench.kwargs(torch.tensor(SLOTS)))
    for obj, operation in zip(objects, ["gather"] * 3 + ["scatter"] * 3, strict=True):
        plan = TransferPlan.build(cache, torch.tensor([1, 2]), [obj], fmt=bench.fmt, layers=0)
        connector.run(operation, plan, [obj], backend=backend)

    def held() -> list[int]:
        return [number for number, obj in enumerate(objects) if obj.get_ref_count() == 2]

    for transfer in transfers:
        transfer.times = 0
    for number in (1, 3, 4):
        transfers[number].finished = True
    connector.settle([transfers[1]], "wait")
    assert [transfer.times for transfer in transfers] == [0] * 6
    connector.reap(thorough=False)
    assert held() == [0, 1, 2, 5]
    assert [transfer.times for transfer in transfers] == [1, 0, 0, 1, 1, 1]
    connector.settle([transfers[1]], "synchronize")
    assert held() == [0, 2, 5]
    transfers[2].finished = True
    connector.reap(thorough=False)
    assert held() == [0, 2, 5]
    connector.reap()
    assert held() == [0, 5]
    transfers[0].finished = transfers[5].finished = True
    connector.reap(thorough=False)
    assert held() == []
