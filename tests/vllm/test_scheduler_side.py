"""The scheduler's half of the vLLM connector on fake requests and scheduler outputs: what is promised, loaded, stored.

Cases 30 to 34, in the shapes of three vLLM versions. No vLLM is needed; the workers' half is tested beside this.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from vllm_fakes import DIALECTS, FakeLookup, FakeRequest, Scheduled, scheduler_output

from lmcache_ref.errors import ArgumentError
from lmcache_ref.integration.vllm.request_tracker import LoadSpec, SavePolicy, SaveSpec
from lmcache_ref.integration.vllm.scheduler_side import SchedulerSide
from lmcache_ref.integration.vllm.token_keys import keyed_prompt

BLOCK = 4
dialects = pytest.mark.parametrize("dialect", DIALECTS)


def side_of(lookup: FakeLookup | None = None, chunk_size: int = 8, **options) -> SchedulerSide:
    policy = {
        name: options.pop(name)
        for name in ("save_decode_cache", "save_unfull_chunk", "skip_last_n_tokens")
        if name in options
    }
    return SchedulerSide(SavePolicy(chunk_size, **policy), lookup or FakeLookup(), block_size=BLOCK, **options)


def admitted(side: SchedulerSide, request: FakeRequest, computed: int = 0) -> int:
    """Match and allocate, as vLLM does for a request that fits."""
    tokens = side.get_num_new_matched_tokens(request, computed)
    side.update_state_after_alloc(request, tokens)
    request.num_computed_tokens = computed + tokens
    return tokens


def only(step):
    assert len(step.requests) == 1
    return step.requests[0]


# ---------------------------------------------------------------------------------------------- the match (case 30)

MATCHES = [
    (32, 24, 16, 8),
    (10009, 256, 336, 0),
    (32, 32, 0, 31),
    (32, 32, 16, 15),
    (32, 32, 31, 0),
    (362, 361, 320, 41),
    (5, 0, 0, 0),
]


@pytest.mark.parametrize(("prompt", "hit", "computed", "expected"), MATCHES)
def test_match(prompt, hit, computed, expected):
    tokens = list(range(prompt))
    lookup = FakeLookup([tokens[:hit]])
    side = side_of(lookup)
    request = FakeRequest("r", tokens)
    answers = [side.get_num_new_matched_tokens(request, computed) for _ in range(2)]
    assert answers == [expected, expected]
    assert [type(answer) for answer in answers] == [int, int]
    assert len(lookup.asked) == 1, "asking again must not ask the caches again"


def test_match_of_a_resumed_request_counts_all_its_tokens():
    """40 tokens of prompt, 24 decoded; all 64 are in the cache: one is left to compute."""
    request = FakeRequest("r", list(range(40)))
    for token in range(40, 64):
        request.decode(token)
    side = side_of(FakeLookup([list(range(64))]))
    assert side.get_num_new_matched_tokens(request, 0) == 63


def test_match_never_exceeds_the_request():
    """A lookup that claims more than it was asked for is cut to the request's tokens."""
    side = side_of(SimpleNamespace(lookup=lambda tokens, request_id: 1000, release=lambda request_id: None))
    assert side.get_num_new_matched_tokens(FakeRequest("r", list(range(20))), 4) == 15


def test_a_match_answers_anew_for_other_computed_tokens():
    """vLLM's own prefix cache may have lost blocks between two questions; the hit is pinned and stays."""
    side = side_of(FakeLookup([list(range(24))]))
    request = FakeRequest("r", list(range(32)))
    assert [side.get_num_new_matched_tokens(request, computed) for computed in (16, 8, 24, 0)] == [8, 16, 0, 24]


def test_a_producer_is_promised_nothing_and_a_consumer_stores_nothing():
    lookup = FakeLookup([list(range(24))])
    producer, consumer = side_of(lookup, loads=False), side_of(lookup, saves=False)
    request = FakeRequest("r", list(range(32)))
    assert admitted(producer, request) == 0 and not lookup.asked
    assert only(producer.build_connector_meta(scheduler_output("0.8.5", [(request, 32, list(range(8)))]))).load is None
    assert admitted(consumer, request) == 24
    work = only(consumer.build_connector_meta(scheduler_output("0.8.5", [(request, 8, list(range(8)))])))
    assert work.load == LoadSpec(0, 24, 24) and work.save is None


