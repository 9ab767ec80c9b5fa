"""Names of chunks: literal hashes that hold on every machine, what they depend on, and names that can be files."""

from __future__ import annotations

import hashlib
import json

import hypothesis
import pytest
import torch
from hypothesis import strategies

from lmcache_ref.connectors import MockGPUConnector
from lmcache_ref.engine import CacheEngine, CacheKey, LMCacheEngineConfig
from lmcache_ref.engine.tokens import ChunkNames, skipped_tokens
from lmcache_ref.metadata import LMCacheMetadata


def metadata(**changes) -> LMCacheMetadata:
    values = {
        "model_name": "org/model",
        "world_size": 2,
        "local_world_size": 2,
        "worker_id": 1,
        "local_worker_id": 1,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (3, 2, 256, 2, 8),
    }
    return LMCacheMetadata(**{**values, **changes})


def hashes(names: ChunkNames, tokens, **options) -> list[str]:
    return [span.key.chunk_hash for span in names.spans(tokens, **options)]


def test_literal_hashes():
    """A change of these loses every cache on every disk."""
    assert hashes(ChunkNames(256, metadata()), range(600)) == [
        "0b7beca21ce0f3bb8315021226e7acf5249f7702f116522a1dcf675d4fbe2732",
        "633043a5ed357149b230cb2bd2052694915793a30f1a9f4b77240f0c65103eee",
    ]
    assert hashes(ChunkNames(4, metadata(), {"fmt": "KV_2TD"}), [0, -1, 1 << 62, 7], cache_salt="a") == [
        "187ed320d037ac3f5731fe362592b168480387dc16510a9890f3239a2db424ba"
    ]


def test_the_engine_uses_these_names():
    small = metadata(kv_shape=(3, 2, 4, 2, 8))
    config = LMCacheEngineConfig(chunk_size=4, max_local_cpu_size=2**-18)
    engine = CacheEngine(config, small, MockGPUConnector.from_metadata(small))
    assert [str(span.key) for span in engine.names.spans(range(5))] == [
        "org%2Fmodel@2@1@bfloat16@9ce91003a6d7f583a627d6c046d3b8656786d36736046d78150133640c319197"
    ]
    engine.close()


def test_the_chain_by_hand():
    seed = json.dumps({"chunk_size": 2, "salt": None, "version": 1}, sort_keys=True).encode()
    first = hashlib.sha256(hashlib.sha256(seed).digest() + bytes([5, *[0] * 7, 6, *[0] * 7])).digest()
    second = hashlib.sha256(first + bytes([7, *[0] * 7])).digest()
    assert hashes(ChunkNames(2, metadata(), save_unfull_chunk=True), [5, 6, 7]) == [first.hex(), second.hex()]
    assert hashes(ChunkNames(2, metadata()), [5, 6, 7]) == [first.hex()]


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "org/model2"},
        {"world_size": 4},
        {"worker_id": 0},
        {"kv_dtype": torch.float16},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_keys_of_other_workers_differ_their_hashes_do_not(changed):
    (one,), (other,) = (ChunkNames(4, m).spans(range(4)) for m in (metadata(), metadata(**changed)))
    assert one.key != other.key and str(one.key) != str(other.key)
    assert one.key.chunk_hash == other.key.chunk_hash


def test_hashes_depend_on_chunk_size_layout_and_salt():
    names = [
        hashes(ChunkNames(size, metadata(), layout), [1] * 8, cache_salt=salt)[0]
        for size in (4, 8)
        for layout in ({}, {"fmt": "KV_T2D"}, {"fmt": "KV_2TD"})
        for salt in (None, "", "a")
    ]
    assert len(set(names)) == len(names) == 18


@hypothesis.given(
    one=strategies.lists(strategies.integers(0, 2), max_size=12),
    other=strategies.lists(strategies.integers(0, 2), max_size=12),
)
def test_equal_names_are_equal_prefixes(one, other):
    names = ChunkNames(3, metadata(), save_unfull_chunk=True)
    for a in names.spans(one):
        for b in names.spans(other):
            assert (a.key == b.key) == (one[: a.end] == other[: b.end])
    assert [(s.start, s.end) for s in names.spans(one)] == [
        (start, min(start + 3, len(one))) for start in range(0, len(one), 3)
    ]


@pytest.mark.parametrize(
    "model", ["", ".", "..", "a/b", "a%2Fb", "/an/absolute/path", "a b\n", "日本", "x" * 400, "x" * 401, "a@1", "a\0"]
)
def test_names_are_names_of_files(model, tmp_path):
    key = CacheKey(model, 1, 0, "bfloat16", "0" * 64)
    for name in (key.scope, str(key)):
        (tmp_path / name).write_text(model)
        assert (tmp_path / name).parent == tmp_path and len(name) < 230
    assert str(key) == f"{key.scope}@{'0' * 64}"


def test_names_of_different_keys_differ():
    models = ["", "a", "a@1", "a@1@0", "a%401", "x" * 400, "x" * 401, "x" * 150, "x" * 151]
    keys = [CacheKey(m, w, i, d, "0") for m in models for w in (1, 11) for i in (0, 1) for d in ("uint8", "int8")]
    assert len({str(key) for key in keys}) == len(keys) == 72


def test_masks():
    def mask(*values):
        return torch.tensor(values, dtype=torch.bool)

    assert skipped_tokens(None, 5, 2) == 0
    assert skipped_tokens(mask(1, 1, 1), 3, 2) == 0
    assert skipped_tokens(mask(0, 0, 1), 3, 2) == 2
    assert skipped_tokens(mask(0, 0, 0), 3, 2) == 3
    assert skipped_tokens(mask(), 0, 2) == 0
