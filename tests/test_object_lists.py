"""Lists of memory objects taken as a whole: the same plans as object by object, the same references, the same refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ref.connectors.object_lists import Held, SameKind
from lmcache_ref.errors import DoubleFreeError, UseAfterFreeError
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat, MemoryObj
from lmcache_ref.plan import LazySpans, TransferPlan

NL, D = 3, 4


class World:
    """One list of objects a layer, and a cache."""

    def __init__(self, lengths: list[int], fmt: MemoryFormat = MemoryFormat.KV_T2D):
        self.lengths, self.fmt, self.kv = lengths, fmt, 2 if fmt is MemoryFormat.KV_T2D else 1
        memory = torch.zeros(NL, self.kv, 8, 4, 1, D, dtype=torch.bfloat16)
        self.cache = PagedKVCache(tuple(tuple(layer) for layer in memory))
        self.allocator = HostMemoryAllocator(1 << 20)
        self.layers = [self.objects() for _ in range(NL)]
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.slots = torch.randperm(32)[: sum(lengths)]

    def objects(self) -> list[MemoryObj]:
        return [self.object(length) for length in self.lengths]

    def object(self, length: int, dtype: torch.dtype = torch.bfloat16) -> MemoryObj:
        shape = [length, 2, D] if self.kv == 2 else [length, D]
        found = self.allocator.allocate(torch.Size(shape), dtype, self.fmt)
        assert found is not None
        return found

    def built(self, layer: int, objects: list[MemoryObj]) -> TransferPlan:
        tensors = [obj.tensor for obj in objects]
        return TransferPlan.build(
            self.cache, self.slots, tensors, fmt=self.fmt, layers=layer, starts=self.starts, skip_prefix_n_tokens=2
        )

    def kind(self) -> SameKind:
        return SameKind(self.layers[0], self.built(0, self.layers[0]))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    fmt=st.sampled_from([MemoryFormat.KV_T2D, MemoryFormat.KV_MLA_FMT]),
)
def test_the_plan_that_build_makes(lengths, fmt):
    world = World(lengths, fmt)
    kind = world.kind()
    for layer in (1, 2):
        found, wanted = kind.plan(world.layers[layer], world.cache, layer, fmt), world.built(layer, world.layers[layer])
        assert found is not None and isinstance(found.spans, LazySpans) and not isinstance(wanted.spans, LazySpans)
        for name in ("cache", "slots", "skip_prefix_n_tokens", "rotation"):
            assert getattr(found, name) is getattr(wanted, name)
        assert all(
            a is b
            for row, other in zip(found.planes, wanted.planes, strict=True)
            for a, b in zip(row, other, strict=True)
        )
        assert (found.span_words, found.on_host) == (wanted.span_words, wanted.on_host)
        assert found.num_tokens == wanted.num_tokens and len(found.spans) == len(wanted.spans)
        for span, other in zip(found.spans, wanted.spans, strict=True):
            assert span.tensor is other.tensor
            assert (span.start, span.end, span.stride_bytes) == (other.start, other.end, other.stride_bytes)
            assert span.chunk.shape == other.chunk.shape and span.chunk.stride() == other.chunk.stride()


def changed(world: World, how: str) -> list[object]:
    objects: list[object] = list(world.layers[1])
    last = world.layers[1][-1]
    if how == "shorter":
        objects.pop()
    elif how == "another length":
        objects[-1] = world.object(world.lengths[-1] + 1)
    elif how == "another dtype":
        objects[-1] = world.object(world.lengths[-1], torch.float16)
    elif how == "another format":
        last.metadata.fmt = MemoryFormat.KV_2LTD
    elif how == "freed":
        last.ref_count_down()
    elif how == "closed":
        world.allocator.close()
    elif how == "no object":
        objects[-1] = last.tensor
    elif how == "of two allocators":
        world.allocator = HostMemoryAllocator(1 << 20)
        objects[-1] = world.object(world.lengths[-1])
    return objects


WAYS = [
    "shorter",
    "another length",
    "another dtype",
    "another format",
    "freed",
    "closed",
    "no object",
    "of two allocators",
]


@pytest.mark.parametrize("how", WAYS)
def test_a_list_that_differs_goes_the_long_way(how):
    world = World([3, 3, 2])
    kind = world.kind()
    assert kind.plan(changed(world, how), world.cache, 1, world.fmt) is None


def test_what_the_first_objects_become_later_does_not_count():
    world = World([3, 3])
    kind = world.kind()
    for layer in (0, 1):
        for obj in world.layers[layer]:
            obj.metadata.shapes[0] = torch.Size([2, 2, D])
    assert kind.plan(world.layers[1], world.cache, 1, world.fmt) is None


def test_the_format_counts_only_where_it_is_given():
    world = World([3, 2])
    kind = world.kind()
    assert kind.plan(changed(world, "another format"), world.cache, 1, None) is not None


def counts(objects: list[MemoryObj]) -> list[int]:
    return [obj.get_ref_count() for obj in objects]


def test_references_are_taken_and_given_back():
    world = World([3, 2])
    first, second = world.layers[0]
    other = World([1]).layers[0][0]
    held = Held([first, second, other, first])
    assert counts([first, second, other]) == [3, 2, 2]
    for _ in range(2):  # the second time there is nothing to give back
        held.let_go()
        assert counts([first, second, other]) == [1, 1, 1]
    Held([]).let_go()


def test_the_objects_that_were_held_are_let_go():
    world = World([3, 2])
    first, second = world.layers[0]
    objects = [first]
    held = Held(objects)
    objects[0] = second  # the caller's list is the caller's
    held.let_go()
    assert counts([first, second]) == [1, 1]


def test_the_last_reference_returns_the_memory():
    world = World([3, 2])
    objects, used = world.layers[0], world.allocator.used_bytes
    once, twice = Held(objects), Held([*objects, objects[0]])
    for obj in objects:
        obj.ref_count_down()
    twice.let_go()
    assert world.allocator.used_bytes == used
    once.let_go()
    assert world.allocator.used_bytes < used and not any(obj.is_valid() for obj in objects)


def test_a_reference_that_somebody_else_gave_back_is_missed():
    objects = World([3, 2]).layers[0]
    held = Held(objects)
    for obj in [*objects, *objects]:
        obj.ref_count_down()
    with pytest.raises(DoubleFreeError):
        held.let_go()


def test_an_object_that_is_only_pinned_can_be_held():
    first, second = World([3, 2]).layers[0]
    second.pin()
    second.ref_count_down()
    Held([first, second])
    assert counts([first, second]) == [2, 1]


def test_nothing_is_held_when_one_is_gone():
    world = World([3, 2])
    first, second = world.layers[0]
    second.ref_count_down()
    others = [World([1]).layers[0][0] for _ in range(3)]  # allocators come in any order
    with pytest.raises(UseAfterFreeError):
        Held([*others[:2], first, second, others[2]])
    assert counts([first, *others]) == [1, 1, 1, 1]