# ---------------------------------------------------------------------------------------------- allocation (case 31)


@dialects
def test_no_load_without_room_and_exactly_one_with_it(dialect):
    lookup = FakeLookup([list(range(24))])
    side = side_of(lookup)
    request = FakeRequest("r", list(range(32)))
    assert side.get_num_new_matched_tokens(request, 0) == 24
    side.update_state_after_alloc(request, 0)
    assert not lookup.pins, "nothing is loaded, nothing stays pinned"
    work = only(side.build_connector_meta(scheduler_output(dialect, [(request, 32, list(range(8)))])))
    assert work.load is None

    assert side.get_num_new_matched_tokens(request, 0) == 24
    side.update_state_after_alloc(request, 24)
    request.num_computed_tokens = 24
    output = scheduler_output(dialect, [(request, 8, list(range(8)))])
    loads = [work.load for _ in range(3) for work in side.build_connector_meta(output).requests if work.load]
    assert loads == [LoadSpec(0, 24, 24)]


def test_a_match_without_allocation_keeps_its_pin_and_its_answer():
    lookup = FakeLookup([list(range(24))])
    side = side_of(lookup)
    request = FakeRequest("r", list(range(32)))
    for _ in range(3):
        assert side.get_num_new_matched_tokens(request, 0) == 24
    assert lookup.pins == {"r": 1}
    side.build_connector_meta(scheduler_output("0.8.5", finished={"r"}))
    assert not lookup.pins


def test_vllm_may_take_fewer_tokens_than_promised_but_not_more():
    side = side_of(FakeLookup([list(range(30))]))
    request = FakeRequest("r", list(range(32)))
    assert side.get_num_new_matched_tokens(request, 8) == 22
    with pytest.raises(ArgumentError, match="23 for request r; 22 tokens were promised"):
        side.update_state_after_alloc(request, 23)
    side.get_num_new_matched_tokens(request, 8)
    side.update_state_after_alloc(request, 20)
    request.num_computed_tokens = 28
    work = only(side.build_connector_meta(scheduler_output("0.32", [(request, 4, list(range(8)))])))
    assert work.load == LoadSpec(8, 30, 28)
    assert work.token_ids[:30] == list(range(30)), "the hit's last chunk is named by all of its tokens"


def test_full_hit_leaves_the_last_token_to_vllm():
    """It is loaded all the same: vLLM's CPU backend packs a block, which is right only as a whole."""
    side = side_of(FakeLookup([list(range(32))]))
    request = FakeRequest("r", list(range(32)))
    assert admitted(side, request) == 31
    work = only(side.build_connector_meta(scheduler_output("0.8.5", [(request, 1, list(range(8)))])))
    assert (work.load, work.save) == (LoadSpec(0, 32, 32), None)


# ---------------------------------------------------------------------------------------------- steps (cases 32, 34)


@dialects
def test_chunked_prefill_stores_each_chunk_once(dialect):
    side = side_of()
    request = FakeRequest("r", list(range(30)))
    assert admitted(side, request) == 0
    steps = [side.build_connector_meta(scheduler_output(dialect, [(request, 10, [5, 6, 7])]))]
    for tokens, blocks in ((10, [8, 9]), (10, [10, 11, 12]), (1, []), (1, [])):
        request.num_computed_tokens += 10 if len(steps) < 4 else 1
        if request.num_computed_tokens >= request.num_tokens:
            request.decode(100 + len(steps))
        one = Scheduled(request, tokens, blocks)
        steps.append(side.build_connector_meta(scheduler_output(dialect, cached=[one])))
    works = [work for step in steps for work in step.requests]
    assert [work.save for work in works] == [SaveSpec(0, 8), SaveSpec(8, 16), SaveSpec(16, 24)]
    assert [work.token_ids for work in works] == [list(range(n)) for n in (8, 16, 24)]
    assert [work.block_ids for work in works] == [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9, 10]]


