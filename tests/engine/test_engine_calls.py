"""store, retrieve and lookup of the cache engine with every connector: bytes, counts, masks, pins, failures.

Tiers, files and configuration have tests of their own.
"""

from __future__ import annotations

import pytest
import torch
from engine_worlds import CHUNK, KINDS, LAYERWISE, NL, World, masked

from lmcache_ref.connectors import MockGPUConnector
from lmcache_ref.engine import CacheEngine, CacheEngineBuilder, LMCacheEngine, LMCacheEngineConfig
from lmcache_ref.errors import ArgumentError, ObjectError, SlotError

TOKENS = list(range(100, 114))  # three chunks and two tokens


@pytest.fixture
def world():
    """Makes a `World`, whose books are checked and which is closed afterwards."""
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        if not each.engine._closed:
            each.check_books()
            each.engine.close()


def test_every_connector_is_here():
    assert len(KINDS) == 11 and len(LAYERWISE) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_comes_back(world, kind):
    w = world(kind)
    assert w.engine.lookup(TOKENS) == 0 and w.retrieve(TOKENS) == 0
    assert w.store(TOKENS) == 12
    assert w.store(TOKENS) == 0
    assert w.engine.lookup(TOKENS) == 12
    assert w.retrieve(TOKENS) == 12
    assert w.retrieve([*TOKENS[:8], *range(8)]) == 8
    assert w.retrieve([7, *TOKENS]) == 0
    stats = w.engine.stats()
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (2, 28, 12)
    assert (stats.stores, stats.stored_chunks, stats.stored_tokens) == (2, 3, 12)
    assert (stats.retrieves, stats.retrieved_tokens) == (4, 20)
    assert stats.host_chunks == 3 and not stats.skipped


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_survives_a_restart(world, kind, tmp_path):
    w = world(kind, folder=tmp_path)
    w.store(TOKENS)
    w.restart()
    assert w.engine.stats().host_chunks == 0
    assert w.engine.lookup(TOKENS) == 12
    assert w.retrieve(TOKENS) == 12
    positions = [
        obj.metadata.cached_positions
        for span in w.engine.names.spans(TOKENS)
        for obj in w.engine.storage.host._chunks[span.key].objects
    ]
    if kind == "buffer":
        assert [p.tolist() for p in positions] == [list(range(s, s + CHUNK)) for s in (0, 4, 8) for _ in range(NL)]
    else:
        assert positions == [None] * len(positions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("save_unfull", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5])
def test_short_requests(world, kind, save_unfull, tokens, tmp_path):
    w = world(kind, save_unfull_chunk=save_unfull, folder=tmp_path)
    kept = tokens if save_unfull else tokens // CHUNK * CHUNK
    assert w.store(TOKENS[:tokens]) == kept
    w.restart()
    assert w.engine.lookup(TOKENS[:tokens]) == kept
    assert w.retrieve(TOKENS[:tokens]) == kept
    assert w.engine.lookup(TOKENS) == kept // CHUNK * CHUNK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [0, 4, 8, 12, 14])
def test_a_mask_leaves_a_prefix_alone(world, kind, skipped):
    w = world(kind)
    left = max(0, 12 - skipped)
    assert w.store(TOKENS, mask=masked(TOKENS, skipped)) == left
    assert w.engine.lookup(TOKENS) == (left if skipped == 0 else 0)
    assert w.retrieve(TOKENS, masked(TOKENS, skipped)) == left
    assert w.store(TOKENS) == 12 - left
    assert w.retrieve(TOKENS, masked(TOKENS, skipped)) == left


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(13, dtype=torch.bool),
        torch.ones(14),
        [True] * 14,
        masked(TOKENS, 3),
        masked(TOKENS, 4).flip(0),
    ],
    ids=["short", "float", "list", "half a chunk", "suffix"],
)
def test_masks_that_are_refused(world, mask):
    w = world()
    for call in (w.store, w.retrieve):
        with pytest.raises(ArgumentError, match=r"mask: .*allowed: "):
            call(TOKENS, mask=mask)


