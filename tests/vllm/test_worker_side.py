"""The workers' half of the vLLM connector under a fake engine that checks every slot: cases 26, 27, 33, 35, long runs.

No vLLM is needed. Loads and stores go through the real cache engine and connectors, in three layouts and with MLA.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from fake_engine import NL, FakeEngine, connector, vllm_config

from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.integration.vllm.request_tracker import StepWork
from lmcache_ref.integration.vllm.worker_side import KVLoadError

WORLDS = [("0.8.5", "FA"), ("0.8.5", "FI"), ("0.8.5", "MLA"), ("0.9", "FA"), ("0.32", "fused"), ("0.32", "MLA")]
worlds = pytest.mark.parametrize(("dialect", "layout"), WORLDS, ids=["-".join(world) for world in WORLDS])
layerwise = pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])


@pytest.fixture
def engine_of(request):
    """FakeEngines that are closed at the end."""
    made = []

    def make(dialect="0.8.5", layout="FA", **options):
        settings = options.pop("settings", {}) | {key: options.pop(key) for key in list(options) if key in SETTINGS}
        engine = FakeEngine(dialect, layout, settings=settings, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


SETTINGS = ("use_layerwise", "save_decode_cache", "save_unfull_chunk", "skip_last_n_tokens", "max_local_cpu_size")


def prompt_of(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(50) for _ in range(count)]


# ---------------------------------------------------------------------------------------------- store, then load


@worlds
@layerwise
def test_what_one_request_stored_another_loads(engine_of, dialect, layout, layerwise):
    engine = engine_of(dialect, layout, use_layerwise=layerwise)
    prompt = list(range(27))
    for name, tokens in [("a", prompt), ("b", prompt), ("c", prompt[:24]), ("d", [*prompt[:10], 49, 48]), ("e", [7])]:
        engine.add(name, tokens, 3)
        engine.run()
    assert engine.hits == {"a": [0], "b": [24], "c": [23], "d": [8], "e": [0]}
    stats = engine.cache.stats()
    assert (stats.stored_tokens, stats.retrieved_tokens, stats.pinned_requests) == (24, 56, 0)


@worlds
@layerwise
@pytest.mark.parametrize("decode", [False, True])
def test_decoded_tokens_are_found_when_they_were_to_be_stored(engine_of, dialect, layout, layerwise, decode):
    engine = engine_of(dialect, layout, use_layerwise=layerwise, save_decode_cache=decode)
    engine.add("a", list(range(10)), 30)
    while engine.waiting or engine.running:
        request = (engine.running or engine.waiting)[0]
        engine.step()
    engine.add("b", request.all_token_ids)
    engine.run()
    assert engine.hits["b"] == [32 if decode else 8]


def test_consumer_and_producer(engine_of):
    """A producer loads nothing, a consumer stores nothing."""
    for role, hits, stored in [("kv_producer", [0], 16), ("kv_consumer", [0], 0)]:
        engine = engine_of(role=role)
        for name in "ab":
            engine.add(name, list(range(20)))
            engine.run()
        assert engine.hits["b"] == hits and engine.cache.stats().stored_tokens == stored


@layerwise
def test_skipped_last_tokens_are_not_stored(engine_of, layerwise):
    engine = engine_of(use_layerwise=layerwise, skip_last_n_tokens=3)
    engine.add("a", list(range(16)))
    engine.add("b", list(range(19)))
    engine.run()
    assert engine.cache.stats().stored_tokens == 16
    engine.add("c", list(range(16)))
    engine.run()
    assert engine.hits["c"] == [8], "of the 13 tokens asked for, one chunk is whole"


@worlds
@layerwise
def test_the_fake_engine_sees_one_wrong_bit(engine_of, dialect, layout, layerwise):
    engine = engine_of(dialect, layout, use_layerwise=layerwise)
    engine.add("a", list(range(24)))
    engine.run()
    chunk = engine.cache.storage.host.get(engine.cache.names.spans(list(range(24)))[1].key)
    chunk.objects[-1].raw_tensor[5] ^= 1
    chunk.release()
    engine.add("b", list(range(24)))
    with pytest.raises(AssertionError, match=r"b layer \d token \d+"):
        engine.run()


# ---------------------------------------------------------------------------------------------- hooks, in any number


@pytest.mark.parametrize("dialect", ["0.8.5", "0.32"])
@layerwise
def test_wait_for_save_before_any_save_twice_and_after_empty_metadata(engine_of, dialect, layerwise):
    """Case 27."""
    engine = engine_of(dialect, use_layerwise=layerwise)
    worker, parent = engine.worker, engine.parent
    parent.metadata = None if dialect == "0.32" else object()  # 0.8.5: vLLM's own, empty class
    worker.wait_for_save()
    parent.metadata = StepWork()
    worker.start_load_kv(engine.context)
    worker.wait_for_save()
    worker.wait_for_save()
    engine.add("a", list(range(16)))
    engine.run()
    worker.wait_for_save()
    assert engine.cache.stats().stored_tokens == 16


@layerwise
def test_more_layers_than_there_are(engine_of, layerwise, monkeypatch):
    """Case 27: calls for further layers, for layers without a cache and for layers that were there do nothing."""
    engine = engine_of(use_layerwise=layerwise)
    names = list(engine.caches)
    real_wait, real_save = engine.worker.wait_for_layer_load, engine.worker.save_kv_layer

    def wait(name):
        real_wait(name)
        if name == names[-1]:
            for more in [*names, "model.layers.77.attn", "draft"]:
                real_wait(more)

    def save(name, *rest):
        real_save(name, *rest)
        if name == names[-1]:
            for more in [*names, "model.layers.77.attn", "draft"]:
                real_save(more, *rest)

    monkeypatch.setattr(engine.worker, "wait_for_layer_load", wait)
    monkeypatch.setattr(engine.worker, "save_kv_layer", save)
    for name in "ab":
        engine.add(name, list(range(16)), 2)
        engine.run()
    assert engine.hits == {"a": [0], "b": [15]}


def test_layers_by_number_of_calls_when_their_names_are_unknown(engine_of, monkeypatch):
    engine = engine_of(use_layerwise=True)
    real_wait, real_save = engine.worker.wait_for_layer_load, engine.worker.save_kv_layer
    monkeypatch.setattr(engine.worker, "wait_for_layer_load", lambda name: real_wait("?"))
    monkeypatch.setattr(engine.worker, "save_kv_layer", lambda name, *rest: real_save("?", *rest))
    for name in "ab":
        engine.add(name, list(range(16)), 2)
        engine.run()
    assert engine.hits == {"a": [0], "b": [15]}


@layerwise
def test_a_profile_run_loads_nothing_and_the_load_comes_later(engine_of, layerwise):
    """Case 33: without attention metadata `start_load_kv` returns; with it the same step loads."""
    engine = engine_of(use_layerwise=layerwise)
    engine.add("a", list(range(16)))
    engine.run()
    real, profile = engine.worker.start_load_kv, SimpleNamespace(attn_metadata=None)

    def start(context):
        real(profile)
        assert engine.cache.stats().retrieves == before
        real(context)

    before = engine.cache.stats().retrieves
    engine.worker.start_load_kv = start
    engine.add("b", list(range(20)))
    engine.run()
    assert engine.hits["b"] == [16] and engine.cache.stats().retrieves == before + 1


@layerwise
def test_start_load_kv_twice_in_a_step_loads_once(engine_of, layerwise):
    engine = engine_of(use_layerwise=layerwise)
    real = engine.worker.start_load_kv
    engine.worker.start_load_kv = lambda context: (real(context), real(context))
    for name in "ab":
        engine.add(name, list(range(16)))
        engine.run()
    assert engine.cache.stats().retrieves == 1


def test_caches_may_move(engine_of):
    """vLLM 0.8.5 hands the caches over in each step; new tensors are used at once."""
    engine = engine_of()
    engine.add("a", list(range(16)))
    engine.run()
    for name, cache in engine.caches.items():
        engine.caches[name] = cache.clone()
        engine.context.no_compile_layers[name].kv_cache = [engine.caches[name].view(torch.float16)]
    engine.add("b", list(range(16)))
    engine.run()
    assert engine.hits["b"] == [15]


@layerwise
@pytest.mark.parametrize("step", range(NL + 1))
def test_a_step_that_breaks_off_stores_nothing_and_leaves_nothing_held(engine_of, layerwise, step, monkeypatch):
    """An exception in the model between two layers; the next step works, no memory is lost."""
    engine = engine_of(use_layerwise=layerwise)
    engine.add("a", list(range(16)))
    engine.run()
    free_bytes = engine.cache.stats().host_free_bytes
    real, calls = engine.compute_layer, iter(range(100))

    def breaking(layer, *rest):
        if next(calls) == step:
            raise RuntimeError("out of memory")
        real(layer, *rest)

    monkeypatch.setattr(engine, "compute_layer", breaking)
    engine.add("b", [*range(16), *range(30, 46)])
    if step < NL:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        engine.running.clear()
        engine.finished.add("b")
    engine.run()
    chunks = 0 if step < NL else 2
    assert engine.cache.stats().stored_tokens == 16 + 8 * chunks
    assert engine.cache.stats().host_free_bytes == free_bytes - chunks * (NL if layerwise else 1) * 4096
    monkeypatch.setattr(engine, "compute_layer", real)
    engine.add("c", list(range(16)))
    engine.run()
    assert engine.hits["c"] == [15] and engine.cache.stats().pinned_requests == 0


# ---------------------------------------------------------------------------------------------- failures (case 35)


def lose_chunk(engine: FakeEngine, index: int) -> None:
    """The next load finds that chunk gone, pinned or not."""
    real = engine.worker.start_load_kv

    def start(context):
        for work in engine.parent.metadata.requests:
            if work.load:
                engine.cache.storage.drop(engine.cache.names.spans(work.token_ids)[index].key)
                engine.worker.start_load_kv = real
                break
        real(context)

    engine.worker.start_load_kv = start


@layerwise
@pytest.mark.parametrize("index", [0, 1, 2])
def test_vllm_085_is_stopped_when_a_promised_load_fails(engine_of, layerwise, index):
    engine = engine_of(use_layerwise=layerwise)
    engine.add("a", list(range(24)))
    engine.run()
    lose_chunk(engine, index)
    engine.unloaded_blocks = lambda: set(range(engine.num_blocks))  # the raise comes at the last layer at the latest
    engine.add("b", list(range(26)))
    with pytest.raises(KVLoadError, match=rf"request b: {24 - 8 * index} of the tokens \[0, 24\).* {8 * index} on"):
        engine.run()
    assert engine.cache.stats().pinned_requests == 0
    assert engine.cache.stats().stores == 1, "the step that failed stored nothing"


@layerwise
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_current_vllm_is_told_and_computes_again(engine_of, layerwise, index):
    """The failing request, and one that runs beside it; what is stored afterwards is right."""
    engine = engine_of("0.32", "fused", use_layerwise=layerwise, budget=100)
    engine.add("a", list(range(24)))
    engine.add("x", list(range(50, 20, -1)), 9)
    engine.run()
    lose_chunk(engine, index)
    unloaded: set[int] = set()
    engine.unloaded_blocks = lambda: unloaded
    engine.add("b", [*range(24), 30, 31, 32, 33, 34, 35, 36, 37, 38], 4)
    engine.add("c", list(range(50, 20, -1)), 9)
    real = engine.forward

    def forward(scheduled, has_loads):
        unloaded.update(engine.blocks.get("b", ()) if has_loads else ())
        real(scheduled, has_loads)
        unloaded.clear()

    engine.forward = forward
    engine.run()
    assert [len(failed) for failed in engine.reported if failed] == [(24 - 8 * index) // engine.block_size]
    assert engine.hits["b"] == [24]
    for name in "de":
        engine.add(name, [*range(24), 30, 31, 32, 33, 34, 35, 36, 37, 38])
        engine.run()
    assert engine.hits["d"] == engine.hits["e"] == [32]
    assert engine.cache.stats().pinned_requests == 0


def test_a_request_that_shares_bad_blocks_stores_nothing(engine_of):
    """Blocks of a failed load may be another request's prefix: until the scheduler knows, nothing of them is stored."""
    engine = engine_of("0.32", "fused")
    worker = engine.worker.worker
    worker._bad_blocks = {5}
    metadata = engine.parent.metadata = StepWork()
    request = engine.scheduler.scheduler
    engine.add("a", list(range(8)))
    engine.blocks["a"] = [5, 6]
    (one,) = engine.waiting
    request.update_state_after_alloc(one, 0)
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([5, 6],), num_computed_tokens=0)],
        scheduled_cached_reqs=[],
        num_scheduled_tokens={"a": 8},
        finished_req_ids=set(),
    )
    metadata = engine.parent.metadata = request.build_connector_meta(output)
    assert metadata.requests[0].save is not None
    engine.worker.wait_for_save()
    assert engine.cache.stats().stored_tokens == 0
    again = engine.parent.metadata = StepWork(metadata.requests, known_failures={5})
    engine.worker.wait_for_save()
    assert again and engine.cache.stats().stored_tokens == 8