@dialects
@pytest.mark.parametrize("decode", [False, True])
def test_decoded_chunks(dialect, decode):
    """Case 34: off, only the prompt's chunks; on, the chunk that decoding completes, once."""
    side = side_of(save_decode_cache=decode)
    request = FakeRequest("r", list(range(13)))
    admitted(side, request)
    saves = [
        work.save
        for work in side.build_connector_meta(scheduler_output(dialect, [(request, 13, [0, 1, 2, 3])])).requests
    ]
    request.num_computed_tokens = 13
    for step in range(20):
        request.decode(500 + step)
        one = Scheduled(request, 1, [4 + step] if request.num_computed_tokens % BLOCK == 0 else [])
        saves += [work.save for work in side.build_connector_meta(scheduler_output(dialect, cached=[one])).requests]
        request.num_computed_tokens += 1
    expected = [SaveSpec(0, 8), SaveSpec(8, 16), SaveSpec(16, 24), SaveSpec(24, 32)]
    assert saves == (expected if decode else expected[:1])


@dialects
def test_a_resumed_request_brings_new_blocks_and_loads_again(dialect):
    lookup = FakeLookup(chunk_size=8)
    side = side_of(lookup)
    request = FakeRequest("r", list(range(20)))
    admitted(side, request)
    only(side.build_connector_meta(scheduler_output(dialect, [(request, 20, [0, 1, 2, 3, 4])])))
    request.num_computed_tokens = 20
    for token in (70, 71, 72, 73, 74):
        request.decode(token)
        one = Scheduled(request, 1, [])
        assert not side.build_connector_meta(scheduler_output(dialect, cached=[one])).requests
        request.num_computed_tokens += 1
    lookup.held.append(list(range(20)))
    request.num_computed_tokens = 0  # preempted
    assert admitted(side, request) == 16
    one = Scheduled(request, 9, [40, 41, 42, 43, 44, 45, 46], resumed=True)
    work = only(side.build_connector_meta(scheduler_output(dialect, cached=[one])))
    assert work.load == LoadSpec(0, 16, 16) and work.save is None
    assert work.block_ids == [40, 41, 42, 43] and work.token_ids == list(range(16))
    request.num_computed_tokens = 25
    request.decode(75)
    one = Scheduled(request, 1, [47])
    assert not side.build_connector_meta(scheduler_output(dialect, cached=[one])).requests


@dialects
def test_a_resumed_request_whose_chunks_are_gone_stores_them_again(dialect):
    side = side_of(save_decode_cache=True)
    request = FakeRequest("r", list(range(12)))
    admitted(side, request)
    side.build_connector_meta(scheduler_output(dialect, [(request, 12, [0, 1, 2])]))
    for token in range(12, 18):
        request.decode(token)
    request.num_computed_tokens = 0
    admitted(side, request)
    one = Scheduled(request, 18, [9, 8, 7, 6, 5], resumed=True)
    work = only(side.build_connector_meta(scheduler_output(dialect, cached=[one])))
    assert work.save == SaveSpec(0, 16) and work.block_ids == [9, 8, 7, 6] and work.token_ids == list(range(16))


@pytest.mark.parametrize("empty", [[], None, [[]], ([],)])
def test_empty_block_ids(empty):
    side = side_of()
    request = FakeRequest("r", list(range(8)))
    admitted(side, request)
    output = scheduler_output("0.8.5", [(request, 4, [3, 4])])
    assert not side.build_connector_meta(output).requests
    request.num_computed_tokens = 4
    output = scheduler_output("0.8.5", cached=[Scheduled(request, 4, [])])
    output.scheduled_cached_reqs[0].new_block_ids = empty
    assert only(side.build_connector_meta(output)).block_ids == [3, 4]


@pytest.mark.parametrize("blocks", [[3, 4], [[3, 4]], ([3, 4],)])
def test_block_ids_flat_or_per_group(blocks):
    side = side_of()
    request = FakeRequest("r", list(range(8)))
    admitted(side, request)
    output = scheduler_output("0.8.5", [(request, 8, [])])
    output.scheduled_new_reqs[0].block_ids = blocks
    assert only(side.build_connector_meta(output)).block_ids == [3, 4]


def test_several_kv_cache_groups_are_refused():
    side = side_of()
    request = FakeRequest("r", list(range(8)))
    output = scheduler_output("0.32", [(request, 8, [])])
    output.scheduled_new_reqs[0].block_ids = ([1, 2], [3, 4])
    with pytest.raises(ArgumentError, match="2 KV cache groups"):
        side.build_connector_meta(output)


