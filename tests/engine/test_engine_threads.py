"""Many threads on one engine: the bytes of every hit, the counts, and nothing held at the end."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_worlds import CHUNK, Memory, World

THREADS = 6
ROUNDS = 60
REQUESTS = [[10 * depth + side for depth in range(3) for _ in range(CHUNK)] for side in range(5)]


def hammer(w: World, seed: int, barrier: threading.Barrier) -> int:
    """Like a scheduler and a worker: look up, load what was promised, store, release. Returns loaded tokens."""
    order, memory, loaded_tokens = random.Random(seed), Memory(w.kind), 0
    barrier.wait(30)
    for turn in range(ROUNDS):
        tokens, name = order.choice(REQUESTS), f"{seed}-{turn}"
        slots = torch.randperm(48)[: len(tokens)]
        hits = w.engine.lookup(tokens, name)
        if hits:
            memory.blank()
            loaded = w.engine.retrieve(tokens[:hits], **w.kwargs(slots[:hits], memory))
            assert loaded.all(), "promised, so loaded"
            memory.check(tokens[:hits], slots[:hits], loaded)
            loaded_tokens += hits
        memory.write(tokens, slots)
        w.engine.store(tokens, **w.kwargs(slots, memory))
        w.engine.release(name)
        w.engine.stats()
    return loaded_tokens


@pytest.mark.parametrize("kind", ["V2", "V3-groups", "layerwise"])
@pytest.mark.parametrize("host_chunks", [8, 40], ids=["tight", "ample"])
def test_threads(kind, host_chunks, tmp_path):
    w = World(kind, folder=tmp_path, host_chunks=host_chunks, max_local_disk_size=12000 / (1 << 30))
    barrier = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        loaded = sum(pool.map(lambda seed: hammer(w, seed, barrier), range(THREADS)))
    stats = w.engine.stats()
    assert loaded == stats.hit_tokens == stats.retrieved_tokens > 0
    assert stats.lookups == stats.stores == THREADS * ROUNDS
    assert stats.disk_drops == stats.failed_loads == 0
    if host_chunks == 40:
        assert stats.stored_chunks == len({tuple(r[:end]) for r in REQUESTS for end in (4, 8, 12)}), "each once"
    w.check_books()
    w.engine.close()


def test_one_chunk_on_the_disk_is_read_once(tmp_path, monkeypatch):
    w = World(folder=tmp_path)
    w.store(REQUESTS[0])
    w.restart()
    reads, real = [], w.engine.storage.disk.get
    monkeypatch.setattr(w.engine.storage.disk, "get", lambda key: (reads.append(key), real(key))[1])
    barrier = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        hits = list(pool.map(lambda n: (barrier.wait(30), w.engine.lookup(REQUESTS[0], str(n)))[1], range(THREADS)))
    assert hits == [12] * THREADS and len(reads) == 3
    for n in range(THREADS):
        w.engine.release(str(n))
    w.check_books()
    w.engine.close()


def test_a_chunk_stored_again_while_it_is_read_from_the_disk_is_pinned_as_it_is_found(tmp_path, monkeypatch):
    """Its file is given up meanwhile, so that the store does not know of it."""
    w = World(folder=tmp_path, host_chunks=4)
    tokens, memory = REQUESTS[0][:CHUNK], Memory(w.kind)
    slots = w.slots(tokens)
    memory.write(tokens, slots)
    w.engine.store(tokens, **w.kwargs(slots, memory))
    w.restart()
    disk = w.engine.storage.disk
    real = disk.get

    def get(key):
        read = real(key)
        disk.remove(key)
        assert w.engine.store(tokens, **w.kwargs(slots, memory)) == CHUNK
        return read

    monkeypatch.setattr(disk, "get", get)
    assert w.engine.lookup(tokens, "request") == CHUNK
    monkeypatch.setattr(disk, "get", real)
    w.engine.storage.flush()
    for other in REQUESTS[1:]:
        w.store(other)  # whatever is not pinned makes room
    for span in w.engine.names.spans(tokens, None):
        disk.remove(span.key)
    memory.blank()
    loaded = w.engine.retrieve(tokens, **w.kwargs(slots, memory))
    assert loaded.all(), "promised, so loaded"
    memory.check(tokens, slots, loaded)
    w.engine.release("request")
    w.check_books()
    w.engine.close()


def test_concurrent_stores_of_one_request_keep_each_chunk_once(tmp_path):
    w = World(folder=tmp_path)
    tokens = REQUESTS[1]
    memories = [Memory(w.kind) for _ in range(THREADS)]
    slots = w.slots(tokens)
    for memory in memories:
        memory.write(tokens, slots)
    barrier = threading.Barrier(THREADS)

    def store(memory: Memory) -> int:
        barrier.wait(30)
        return w.engine.store(tokens, **w.kwargs(slots, memory))

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(store, memories)) == 12
    w.check_books()
    assert w.engine.stats().host_chunks == w.engine.stats().disk_chunks == 3
    w.engine.close()
