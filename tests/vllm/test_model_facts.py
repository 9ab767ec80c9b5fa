"""What is read off vLLM's configuration: sizes, dtypes, memory order, names, settings, the model's rotation."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_engine import HS, NH, NL, connector, vllm_config

from lmcache_ref.connectors import VLLMBufferLayerwiseGPUConnector
from lmcache_ref.engine import LMCacheEngineConfig
from lmcache_ref.errors import ArgumentError
from lmcache_ref.integration.vllm import model_facts
from lmcache_ref.integration.vllm.request_tracker import StepWork

CONFIG = LMCacheEngineConfig(chunk_size=8)


def test_metadata_of_one_worker_of_four(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # where there is one at all
    config = vllm_config(block_size=16, rank=3, world_size=4)
    config.model_config.served_model_name = ["name", "alias"]
    found = model_facts.metadata(config, CONFIG, "worker")
    assert found.kv_shape == (NL, 2, 8, NH, HS) and not found.use_mla
    assert (found.worker_id, found.world_size, found.local_worker_id, found.local_world_size) == (3, 4, 3, 4)
    assert (found.model_name, found.served_model_name, found.kv_dtype) == ("fake/model", "name", torch.float16)


def test_metadata_with_mla():
    found = model_facts.metadata(vllm_config(block_size=16, mla=True), CONFIG, "worker")
    assert found.kv_shape == (NL, 1, 8, 1, HS) and found.use_mla


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", "bfloat16", torch.bfloat16),
        ("bfloat16", torch.float16, torch.bfloat16),
        ("half", torch.bfloat16, torch.float16),
        ("float", torch.bfloat16, torch.float32),
        ("float32", torch.bfloat16, torch.float32),
        ("fp8", torch.bfloat16, torch.uint8),
        ("fp8_e4m3", torch.bfloat16, torch.uint8),
        ("fp8_e5m2", torch.bfloat16, torch.uint8),
        ("fp8_inc", torch.bfloat16, torch.float8_e4m3fn),
        ("int8", torch.bfloat16, torch.int8),
        ("nvfp4", torch.bfloat16, torch.uint8),
    ],
)
def test_dtype_of_the_cache(cache_dtype, model_dtype, expected):
    config = vllm_config(block_size=16)
    config.cache_config.cache_dtype, config.model_config.dtype = cache_dtype, model_dtype
    assert model_facts.cache_dtype(config) is expected


# ---------------------------------------------------------------------------------------------- memory order


def test_085_states_nothing_and_keeps_nhd():
    hints = model_facts.layout_hints(vllm_config(block_size=16), engine_lays_out=False)
    assert hints == {"kv_layout": "NHD", "tokens_per_block": 16}


def test_a_current_vllm_states_it_in_the_cache_config():
    config = vllm_config(block_size=16)
    config.cache_config.get_resolved_kv_cache_layout = lambda: SimpleNamespace(name="LBNHC")
    assert model_facts.layout_hints(config, engine_lays_out=True) == {"kv_layout": "LBNHC"}


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_versions_between_state_it_in_a_function(fake_vllm, order):
    fake_vllm("vllm.v1.attention.backends.utils", get_kv_cache_layout=lambda: order)
    assert model_facts.layout_hints(vllm_config(block_size=16), engine_lays_out=True) == {"kv_layout": order}


def test_the_first_of_them_have_no_such_function():
    assert model_facts.layout_hints(vllm_config(block_size=16), engine_lays_out=True) == {}


def test_on_a_cpu_heads_come_before_tokens(fake_vllm):
    fake_vllm("vllm.v1.attention.backends.utils", get_kv_cache_layout=lambda: "NHD")
    config = vllm_config(block_size=16)
    config.device_config.device_type = "cpu"
    assert model_facts.layout_hints(config, engine_lays_out=True) == {"kv_layout": "HND"}


@pytest.fixture
def fake_vllm(monkeypatch):
    """Puts a module of vLLM in place, with the packages above it."""

    def put(name: str, **contents) -> None:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:count]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
        sys.modules[name].__dict__.update(contents)

    return put


# ---------------------------------------------------------------------------------------------- names and settings


def test_an_engine_is_told_from_every_other():
    def name(instance="i", engine_id=None, rank=0, ours="default"):
        config = vllm_config(block_size=16, data_parallel_rank=rank)
        config.instance_id, config.kv_transfer_config.engine_id = instance, engine_id
        return model_facts.engine_id(config, LMCacheEngineConfig(lmcache_instance_id=ours))

    assert name() == name()
    assert len({name(), name("j"), name(engine_id="e"), name(rank=1), name(ours="mine")}) == 5


def test_settings_of_the_command_line_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    monkeypatch.setenv("LMCACHE_SAVE_DECODE_CACHE", "true")
    extra = {"lmcache.chunk_size": 32, "skip_last_n_tokens": 3, "somebody_elses": 1}
    config = model_facts.engine_config(vllm_config(block_size=16, extra=extra))
    assert (config.chunk_size, config.save_decode_cache, config.skip_last_n_tokens) == (32, True, 3)


@pytest.mark.parametrize(
    ("transport", "executor", "serves"),
    [
        ("auto", "uni", False),
        ("auto", "mp", True),
        ("auto", object, True),
        ("local", "mp", False),
        ("zmq", "uni", True),
    ],
)
def test_when_a_worker_answers_other_processes(transport, executor, serves):
    config = vllm_config(block_size=16, distributed_executor_backend=executor)
    ours = LMCacheEngineConfig(lookup_transport=transport)
    assert model_facts.scheduler_may_be_elsewhere(config, ours) == serves


# ---------------------------------------------------------------------------------------------- rotation


def rotary_module(name: str = "RotaryEmbedding", **more) -> torch.nn.Module:
    module = type(name, (torch.nn.Module,), {})()
    module.cos_sin_cache, module.is_neox_style, module.rotary_dim = torch.rand(64, HS), True, HS
    module.__dict__.update(more)
    return module


def blending_worker(fake_vllm, *modules):
    table = dict(enumerate(modules))
    fake_vllm("vllm.model_executor.layers.rotary_embedding", _ROPE_DICT=table)
    extra = {"use_layerwise": True, "enable_blending": True, "max_local_cpu_size": 0.001}
    worker, parent = connector("WORKER", vllm_config(block_size=4, extra=extra), "0.32")
    parent.metadata = StepWork()
    return worker


CACHES = {f"layer{i}": torch.zeros(2, 9, 4, NH, HS, dtype=torch.float16) for i in range(NL)}


def test_blending_rotates_as_the_model_does(fake_vllm):
    module = rotary_module()
    worker = blending_worker(fake_vllm, module, module)  # two keys of one module
    worker.register_kv_caches(CACHES)
    connector_ = worker.lmcache_engine.connector
    assert isinstance(connector_, VLLMBufferLayerwiseGPUConnector)
    assert connector_.rope.cos_sin_cache is module.cos_sin_cache or torch.equal(
        connector_.rope.cos_sin_cache, module.cos_sin_cache
    )
    worker.shutdown()


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([], r"the model has 0 rotary modules \(none\)"),
        ([rotary_module(), rotary_module("Other")], r"2 rotary modules \(RotaryEmbedding, Other\)"),
        ([rotary_module("MRotaryEmbedding")], "MRotaryEmbedding"),
    ],
)
def test_blending_is_refused_by_name_where_keys_cannot_be_moved(fake_vllm, modules, words):
    worker = blending_worker(fake_vllm, *modules)
    with pytest.raises(ArgumentError, match=words):
        worker.register_kv_caches(CACHES)
    worker.shutdown()
