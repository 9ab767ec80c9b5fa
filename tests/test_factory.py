"""`CreateGPUConnector`: its whole decision table, what it refuses and advises, devices, and what it hands to a connector."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

from helpers import addressed, assert_same, words
from lmcache_ref.connectors import (
    CreateGPUConnector,
    GPUConnectorInterface,
    MockGPUConnector,
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    TRTLLMGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
    need_gpu_interm_buffer,
)
from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.layouts import register_layout, unregister_layout
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat
from lmcache_ref.metadata import EngineType, LMCacheMetadata
from lmcache_ref.rope import RotarySpec, rotary_table

LAYERWISE, BLENDING, V3, PD = FLAGS = ("use_layerwise", "enable_blending", "use_gpu_connector_v3", "enable_pd")
#: the contract's table; PD changes only the staging, and there is no blending without staging
TABLE = {
    ("vllm", ()): VLLMPagedMemGPUConnectorV2,
    ("vllm", (V3,)): VLLMPagedMemGPUConnectorV3,
    ("vllm", (LAYERWISE,)): VLLMPagedMemLayerwiseGPUConnector,
    ("vllm", (LAYERWISE, BLENDING)): VLLMBufferLayerwiseGPUConnector,
    ("sglang", ()): SGLangGPUConnector,
    ("sglang", (LAYERWISE,)): SGLangLayerwiseGPUConnector,
    ("trtllm", ()): TRTLLMGPUConnector,
    ("mock", ()): MockGPUConnector,
}
CASES = [
    (engine, flags, mla)
    for engine in ("vllm", "sglang", "trtllm", "mock")
    for number in range(len(FLAGS) + 1)
    for flags in itertools.combinations(FLAGS, number)
    for mla in (False, True)
]


def expected(engine: str, flags: tuple[str, ...], mla: bool):
    """The class, or None where nothing can work."""
    if BLENDING in flags and (PD in flags or mla):
        return None
    if engine == "trtllm" and mla:
        return None
    return TABLE.get((engine, tuple(flag for flag in flags if flag != PD)))


def config(flags) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(flags, True))


def metadata(mla: bool = False, local_worker_id: int = 0) -> LMCacheMetadata:
    shape = (3, 1, 8, 1, 24) if mla else (3, 2, 8, 2, 16)
    return LMCacheMetadata("m", 8, 8, 5, local_worker_id, torch.float16, shape, use_mla=mla)


def case_id(case) -> str:
    engine, flags, mla = case
    return "-".join([engine, *flags, *(["mla"] if mla else [])])


def test_there_are_as_many_cases_as_there_should_be():
    assert len(CASES) == 4 * 2**4 * 2
    made = [case for case in CASES if expected(*case)]
    # VLLM: 4 ways, less one with MLA and one with PD; SGLang: 2, each with and without MLA and PD; and so on
    assert len(made) == (4 + 3 + 3 + 3) + 2 * 4 + 2 + 4


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("as_string", [False, True], ids=["EngineType", "string"])
def test_the_whole_table(case, as_string):
    engine, flags, mla = case
    given = engine.upper() if as_string else EngineType(engine)
    wanted = expected(*case)
    if wanted is None:
        with pytest.raises(ArgumentError) as error:
            CreateGPUConnector(config(flags), metadata(mla), given)
        for word in (engine, *flags):
            assert word in str(error.value)
        return
    connector = CreateGPUConnector(config(flags), metadata(mla), given)
    assert type(connector) is wanted and isinstance(connector, GPUConnectorInterface)
    assert connector.use_gpu is (PD not in flags)


def changes(message: str) -> list[list[tuple[str, bool]]]:
    """The choices that each advice of a message leaves: `turn A or B off`."""
    advice = re.findall(r"turn (\w+)(?: or (\w+))? (on|off)", message)
    return [[(flag, state == "on") for flag in (first, second) if flag] for first, second, state in advice]


@pytest.mark.parametrize("case", [case for case in CASES if not expected(*case)], ids=case_id)
def test_whoever_follows_the_advice_gets_a_connector(case):
    engine, flags, mla = case
    with pytest.raises(ArgumentError) as error:
        CreateGPUConnector(config(flags), metadata(mla), engine)
    advised = changes(str(error.value))
    if engine == "trtllm" and mla:
        assert "register_layout()" in str(error.value)
        register_layout("TEST_TRTLLM_MLA", "nb nl 1 bs hs", engines=["trtllm"])
    else:
        assert advised
    try:
        for choice in itertools.product(*advised):
            settings = {**dict.fromkeys(FLAGS, False), **dict.fromkeys(flags, True)}
            for flag, state in choice:
                settings[flag] = state
            CreateGPUConnector(SimpleNamespace(**settings), metadata(mla), engine)
    finally:
        if engine == "trtllm" and mla:
            unregister_layout("TEST_TRTLLM_MLA")


def test_an_unknown_engine_is_named():
    with pytest.raises(ArgumentError, match=r"'llamacpp' is unknown; known: vllm, sglang, trtllm, mock"):
        CreateGPUConnector(config(()), metadata(), "llamacpp")


@pytest.mark.parametrize(("pd", "needed"), [(None, True), (False, True), (True, False)])
def test_need_gpu_interm_buffer(pd, needed):
    assert need_gpu_interm_buffer(SimpleNamespace(**({} if pd is None else {PD: pd}))) is needed


# Devices


def available(monkeypatch, *kinds: str) -> None:
    for kind in ("cuda", "xpu", "hpu"):
        module = getattr(torch, kind, None) or SimpleNamespace()
        monkeypatch.setattr(module, "is_available", lambda kind=kind: kind in kinds, raising=False)
        monkeypatch.setattr(torch, kind, module, raising=False)

    def refuse(*args, **kwargs):
        raise AssertionError("the current device was changed")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    monkeypatch.setattr(torch.xpu, "set_device", refuse)


@pytest.mark.parametrize(
    ("kinds", "device"),
    [
        ((), "cpu"),
        (("cuda",), "cuda:3"),
        (("xpu",), "xpu:3"),
        (("hpu",), "hpu:3"),
        (("cuda", "xpu", "hpu"), "cuda:3"),
        (("xpu", "hpu"), "xpu:3"),
    ],
)
@pytest.mark.parametrize("way", TABLE, ids=lambda way: "-".join([way[0], *way[1]]))
def test_the_device_is_the_workers_own_by_its_local_number(monkeypatch, kinds, device, way):
    available(monkeypatch, *kinds)
    connector = CreateGPUConnector(config(way[1]), metadata(local_worker_id=3), way[0])
    assert connector.device == torch.device(device)


def test_without_such_a_module_the_cpu_serves(monkeypatch):
    available(monkeypatch)
    monkeypatch.delattr(torch, "hpu")
    monkeypatch.delattr(torch, "xpu")
    assert CreateGPUConnector(config(()), metadata(), "vllm").device == torch.device("cpu")


@pytest.mark.gpu
def test_the_current_device_stays_current():
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    connector = CreateGPUConnector(config(()), metadata(local_worker_id=last), "vllm")
    assert connector.device == torch.device("cuda", last) and torch.cuda.current_device() == before


# What reaches the connector


@pytest.mark.parametrize("way", TABLE, ids=lambda way: "-".join([way[0], *way[1]]))
def test_sizes_dtype_and_hints_reach_the_connector(way):
    hints = {"tokens_per_block": 4}
    connector = CreateGPUConnector(config(way[1]), metadata(), way[0], hints)
    assert connector.layout_hints["tokens_per_block"] == 4
    if way[1] != (V3,):
        sizes = {"num_layers": 3, "hidden_dim_size": 32, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float16}
        assert sizes.items() <= connector.layout_hints.items()
    with pytest.raises(ArgumentError, match="unknown layout hint 'tokens_per_blok'"):
        CreateGPUConnector(config(way[1]), metadata(), way[0], {"tokens_per_blok": 4})


def test_the_rotation_reaches_the_connector_that_blends():
    rope = RotarySpec(rotary_table(16, 16))
    assert CreateGPUConnector(config((LAYERWISE, BLENDING)), metadata(), "vllm", rope=rope).rope is rope
    assert CreateGPUConnector(config((LAYERWISE, BLENDING)), metadata(), "vllm").rope is None
    with pytest.raises(ArgumentError, match="rope must be a RotarySpec"):
        CreateGPUConnector(config((LAYERWISE, BLENDING)), metadata(), "vllm", rope="neox")


@pytest.mark.parametrize("hints", [{}, {"tokens_per_block": 4}, {"kv_layout": "HND"}], ids=str)
def test_trtllm_stores_from_its_flat_pool(hints):
    """`[NB, NL, 2, NH*BS*HS]`: NL, NH and HS come from the metadata, BS is what is left."""
    logical = words(addressed(3 * 2 * 5 * 4 * 2 * 16, torch.float16)).view(3, 2, 5, 4, 2, 16)
    pool = rearrange(logical, "nl two nb bs nh hs -> nb nl two (nh bs hs)").contiguous().view(torch.float16)
    connector = CreateGPUConnector(config(()), metadata(), "trtllm", hints)
    obj = HostMemoryAllocator(1 << 14).allocate(connector.get_shape(3), torch.float16, MemoryFormat.UNDEFINED)
    connector.from_gpu(obj, 1, 4, kvcaches=pool, slot_mapping=torch.tensor([9, 7, 0, 19]))
    rows = logical.flatten(2, 3)[:, :, [7, 0, 19]]
    wanted = rearrange(rows, "nl two t nh hs -> two nl t (nh hs)").contiguous().view(torch.float16)
    assert_same(obj.tensor.flatten(), wanted.flatten(), "the object")


def test_trtllms_flat_pool_without_sizes_says_which_hints_it_needs():
    connector = TRTLLMGPUConnector(32, 3, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"needs the hints num_kv_heads"):
        connector.initialize_kvcaches_ptr(kvcaches=torch.zeros(5, 3, 2, 128, dtype=torch.float16))
    TRTLLMGPUConnector(32, 3, layout_hints={"num_kv_heads": 2}).initialize_kvcaches_ptr(
        kvcaches=torch.zeros(5, 3, 2, 128)
    )


# NVTX


@pytest.mark.parametrize("way", [way for way in TABLE if way[0] != "mock"], ids=lambda way: "-".join([way[0], *way[1]]))
def test_ranges_are_named_where_cuda_is(monkeypatch, way):
    """Every connector's work lies in ranges that name its class; without CUDA there are none."""
    from drive import CONNECTORS, Bench
    from lmcache_ref.backends import use_backend

    (name,) = [name for name, driven in CONNECTORS.items() if driven.make is TABLE[way]]
    bench, opened = Bench(name), []
    objects = bench.allocate([(0, 2)])
    bench.put_objects(objects, bench.request_values(2), [(0, 2)])

    closed = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: closed.append(1))
    with use_backend("reference"):
        bench.load(objects, [(0, 2)], torch.tensor([3, 1]))
        assert opened == []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        bench.store(objects, [(0, 2)], torch.tensor([3, 1]))
        bench.load(objects, [(0, 2)], torch.tensor([3, 1]))
    assert opened and {text.partition(".")[0] for text in opened} == {TABLE[way].__name__}
    assert len(closed) == len(opened)
