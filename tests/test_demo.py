"""The demo shows what it says, and every way of being wrong that it should notice makes it say so.

The raw table, on which all of it rests, is compared with element numbers written out by hand.
"""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
import torch

import lmcache_ref.demo.run as run
import lmcache_ref.demo.trip as trip
from lmcache_ref import LAYOUTS, get_backend, register_backend, register_layout
from lmcache_ref.backends import unregister_backend
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2
from lmcache_ref.demo import CONNECTORS, model, run_demo
from lmcache_ref.demo.connectors import whole_model
from lmcache_ref.demo.raw import raw_table
from lmcache_ref.discovery import flatten
from lmcache_ref.errors import ArgumentError, BackendError, LayoutError
from lmcache_ref.layouts import unregister_layout

AT_IMPORT = tuple(LAYOUTS)
PER_LAYER, FUSED, MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_NH_BS_TWO_HS", "NL_X_NB_BS_HS"
DIRECTION_BYTES = 2 * model.NL * model.PROMPT_TOKENS * model.NH * model.HS * 2

# Sizes for the raw table alone: no two alike but NH and TWO, so that lines written by hand stay short.
TINY = {"NL": 2, "NB": 3, "BS": 4, "NH": 2, "HS": 2, "C": 5}


def demo_one(layout=PER_LAYER, **options):
    (result,) = run_demo([layout], **options)
    return result


@pytest.fixture(scope="module")
def shown():
    progress = []
    results = run_demo(on_progress=progress.append)
    assert progress == results
    return {result.layout: result for result in results}


# The whole table


def test_every_layout_is_shown_in_order(shown):
    assert tuple(shown) == AT_IMPORT
    assert len(shown) == 26


@pytest.mark.parametrize("name", AT_IMPORT)
def test_layout_is_right(shown, name):
    result = shown[name]
    assert result.ok, result
    assert (result.tokens_equal, result.logits_equal, result.control_differs) == (True, True, True)
    assert (result.error, result.skipped) == ("", False)
    assert result.connector == "VLLMPagedMemGPUConnectorV2"
    assert result.backend == get_backend().name
    assert result.bytes == DIRECTION_BYTES == 204800
    assert result.store_gb_per_second == result.bytes / result.store_seconds / 1e9 > 0
    assert result.load_gb_per_second == result.bytes / result.load_seconds / 1e9 > 0
    assert result.note == ("one latent row a token: K then V" if LAYOUTS[name].is_mla else "")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_every_layout_on_a_gpu(seed):
    results = run_demo(device="cuda", seed=seed)
    assert len(results) == len(AT_IMPORT)
    assert [result for result in results if not result.ok] == []


def test_other_seeds_are_other_models_and_right_too():
    assert demo_one(FUSED, seed=1).ok
    device = torch.device("cpu")
    one, other, again = (model.run_uninterrupted(seed, device) for seed in (0, 1, 0))
    assert not torch.equal(one.rows[0][0], other.rows[0][0])
    assert model.tokens_of(one.logits) != model.tokens_of(other.logits)
    assert all(model.same_bits(*pair) for pair in zip(one.logits, again.logits, strict=True))
    assert len(one.logits) == model.DECODED_TOKENS


# The raw table


def test_the_raw_table_has_exactly_the_layouts():
    assert set(raw_table(**TINY)) == set(AT_IMPORT)


def numbered(raw):
    """The engine's tensors, each element its own place in its tensor."""
    kv = raw.allocate(0, torch.int64, "cpu")
    for leaf in flatten(kv)[0]:
        leaf.copy_(torch.arange(leaf.numel()).view(leaf.shape))
    return kv