@pytest.mark.parametrize("tokens", ["text", 5, [1.5], ["1"], [1 << 63], None, torch.ones(3), torch.ones(2, 2).long()])
def test_tokens_that_are_refused(world, tokens):
    w = world()
    for call in (w.engine.store, w.engine.retrieve, w.engine.lookup):
        with pytest.raises(ArgumentError, match=r"tokens: .*allowed: "):
            call(tokens)


def test_tokens_may_be_a_tensor(world):
    w = world()
    w.store(TOKENS)
    for dtype in (torch.int64, torch.int32):
        assert w.engine.lookup(torch.tensor(TOKENS, dtype=dtype)) == 12
    assert w.engine.lookup(tuple(TOKENS)) == w.engine.lookup(iter(TOKENS)) == 12


def test_salts_separate_requests(world):
    w = world()
    w.store(TOKENS, cache_salt="adapter a")
    assert (
        w.engine.lookup(TOKENS)
        == w.engine.lookup(TOKENS, cache_salt="b")
        == w.engine.lookup(TOKENS, cache_salt="")
        == 0
    )
    assert w.engine.lookup(TOKENS, cache_salt="adapter a") == w.retrieve(TOKENS, cache_salt="adapter a") == 12
    with pytest.raises(ArgumentError, match="cache_salt: 3"):
        w.engine.lookup(TOKENS, cache_salt=3)


def test_keyword_arguments_reach_the_connector(world):
    """`vllm_cached_tokens`: those tokens count as loaded, their slots are not written."""
    w = world()
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    w.memory.blank()
    loaded = w.engine.retrieve(TOKENS, **w.kwargs(slots, vllm_cached_tokens=6))
    assert loaded.sum() == 12
    w.memory.check(TOKENS, slots, loaded & (torch.arange(14) >= 6))


@pytest.mark.parametrize("kind", ["sglang", "sglang-layerwise"])
def test_a_partial_mapping_reaches_the_connector(world, kind):
    w = world(kind)
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    w.memory.blank()
    loaded = w.engine.retrieve(TOKENS, masked(TOKENS, 4), **w.kwargs(slots[4:], offset=4))
    w.check(TOKENS, slots, loaded, masked(TOKENS, 4))
    assert loaded.sum() == 8


# ---------------------------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("kind", ["V2", "layerwise"])
def test_what_a_lookup_pins_is_not_evicted(world, kind):
    w = world(kind, host_chunks=4)
    w.store(TOKENS)
    assert w.engine.lookup(TOKENS, "r") == 12
    assert w.engine.lookup(TOKENS, request_id="r", pin=True) == 12, "asking again pins nothing twice"
    others = list(range(500, 512))
    assert w.store(others) == CHUNK, "one chunk fits beside the pinned three"
    assert w.engine.stats().skipped == {"no_memory": 2}
    assert w.retrieve(TOKENS) == 12
    w.engine.release("r")
    w.engine.release("r")
    w.engine.lookup_unpin("never seen")
    w.check_books()
    assert w.store(others) == 8
    assert w.engine.stats().evictions == 2
    assert w.engine.lookup(TOKENS) == 4, "the end of a request goes first"


def test_a_lookup_without_a_request_pins_nothing(world):
    w = world()
    w.store(TOKENS)
    assert w.engine.lookup(TOKENS) == w.engine.lookup(TOKENS, "r", pin=False) == 12
    w.check_books()
    with pytest.raises(ArgumentError, match="pin: True, but request_id is None"):
        w.engine.lookup(TOKENS, pin=True)


def test_a_lookup_counts_only_what_finds_room_in_host_memory(world, tmp_path):
    big = world(folder=tmp_path)
    big.store(TOKENS)
    big.engine.close()
    w = world(folder=tmp_path, host_chunks=2)
    assert w.engine.lookup(TOKENS, "r") == 8
    assert w.engine.lookup(TOKENS) == 8 and w.retrieve(TOKENS) == 8
    w.engine.release("r")
    assert w.engine.stats().disk_drops == 0, "no room is no damage"
    assert w.engine.stats().disk_chunks == 3


