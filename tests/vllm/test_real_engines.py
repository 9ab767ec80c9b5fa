"""The connector inside real vLLM engines, 0.8.5 and a current one: bits, hits, preemption, processes, failures, a soak.

Each run is `run_engine.py` in vLLM's own virtual environment, which `LMCACHE_VLLM085_VENV` and `LMCACHE_VLLM032_VENV` name.
A run without the connector says what the tokens must be; a control that loads nothing says that the cache mattered.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from run_engine import trace

SCRIPT = Path(__file__).with_name("run_engine.py")
CHUNK = 32
VENVS = {"0.8.5": "LMCACHE_VLLM085_VENV", "0.32": "LMCACHE_VLLM032_VENV"}
TIMEOUT_S = 240
both = pytest.mark.parametrize("version", VENVS)


@pytest.fixture
def run(tmp_path):
    """Runs a scenario; returns its result, or the process when it is expected to fail."""

    def run_in(version: str, *arguments: str, fails: bool = False, path: str | Path = "", **settings):
        python = Path(os.environ.get(VENVS[version], "")) / "bin" / "python"
        if VENVS[version] not in os.environ or not python.exists():
            pytest.skip(f"vLLM {version} is not installed")
        settings = {"chunk_size": CHUNK, "max_local_cpu_size": 0.1, "backend": "auto"} | settings
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "VLLM_"))}
        environment |= {f"LMCACHE_{key.upper()}": str(value) for key, value in settings.items()}
        environment["PYTHONPATH"] = str(path)
        command = [str(python), str(SCRIPT), *arguments, "--folder", str(tmp_path / version)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if fails:
            assert process.returncode != 0 and not lines, process.stdout[-2000:]
            return process
        assert process.returncode == 0 and lines, f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        return json.loads(lines[-1].removeprefix("RESULT "))

    return run_in


RUNS = [
    ("0.8.5", "FA", False, "reference"),
    ("0.8.5", "FA", True, "cpu"),
    ("0.8.5", "FI", False, "cpu"),
    ("0.8.5", "FI", True, "reference"),
    ("0.32", "FA", False, "cpu"),
    ("0.32", "FA", True, "reference"),
]


@pytest.mark.parametrize(("version", "layout", "layerwise", "backend"), RUNS)
def test_a_hit_gives_the_same_bits(run, version, layout, layerwise, backend):
    result = run(version, "once", "--layout", layout, use_layerwise=layerwise, backend=backend)
    assert result["hits"] == [[0], [96], [96]]
    assert (result["tokens_equal"], result["logprobs_equal"], result["control_differs"]) == (True, True, True)
    assert ("Layerwise" in result["connector"]) == layerwise
    assert result["stats"]["retrieved_tokens"] == 96, "the control loads nothing"


@pytest.mark.parametrize(
    ("version", "processes", "workers", "least"), [("0.8.5", 2, 1, 2), ("0.8.5", 3, 2, 4), ("0.32", 3, 1, 3)]
)
def test_scheduler_and_workers_in_processes_of_their_own(run, version, processes, workers, least):
    result = run(version, "once", "--processes", str(processes), "--workers", str(workers))
    assert result["processes"] >= least
    assert result["hits"] == [[0], [96]] and result["tokens_equal"] and result["logprobs_equal"]


@pytest.mark.parametrize("version", ["0.8.5"])
def test_a_hit_through_the_blending_buffer(run, version):
    """The rotation is the model's own; a prefix stays where it was, so that the bits are the same."""
    result = run(version, "once", use_layerwise=True, enable_blending=True)
    assert result["connector"] == "VLLMBufferLayerwiseGPUConnector"
    assert result["hits"] == [[0], [96], [96]] and result["logprobs_equal"] and result["control_differs"]


@both
def test_a_disk_survives_the_engine(run, version, tmp_path):
    disk = dict(local_disk=tmp_path / "disk", max_local_disk_size=1)
    assert run(version, "once", "--role", "kv_producer", **disk)["hits"] == [[0], [0], [0]]
    result = run(version, "once", "--role", "kv_consumer", **disk)
    assert result["hits"] == [[96], [96], [96]] and result["stats"]["stores"] == 0
    assert result["tokens_equal"] and result["control_differs"]