def test_too_few_blocks_are_an_error():
    side = side_of()
    request = FakeRequest("r", list(range(8)))
    with pytest.raises(ArgumentError, match=r"request r: 1 blocks of 4 tokens, .* up to 8"):
        side.build_connector_meta(scheduler_output("0.8.5", [(request, 8, [3])]))


def test_the_scheduler_output_is_not_changed():
    side = side_of()
    request = FakeRequest("r", list(range(9)))
    admitted(side, request)
    output = scheduler_output("0.8.5", [(request, 9, [1, 2, 3])])
    before = repr(output)
    side.build_connector_meta(output)
    assert repr(output) == before


@pytest.mark.parametrize("dialect", ["0.8.5", "0.9"])
def test_without_the_request_object_the_output_tells_the_tokens(dialect):
    """A scheduler that never called `update_state_after_alloc`: tokens come with the steps, where vLLM sends them."""
    side = side_of(save_decode_cache=True)
    request = FakeRequest("r", list(range(6)))
    assert not side.build_connector_meta(scheduler_output(dialect, [(request, 6, [1, 2])])).requests
    request.num_computed_tokens = 6
    request.all_token_ids += [90, 91]
    work = only(side.build_connector_meta(scheduler_output(dialect, cached=[Scheduled(request, 2, [])])))
    assert work.token_ids == [0, 1, 2, 3, 4, 5, 90, 91] and work.save == SaveSpec(0, 8)


@dialects
def test_drafts_are_not_stored(dialect):
    """Three drafts are scheduled behind the sampled token; only what was accepted is a token of the request."""
    side = side_of(save_decode_cache=True)
    request = FakeRequest("r", list(range(6)))
    admitted(side, request)
    side.build_connector_meta(scheduler_output(dialect, [(request, 6, [1, 2, 3])]))
    request.num_computed_tokens = 6
    request.decode(60)
    output = scheduler_output(dialect, cached=[Scheduled(request, 4, [])])
    assert not side.build_connector_meta(output).requests
    request.num_computed_tokens = 8  # one draft was accepted
    request.decode(61)
    request.decode(62)
    work = only(side.build_connector_meta(scheduler_output(dialect, cached=[Scheduled(request, 4, [])])))
    assert work.token_ids == [0, 1, 2, 3, 4, 5, 60, 61] and work.save == SaveSpec(0, 8)


def test_a_step_taken_back_is_stored_again():
    """vLLM 0.32 after a failed load: the request goes on from the first block that failed."""
    side = side_of()
    request = FakeRequest("r", list(range(40)))
    admitted(side, request)
    work = only(side.build_connector_meta(scheduler_output("0.32", [(request, 24, list(range(6)))])))
    assert work.save == SaveSpec(0, 24)
    request.num_computed_tokens = 12
    work = only(side.build_connector_meta(scheduler_output("0.32", cached=[Scheduled(request, 12, [])])))
    assert work.save == SaveSpec(8, 24)


# ---------------------------------------------------------------------------------------------- what may be stored


def test_skip_last_n_tokens():
    """Case 33: with 3 of 16 tokens left out, lookup and store both use 13."""
    lookup = FakeLookup()
    side = side_of(lookup, chunk_size=13, skip_last_n_tokens=3)
    request = FakeRequest("r", list(range(16)))
    admitted(side, request)
    assert lookup.asked == [list(range(13))]
    work = only(side.build_connector_meta(scheduler_output("0.8.5", [(request, 16, [0, 1, 2, 3])])))
    assert work.save == SaveSpec(0, 13) and work.token_ids == list(range(13))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_prompt_of_nothing_but_its_last_tokens_is_not_looked_up(tokens):
    lookup = FakeLookup()
    side = side_of(lookup, skip_last_n_tokens=3)
    assert side.get_num_new_matched_tokens(FakeRequest("r", list(range(tokens))), 0) == 0
    assert not lookup.asked


def test_unfull_chunks():
    side = side_of(save_unfull_chunk=True)
    request = FakeRequest("r", list(range(13)))
    admitted(side, request)
    saves = [side.build_connector_meta(scheduler_output("0.8.5", [(request, 10, [0, 1, 2])])).requests[0].save]
    request.num_computed_tokens = 10
    output = scheduler_output("0.8.5", cached=[Scheduled(request, 3, [3])])
    saves += [work.save for work in side.build_connector_meta(output).requests]
    request.num_computed_tokens = 13
    request.decode(7)
    output = scheduler_output("0.8.5", cached=[Scheduled(request, 1, [])])
    saves += [work.save for work in side.build_connector_meta(output).requests]
    assert saves == [SaveSpec(0, 8), SaveSpec(8, 13)]


