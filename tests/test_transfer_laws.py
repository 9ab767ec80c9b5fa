"""Laws of the move over drawn caches and chunks: any sizes, axis order, padding and offset, any slots.

What is expected is an index correspondence over flat buffers, in plain integers. The product of layouts, directions,
formats and dtypes is the conformance suite's; what is refused is in `test_transfer_rules.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import lmcache_ref
from helpers import DTYPES, addressed, assert_same, untouched, words
from lmcache_ref import transfer
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat


@pytest.fixture(autouse=True)
def by_the_reference():
    """What holds for the specification; other backends are compared with it elsewhere."""
    with lmcache_ref.use_backend("reference"):
        yield


# Drawn memory


@dataclass(frozen=True)
class Place:
    """Where the elements of named axes are in a flat buffer: sum of index * stride, plus an offset."""

    sizes: dict[str, int]
    strides: dict[str, int]
    offset: int
    num_elements: int

    def at(self, **index: int) -> int:
        return self.offset + sum(self.strides[axis] * i for axis, i in index.items())

    def view(self, flat: torch.Tensor, *axes: str, **fixed: int) -> torch.Tensor:
        shape, strides = [self.sizes[axis] for axis in axes], [self.strides[axis] for axis in axes]
        return flat.as_strided(shape, strides, self.at(**fixed))


@st.composite
def places(draw, sizes: dict[str, int], innermost: str) -> Place:
    """Any order of the axes but the innermost, any padding behind each, any offset, a guard at the end."""
    order = [*draw(st.permutations(sorted(set(sizes) - {innermost}))), innermost]
    strides, extent = {}, 1
    for axis in reversed(order):
        strides[axis] = extent
        extent = extent * sizes[axis] + (draw(st.integers(0, 3)) if axis != innermost else 0)
        if axis == innermost:
            extent += draw(st.integers(0, 3))
    offset = draw(st.integers(0, 5))
    return Place(sizes, strides, offset, offset + extent + 5)


@dataclass(frozen=True)
class Scene:
    """A cache, a chunk that holds the tokens [start, start + T), and the slots of the request."""

    cache: Place
    chunk: Place
    slots: list[int]
    start: int
    skip: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.chunk.sizes["t"]

    def planes(self, flat: torch.Tensor) -> PagedKVCache:
        sizes = self.cache.sizes
        return PagedKVCache(
            tuple(
                tuple(self.cache.view(flat, "nb", "bs", "nh", "hs", nl=layer, two=kv) for kv in range(sizes["two"]))
                for layer in range(sizes["nl"])
            )
        )

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        return self.chunk.view(flat, "two", "nl", "t", "d")

    def move(self, operation, cache: torch.Tensor, chunk: torch.Tensor, slots: list[int] | None = None) -> None:
        operation(
            self.planes(cache),
            torch.tensor(self.slots if slots is None else slots, dtype=torch.int64),
            [self.tensor(chunk)],
            fmt=MemoryFormat.KV_2LTD if self.cache.sizes["two"] == 2 else MemoryFormat.KV_MLA_FMT,
            starts=[self.start],
            skip_prefix_n_tokens=self.skip,
        ).synchronize()

    def pairs(self, slots: list[int] | None = None):
        """(element of the cache, element of the chunk) of everything that moves."""
        slots, sizes = self.slots if slots is None else slots, self.cache.sizes
        for row in range(self.tokens):
            token = self.start + row
            if slots[token] < 0 or token < self.skip:
                continue
            block, offset = divmod(slots[token], sizes["bs"])
            for layer, kv, head, element in itertools.product(*(range(sizes[a]) for a in ("nl", "two", "nh", "hs"))):
                yield (
                    self.cache.at(nl=layer, two=kv, nb=block, bs=offset, nh=head, hs=element),
                    self.chunk.at(nl=layer, two=kv, t=row, d=head * sizes["hs"] + element),
                )

    @property
    def moving(self) -> list[int]:
        """Rows of the chunk that move."""
        return [r for r in range(self.tokens) if self.slots[self.start + r] >= 0 and self.start + r >= self.skip]


def small(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most)


@st.composite
def scenes(draw) -> Scene:
    sizes = {
        axis: draw(small(most)) for axis, most in (("nl", 3), ("two", 2), ("nb", 4), ("bs", 4), ("nh", 3), ("hs", 5))
    }
    tokens = draw(st.integers(0, min(6, sizes["nb"] * sizes["bs"])))
    start, rest = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    slots = draw(st.permutations(range(sizes["nb"] * sizes["bs"])))[:tokens]
    slots = [draw(st.sampled_from((slot, slot, slot, -1, -sizes["bs"], -(2**62)))) for slot in slots]
    chunk = {"nl": sizes["nl"], "two": sizes["two"], "t": tokens, "d": sizes["nh"] * sizes["hs"]}
    return Scene(
        cache=draw(places(sizes, "hs")),
        chunk=draw(places(chunk, "d")),
        slots=[draw(st.sampled_from((-1, 0, 2**40))) for _ in range(start)] + slots + [2**40] * rest,
        start=start,
        skip=draw(st.integers(0, start + tokens + 1)),
        dtype=draw(st.sampled_from(DTYPES)),
    )


def copied(target: torch.Tensor, source: torch.Tensor, pairs) -> torch.Tensor:
    """What the target is after each (to, from) of pairs."""
    expected = target.clone()
    for to, origin in pairs:
        words(expected)[to] = words(source)[origin]
    return expected


# The laws


@given(scenes())
def test_gather_is_the_index_correspondence(scene: Scene):
    cache = addressed(scene.cache.num_elements, scene.dtype)
    chunk = untouched(scene.chunk.num_elements, scene.dtype)
    expected = copied(chunk, cache, ((to, origin) for origin, to in scene.pairs()))
    scene.move(lmcache_ref.gather, cache, chunk)
    assert_same(chunk, expected, "the chunk's whole buffer")
    assert_same(cache, addressed(scene.cache.num_elements, scene.dtype), "the cache, which gather only reads")


@given(scenes())
def test_scatter_is_the_index_correspondence(scene: Scene):
    cache = untouched(scene.cache.num_elements, scene.dtype)
    chunk = addressed(scene.chunk.num_elements, scene.dtype)
    expected = copied(cache, chunk, scene.pairs())
    scene.move(lmcache_ref.scatter, cache, chunk)
    assert_same(cache, expected, "the cache's whole buffer")
    assert_same(chunk, addressed(scene.chunk.num_elements, scene.dtype), "the chunk, which scatter only reads")


@given(scenes(), st.data())
def test_round_trip_through_other_slots(scene: Scene, data):
    """gather -> scatter elsewhere -> gather there equals the first gather, bit for bit and row for row."""
    there = list(scene.slots)
    free = data.draw(st.permutations(range(scene.cache.sizes["nb"] * scene.cache.sizes["bs"])))
    for row in scene.moving:
        there[scene.start + row] = free.pop()
    first = untouched(scene.chunk.num_elements, scene.dtype)
    again = untouched(scene.chunk.num_elements, scene.dtype)
    elsewhere = untouched(scene.cache.num_elements, scene.dtype)
    scene.move(lmcache_ref.gather, addressed(scene.cache.num_elements, scene.dtype), first)
    scene.move(lmcache_ref.scatter, elsewhere, first, there)
    scene.move(lmcache_ref.gather, elsewhere, again, there)
    assert_same(again, first, "the chunk after the round trip")


@given(scenes())
def test_gather_after_scatter_gives_the_chunk(scene: Scene):
    cache = untouched(scene.cache.num_elements, scene.dtype)
    chunk = addressed(scene.chunk.num_elements, scene.dtype)
    back = untouched(scene.chunk.num_elements, scene.dtype)
    scene.move(lmcache_ref.scatter, cache, chunk)
    scene.move(lmcache_ref.gather, cache, back)
    expected = words(untouched(scene.chunk.num_elements, scene.dtype))
    for row in scene.moving:
        scene.tensor(expected)[:, :, row] = scene.tensor(words(chunk))[:, :, row]
    assert_same(words(back), expected, "the chunk that came back")


@given(scenes(), st.data())
def test_order_of_tokens_does_not_matter(scene: Scene, data):
    """Slots and the chunk's rows in another order, both alike: the same cache."""
    scene = replace(scene, skip=0)  # a prefix is about the order
    order = data.draw(st.permutations(range(scene.tokens)))
    slots = list(scene.slots)
    slots[scene.start : scene.start + scene.tokens] = [scene.slots[scene.start + row] for row in order]
    one, other = (untouched(scene.cache.num_elements, scene.dtype) for _ in range(2))
    chunk = addressed(scene.chunk.num_elements, scene.dtype)
    scene.move(lmcache_ref.scatter, one, chunk)
    permuted = chunk.clone()
    scene.tensor(words(permuted))[:] = scene.tensor(words(chunk))[:, :, order]
    scene.move(lmcache_ref.scatter, other, permuted, slots)
    assert_same(other, one, "the cache")