def test_a_store_does_not_evict_its_own_prefix(world):
    w = world(host_chunks=2)
    assert w.store(TOKENS) == 8
    assert w.store(TOKENS) == 0
    assert w.engine.stats().skipped == {"no_memory": 2}
    assert w.engine.lookup(TOKENS) == 8 and w.engine.stats().evictions == 0


def test_the_least_recently_used_is_evicted_first(world):
    w = world(host_chunks=3)
    for first in (1, 2, 3):
        w.store([first] * CHUNK)
    assert w.engine.lookup([1] * CHUNK) == CHUNK
    w.store([4] * CHUNK)
    assert [w.engine.lookup([first] * CHUNK) for first in (1, 2, 3, 4)] == [4, 0, 4, 4]


def test_an_engine_without_memory_goes_on(world):
    w = world(host_chunks=1, kind="layerwise", max_local_cpu_size=4096 / (1 << 30))
    assert w.store(TOKENS) == 0 and w.engine.lookup(TOKENS) == 0 and w.retrieve(TOKENS) == 0
    assert w.engine.stats().skipped == {"no_memory": 3}


def test_without_local_cpu_host_memory_is_the_way_to_the_disk(world, tmp_path):
    w = world(folder=tmp_path, local_cpu=False)
    assert w.store(TOKENS) == 12
    w.engine.flush()
    assert w.engine.stats().host_chunks == 0 and w.engine.stats().disk_chunks == 3
    assert w.engine.lookup(TOKENS, "r") == 12 and w.engine.stats().host_chunks == 3
    assert w.retrieve(TOKENS) == 12 and w.engine.stats().host_chunks == 3
    w.engine.release("r")
    assert w.engine.stats().host_chunks == 0 == w.engine.stats().host_used_bytes


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_chunk_with_a_negative_slot_is_not_stored(world):
    """Its row would be whatever the memory held before."""
    for kind in ("V2", "layerwise", "V3-groups"):
        w = world(kind)
        slots = w.slots(TOKENS)
        w.memory.write(TOKENS, slots)
        slots[6] = -1
        assert w.engine.store(TOKENS, **w.kwargs(slots)) == 4
        assert w.engine.stats().skipped == {"unmapped_slots": 2}
        assert w.retrieve(TOKENS) == 4
        slots[0] = -1
        assert w.engine.store(TOKENS, masked(TOKENS, 8), **w.kwargs(slots)) == 4, "only the chunks to store matter"


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_chunk_that_the_connector_refuses_ends_what_is_loaded(world, monkeypatch, bad):
    w = world()
    w.store(TOKENS)
    real = w.connector.batched_to_gpu

    def fails(objects, starts, ends, **kwargs):
        if bad * CHUNK in starts:
            raise RuntimeError("the copy failed")
        return real(objects, starts, ends, **kwargs)

    monkeypatch.setattr(w.connector, "batched_to_gpu", fails)
    assert w.retrieve(TOKENS) == bad * CHUNK
    assert w.engine.stats().failed_loads == 1
    assert w.engine.lookup(TOKENS) == bad * CHUNK, "it is not promised again"
    monkeypatch.undo()
    assert w.store(TOKENS) == 4 and w.retrieve(TOKENS) == 12


def test_a_batch_that_fails_once_is_loaded_chunk_by_chunk(world, monkeypatch):
    w = world()
    w.store(TOKENS)
    real = w.connector.batched_to_gpu

    def fails(objects, *args, **kwargs):
        if len(objects) > 1:
            raise RuntimeError("too many")
        return real(objects, *args, **kwargs)

    monkeypatch.setattr(w.connector, "batched_to_gpu", fails)
    assert w.retrieve(TOKENS) == 12 and w.engine.stats().failed_loads == 0