def test_layers_that_are_never_announced(engine_of):
    """A platform that leaves the hooks out: the model has computed without its loads, which must not pass unnoticed."""
    engine = engine_of(use_layerwise=True)
    engine.add("a", list(range(16)))
    engine.run()
    engine.worker.wait_for_layer_load = lambda name: None
    engine.unloaded_blocks = lambda: set(range(engine.num_blocks))
    engine.add("b", list(range(20)))
    with pytest.raises(KVLoadError, match="turn use_layerwise off"):
        engine.run()


def test_layers_that_are_not_all_announced_are_not_stored(engine_of):
    engine = engine_of(use_layerwise=True)
    real, last = engine.worker.save_kv_layer, list(engine.caches)[-1]
    engine.worker.save_kv_layer = lambda name, *rest: None if name == last else real(name, *rest)
    engine.add("a", list(range(16)))
    engine.run()
    assert engine.cache.stats().stored_tokens == 0 == engine.cache.stats().host_used_bytes


def test_a_load_that_was_promised_and_never_started_is_not_stored_over(engine_of):
    engine = engine_of()
    engine.add("a", list(range(16)))
    engine.run()
    engine.worker.start_load_kv = lambda context: None
    engine.unloaded_blocks = lambda: set(range(engine.num_blocks))
    engine.add("b", list(range(32)))
    engine.run()
    assert engine.hits["b"] == [16] and engine.cache.stats().stored_tokens == 16
    assert engine.cache.stats().pinned_requests == 0, "released when the request finished"