@given(scenes(), st.data())
def test_many_chunks_are_one(scene: Scene, data):
    """A chunk cut anywhere, its pieces in any order and in one call: the same bytes, both ways."""
    cuts = sorted({0, scene.tokens, *data.draw(st.lists(st.integers(0, scene.tokens), max_size=3))})
    spans = data.draw(st.permutations(list(itertools.pairwise(cuts)))) or [(0, 0)]
    fmt = MemoryFormat.KV_2LTD if scene.cache.sizes["two"] == 2 else MemoryFormat.KV_MLA_FMT
    slots = torch.tensor(scene.slots, dtype=torch.int64)

    def in_pieces(operation, cache, chunk):
        pieces = [scene.tensor(chunk)[:, :, start:end] for start, end in spans]
        starts = [scene.start + start for start, _ in spans]
        operation(scene.planes(cache), slots, pieces, fmt=fmt, starts=starts, skip_prefix_n_tokens=scene.skip)

    for operation, target in ((lmcache_ref.gather, 1), (lmcache_ref.scatter, 0)):
        whole, cut = [], []
        for memory in (whole, cut):
            for side, place in enumerate((scene.cache, scene.chunk)):
                fill = untouched if side == target else addressed
                memory.append(fill(place.num_elements, scene.dtype))
        scene.move(operation, *whole)
        in_pieces(operation, *cut)
        assert_same(cut[target], whole[target], operation.__name__)