# Layer 1, k, slot 6 (block 1, offset 2), NL 2, NB 3, BS 4, NH 2, HS 2, C 5: where in the one tensor that holds them are
# the elements [head 0: (0, 1)], [head 1: (0, 1)]? And which tensor is it, counted through the lists?
BY_HAND = [
    ("NL_X_TWO_NB_BS_NH_HS", 1, 1, [[72, 73], [74, 75]]),  # 1*48 + 1*16 + 2*4
    ("NL_X_NB_TWO_BS_NH_HS", 1, 1, [[56, 57], [58, 59]]),  # 1*32 + 1*16 + 2*4
    ("NL_X_NB_TWO_NH_BS_HS", 0, 1, [[36, 37], [44, 45]]),  # 1*32 + 0*16 + 2*2, a head is 8
    ("NL_X_TWO_NB_NH_BS_HS", 1, 1, [[68, 69], [76, 77]]),  # 1*48 + 1*16 + 2*2, a head is 8
    ("NL_X_NB_NH_BS_TWO_HS", 1, 1, [[42, 43], [58, 59]]),  # 1*32 + 2*4 + 1*2, a head is 16
    ("NL_X_NB_BS_NH_TWO_HS", 0, 1, [[48, 49], [52, 53]]),  # 1*32 + 2*8 + 0*2, a head is 4
    ("NL_X_NH_NB_BS_TWO_HS", 1, 1, [[26, 27], [74, 75]]),  # 1*16 + 2*4 + 1*2, a head is 48
    ("NB_NL_TWO_BS_NH_HS", 1, 0, [[120, 121], [122, 123]]),  # 1*64 + 1*32 + 1*16 + 2*4
    ("NB_NL_TWO_NH_BS_HS", 0, 0, [[100, 101], [108, 109]]),  # 1*64 + 1*32 + 0*16 + 2*2, a head is 8
    ("NB_NL_TWO_NHBSHS", 0, 0, [[100, 101], [108, 109]]),  # the same memory, its last three axes in one
    ("NB_NH_NL_TWO_BS_HS", 1, 0, [[92, 93], [124, 125]]),  # 1*64 + 1*16 + 1*8 + 2*2, a head is 32
    ("LBHNC", 1, 0, [[138, 139], [154, 155]]),  # 1*96 + 1*32 + 2*4 + 1*2, a head is 16
    ("LHBNC", 1, 0, [[122, 123], [170, 171]]),  # 1*96 + 1*16 + 2*4 + 1*2, a head is 48
    ("BHLNC", 0, 0, [[88, 89], [120, 121]]),  # 1*64 + 1*16 + 2*4 + 0*2, a head is 32
    ("TWO_X_NL_X_NBBS_NH_HS", 1, 3, [[24, 25], [26, 27]]),  # tensor V1; 6*4
    ("TWO_NL_X_NB_BS_NH_HS", 0, 1, [[24, 25], [26, 27]]),  # tensor K1; 1*16 + 2*4
    ("NL_X_NB_BS_HS", 0, 1, [30, 31, 32, 33, 34]),  # 1*20 + 2*5
    ("ONE_X_NL_X_NBBS_ONE_HS", 0, 1, [30, 31, 32, 33, 34]),  # 6*5
]


@pytest.mark.parametrize(("name", "k", "leaf", "numbers"), BY_HAND, ids=[case[0] for case in BY_HAND])
def test_raw_line_against_numbers_written_by_hand(name, k, leaf, numbers):
    raw = raw_table(**TINY)[name]
    kv = numbered(raw)
    row = raw.row(kv, 1, k, 6)
    assert row.tolist() == numbers
    row[:] = -1  # a view of that tensor, and of nothing else in it
    changed = [
        [index for index, value in enumerate(tensor.flatten().tolist()) if value == -1] for tensor in flatten(kv)[0]
    ]
    assert changed[leaf] == torch.tensor(numbers).flatten().tolist()
    assert sum(map(len, changed)) == len(changed[leaf])


@pytest.mark.parametrize("name", AT_IMPORT)
def test_raw_rows_fill_the_memory_exactly_once(name):
    raw = raw_table(**TINY)[name]
    kv = raw.allocate(0, torch.int64, "cpu")
    places = [
        (layer, k, slot) for layer in range(2) for k in range(1 if LAYOUTS[name].is_mla else 2) for slot in range(12)
    ]
    for place in places:
        raw.row(kv, *place)[:] += 1
    assert all(bool((leaf == 1).all()) for leaf in flatten(kv)[0])
    for number, place in enumerate(places):
        raw.row(kv, *place)[:] = number
    assert [set(raw.row(kv, *place).flatten().tolist()) for place in places] == [{n} for n in range(len(places))]


@pytest.mark.parametrize("name", [PER_LAYER, MLA])
def test_fresh_pages_are_the_sentinel(name):
    for leaf in flatten(raw_table(**TINY)[name].allocate(0xA5, torch.bfloat16, "cpu"))[0]:
        assert set(leaf.view(torch.uint8).flatten().tolist()) == {0xA5}


# Broken connectors


class SwapsOnStore(VLLMPagedMemGPUConnectorV2):
    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
        for obj in memory_objs:
            obj.tensor.copy_(obj.tensor.flip(0))


class SwapsOnLoad(VLLMPagedMemGPUConnectorV2):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        for obj in memory_objs:
            obj.tensor.copy_(obj.tensor.flip(0))
        super().batched_to_gpu(memory_objs, starts, ends, **kwargs)
        for obj in memory_objs:
            obj.tensor.copy_(obj.tensor.flip(0))