def expected_first_hits() -> list[int]:
    """Of the 20 requests that run alone: whole chunks that those before them stored, and one token left to compute."""
    stored: set[tuple[int, ...]] = set()
    hits = []
    for ((prompt, _),) in trace()[:20]:
        chunks = [tuple(prompt[: end + CHUNK]) for end in range(0, len(prompt) - CHUNK + 1, CHUNK)]
        held = 0
        while held < len(chunks) and chunks[held] in stored:
            held += 1
        hits.append(min(held * CHUNK, len(prompt) - 1))
        stored.update(chunks)
    return hits


@both
def test_a_trace_of_40_requests(run, version):
    """Shared prefixes, partial and full hits, short prompts, preemption: tokens as without a cache, hits as counted."""
    blocks = {"0.8.5": "34", "0.32": "18"}[version]
    plain = run(version, "trace", "--connector", "none", "--blocks", blocks)
    expected = expected_first_hits()
    assert {0, 32, 63, 64} <= set(expected)
    shared = run(version, "trace", "--blocks", blocks, "--prefix-caching")
    assert shared["tokens"] == plain["tokens"], "beside the engine's own prefix cache"
    assert sum(any(hits) for hits in shared["hits"]) > 5 and shared["stats"]["pinned_requests"] == 0
    for layerwise in (False, True)[: 2 if version == "0.8.5" else 1]:
        result = run(version, "trace", "--blocks", blocks, use_layerwise=layerwise)
        assert len(result["tokens"]) == 40 and result["tokens"] == plain["tokens"]
        assert result["hits"][:20] == [[hit] for hit in expected]
        assert [hits[1:] for hits in result["hits"] if len(hits) > 1] == [[128]] * 4, "preempted, resumed with a hit"
        assert result["stats"]["pinned_requests"] == 0 and result["stats"]["skipped"] == {}


@pytest.fixture
def upstream() -> str:
    """The folder of LMCache's wheel, for the Python of vLLM 0.8.5's environment."""
    folder = Path(os.environ.get("LMCACHE_UPSTREAM", "none"))
    pythons = list(Path(os.environ.get(VENVS["0.8.5"], "none")).glob("lib/python3.*"))
    tag = pythons[0].name.replace("python3.", "cpython-3") if pythons else "no Python"
    if not list((folder / "lmcache").glob(f"*.{tag}-*.so")):
        pytest.skip("lmcache==0.4.5 is not installed")
    return str(folder)


def test_the_real_lmcache_in_the_same_engine_has_the_same_hits(run, upstream):
    connector = "upstream_connector:LMCacheConnectorV1Dynamic"
    ours = run("0.8.5", "trace", "--blocks", "34")
    for layerwise in (False, True):
        theirs = run(
            "0.8.5", "trace", "--blocks", "34", "--connector", connector,
            path=upstream, local_cpu=True, use_layerwise=layerwise,
        )  # fmt: skip
        assert theirs["hits"] == ours["hits"] and len(ours["hits"]) == 40
        assert theirs["tokens"] == ours["tokens"]


@both
def test_a_soak_of_300_requests_and_a_cache_too_small(run, version):
    plain = run(version, "soak", "--connector", "none", "--blocks", "40")
    chunk_bytes = {"0.8.5": 1 << 16, "0.32": 1 << 17}[version]
    size_gib = 32 * chunk_bytes / (1 << 30)
    result = run(version, "soak", "--blocks", "40", max_local_cpu_size=size_gib)
    assert len(result["tokens"]) == 300 and result["tokens"] == plain["tokens"]
    stats = result["stats"]
    assert sum(any(hits) for hits in result["hits"]) > 200 and stats["evictions"] > 100
    assert stats["pinned_requests"] == 0 and stats["failed_loads"] == 0
    assert stats["host_used_bytes"] == stats["host_chunks"] * chunk_bytes
    assert stats["host_used_bytes"] + stats["host_free_bytes"] == 32 * chunk_bytes


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_current_vllm_computes_again_what_failed_to_load(run, layerwise):
    result = run("0.32", "fail", use_layerwise=layerwise)
    assert result["failed_equal"] == [True] * 3 and result["again_equal"] == [True] * 3
    assert result["stats"]["pinned_requests"] == 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_vllm_085_ends_rather_than_go_on_with_unloaded_slots(run, layerwise):
    process = run("0.8.5", "fail", use_layerwise=layerwise, fails=True)
    assert "KVLoadError: request 4: 128 of the tokens [0, 160) were not loaded, from token 32 on" in process.stderr
