"""What every connector refuses, in both directions: a clear error of ours, and nothing has moved, nothing is held.

Each wrong input is the right call with one thing changed. Sent objects of layerwise loads are in `test_generators.py`,
constructors in `test_factory.py` and `test_blend.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from drive import CONNECTORS, Bench, Sizes
from helpers import assert_same
from lmcache_ref.backends import use_backend
from lmcache_ref.discovery import flatten
from lmcache_ref.errors import LMCacheRefError
from lmcache_ref.memory import MemoryFormat

SPANS = [(1, 3), (4, 6)]
SLOTS = [5, 0, 9, 27, 11, 2]


@dataclass
class Call:
    """The arguments of one call; a wrong input changes one of them."""

    bench: Bench
    objects: Any
    starts: Any
    ends: Any
    kwargs: dict[str, Any]

    def run(self, direction: str) -> None:
        connector, per_layer = self.bench.connector, self.bench.driven.per_layer
        if direction == "store":
            result = connector.batched_from_gpu(
                self.objects if per_layer else self.objects[0], self.starts, self.ends, **self.kwargs
            )
            list(result or ())
        elif not per_layer:
            connector.batched_to_gpu(self.objects[0], self.starts, self.ends, **self.kwargs)
        else:
            generator = connector.batched_to_gpu(self.starts, self.ends, **self.kwargs)
            next(generator)
            for row in self.objects:
                generator.send(row)
            next(generator)


def object_of(call: Call, tokens: int = 2, dtype: torch.dtype | None = None, fmt: MemoryFormat | None = None):
    """Another object in place of the second of the first row."""
    bench = call.bench
    obj = bench.allocator.allocate(bench.connector.get_shape(tokens), dtype or bench.dtype, fmt or bench.fmt)
    obj.metadata.cached_positions = torch.arange(4, 4 + tokens)
    call.objects[0][1] = obj


def caches(call: Call, change: Any) -> None:
    """Other engine tensors: `change` is applied to each."""

    def walk(given):
        return change(given) if isinstance(given, torch.Tensor) else [walk(item) for item in given]

    call.kwargs["kvcaches"] = walk(call.bench.kvcaches)


def freed(call: Call) -> None:
    object_of(call)
    call.objects[0][1].ref_count_down()


def set_(name: str, value: Any):
    return lambda call: call.kwargs.__setitem__(name, value)


def slots(*values: int):
    return set_("slot_mapping", torch.tensor(values))


def spans(starts: Any, ends: Any):
    def change(call: Call) -> None:
        call.starts, call.ends = starts, ends

    return change


BOTH = ("store", "load")
#: what -> (change, directions, a word of the message)
WRONG = {
    "lengths of starts and ends": (spans([1], [3, 6]), BOTH, "lengths differ"),
    "fewer objects than starts": (spans([1, 4, 6], [3, 6, 6]), BOTH, "2 memory objects|list of 3 objects"),
    "end before start": (spans([1, 6], [3, 4]), BOTH, "is no token range"),
    "negative start": (spans([-1, 4], [1, 6]), BOTH, "is no token range"),
    "beyond the mapping": (spans([1, 5], [3, 7]), BOTH, "outside slot_mapping"),
    "starts no list": (spans(1, [3, 6]), BOTH, "starts must be a list, got int"),
    "starts missing": (spans(None, None), BOTH, "starts must be a list, got NoneType"),
    "no whole numbers": (spans([1.0, 4.0], [3.0, 6.0]), BOTH, r"chunk 0: \[1.0, 3.0\) is no token range"),
    "objects no list": (lambda call: call.objects.__setitem__(0, 7), BOTH, "list"),
    "no object": (lambda call: call.objects[0].__setitem__(1, None), BOTH, r"memory_objs\[1\] has no tensor"),
    "a tensor": (lambda call: call.objects[0].__setitem__(1, torch.zeros(3)), BOTH, "has no tensor"),
    "another shape": (lambda call: object_of(call, tokens=3), BOTH, "shape"),
    "another dtype": (lambda call: object_of(call, dtype=torch.float32), BOTH, "float32"),
    "another format": (lambda call: object_of(call, fmt=MemoryFormat.BINARY), ("load",), "BINARY"),
    "a freed object": (freed, BOTH, "was freed"),
    "mapping missing": (set_("slot_mapping", None), BOTH, "slot_mapping is missing"),
    "mapping a list": (set_("slot_mapping", SLOTS), BOTH, "slots must be a tensor|layer groups"),
    "mapping of floats": (set_("slot_mapping", torch.zeros(6)), BOTH, "slots must be int64"),
    "mapping of two axes": (set_("slot_mapping", torch.zeros(2, 3, dtype=torch.int64)), BOTH, "slots must be int64"),
    "slot out of range": (slots(5, 0, 9, 27, 11, 28), BOTH, r"slots\[5\] = 28"),
    "slot twice": (slots(5, 0, 9, 27, 9, 2), ("load",), "are both 9"),
    "caches missing": (set_("kvcaches", None), BOTH, "kvcaches is missing"),
    "caches no tensors": (set_("kvcaches", ["k", "v"]), BOTH, "kv_caches|layer groups need"),
    "caches of another dtype": (lambda call: caches(call, torch.Tensor.float), BOTH, "float32"),
    "caches with gaps inside HS": (lambda call: caches(call, lambda t: t[..., ::2]), BOTH, "innermost axis"),
    "caches expanded": (lambda call: caches(call, lambda t: t[:1].expand_as(t)), BOTH, "share memory"),
    "negative prefix": (set_("vllm_cached_tokens", -1), ("load",), "vllm_cached_tokens must be an int >= 0, got -1"),
    "prefix no number": (set_("vllm_cached_tokens", "3"), ("load",), "vllm_cached_tokens must be an int >= 0, got '3'"),
    "sync no bool": (set_("sync", 1), BOTH, "sync must be True or False, got 1"),
}
CASES = [
    (name, direction, what)
    for name in CONNECTORS
    for direction in BOTH
    for what, (_, directions, _) in WRONG.items()
    if direction in directions
    and not (name == "mock" and what.startswith(("caches", "mapping missing")))
    and not (what == "sync no bool" and not CONNECTORS[name].per_layer)
]


def test_there_are_as_many_cases_as_there_should_be():
    """Those of loads only: 4. The mock has caches and a mapping of its own, and five connectors no `sync`."""
    assert len(WRONG) == 29
    assert len(CASES) == 8 * (2 * 25 + 4) - 2 * 6 - 5 * 2


@pytest.mark.parametrize(("name", "direction", "what"), CASES, ids=["-".join(case) for case in CASES])
def test_wrong_input_is_refused_before_anything_moves(name, direction, what):
    change, _, message = WRONG[what]
    with use_backend("reference"):  # duplicates and slots on the host are checked by every backend that must
        bench = Bench(name, sizes=Sizes(NH=3, HS=6))
        objects = bench.allocate(SPANS)
        bench.put_objects(objects, bench.request_values(6), SPANS)
        bench.put_engine(bench.cache_values(7))
        rows = [list(row) for row in objects]
        call = Call(bench, rows, [1, 4], [3, 6], bench.kwargs(torch.tensor(SLOTS)))
        change(call)
        pool, engine = bench.allocator.pool.clone(), [flat.clone() for flat in bench.engine]
        with pytest.raises((LMCacheRefError), match=message) as raised:
            call.run(direction)
    assert isinstance(raised.value, ValueError) or what == "a freed object"
    assert_same(bench.allocator.pool, pool, "the pool")
    for flat, before in zip(bench.engine, engine, strict=True):
        assert_same(flat, before, "the engine")
    bench.connector.reap()
    assert bench.connector.buffers.in_use == 0
    assert {obj.get_ref_count() for row in objects for obj in row} == {1}


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name != "mock"])
@pytest.mark.parametrize("change", [-1, 1], ids=["one short", "one more"])
def test_case_8_another_number_of_layers_names_both_numbers(name, change):
    """Of a list by its length, of one pool by its layer axis."""
    made = Bench(name, "NL_X_TWO_NB_BS_NH_HS" if CONNECTORS[name].engine == "vllm" else None)
    other = Bench(name, made.layout, sizes=Sizes(NL=3 + change))
    for call in (made.store, made.load):
        objects = made.allocate(SPANS)
        made.put_objects(objects, made.request_values(6), SPANS)
        with pytest.raises(LMCacheRefError, match=rf"\b{3 + change}\b.*\b3\b|\b3\b.*\b{3 + change}\b"):
            call(objects, SPANS, torch.tensor(SLOTS), kvcaches=other.kvcaches)
    assert len(flatten(other.kvcaches)[0]) != len(flatten(made.kvcaches)[0]) or name == "trtllm"
