"""The engine's settings: every key from code, file and environment; every wrong value and unknown key named."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys

import pytest

from lmcache_ref.engine import LMCacheEngineConfig
from lmcache_ref.errors import ArgumentError

#: key -> a value that is not the default, and how the environment says it
VALUES = {
    "chunk_size": (32, "32"),
    "local_cpu": (False, "False"),
    "max_local_cpu_size": (0.5, "0.5"),
    "local_disk": ("/tmp/cache", "file:///tmp/cache"),
    "max_local_disk_size": (2.0, "2"),
    "use_layerwise": (True, "true"),
    "enable_blending": (True, "1"),
    "use_gpu_connector_v3": (True, "Yes"),
    "enable_pd": (True, "ON"),
    "save_unfull_chunk": (True, " true "),
    "save_decode_cache": (True, "True"),
    "skip_last_n_tokens": (3, "3"),
    "lookup_transport": ("zmq", "zmq"),
    "lookup_url": ("tcp://localhost:5555", "tcp://localhost:5555"),
    "lookup_timeout_ms": (10, "10"),
    "lmcache_instance_id": ("other", "other"),
    "extra_config": ({"a": [1]}, '{"a": [1]}'),
}
WRONG = {
    "chunk_size": [0, -1, 1.0, True, "32", None],
    "local_cpu": [1, "true", None],
    "max_local_cpu_size": [0, -1.0, 1e-12, float("nan"), float("inf"), True, "5", None],
    "local_disk": ["", "file://", 3, True],
    "max_local_disk_size": [-0.5, float("inf"), "5", None],
    "use_layerwise": ["false", 0],
    "enable_blending": [0],
    "use_gpu_connector_v3": [None],
    "enable_pd": ["no"],
    "save_unfull_chunk": [2],
    "save_decode_cache": [1.0],
    "skip_last_n_tokens": [-1, 1.5, False],
    "lookup_transport": ["udp", "", None],
    "lookup_url": ["", 5555],
    "lookup_timeout_ms": [0, 2.5],
    "lmcache_instance_id": ["", None, 1],
    "extra_config": [[], "{}"],
}
KEYS = [field.name for field in dataclasses.fields(LMCacheEngineConfig)]


def test_all_keys_are_tested():
    assert list(VALUES) == list(WRONG) == KEYS and len(KEYS) == 17


def needed(key: str) -> dict:
    """What has to be set beside a key."""
    return {
        "local_cpu": {"local_disk": "/d", "max_local_disk_size": 1.0},
        "local_disk": {"max_local_disk_size": 1.0},
    }.get(key, {})


def test_defaults():
    config = LMCacheEngineConfig()
    assert config == LMCacheEngineConfig.from_dict({}) == LMCacheEngineConfig.from_env({})
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size, config.local_disk) == (256, True, 5.0, None)
    assert config.max_local_cpu_bytes == 5 << 30 and config.max_local_disk_bytes == 0


@pytest.mark.parametrize("key", KEYS)
def test_each_key_from_everywhere(key, tmp_path):
    value, text = VALUES[key]
    values = {key: value, **needed(key)}
    expected = LMCacheEngineConfig(**values)
    assert getattr(expected, key) == value != getattr(LMCacheEngineConfig(), key)
    assert LMCacheEngineConfig.from_dict(values) == expected
    others = {f"LMCACHE_{name.upper()}": str(other) for name, other in needed(key).items()}
    assert LMCacheEngineConfig.from_env({f"LMCACHE_{key.upper()}": text, **others, "PATH": "/bin"}) == expected
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{name}: {other}\n" for name, other in values.items()))
    assert LMCacheEngineConfig.from_file(file) == expected


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_wrong_values_are_named(key, value):
    with pytest.raises(ArgumentError, match=f"^{key}: .*; allowed: ") as error:
        LMCacheEngineConfig(**{**needed(key), key: value})
    assert repr(value) in str(error.value) or key == "local_disk"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LMCACHE_CHUNK_SIZE", "many"),
        ("LMCACHE_LOCAL_CPU", "maybe"),
        ("LMCACHE_LOCAL_CPU", ""),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "5GB"),
        ("LMCACHE_EXTRA_CONFIG", "{a"),
    ],
)
def test_wrong_variables_are_named(name, text):
    with pytest.raises(ArgumentError, match=f"^{name}: {text!r}; allowed: "):
        LMCacheEngineConfig.from_env({name: text})
    with pytest.raises(ArgumentError, match=r"^chunk_size: 0; allowed"):
        LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "0"})


def test_a_variable_can_say_none():
    for text in ("", "none", "NULL"):
        assert LMCacheEngineConfig.from_env({"LMCACHE_LOCAL_DISK": text}).local_disk is None


def test_what_must_fit_together():
    with pytest.raises(ArgumentError, match=r"max_local_disk_size: 0\.0; allowed with local_disk"):
        LMCacheEngineConfig(local_disk="/d")
    with pytest.raises(ArgumentError, match="local_cpu: False; allowed without local_disk: True"):
        LMCacheEngineConfig(local_cpu=False)


def test_a_change_after_the_fact_is_checked_by_validate():
    config = LMCacheEngineConfig()
    config.chunk_size = 0
    with pytest.raises(ArgumentError, match="chunk_size"):
        config.validate()


def test_unknown_keys_are_named(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"unknown key 'chunksize' \(did you mean chunk_size\?\).*known keys: chunk"
    ):
        LMCacheEngineConfig.from_dict({"chunksize": 3, "local_cpu": True})
    file = tmp_path / "config.yaml"
    for text, message in [
        ("remote_url: x", "unknown key 'remote_url'"),
        ("3: 4", "unknown key 3"),
        ("- a", "holds a list"),
        ("a: [", "cannot be read"),
        ("chunk_size: 0", "chunk_size: 0; allowed"),
        ("chunk_size: '32'", "chunk_size: '32'; allowed"),
    ]:
        file.write_text(text)
        with pytest.raises(ArgumentError, match=f"^{file}: {message}"):
            LMCacheEngineConfig.from_file(file)
    with pytest.raises(ArgumentError, match=r"missing\.yaml: cannot be read"):
        LMCacheEngineConfig.from_file(tmp_path / "missing.yaml")
    file.write_text("# nothing\n")
    assert LMCacheEngineConfig.from_file(file) == LMCacheEngineConfig()


def test_the_file_of_the_environment_and_variables_over_it(tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    with pytest.raises(ArgumentError, match="LMCACHE_CONFIG_FILE is not set"):
        LMCacheEngineConfig.from_file()
    file = tmp_path / "config.yaml"
    file.write_text("chunk_size: 32\nlocal_cpu: true\nmax_local_cpu_size: 2\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    assert LMCacheEngineConfig.from_file() == LMCacheEngineConfig(chunk_size=32, max_local_cpu_size=2.0)
    assert LMCacheEngineConfig.from_env() == LMCacheEngineConfig(chunk_size=64, max_local_cpu_size=2.0)


def test_unknown_variables_are_warned_of_by_name(caplog):
    known = {
        "LMCACHE_BACKEND": "cpu",
        "LMCACHE_VALIDATE": "1",
        "LMCACHE_CONFIG_FILE": "",
        "LMCACHE_FAST_CACHE": "/c",
        "LMCACHE_FAST_ANYTHING": "",
        "OTHER": "",
    }
    with caplog.at_level(logging.WARNING):
        LMCacheEngineConfig.from_env(known)
        assert not caplog.records
        unknown = {"LMCACHE_CHUNK_SIZ": "3", "LMCACHE_chunk_size": "3", "LMCACHE_USE_EXPERIMENTAL": "True"}
        assert LMCacheEngineConfig.from_env({**known, **unknown}) == LMCacheEngineConfig()
    assert [next(name for name in unknown if f" {name} " in r.getMessage()) for r in caplog.records] == list(unknown)
    assert "did you mean chunk_size?" in caplog.text


def test_importing_the_engine_brings_no_extra():
    code = "import lmcache_ref.engine, sys; print([m for m in ('yaml', 'safetensors', 'zmq') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_yaml_a_file_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ArgumentError, match=r"needs PyYAML: pip install 'lmcache-ref\[engine\]'"):
        LMCacheEngineConfig.from_file(tmp_path / "config.yaml")