@given(scenes(), st.data())
def test_some_layers_are_those_of_the_whole(scene: Scene, data):
    """`layers` in any order: the chunk holds those layers in that order; one layer also as [T, 2, D] and [2, T, D]."""
    NL, kv = scene.cache.sizes["nl"], scene.cache.sizes["two"]
    layers = data.draw(st.lists(st.integers(0, NL - 1), unique=True, min_size=1, max_size=NL))
    slots = torch.tensor(scene.slots, dtype=torch.int64)
    keywords = {"starts": [scene.start], "skip_prefix_n_tokens": scene.skip}
    cache = scene.planes(addressed(scene.cache.num_elements, scene.dtype))
    D = scene.chunk.sizes["d"]
    whole = untouched(scene.chunk.num_elements, scene.dtype)
    scene.move(lmcache_ref.gather, addressed(scene.cache.num_elements, scene.dtype), whole)
    expected = scene.tensor(whole)[:, layers]
    shapes = {MemoryFormat.KV_2LTD: (2, len(layers), scene.tokens, D)} if kv == 2 else {}
    if kv == 2 and len(layers) == 1:
        shapes |= {MemoryFormat.KV_T2D: (scene.tokens, 2, D), MemoryFormat.KV_2TD: (2, scene.tokens, D)}
    if kv == 1:
        shapes = {MemoryFormat.KV_MLA_FMT: (scene.tokens, D) if len(layers) == 1 else (1, len(layers), scene.tokens, D)}
    for fmt, shape in shapes.items():
        chunk = untouched(kv * len(layers) * scene.tokens * D, scene.dtype).view(shape)
        lmcache_ref.gather(cache, slots, [chunk], fmt=fmt, layers=layers, **keywords)
        got = chunk.transpose(0, 1) if fmt is MemoryFormat.KV_T2D else chunk
        assert_same(got.reshape(-1), expected.reshape(-1), fmt.name)


