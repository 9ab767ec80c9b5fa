"""The registry of backends: what is asked for by name runs or raises, only `auto` chooses and says so.

Backends here are stand-ins that say who was called; that real ones move the right bytes is tested elsewhere.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

import lmcache_ref
from lmcache_ref import backends
from lmcache_ref.backends import OPERATIONS, explain_backends, get_backend, register_backend, use_backend
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2
from lmcache_ref.errors import ArgumentError, BackendError
from lmcache_ref.memory import MemoryFormat
from registry import operations, own_registry

__all__ = ["own_registry"]


def chosen(device="cpu") -> str:
    return get_backend(device=device).name


# Names


def test_the_reference_is_there_and_has_every_operation():
    assert list(OPERATIONS) == ["gather", "scatter", "rerotate"]
    reference = get_backend("reference")
    assert reference.name == "reference" and not reference.stages
    assert all(callable(getattr(reference, name)) for name in OPERATIONS)
    assert get_backend("reference") is reference


def test_the_environment_names_one(monkeypatch):
    register_backend("mine", operations(), speed=-5)
    assert chosen() == "reference"
    monkeypatch.setenv("LMCACHE_BACKEND", "mine")
    assert chosen() == "mine"
    monkeypatch.setenv("LMCACHE_BACKEND", " mine ")
    assert chosen() == "mine"
    for nothing in ("", "  ", "auto"):
        monkeypatch.setenv("LMCACHE_BACKEND", nothing)
        assert chosen() == "reference"
    monkeypatch.setenv("LMCACHE_BACKEND", "yours")
    with pytest.raises(BackendError, match=r"^unknown backend 'yours'; known: reference, mine, auto$"):
        get_backend()


def test_an_argument_beats_use_backend_and_that_the_environment(monkeypatch):
    for name in ("one", "two", "three"):
        register_backend(name, operations())
    monkeypatch.setenv("LMCACHE_BACKEND", "one")
    with use_backend("two") as active:
        assert active is get_backend("two")
        assert (chosen(), get_backend("three").name) == ("two", "three")
    assert chosen() == "one"


def test_use_backend_nests_and_is_undone_by_an_exception():
    register_backend("one", operations())
    register_backend("two", operations())
    with use_backend("one"):
        with pytest.raises(ZeroDivisionError), use_backend("two"):
            assert chosen() == "two"
            raise ZeroDivisionError
        assert chosen() == "one"
        with use_backend("auto") as active:
            assert active is None and chosen() == "reference"
        assert chosen() == "one"
    assert chosen() == "reference"


def test_use_backend_raises_before_its_block():
    ran = []
    for name in ("nothing", ""):
        with pytest.raises(BackendError, match=f"unknown backend '{name}'; known: reference, auto"):
            with use_backend(name):
                ran.append(name)
        with pytest.raises(BackendError, match=f"unknown backend '{name}'"):
            get_backend(name)
    assert ran == []


def test_use_backend_is_of_its_thread():
    register_backend("one", operations())
    register_backend("two", operations())
    inside, told = threading.Event(), threading.Event()
    seen = []

    def other():
        seen.append(chosen())
        with use_backend("two"):
            inside.set()
            assert told.wait(10)
            seen.append(chosen())

    with use_backend("one"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        seen.append(chosen())
        told.set()
        thread.join()
        seen.append(chosen())
    assert seen == ["reference", "one", "two", "one"]


# What a backend must be


@pytest.mark.parametrize("name", ["", None, "auto", "reference"])
def test_names_that_are_taken(name):
    with pytest.raises(ArgumentError, match="already registered" if name == "reference" else "cannot be called"):
        register_backend(name, operations())


def test_devices_are_a_list():
    with pytest.raises(ArgumentError, match="devices must be a list of device types, got 'cuda'"):
        register_backend("mine", operations(), devices="cuda")


def test_a_backend_may_be_an_object_a_function_or_a_module_name(monkeypatch):
    module = ModuleType("a_backend_module")
    vars(module).update(vars(operations()))
    monkeypatch.setitem(sys.modules, "a_backend_module", module)
    for name, load in (
        ("object", operations()),
        ("function", operations),
        ("module", module),
        ("name", module.__name__),
    ):
        register_backend(name, load)
        assert get_backend(name).name == name
    assert get_backend("name").gather is module.gather


def test_it_is_loaded_once_and_late():
    calls = []

    def load():
        calls.append("loaded")
        return operations()

    register_backend("mine", load)
    assert calls == []
    assert get_backend("mine") is get_backend("mine")
    assert calls == ["loaded"]
    backends.unregister_backend("mine")
    with pytest.raises(BackendError, match="unknown backend 'mine'"):
        get_backend("mine")
    register_backend("mine", operations())
    assert get_backend("mine").name == "mine" and calls == ["loaded"]
    with pytest.raises(BackendError, match="unknown backend 'yours'"):
        backends.unregister_backend("yours")


def raising(error):
    def load():
        raise error

    return load


#: name: how to register it, and why it cannot be had
BROKEN = {
    "unavailable": ({"load": operations(), "unavailable": lambda: "no such card"}, "cannot run here: no such card"),
    "bad-check": (
        {"load": operations(), "unavailable": raising(OSError("driver gone"))},
        "cannot run here: its check failed: OSError: driver gone",
    ),
    "no-module": (
        {"load": "no_such_module"},
        "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "import-error": ({"load": raising(ImportError("libcuda"))}, "cannot be loaded: ImportError: libcuda"),
    "compile-error": ({"load": raising(RuntimeError("nvrtc: 7"))}, "cannot be loaded: RuntimeError: nvrtc: 7"),
    "incomplete": ({"load": SimpleNamespace(gather=print)}, "lacks scatter, rerotate of gather, scatter, rerotate"),
    "uncallable": ({"load": operations(scatter=None)}, "lacks scatter of gather, scatter, rerotate"),
    "nothing": ({"load": None}, "lacks gather, scatter, rerotate of gather, scatter, rerotate"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("how", ["argument", "environment", "block", "transfer"])
def test_an_explicit_choice_runs_or_raises(monkeypatch, caplog, name, how):
    """Never a fallback, and never a word about one: the reason and the known names."""
    given, reason = BROKEN[name]
    register_backend(name, **given, speed=9)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BackendError) as refusal:
        if how == "argument":
            get_backend(name)
        elif how == "block":
            with use_backend(name):
                pass
        else:
            monkeypatch.setenv("LMCACHE_BACKEND", name)
            if how == "environment":
                get_backend()
            else:
                move()
    assert str(refusal.value) == f"backend {name!r} {reason}; known: reference, {name}, auto"
    assert caplog.records == []


@pytest.mark.parametrize("name", BROKEN)
def test_auto_passes_it_over_and_says_once_what_it_chose(caplog, name):
    given, reason = BROKEN[name]
    register_backend(name, **given, speed=9)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        assert chosen() == "reference"
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "lmcache_ref.backends")
    text = record.getMessage()
    assert text.startswith(f"cpu: backend 'reference' chosen automatically; faster ones cannot run: {name}: ")
    assert reason.removeprefix("cannot run here: ") in text


def test_auto_takes_the_fastest_that_serves_the_device(caplog):
    caplog.set_level(logging.INFO)
    register_backend("slow", operations(), speed=-1)
    register_backend("fast", operations(), speed=5)
    register_backend("card", operations(), devices=["cuda", "xpu"], speed=9)
    register_backend("slower", operations(), speed=-2)
    devices = {"cpu": "fast", "cuda": "card", "cuda:1": "card", "meta": "fast"}
    assert {device: chosen(device) for device in devices} == devices
    assert [record.getMessage() for record in caplog.records] == [
        "cpu: backend 'fast' chosen automatically",
        "cuda: backend 'card' chosen automatically",
        "meta: backend 'fast' chosen automatically",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    caplog.clear()
    register_backend("fastest", operations(), speed=7)
    assert chosen() == "fastest"  # one that comes later is considered
    assert [record.getMessage() for record in caplog.records] == ["cpu: backend 'fastest' chosen automatically"]


def test_auto_says_it_once_for_all_threads(caplog):
    caplog.set_level(logging.INFO)
    gate = threading.Barrier(8)
    loads = []

    def load():
        loads.append(1)
        return operations()

    register_backend("mine", load, speed=1)

    def first():
        gate.wait(10)
        assert chosen() == "mine"

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == len(loads) == 1


def test_auto_without_any_backend_for_the_device(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", {})
    with pytest.raises(BackendError, match="no backend serves cuda: none is registered for it"):
        get_backend(device="cuda")
    register_backend("card", operations(), devices=["cuda"], unavailable=lambda: "no such card")
    with pytest.raises(BackendError, match="no backend serves cuda: card: no such card"):
        get_backend(device="cuda:0")


def test_explain_lists_all_fastest_first():
    register_backend("card", operations(), devices=["cuda"], speed=9)
    register_backend("broken", operations(), unavailable=lambda: "no compiler", speed=5)
    assert [(backend.name, why) for backend, why in explain_backends("cpu")] == [
        ("card", "serves cuda, not cpu"),
        ("broken", "no compiler"),
        ("reference", None),
    ]


# Which backend a transfer uses


def move(operation="gather"):
    cache = lmcache_ref.PagedKVCache.from_vllm([torch.zeros(2, 5, 4, 3, 8)])
    chunk = torch.zeros(2, 1, 4, 24)
    return getattr(lmcache_ref, operation)(cache, torch.arange(4), [chunk], fmt=MemoryFormat.KV_2LTD)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_a_transfer_goes_to_the_selected_backend(operation):
    plans, handle = [], lmcache_ref.Transfer()
    register_backend("mine", operations(**{operation: lambda plan: plans.append(plan) or handle}))
    with use_backend("mine"):
        assert move(operation) is handle
    assert [plan.num_tokens for plan in plans] == [4]


def test_a_selected_backend_for_another_device_raises(monkeypatch):
    register_backend("card", operations(), devices=["cuda"], speed=9)
    assert get_backend("card").name == "card"
    message = r"^backend 'card' serves cuda, the KV cache is on cpu; known: reference, card, auto$"
    monkeypatch.setenv("LMCACHE_BACKEND", "card")
    with pytest.raises(BackendError, match=message):
        move()
    connector = VLLMPagedMemGPUConnectorV2(24, 1)
    with pytest.raises(BackendError, match=message):
        connector.batched_from_gpu([], [], [], kvcaches=[torch.zeros(2, 5, 4, 3, 8)], slot_mapping=torch.arange(4))
    with use_backend("reference"):
        move()