@pytest.mark.parametrize("dialect", ["0.8.5", "0.32"])
def test_caches_of_another_model_are_refused_at_once(dialect):
    """0.32: when they are registered; 0.8.5: in the first step."""
    worker, parent = connector(
        "WORKER", vllm_config(block_size=4, extra={"lmcache.max_local_cpu_size": 0.001}), dialect
    )
    caches = {f"layer{i}": torch.zeros(2, 9, 4, 2, 4, dtype=torch.float16) for i in range(NL + 1)}
    context = SimpleNamespace(
        no_compile_layers={name: SimpleNamespace(kv_cache=[cache]) for name, cache in caches.items()},
        virtual_engine=0,
        attn_metadata=object(),
    )
    parent.metadata = StepWork()
    with pytest.raises(LayoutError, match="NL"):
        worker.register_kv_caches(caches) if dialect == "0.32" else worker.start_load_kv(context)
    worker.shutdown()


def test_a_worker_among_several_does_not_report():
    """What the others stored in that step was computed with this one's bad blocks: the run has to end."""
    config = vllm_config(block_size=4, extra={"lmcache.max_local_cpu_size": 0.001}, world_size=2)
    worker, _ = connector("WORKER", config, "0.32")
    assert not worker.worker.reports_failures
    worker.shutdown()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(role="kv_nobody"), "kv_role: 'kv_nobody'; allowed: kv_producer, kv_consumer, kv_both"),
        (dict(decode_context_parallel_size=2), "decode_context_parallel_size: 2"),
        (dict(extra={"lmcache.chunk_sice": 8}), "did you mean chunk_size"),
        (dict(extra={"lmcache.chunk_size": 0}), "chunk_size: 0"),
    ],
)
def test_configurations_that_cannot_work(change, words):
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(ArgumentError, match=words):
            connector(role, vllm_config(block_size=4, **change))