def test_what_the_cache_had_is_not_stored_again():
    side = side_of(FakeLookup([list(range(16))]))
    request = FakeRequest("r", list(range(30)))
    assert admitted(side, request) == 16
    work = only(side.build_connector_meta(scheduler_output("0.8.5", [(request, 14, list(range(8)))])))
    assert work.load == LoadSpec(0, 16, 16) and work.save == SaveSpec(16, 24)
    assert len(work.token_ids) == 24 and len(work.block_ids) == 6


# ---------------------------------------------------------------------------------------------- ids and pins


def test_finished_and_new_under_one_id_in_one_step():
    lookup = FakeLookup([list(range(8))])
    side = side_of(lookup)
    first = FakeRequest("r", list(range(50, 66)))
    admitted(side, first)
    side.build_connector_meta(scheduler_output("0.8.5", [(first, 16, [0, 1, 2, 3])]))
    second = FakeRequest("r", list(range(16)))
    assert admitted(side, second) == 8
    work = only(side.build_connector_meta(scheduler_output("0.8.5", [(second, 8, [4, 5, 6, 7])], finished={"r"})))
    assert work.load == LoadSpec(0, 8, 8) and work.token_ids == list(range(16))


def test_every_way_out_gives_the_pins_back():
    lookup = FakeLookup([list(range(8))])
    side = side_of(lookup)
    for name in "abcd":
        side.get_num_new_matched_tokens(FakeRequest(name, list(range(16))), 0)
    assert set(lookup.pins) == set("abcd")
    side.update_state_after_alloc(FakeRequest("a", list(range(16))), 0)
    side.build_connector_meta(scheduler_output("0.8.5", finished={"b"}))
    side.forget("c")
    side.forget("c")
    assert set(lookup.pins) == {"d"}
    side.forget("d")
    assert not lookup.pins
    side.close()
    assert lookup.closed


def test_nothing_is_kept_of_finished_requests():
    side = side_of(FakeLookup([list(range(8))]))
    for number in range(50):
        request = FakeRequest(f"r{number}", list(range(16)))
        admitted(side, request)
        side.build_connector_meta(scheduler_output("0.8.5", [(request, 8, [0, 1, 2, 3])]))
        side.build_connector_meta(scheduler_output("0.8.5", finished={request.request_id}))
    kept = {name: value for name, value in vars(side).items() if name.startswith("_") and value}
    assert kept == {}


# ---------------------------------------------------------------------------------------------- the tokens as keys


def test_images_adapters_and_salts_change_the_keys():
    tokens = list(range(20))
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=5, length=3))
    other = SimpleNamespace(identifier="dog", mm_position=SimpleNamespace(offset=5, length=3))
    lora = SimpleNamespace(lora_name="adapter", lora_path="/somewhere")
    variants = [
        FakeRequest("r", tokens),
        FakeRequest("r", tokens, mm_features=[image]),
        FakeRequest("r", tokens, mm_features=[other]),
        FakeRequest("r", tokens, mm_hashes=["bird"], mm_positions=[{"offset": 5, "length": 3}]),
        FakeRequest("r", tokens, mm_hashes=[], mm_positions=[SimpleNamespace(offset=5, length=3)]),
        FakeRequest("s", tokens, mm_hashes=[], mm_positions=[SimpleNamespace(offset=5, length=3)]),
        FakeRequest("r", tokens, lora_request=lora),
        FakeRequest("r", tokens, cache_salt="tenant"),
        FakeRequest("r", tokens, cache_salt="tenant", lora_request=lora),
    ]
    keys = [tuple(keyed_prompt(one)) for one in variants]
    assert len(set(keys)) == len(keys)
    assert keys[0] == tuple(tokens)
    assert [tuple(keyed_prompt(one)) for one in variants] == keys
    for key in keys[1:6]:
        assert key[:5] == tuple(tokens[:5]) and key[8:] == tuple(tokens[8:]) and max(key[5:8]) < 0
    for key in keys[6:]:
        assert key[0] < 0 and key[1:] == tuple(tokens[1:])