def test_what_is_wrong_with_the_call_is_raised(world):
    w = world()
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    slots[5] = 1 << 40
    with pytest.raises(SlotError):
        w.engine.retrieve(TOKENS, **w.kwargs(slots))
    with pytest.raises(ArgumentError, match="slot_mapping is missing"):
        w.engine.retrieve(TOKENS)
    assert w.engine.lookup(TOKENS) == 12, "no chunk is to blame"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_fails_keeps_nothing(world, kind):
    w = world(kind)
    w.store(TOKENS[:4])
    slots = w.slots(TOKENS)
    w.memory.write(TOKENS, slots)
    broken = slots.clone()
    broken[9] = 1 << 40
    with pytest.raises(SlotError):
        w.engine.store(TOKENS, **w.kwargs(broken))
    w.check_books()
    assert w.engine.lookup(TOKENS) == 4
    assert w.engine.store(TOKENS, **w.kwargs(slots)) == 8 and w.retrieve(TOKENS) == 12


def test_a_chunk_of_another_model_is_dropped(world, tmp_path):
    """The same name and sizes, but now there are layer groups: what is on the disk does not fit."""
    w = world("V3", folder=tmp_path)
    w.store(TOKENS)
    w.engine.close()
    other = world("V3-groups", folder=tmp_path)
    assert other.engine.lookup(TOKENS) == 0
    assert other.engine.stats().disk_drops == 1
    assert other.retrieve(TOKENS) == 0


def test_settings_whose_chunks_differ_share_a_folder(world, tmp_path):
    """They share no names, so going back and forth loses nothing."""
    kinds = ["layerwise", "buffer", "V2", "V3", "V2-mla", "layerwise-mla"]
    for stored in (12, 0):
        for kind in kinds:
            w = world(kind, folder=tmp_path)
            expected = 0 if kind == "V3" else stored  # its chunks are those of V2
            assert w.store(TOKENS) == expected and w.retrieve(TOKENS) == 12
            assert w.engine.stats().disk_drops == 0
            w.engine.close()


@pytest.mark.parametrize("kind", ["V3", "V3-groups"])
def test_v3_is_asked_before_its_groups_are_known(world, kind, tmp_path):
    """A scheduler may look up before the worker has seen the engine's memory."""
    w = world(kind, folder=tmp_path)
    w.store(TOKENS)
    w.restart()
    w.metadata._layer_groups, w.connector._known = (), None
    assert w.engine.lookup(TOKENS, "r") == 12
    assert w.retrieve(TOKENS) == 12
    assert len(w.metadata.layer_groups) == (2 if kind == "V3-groups" else 1)
    w.engine.release("r")


# ---------------------------------------------------------------------------------------------------------- generators


@pytest.mark.parametrize("kind", LAYERWISE)
def test_layerwise_yields_and_what_they_say(world, kind):
    w = world(kind)
    slots = w.slots(TOKENS)
    w.memory.write(TOKENS, slots)
    for expected in (12, 0):  # a miss, then everything there
        assert list(w.engine.store_layer(TOKENS, **w.kwargs(slots))) == [None] * NL + [expected]
    assert list(w.engine.store_layer([], **w.kwargs(slots[:0]))) == [None] * NL + [0]
    for tokens, hits in ((TOKENS, 12), ([1] * 14, 0), ([], 0)):
        w.memory.blank()
        first, *middle, mask = w.engine.retrieve_layer(tokens, **w.kwargs(slots[: len(tokens)]))
        assert (first, middle) == (hits, [None] * NL)
        w.check(tokens, slots[: len(tokens)], mask)
        assert mask.sum() == hits


def test_layers_are_written_one_after_the_other(world):
    """When `next` number i+3 has returned, layer i is in its slots, and layer i+2 is not."""
    w = world("layerwise")
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    w.memory.blank()
    wanted = [[plane[:12] for plane in row] for row in w.memory.rows(TOKENS)]
    loading = w.engine.retrieve_layer(TOKENS, **w.kwargs(slots))
    for step in range(1, NL + 3):
        next(loading)
        there = [torch.equal(w.memory.planes[layer][0][slots[:12]], wanted[layer][0]) for layer in range(NL)]
        assert all(there[: max(0, step - 2)]) and not any(there[max(0, step - 1) :]), step