def group(name: str, block_size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=type(name, (), {"block_size": block_size})())


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group("FullAttentionSpec"), group("SlidingWindowSpec")], "--disable-hybrid-kv-cache-manager"),
        ([group("MambaSpec")], "Mamba"),
    ],
)
def test_models_that_cannot_be_served(groups, words):
    with pytest.raises(ArgumentError, match=words):
        connector("SCHEDULER", vllm_config(block_size=4), kv_cache_config=SimpleNamespace(kv_cache_groups=groups))


def test_the_block_size_is_the_groups():
    config = SimpleNamespace(kv_cache_groups=[group("FullAttentionSpec", 64)])
    scheduler, _ = connector("SCHEDULER", vllm_config(block_size=4), kv_cache_config=config)
    assert scheduler.block_size == 64


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(chunk_size=24), "only whole blocks can move"),
        (dict(chunk_size=16, save_unfull_chunk=True), "only whole blocks can move"),
        (dict(chunk_size=16, use_layerwise=True, enable_blending=True), "no rows to rotate"),
    ],
)
def test_on_a_cpu_only_whole_blocks_move(settings, words):
    config = vllm_config(block_size=16, extra={f"lmcache.{key}": value for key, value in settings.items()})
    config.device_config.device_type = "cpu"
    with pytest.raises(ArgumentError, match=words):
        connector("WORKER", config, "0.32")