class SwapsBothWays(SwapsOnStore, SwapsOnLoad):
    """Two wrongs that cancel in the pages: only the objects show it."""


class NextSlotOnLoad(VLLMPagedMemGPUConnectorV2):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, *, slot_mapping, **kwargs):
        slots = (slot_mapping + 1) % (trip.NB * trip.BS)
        super().batched_to_gpu(memory_objs, starts, ends, slot_mapping=slots, **kwargs)


class ForgetsTheLastChunk(VLLMPagedMemGPUConnectorV2):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        super().batched_to_gpu(memory_objs[:-1], starts[:-1], ends[:-1], **kwargs)


class WritesOneByteTooMany(VLLMPagedMemGPUConnectorV2):
    """All tokens are right; a slot that nobody named is not."""

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, *, kvcaches, slot_mapping, **kwargs):
        super().batched_to_gpu(memory_objs, starts, ends, kvcaches=kvcaches, slot_mapping=slot_mapping, **kwargs)
        free = min(set(range(trip.NB * trip.BS)) - set(slot_mapping.tolist()))
        kvcaches[3].view(torch.uint8)[0, free // trip.BS, free % trip.BS, 0, 5] ^= 1


class Raises(VLLMPagedMemGPUConnectorV2):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        raise KeyError("out of luck")


@pytest.mark.parametrize(
    ("broken", "logits_equal", "error"),
    [
        (SwapsOnStore, False, "800 stored rows hold other bytes, the first is layer 0, K, token 0"),
        (SwapsOnLoad, False, "bytes of paged memory are not what the load should leave"),
        (SwapsBothWays, True, "800 stored rows hold other bytes"),
        (NextSlotOnLoad, False, "bytes of paged memory are not what the load should leave"),
        (ForgetsTheLastChunk, False, "bytes of paged memory are not what the load should leave"),
        (WritesOneByteTooMany, True, "1 bytes of paged memory are not what the load should leave"),
        (Raises, False, "KeyError: 'out of luck'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_connector_is_shown_as_broken(monkeypatch, broken, logits_equal, error):
    monkeypatch.setitem(CONNECTORS, "Broken", whole_model(broken))
    result = demo_one(connector="Broken")
    assert not result.ok
    assert result.logits_equal == logits_equal
    assert error in result.error
    assert (result.connector, result.skipped) == ("Broken", False)


def test_one_broken_layout_does_not_hide_the_others(monkeypatch):
    class DislikesMLA(VLLMPagedMemGPUConnectorV2):
        def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
            assert not self.use_mla, "no MLA"
            super().batched_to_gpu(memory_objs, starts, ends, **kwargs)

    monkeypatch.setitem(CONNECTORS, "Broken", whole_model(DislikesMLA))
    results = run_demo([PER_LAYER, MLA, FUSED], connector="Broken")
    assert [(result.layout, result.ok) for result in results] == [(PER_LAYER, True), (MLA, False), (FUSED, True)]
    assert "no MLA" in results[1].error


@pytest.mark.parametrize("name", [PER_LAYER, FUSED, "NB_NL_TWO_NHBSHS"])
def test_a_wrong_raw_line_does_not_agree_with_the_library(monkeypatch, name):
    """The demo's own table is no echo of the library's: with K and V the other way round they disagree."""
    table = raw_table(model.NL, trip.NB, trip.BS, model.NH, model.HS, trip.LATENT)
    right = table[name].row
    table[name] = table[name]._replace(row=lambda kv, layer, k, slot: right(kv, layer, 1 - k, slot))
    monkeypatch.setattr(run, "raw_table", lambda *sizes: table)
    result = demo_one(name)
    assert not result.ok
    assert "stored rows hold other bytes" in result.error


# The control


@pytest.mark.parametrize("name", [PER_LAYER, MLA])
def test_a_control_that_changes_nothing_fails(monkeypatch, name):
    monkeypatch.setattr(trip, "flip_sign_of_greatest", lambda row: None)
    result = demo_one(name)
    assert (result.tokens_equal, result.logits_equal, result.control_differs) == (True, True, False)
    assert not result.ok
    assert result.error == "a flipped bit of a stored key changed no logit"


def test_flip_changes_the_sign_of_the_greatest_element_and_back():
    row = torch.tensor([0.5, -3.0, 2.0], dtype=torch.bfloat16)
    before = row.view(torch.uint8).tolist()
    trip.flip_sign_of_greatest(row)
    assert row.tolist() == [0.5, 3.0, 2.0]
    assert [one ^ other for one, other in zip(before, row.view(torch.uint8).tolist(), strict=True)] == [
        0,
        0,
        0,
        0x80,
        0,
        0,
    ]
    trip.flip_sign_of_greatest(row)
    assert row.view(torch.uint8).tolist() == before


def test_a_model_that_is_not_reproducible_is_refused(monkeypatch):
    right = model.cache_of

    def disturbed(rows):
        return right([[side + 1 for side in pair] for pair in rows])

    monkeypatch.setattr(model, "cache_of", disturbed)
    with pytest.raises(RuntimeError, match="nothing can be compared"):
        demo_one()


# What is not shown, and wrong names


def test_a_layout_without_a_raw_line_is_reported_by_name():
    register_layout("NL_X_NH_BS_NB_TWO_HS", "nh bs nb (two hs)", nesting=("nl",))
    try:
        results = run_demo([PER_LAYER, "NL_X_NH_BS_NB_TWO_HS"])
    finally:
        unregister_layout("NL_X_NH_BS_NB_TWO_HS")
    assert [(result.ok, result.skipped) for result in results] == [(True, False), (False, True)]
    assert (results[1].layout, results[1].note, results[1].error) == ("NL_X_NH_BS_NB_TWO_HS", "no raw line", "")
    assert (results[1].bytes, results[1].store_gb_per_second, results[1].load_gb_per_second) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"layouts": [PER_LAYER, "NL_X"]}, LayoutError, "'NL_X'.*NL_X_TWO_NB_BS_NH_HS"),
        ({"connector": "V9"}, ArgumentError, "'V9'.*VLLMPagedMemGPUConnectorV2"),
        ({"backend": "abacus"}, BackendError, "'abacus'.*reference"),
    ],
    ids=["layout", "connector", "backend"],
)
def test_unknown_names_are_errors_before_the_model_is_built(monkeypatch, wrong, error, words):
    monkeypatch.setattr(model, "build_model", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(error, match=words):
        run_demo(**wrong)


def test_the_backend_asked_for_moves_the_bytes():
    calls = []
    reference = get_backend("reference")

    def counted(name):
        def operation(plan):
            calls.append((name, len(plan.spans)))
            return getattr(reference, name)(plan)

        return operation

    operations = SimpleNamespace(gather=counted("gather"), scatter=counted("scatter"), rerotate=reference.rerotate)
    register_backend("counting", operations, speed=-9)
    try:
        result = demo_one(backend="counting")
    finally:
        unregister_backend("counting")
    assert result.ok and result.backend == "counting"
    stores = loads = 1 + trip.MORE_TIMES
    control = 1
    assert calls.count(("gather", 4)) == stores
    assert calls.count(("scatter", 4)) == loads + control
    assert len(calls) == stores + loads + control


# The model


def test_the_chunks_are_ragged_and_cover_the_prompt():
    assert trip.SPANS == [(0, 32), (32, 64), (64, 96), (96, 100)]


def test_building_the_model_touches_no_network_and_no_global_state(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    model.run_uninterrupted(0, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'lmcache-ref\[demo\]'"):
        demo_one()


def test_rows_of_old_and_new_caches_are_copies_in_token_order():
    keys, values = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4), torch.arange(24.0, 48.0).view(1, 2, 3, 4)
    new = SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=values)])
    old = SimpleNamespace(key_cache=[keys], value_cache=[values])
    for cache in (new, old):
        ((k, v),) = model.rows_of(cache)
        assert k[1].tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]  # token 1: head 0, head 1
        assert v[2].tolist() == [[32, 33, 34, 35], [44, 45, 46, 47]]
        k.zero_()
        assert keys[0, 0, 0, 1] == 1


def test_rows_survive_a_dynamic_cache_and_a_latent_row():
    shape = (5, model.NH, model.HS)
    rows = [[torch.randn(shape).bfloat16() for _ in range(2)] for _ in range(model.NL)]
    for back in (model.rows_of(model.cache_of(rows)), model.rows_of_latent(model.latent_of(rows))):
        assert len(back) == model.NL
        for pair, other in zip(rows, back, strict=True):
            assert all(model.same_bits(*sides) for sides in zip(pair, other, strict=True))
    assert model.latent_of(rows)[0][0].shape == (5, trip.LATENT)


def test_same_bits_is_about_bits():
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert model.same_bits(nan, nan.clone())
    assert not model.same_bits(zero, -zero)
