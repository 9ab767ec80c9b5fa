"""Compiling at first use: kept, shared by processes, and every failure an error that says what to do.

Also that importing and registering the package starts no compiler and touches no GPU.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_fast.cpu import compile as compile_module
from lmcache_fast.cpu.compile import load_library
from lmcache_fast.cuda import compile as cuda_compile
from lmcache_ref import backends
from lmcache_ref.backends import explain_backends, get_backend
from lmcache_ref.errors import BackendError

SOURCE = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LMCACHE_FAST_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE % 41)
    return file


def logging_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that notes each time it makes a library, and that file of notes."""
    notes, script = folder / "notes", folder / "compiler"
    real = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) echo made >> "{notes}"; sleep 0.5;; esac\nexec {real} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script, notes


def made(notes: Path) -> int:
    return len(notes.read_text().splitlines()) if notes.exists() else 0


# ------------------------------------------------------------------------------------------------ what is kept


def test_a_library_is_compiled_once_and_again_when_anything_changes(source, tmp_path, monkeypatch):
    script, notes = logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(script))
    header = tmp_path / "unused.h"
    header.write_text("")
    for change, (count, answer) in {
        "nothing": (1, 41),
        "nothing again": (1, 41),
        "source": (2, 42),
        "header": (3, 42),
        "flags": (4, 42),
        "compiler": (5, 42),
    }.items():
        if change == "source":
            source.write_text(SOURCE % 42)
        if change == "header":
            header.write_text("// changed")
        if change == "compiler":
            monkeypatch.setenv("CXX", f"{script} -D_ANOTHER_COMPILER_WOULD_DEFINE_THIS")
        flags = ["-DX"] if change in ("flags", "compiler") else []
        assert load_library("answer", [source], [header], flags).answer() == answer, change
        assert made(notes) == count, change
    left = sorted({file.suffix for file in (tmp_path / "cache").iterdir()})
    assert left == [".lock", ".so"]


def test_processes_that_start_together_compile_once(source, tmp_path):
    script, notes = logging_compiler(tmp_path)
    program = (
        "import sys; from pathlib import Path; from lmcache_fast.cpu.compile import load_library;"
        "sys.exit(load_library('answer', [Path(sys.argv[1])]).answer() != 41)"
    )
    environment = {**os.environ, "CXX": str(script)}
    started = [subprocess.Popen([sys.executable, "-c", program, str(source)], env=environment) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert made(notes) == 1


def test_the_folder_is_the_users_cache_unless_named(monkeypatch, tmp_path):
    from lmcache_fast.environment import cache_folder

    monkeypatch.setenv("LMCACHE_FAST_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("LMCACHE_FAST_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "lmcache_fast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lmcache_fast"


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_an_error_of_the_compiler_is_shown_and_leaves_nothing(source, tmp_path):
    source.write_text("this is no C++\n")
    with pytest.raises(BackendError, match=r"(?s)answer\.cpp.*failed with status 1.*error:"):
        load_library("answer", [source])
    assert {file.suffix for file in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_a_flag_the_compiler_does_not_know_is_shown(source):
    with pytest.raises(BackendError, match="-fno-such-flag"):
        load_library("answer", [source], flags=["-fno-such-flag"])


def test_a_folder_that_cannot_be_used_is_named_with_the_variable(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMCACHE_FAST_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(BackendError, match=r"below.*LMCACHE_FAST_CACHE"):
        load_library("answer", [source])


def test_a_library_that_cannot_be_loaded_is_named(source, monkeypatch):
    monkeypatch.setattr(compile_module, "_compile", lambda command, sources, library: library.write_text("not one"))
    with pytest.raises(BackendError, match=r"cannot load .*answer-\w+\.so"):
        load_library("answer", [source])


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setattr(backends, "_automatic", {})


def test_without_a_compiler_the_backend_says_so(no_compiler, caplog):
    get_backend(device="meta")  # whatever serves it; the registry is complete from here on
    reason = backends.BACKENDS["cpu"].unavailable()
    assert reason is not None and "no C++ compiler: looked for g++, c++, clang++" in reason
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        get_backend("cpu")
    with caplog.at_level("WARNING"):
        assert get_backend(device="cpu").name == "reference"
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_is_named_but_missing_is_named(no_compiler, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    assert "/nowhere/c++ -m64" in (compile_module.unavailable() or "")


# ------------------------------------------------------------------------------------------------ import


def test_import_and_registration_start_no_process_and_touch_no_gpu():
    program = """
import sys
events = []
watched = ("subprocess.Popen", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda name, arguments: name in watched and events.append(arguments))
import lmcache_fast
import lmcache_ref
from lmcache_ref import backends
backends._entry_points_read = True  # registered here, once, whether or not the package is installed
lmcache_fast.register()
assert "cpu" in backends.BACKENDS, backends.BACKENDS
import torch
assert not torch.cuda.is_initialized()
assert "cupy" not in sys.modules and "cuda" not in sys.modules
assert not events, events
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_check_of_imports_sees_a_process():
    program = """
import sys
events = []
watched = ("subprocess.Popen", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda name, arguments: name in watched and events.append(arguments))
import subprocess
subprocess.run(["true"])
assert events
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sources_are_whole_and_have_every_kernel():
    text = {name: cuda_compile.source_text(name) for name in cuda_compile.SOURCES}
    for name, source in text.items():
        assert "#include" not in source, name
        assert source.count("struct Plane {") == 1, name
    assert "LMC_KERNELS(16, uint4)" in text["transfer.cu"] and "LMC_KEEP(16, uint4)" in text["keep.cu"]


def test_without_a_device_it_says_why(monkeypatch):
    backend = next(backend for backend, _ in explain_backends() if backend.name == "cuda")
    assert (backend.devices, backend.stages, backend.speed) == (("cuda",), True, 20)
    monkeypatch.setattr(cuda_compile.importlib.util, "find_spec", lambda name: None)
    assert "cupy is not installed" in cuda_compile.unavailable()
    monkeypatch.setattr(cuda_compile.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_compile.unavailable() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_compile.unavailable() is None
