"""The generator protocol of the layerwise connectors: counts on every path, and every way out of a generator.

On a backend whose transfers happen late, so that a way out that forgets one is seen. When transfers must be ordered is
`test_ordering.py`; random walks over many generators are `test_generators_stateful.py`.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from deferred import deferred
from drive import LAYERWISE, Bench, Sizes
from helpers import assert_same
from lmcache_ref.backends import use_backend
from lmcache_ref.errors import LMCacheRefError
from lmcache_ref.memory import MemoryFormat
from steps import REQUESTS, SLOTS, Open, assert_nothing_is_left, assert_usable

KINDS = ("store", "load")
#: direct; staged by the connector; staged by the backend
STAGING = {"direct": (False, False), "staged": (True, False), "backend stages": (True, True)}
WAYS = [(name, how) for name in LAYERWISE for how in STAGING if name != "buffer" or how != "direct"]
every_way = pytest.mark.parametrize(("name", "how"), WAYS, ids=[f"{name}-{how}" for name, how in WAYS])


def make(name: str, how: str, NL: int = 3, **options) -> Bench:
    return Bench(name, use_gpu=STAGING[how][0], sizes=Sizes(NL=NL, NH=3, HS=4), **options)


def late(bench: Bench, how: str):
    return deferred(bench.allocator.pool, stages=STAGING[how][1])


def test_there_are_as_many_ways_as_there_should_be():
    assert len(WAYS) == 3 * 3 - 1


# Counts


@every_way
@pytest.mark.parametrize("NL", [1, 3])
@pytest.mark.parametrize("spans", [[], [(3, 3)], [(3, 3), (5, 5)], [(1, 3), (3, 3), (4, 6)]], ids=str)
@pytest.mark.parametrize("sync", [True, False])
def test_counts(name, how, NL, spans, sync):
    bench = make(name, how, NL)
    with late(bench, how) as backend:
        store, load = Open(bench, "store", spans, sync=sync), Open(bench, "load", spans, sync=sync)
        assert (store.steps, load.steps) == (NL + 1, NL + 2)
        store.finish()
        load.finish()
        backend.run_stream()
        bench.connector.reap()
        assert_nothing_is_left(store, load)


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("NL", [1, 3])
def test_without_chunks_there_is_nothing_to_send(name, NL):
    """`next` all the way, an empty list, or both; with chunks `next` in the place of `send` is an error."""
    for sent in (None, [], ()):
        bench = make(name, "staged", NL)
        generator = bench.connector.batched_to_gpu([], [], **bench.kwargs(torch.tensor(SLOTS)))
        next(generator)
        assert [generator.send(sent) for _ in range(NL + 1)] == [None] * (NL + 1)
        assert next(generator, "ended") == "ended"
    opened = Open(make(name, "staged", NL), "load", [(1, 3)]).run(1)
    with pytest.raises(LMCacheRefError, match="layer 0: memory_objs must be a list, got NoneType"):
        next(opened.generator)


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_that_is_filled_anew_between_two_layers(name, how, kind):
    """What a generator found at its first `next` is what it moves by."""
    bench = make(name, how)
    cache = bench.cache_values()
    bench.put_engine(cache)
    with late(bench, how) as backend:
        slots = torch.tensor(SLOTS)
        opened = Open(bench, kind, REQUESTS[0], mapping=slots)
        for obj in itertools.chain(*opened.objects if kind == "store" else []):
            obj.raw_tensor.zero_()
        opened.run(1)
        slots.copy_(slots.flip(0))
        opened.finish()
        backend.run_stream()
    if kind == "load":
        assert_same(bench.engine[0], bench.engine_holding(opened.expected(cache))[0], "the engine")
    else:
        blank = bench.request_values(len(SLOTS)).fill_(0)
        stored = bench.stored(cache, blank, REQUESTS[0], SLOTS)
        for row, pieces in zip(opened.objects, bench.pieces(stored, REQUESTS[0]), strict=True):
            for obj, piece in zip(row, pieces, strict=True):
                assert_same(obj.tensor.view(piece.dtype), piece, "an object")


# Every way out


def leave(opened: Open, way: str) -> None:
    """Leave an open generator; what must come out of it is checked."""
    if way == "close":
        opened.generator.close()
    elif way == "throw":
        with pytest.raises(ZeroDivisionError):
            opened.generator.throw(ZeroDivisionError())
    else:
        del opened.generator  # nobody holds it any more


@every_way
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["close", "throw", "forget"])
@pytest.mark.parametrize("sync", [True, False])
def test_left_at_every_yield(name, how, kind, way, sync):
    for steps in range(6 if kind == "load" else 5):
        bench = make(name, how)
        with late(bench, how) as backend:
            opened = Open(bench, kind, REQUESTS[0], sync=sync).run(steps)
            leave(opened, way)
            assert not backend.unordered, "a transfer is still under way"
            backend.run_stream()  # what the current stream waits for holds its objects until then
            bench.connector.reap()
            assert_nothing_is_left(opened)
        assert_usable(bench)


def wrong_objects(bench: Bench, opened: Open, layer: int):
    """What may not be sent for a layer, each with a word of the message it must bring."""
    good = opened.objects[layer]
    other = bench.allocator.allocate(bench.connector.get_shape(2), bench.dtype, MemoryFormat.BINARY)
    wider = bench.allocator.allocate(bench.connector.get_shape(2), torch.float32, bench.fmt)
    longer = bench.allocator.allocate(bench.connector.get_shape(3), bench.dtype, bench.fmt)
    for obj in (wider, longer):
        obj.metadata.cached_positions = torch.arange(4, 6)
    freed = bench.allocator.allocate(bench.connector.get_shape(2), bench.dtype, bench.fmt)
    freed.ref_count_down()
    mine = [other, wider, longer]
    lists = {
        "None": (None, "list"),
        "a number": (7, "list"),
        "one short": (good[:1], "lengths differ"),
        "one more": ([*good, good[0]], "lengths differ"),
        "no object": ([good[0], None], r"memory_objs\[1\]"),
        "another format": ([good[0], other], "BINARY"),
        "another dtype": ([good[0], wider], "float32"),
        "another length": ([good[0], longer], "shape"),
        "freed": ([good[0], freed], "freed"),
    }
    return lists, mine


@every_way
@pytest.mark.parametrize("layer", range(3))
def test_wrong_objects_sent_at_every_layer(name, how, layer):
    bench = make(name, how)
    blank = bench.untouched_cache()
    with late(bench, how) as backend:
        probe = Open(bench, "load", REQUESTS[0])
        lists, mine = wrong_objects(bench, probe, layer)
        assert len(lists) == 9
        for what, (sent, word) in lists.items():
            bench.put_engine(blank)
            opened = Open(bench, "load", REQUESTS[0]).run(layer + 1)
            with pytest.raises((LMCacheRefError, RuntimeError), match=word):
                opened.generator.send(sent)
            whole = opened.expected(blank)
            got = [bench.engine_holding(opened.expected(blank, n)) for n in range(layer + 1)]
            assert any(torch.equal(bench.engine[0].view(torch.int16), flat[0].view(torch.int16)) for flat in got), (
                f"{what} at layer {layer}: a part of a layer was written"
            )
            assert not torch.equal(whole, blank)
            assert bench.connector.buffers.in_use == 0 and not backend.unordered
            bench.connector.reap()
            assert {obj.get_ref_count() for row in opened.objects for obj in row} == {1}
            opened.release()
        for obj in mine:
            obj.ref_count_down()
        assert_nothing_is_left(probe)
    assert_usable(bench)


@pytest.mark.parametrize("name", LAYERWISE)
def test_wrong_objects_of_the_last_layer_are_refused_before_a_store_moves_anything(name):
    bench = make(name, "staged")
    with late(bench, "staged") as backend:
        opened = Open(bench, "store", REQUESTS[0])
        for what, (sent, word) in wrong_objects(bench, opened, 2)[0].items():
            if what in ("another format", "None"):
                continue  # a store sets the format
            connector, (starts, ends) = bench.connector, zip(*REQUESTS[0], strict=True)
            generator = connector.batched_from_gpu(
                [*opened.objects[:2], sent], list(starts), list(ends), **bench.kwargs(torch.tensor(SLOTS))
            )
            with pytest.raises((LMCacheRefError, RuntimeError), match=word):
                next(generator)
        assert backend.submitted == []
        assert all(obj.metadata.fmt is MemoryFormat.UNDEFINED for row in opened.objects for obj in row)


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_fails_at_every_operation(name, how, kind):
    """Refused by the call, or by the device later: the error comes out, nothing is left, the next request works."""
    for late_error, number in itertools.product((False, True), range(6)):
        bench = make(name, how)
        with late(bench, how) as backend:
            opened = Open(bench, kind, REQUESTS[0])
            (backend.fail if late_error else backend.refuse)[number] = ZeroDivisionError()
            operations = {"store": 6 if how == "staged" else 3, "load": 6 if name == "buffer" or how == "staged" else 3}
            if number < operations[kind]:
                with pytest.raises(ZeroDivisionError):
                    opened.run()
            else:
                opened.finish()
            assert not backend.unordered, "a transfer is still under way"
            backend.run_stream()
            bench.connector.reap()
            assert_nothing_is_left(opened)
        assert_usable(bench)


# Two at a time


@every_way
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_two_interleaved(name, how, kinds):
    """Strictly in turn, and one wholly inside the other at each of its yields."""
    if name == "buffer" and kinds == ("load", "load"):
        return  # refused, see test_blend
    turns = [[0, 1] * 5, *([0] * before + [1] * 5 + [0] * 5 for before in range(6))]
    for order in turns:
        bench = make(name, how)
        cache = bench.cache_values()
        bench.put_engine(cache)
        with late(bench, how):
            opened = [Open(bench, kind, REQUESTS[i], first=20000 + 9000 * i) for i, kind in enumerate(kinds)]
            for index in order:
                if not opened[index].ended:
                    opened[index].step()
            for one in opened:
                one.finish()
            expected, blank = cache, bench.untouched_cache().view(-1)[0]
            for one in opened:
                if one.kind == "load":
                    expected = one.expected(expected)
            assert_same(bench.engine[0], bench.engine_holding(expected)[0], f"the engine, turns {order}")
            for one in (one for one in opened if one.kind == "store"):
                values = bench.stored(cache, one.values.fill_(blank), one.spans, SLOTS)
                for row, pieces in zip(one.objects, bench.pieces(values, one.spans), strict=True):
                    for obj, piece in zip(row, pieces, strict=True):
                        assert torch.equal(obj.tensor.view(piece.dtype), piece)
            bench.connector.reap()
            assert_nothing_is_left(*opened)


# Too little


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_is_too_small_is_an_error_before_the_first_yield(name, how, kind):
    span = 5 if name == "buffer" else 4  # from the first to the last token; the tokens that are moved
    for tokens, fits in ((span, True), (span - 1, False)):
        bench = make(name, how, buffer_tokens=tokens)
        with late(bench, how) as backend:
            opened = Open(bench, kind, REQUESTS[0])
            if fits or how == "direct":
                opened.finish()
            else:
                with pytest.raises(ValueError, match=rf"{span} tokens, the buffer holds {tokens} \(buffer_tokens\)"):
                    opened.step()
                assert backend.submitted == []
            backend.run_stream()
            bench.connector.reap()
            assert_nothing_is_left(opened)


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_for_a_buffer_leaves_nothing(name, kind, monkeypatch):
    """The device is full when the first or the second buffer is taken."""
    for number in range(2):
        bench = make(name, "staged")
        opened, real, calls = Open(bench, kind, REQUESTS[0]), torch.empty, itertools.count()

        def empty(*args, real=real, calls=calls, number=number, **kwargs):
            if kwargs.get("dtype") is torch.uint8 and next(calls) == number:
                raise torch.OutOfMemoryError("full")
            return real(*args, **kwargs)

        with use_backend("reference"), monkeypatch.context() as patch:
            patch.setattr("lmcache_ref.connectors.buffers.torch.empty", empty)
            if number == 0 or (name == "buffer" and kind == "load"):
                with pytest.raises(torch.OutOfMemoryError):
                    opened.run()
            else:
                opened.finish()
        assert_nothing_is_left(opened)
        assert_usable(bench)


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_comes_while_leaving_does_not_spare_the_other_transfers(name, how, kind):
    for number, steps in itertools.product(range(3), range(1, 4)):
        bench = make(name, how)
        with late(bench, how) as backend:
            opened = Open(bench, kind, REQUESTS[0], sync=False)
            backend.fail[number] = ZeroDivisionError("from the device")
            with contextlib.suppress(ZeroDivisionError):  # known already, or found by close(), or not met
                opened.run(steps)
                opened.generator.close()
            assert not backend.unordered
            backend.run_stream()
            bench.connector.reap()
            assert_nothing_is_left(opened)
