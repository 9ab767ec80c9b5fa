"""Random walks over several generators of one layerwise connector, on a backend whose transfers happen late (hypothesis).

Generators are opened, advanced, sent wrong objects, closed, thrown into and forgotten in any order, objects released as early
as allowed and their memory overwritten. A plain model of the cache says what must be in the engine and in the objects.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deferred import deferred
from drive import LAYERWISE, Bench, Sizes
from helpers import assert_same
from lmcache_ref.errors import ArgumentError, LMCacheRefError
from steps import Open

SPANS = [[(0, 2), (3, 5)], [(1, 4)], [(2, 2)], []]
#: (use_gpu, whether the backend stages)
STAGING = {"direct": (False, False), "staged": (True, False), "backend stages": (True, True)}
WAYS = [(name, how) for name in LAYERWISE for how in STAGING if name != "buffer" or how != "direct"]
GROUPS = [list(range(first, first + 5)) for first in range(0, 25, 5)]  # slots of one request each; NB*BS = 28


class Generators(RuleBasedStateMachine):
    name, how = "layerwise", "direct"

    @initialize()
    def start(self) -> None:
        use_gpu, stages = STAGING[self.how]
        self.stack = contextlib.ExitStack()
        self.bench = Bench(self.name, use_gpu=use_gpu, sizes=Sizes(NH=1, HS=4))
        self.cache = self.bench.cache_values()
        self.bench.put_engine(self.cache)
        self.backend = self.stack.enter_context(deferred(self.bench.allocator.pool, stages=stages))
        self.open: list[Open] = []
        self.seed = 0

    # ------------------------------------------------------------------------------------------ the rules

    @precondition(lambda self: len(self.open) < len(GROUPS))
    @rule(kind=st.sampled_from(["store", "load"]), spans=st.sampled_from(SPANS), sync=st.booleans(), data=st.data())
    def open_one(self, kind: str, spans: Any, sync: bool, data: Any) -> None:
        free = [group for group in GROUPS if all(group is not one.slots for one in self.open)]
        self.seed += 1
        first = 100 * self.seed % 50000
        self.open.append(Open(self.bench, kind, spans, first=first, slots=data.draw(st.sampled_from(free)), sync=sync))

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), count=st.integers(1, 3))
    def advance(self, index: int, count: int) -> None:
        one = self.open[index % len(self.open)]
        for _ in range(count):
            if one.ended:
                return
            if self.must_wait(one):
                with pytest.raises(ArgumentError, match="still open"):
                    one.step()
                self.gone(one, moved=False)
                return
            one.step()
            layer = one.yields - 2
            if one.kind == "load" and 0 <= layer < self.bench.NL and one.slots[0] % 2:
                for obj in one.objects[layer]:  # some callers release at once, and the memory is overwritten
                    obj.ref_count_down()
                one.objects[layer] = []
                self.scribble()

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9))
    def finish(self, index: int) -> None:
        one = self.open[index % len(self.open)]
        if self.must_wait(one):
            return
        one.finish()
        if one.kind == "load":
            self.cache = one.expected(self.cache)
        else:
            blank = torch.zeros_like(one.values)
            values = self.bench.stored(self.cache, blank, one.spans, one.slots)
            for row, pieces in zip(one.objects, self.bench.pieces(values, one.spans), strict=True):
                for obj, piece in zip(row, pieces, strict=True):
                    assert torch.equal(obj.tensor.view(piece.dtype), piece), "a stored object"
        self.gone(one, moved=False)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), way=st.sampled_from(["close", "throw", "forget", "wrong"]))
    def leave(self, index: int, way: str) -> None:
        one = self.open[index % len(self.open)]
        if way == "close":
            one.generator.close()
        elif way == "throw":
            with contextlib.suppress(ZeroDivisionError):
                one.generator.throw(ZeroDivisionError())
        elif way == "forget":
            del one.generator
        elif one.kind == "load" and 0 < one.yields <= self.bench.NL:
            with pytest.raises(LMCacheRefError):
                one.generator.send([None])
        else:
            one.generator.close()
        self.gone(one, moved=True)

    @rule()
    def the_device_catches_up(self) -> None:
        self.backend.run_stream()
        self.bench.connector.reap()

    # ------------------------------------------------------------------------------------------ what holds

    @invariant()
    def buffers_are_lent_to_open_loads_only(self) -> None:
        if not hasattr(self, "bench"):
            return
        started = [one for one in self.open if one.kind == "load" and 0 < one.yields < one.steps]
        assert self.bench.connector.buffers.in_use == (2 * len(started) if self.name == "buffer" else 0)
        assert self.bench.allocator.memcheck()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        with self.stack:
            for one in list(self.open):
                one.generator.close()
                self.gone(one, moved=True)
            assert not self.backend.unordered, "a transfer is still under way"
            assert_same(self.bench.engine[0].clone(), self.bench.engine_holding(self.cache)[0], "the engine")
            self.backend.run_stream()
            self.bench.connector.reap()
            assert self.bench.allocator.free_bytes == self.bench.allocator.total_bytes, "a reference is left"

    def must_wait(self, one: Open) -> bool:
        """Whether another load of the buffer connector is open and this one has not begun."""
        others = (other for other in self.open if other is not one and other.kind == "load")
        busy = any(0 < other.yields < other.steps for other in others)
        return self.name == "buffer" and one.kind == "load" and one.yields == 0 and busy

    def gone(self, one: Open, *, moved: bool) -> None:
        """The generator is no more. moved: a load may have got so far; whole layers in order, or nothing."""
        self.open.remove(one)
        one.release()
        if moved and one.kind == "load":
            seen = self.bench.engine[0].clone()
            whole = [one.expected(self.cache, layers) for layers in range(self.bench.NL + 1)]
            found = [cache for cache in whole if self.holds_at(seen, cache, one.slots)]
            assert found, "a part of a layer was written"
            self.cache[:, :, one.slots] = found[0][:, :, one.slots]

    def holds_at(self, seen: torch.Tensor, cache: torch.Tensor, slots: list[int]) -> bool:
        """Whether the engine holds `cache` at these slots; other loads may be on their way elsewhere."""
        mask = torch.zeros_like(cache)
        mask[:, :, slots] = 1
        where = self.bench.engine_holding(mask)[0].view(torch.int16) == 1
        wanted = self.bench.engine_holding(cache)[0].view(torch.int16)
        return torch.equal(seen.view(torch.int16)[where], wanted[where])

    def scribble(self) -> None:
        """Whoever gets the free memory of the pool writes to it."""
        taken = []
        while (obj := self.bench.allocator.allocate([64], torch.uint8)) is not None:
            taken.append(obj)
        for obj in taken:
            obj.raw_tensor.fill_(0x11)
        self.bench.allocator.batched_free(taken)


@pytest.mark.parametrize(("name", "how"), WAYS, ids=[f"{name}-{how}" for name, how in WAYS])
def test_random_walks(name, how):
    machine = type("Generators", (Generators,), {"name": name, "how": how})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30))


def test_a_walk_sees_a_reference_that_is_kept(monkeypatch):
    """The test of this test: a connector that never gives its references back."""
    monkeypatch.setattr("lmcache_ref.connectors.base.ConnectorBase.reap", lambda self, thorough=True: None)
    with pytest.raises(AssertionError, match="a reference is left"):
        run_state_machine_as_test(
            Generators, settings=settings(max_examples=25, database=None, print_blob=False, phases=[Phase.generate])
        )