def test_a_prompt_of_embeddings_is_left_alone():
    lookup = FakeLookup()
    side = side_of(lookup)
    request = FakeRequest("r", [0] * 16, prompt_embeds=object())
    assert admitted(side, request) == 0
    output = scheduler_output("0.32", [(request, 16, [0, 1, 2, 3])])
    output.scheduled_new_reqs[0].prompt_embeds = request.prompt_embeds
    assert not side.build_connector_meta(output).requests
    request.num_computed_tokens = 16
    request.decode(4)
    assert not side.build_connector_meta(scheduler_output("0.32", cached=[Scheduled(request, 1, [4])])).requests
    assert not lookup.asked


# ---------------------------------------------------------------------------------------------- a long random run


@dialects
@pytest.mark.parametrize("seed", range(5))
def test_every_chunk_is_stored_once_from_the_slots_that_hold_it(dialect, seed):
    """A scheduler that admits, prefills in parts, decodes, preempts and finishes at random.

    Every save is of tokens that the step has computed, from the blocks that the request has at the moment; spans follow
    one another; at the end every prompt chunk was stored, and nothing is kept.
    """
    rng = random.Random(seed)
    lookup = FakeLookup(chunk_size=8)
    side = side_of(lookup, save_decode_cache=bool(seed % 2))
    blocks_of: dict[str, list[int]] = {}
    stored: dict[str, int] = {}
    running: dict[str, FakeRequest] = {}
    preempted: list[FakeRequest] = []
    counter = iter(range(10**6))
    finished: set[str] = set()
    for step in range(300):
        new, cached = [], []
        for request in list(running.values()):
            if rng.random() < 0.05:
                del running[request.request_id]
                request.num_computed_tokens = 0
                preempted.append(request)
                continue
            tokens = min(rng.choice([1, 3, 8, 20]), request.num_tokens - request.num_computed_tokens)
            need = -(-(request.num_computed_tokens + tokens) // BLOCK) - len(blocks_of[request.request_id])
            fresh = [next(counter) for _ in range(max(0, need))]
            blocks_of[request.request_id] += fresh
            cached.append(Scheduled(request, tokens, fresh))
        for resumed in [True] * (bool(preempted) and rng.random() < 0.5) + [False] * (len(running) < 4):
            request = preempted.pop() if resumed else FakeRequest(f"r{step}", rng.sample(range(99), rng.randint(1, 40)))
            admitted(side, request)
            left = request.num_tokens - request.num_computed_tokens
            tokens = min(left, rng.choice([5, 16, 50]))
            count = -(-(request.num_computed_tokens + tokens) // BLOCK)
            blocks_of[request.request_id] = [next(counter) for _ in range(count)]
            if resumed:
                cached.append(Scheduled(request, tokens, blocks_of[request.request_id], resumed=True))
            else:
                new.append((request, tokens, blocks_of[request.request_id]))
            stored[request.request_id] = request.num_computed_tokens // 8 * 8
            running[request.request_id] = request
        output = scheduler_output(dialect, new, cached, finished)
        for work in side.build_connector_meta(output).requests:
            request = running[work.request_id]
            done = request.num_computed_tokens + output.num_scheduled_tokens[work.request_id]
            assert work.token_ids == request.all_token_ids[: len(work.token_ids)]
            assert work.block_ids == blocks_of[work.request_id][: len(work.block_ids)]
            if work.save:
                assert work.save.skip_leading_tokens == stored[work.request_id] < work.save.end_token <= done
                stored[work.request_id] = work.save.end_token
                lookup.held.append(request.all_token_ids[: work.save.end_token])
        finished = set()
        for request in list(running.values()):
            request.num_computed_tokens += output.num_scheduled_tokens.get(request.request_id, 0)
            if request.num_computed_tokens == request.num_tokens:
                if rng.random() < 0.1:
                    finished.add(request.request_id)
                    del running[request.request_id]
                    assert stored[request.request_id] >= request.num_prompt_tokens // 8 * 8
                else:
                    request.decode(rng.randrange(99))
    for request_id in [*running, *finished, *(one.request_id for one in preempted)]:
        side.forget(request_id)
    assert not lookup.pins and len(stored) > 50
    assert {name: value for name, value in vars(side).items() if name.startswith("_") and value} == {}