# ---------------------------------------------------------------------------------------------- long runs


@worlds
@layerwise
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_run_with_reuse_preemption_and_a_cache_too_small(engine_of, dialect, layout, layerwise, seed):
    """Every slot that counts as computed is checked before every layer of every step; at the end nothing is held."""
    engine = engine_of(
        dialect,
        layout,
        use_layerwise=layerwise,
        save_decode_cache=bool(seed),
        num_blocks=22,
        max_local_cpu_size=(12 if layerwise else 6) * (2 * NL if layerwise else 2) * 4096 / (1 << 30),
        seed=seed,
    )
    generator = random.Random(seed)
    prefixes = [[generator.randrange(50) for _ in range(count)] for count in (8, 16, 24, 30)]
    for number in range(60):
        tail = [generator.randrange(50) for _ in range(generator.randrange(1, 12))]
        engine.add(f"r{number}", generator.choice(prefixes) + tail, generator.choice([1, 2, 20]))
    hits = engine.run()
    stats = engine.cache.stats()
    assert sum(any(one) for one in hits.values()) > 15, "too few hits to prove anything"
    assert any(len(one) > 1 for one in hits.values()), "nobody was preempted"
    assert stats.evictions > 0 and stats.failed_loads == 0 and stats.pinned_requests == 0
    used = stats.host_chunks * (stats.host_used_bytes // stats.host_chunks)
    assert used == stats.host_used_bytes
    assert sorted(engine.free) == list(range(22))