@pytest.mark.parametrize("kind", LAYERWISE)
@pytest.mark.parametrize("steps", range(NL + 2))
def test_generators_closed_early_leave_nothing_held(world, kind, steps):
    w = world(kind)
    w.store(TOKENS[:4])
    slots = w.slots(TOKENS)
    w.memory.write(TOKENS, slots)
    storing = w.engine.store_layer(TOKENS, **w.kwargs(slots))
    for _ in range(min(steps, NL)):
        next(storing)
    storing.close()
    w.check_books()
    assert w.engine.lookup(TOKENS) == 4
    assert w.store(TOKENS) == 8
    loading = w.engine.retrieve_layer(TOKENS, **w.kwargs(slots))
    for _ in range(steps):
        next(loading)
    loading.close()
    w.check_books()
    assert w.retrieve(TOKENS) == 12


@pytest.mark.parametrize("kind", LAYERWISE)
def test_an_error_between_layers_leaves_nothing_held(world, kind, monkeypatch):
    w = world(kind)
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    loading = w.engine.retrieve_layer(TOKENS, **w.kwargs(slots))
    next(loading)
    next(loading)
    with monkeypatch.context() as patch:
        patch.setattr(w.connector, "run", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(loading)
        storing = w.engine.store_layer([1] * 8, **w.kwargs(slots))
        with pytest.raises(ZeroDivisionError):
            next(storing)
    w.check_books()
    assert w.retrieve(TOKENS) == 12 and w.engine.lookup([1] * 8) == 0


def test_chunks_of_an_open_load_are_not_evicted(world):
    w = world("layerwise", host_chunks=3)
    w.store(TOKENS)
    slots = w.slots(TOKENS)
    w.memory.blank()
    loading = w.engine.retrieve_layer(TOKENS, **w.kwargs(slots))
    next(loading)
    assert list(w.engine.store_layer([1] * 4, **w.kwargs(slots[:4])))[-1] == 0
    *_, mask = loading
    assert mask.sum() == 12
    w.check(TOKENS, slots, mask)


def test_two_stores_of_one_chunk_keep_one(world):
    w = world("layerwise")
    slots = w.slots(TOKENS)
    w.memory.write(TOKENS, slots)
    first = w.engine.store_layer(TOKENS[:8], **w.kwargs(slots[:8]))
    next(first)
    used = w.engine.stats().host_used_bytes
    second = w.engine.store_layer(TOKENS, **w.kwargs(slots))
    next(second)
    assert w.engine.stats().host_used_bytes == used * 3 // 2, "the chunk that nobody is storing"
    assert (list(first)[-1], list(second)[-1]) == (8, 4)
    assert w.retrieve(TOKENS) == 12


# ---------------------------------------------------------------------------------------------------------- life cycle


def test_a_closed_engine_says_so(world):
    w = world()
    w.engine.lookup(TOKENS)
    w.engine.close()
    w.engine.close()
    for call in (w.engine.lookup, w.engine.store, w.engine.retrieve):
        with pytest.raises(ObjectError, match="closed"):
            call(TOKENS)
    with pytest.raises(ObjectError, match="closed"):
        next(w.engine.store_layer(TOKENS))


def test_closing_releases_what_is_pinned(world):
    w = world()
    w.store(TOKENS)
    w.engine.lookup(TOKENS, "r")
    w.engine.close()
    assert w.engine.storage.host.allocator.used_bytes == 0


def test_engines_by_name(world):
    w = world("mock")
    metadata, connector = w.metadata, MockGPUConnector.from_metadata(w.metadata)
    engine = CacheEngineBuilder.get_or_create("one", w.config, metadata, connector)
    try:
        assert isinstance(engine, LMCacheEngine) and LMCacheEngine is CacheEngine
        assert CacheEngineBuilder.get_or_create("one", w.config, metadata, connector) is engine
        assert CacheEngineBuilder.get("one") is engine and CacheEngineBuilder.get("two") is None
        with pytest.raises(ArgumentError, match="instance_id: 'one'"):
            CacheEngineBuilder.get_or_create("one", LMCacheEngineConfig(chunk_size=8), metadata, connector)
    finally:
        CacheEngineBuilder.destroy("one")
        CacheEngineBuilder.destroy("one")
    assert CacheEngineBuilder.get("one") is None
    with pytest.raises(ObjectError):
        engine.lookup([1])