@given(
    st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 11), unique=True, max_size=6)
)
def test_case_2_k_and_v_first_or_second_make_the_same_bytes(dtype, NH, NL, slots):
    """The same content in both layouts gives byte-identical objects, and an object of one loads into the other."""
    content = addressed(NL * 2 * 3 * 4 * NH * 5, dtype).view(NL, 2, 3, 4, NH, 5)
    second = content.transpose(1, 2).contiguous()
    caches = [PagedKVCache.from_vllm(list(kv), num_kv_heads=NH, tokens_per_block=4) for kv in (content, second)]
    assert [cache.layout.upstream_id for cache in caches] == [1, 2]
    mapping, fmt = torch.tensor(slots, dtype=torch.int64), MemoryFormat.KV_2LTD
    objects = [untouched(2 * NL * len(slots) * NH * 5, dtype) for _ in caches]
    for cache, flat in zip(caches, objects, strict=True):
        lmcache_ref.gather(cache, mapping, [flat.view(2, NL, len(slots), NH * 5)], fmt=fmt)
    assert_same(objects[0], objects[1], "the object")
    loaded = [untouched(content.numel(), dtype).view(shape) for shape in (content.shape, second.shape)]
    for other, flat in zip(reversed(loaded), objects, strict=True):
        cache = PagedKVCache.from_vllm(list(other), num_kv_heads=NH, tokens_per_block=4)
        lmcache_ref.scatter(cache, mapping, [flat.view(2, NL, len(slots), NH * 5)], fmt=fmt)
    assert_same(loaded[0].reshape(-1), loaded[1].transpose(1, 2).reshape(-1), "the caches, one loaded from the other")


# The comparison itself


def test_the_comparison_sees_every_bit():
    assert_same(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), "equal")
    payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for one, other in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (payload[:1], payload[1:]),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
        (torch.tensor([1.0]), torch.tensor([1])),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
    ):
        with pytest.raises(AssertionError):
            assert_same(one, other, "unequal")
    with pytest.raises(AssertionError, match=r"it: 1 of 4 elements differ, the first at 2: 0xee, expected 0x3 "):
        assert_same(torch.tensor([1, 2, 0xEE, 4]), torch.tensor([1, 2, 3, 4]), "it")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_say_where_they_are_and_are_no_sentinel(dtype):
    source = words(addressed(4000, dtype)).tolist()
    assert int(words(untouched(1, dtype))[0]) not in source
    assert len(set(source)) == (199 if dtype.itemsize == 1 else 4000)


# The laws can fail: mistakes that backends make

tokens_to_move = transfer.tokens_to_move


def negative_slots_count_from_the_end(plan, span):
    slots = torch.where(plan.slots < 0, plan.slots % plan.cache.num_slots, plan.slots)
    return tokens_to_move(replace(plan, slots=slots), span)


def the_prefix_counts_from_the_chunk(plan, span):
    return tokens_to_move(replace(plan, skip_prefix_n_tokens=plan.skip_prefix_n_tokens + span.start), span)


def the_prefix_is_moved(plan, span):
    return tokens_to_move(replace(plan, skip_prefix_n_tokens=0), span)


def the_mapping_starts_at_the_chunk(plan, span):
    return tokens_to_move(replace(plan, slots=plan.slots.roll(span.start)), span)


def the_last_row_is_forgotten(plan, span):
    token, block, offset = tokens_to_move(plan, span)
    rows = torch.arange(span.end - span.start)[token]
    return rows[:-1], block[:-1], offset[:-1]


def blocks_are_one_token_long(plan, span):
    token, block, offset = tokens_to_move(plan, span)
    return token, offset % plan.cache.num_blocks, block % plan.cache.block_size


MISTAKES = [
    negative_slots_count_from_the_end,
    the_prefix_counts_from_the_chunk,
    the_prefix_is_moved,
    the_mapping_starts_at_the_chunk,
    the_last_row_is_forgotten,
    blocks_are_one_token_long,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("law", [test_gather_is_the_index_correspondence, test_scatter_is_the_index_correspondence])
def test_a_mistake_breaks_the_law(monkeypatch, law, mistake):
    monkeypatch.setattr(transfer, "tokens_to_move", mistake)
    quick = settings(max_examples=300, phases=[Phase.generate], database=None, report_multiple_bugs=False)
    with pytest.raises((AssertionError, IndexError)):
        quick(given(scenes())(law.hypothesis.inner_test))()
