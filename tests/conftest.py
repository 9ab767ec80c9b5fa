"""What holds for every test: report header, `gpu` marker and `--require-gpu`, hypothesis profile, poison.

Nothing here knows the library; sentinels, comparers and engine caches live in the modules that use them.
`test_house.py` runs this very file in small suites of its own and checks each promise.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import lmcache_fast
from lmcache_ref.backends import BACKENDS

pytest_plugins = ["pytester"]

LIBRARY_PACKAGES = ("lmcache_ref", "lmcache_fast")
POISON_BYTE = 0xA5
# Pages of a large pool that no test touches should not become real: above twice this, only its ends change.
POISON_END_BYTES = 32 << 20

# CI draws the same examples every time, so that a red run is red again; elsewhere each run draws new ones.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("house")

# torch remembers its factory functions the first time a `with torch.device(...)` block calls one. That has to
# be now, while they are its own: later it would remember the poisoned torch.empty, and ignore the real one.
with torch.device("cpu"):
    torch.empty(0)


# Workers of xdist share the cores: threads beyond them would only wait for each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(_threads)  # for subprocesses
    torch.set_num_threads(_threads)

# In a checkout that is not installed, no entry point brings the fast backends: what it names is called here instead.
# (Once a process: `test_house.py` runs this file in a process that has run it before.)
if not importlib.metadata.entry_points(group="lmcache_ref.backends", name="fast"):
    _root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_root, os.environ.get("PYTHONPATH")]))  # for subprocesses
    if "cpu" not in BACKENDS:
        lmcache_fast.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="without a CUDA device, gpu tests are errors, not skips"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("LMCACHE_")]
    return [
        f"backend: LMCACHE_BACKEND={os.environ.get('LMCACHE_BACKEND', '(unset, so auto)')}",
        f"environment: {' '.join(variables) or 'no LMCACHE_* variable'}",
        f"versions: python {platform.python_version()}, torch {torch.__version__}, "
        + ", ".join([_installed("einops"), _installed_cupy(), _installed("hypothesis")]),
        f"devices: {', '.join(_devices())}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the GPU tests of a machine that has none, before any of their fixtures runs."""
    if config.getoption("--require-gpu") or torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    required = item.get_closest_marker("gpu") and item.config.getoption("--require-gpu")
    if required and not torch.cuda.is_available():
        pytest.fail("no CUDA device, and --require-gpu was given", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def no_zero_copy() -> None:
    """Most calls of tests are small. They go through staging, as those of a model do; zero copy has tests of its own."""
    os.environ.setdefault("LMCACHE_FAST_ZERO_COPY_BYTES", "0")


@pytest.fixture(autouse=True, scope="session")
def poison_fresh_memory() -> Iterator[None]:
    """Memory that the library allocates uninitialised holds 0xA5 bytes, never zeros left by luck.

    Only calls made from a module of the library are filled: torch's own, and those of any other package,
    get what torch gives them.
    """
    factories = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in factories:
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def _poisoned(allocate):
    @functools.wraps(allocate)
    def allocate_and_poison(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # type(...) is: a subclass (fake, functional, parameter) has no bytes of its own to fill.
        if (
            caller.partition(".")[0] in LIBRARY_PACKAGES
            and type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and kwargs.get("out") is None
        ):
            _fill_with_poison(tensor)
        return tensor

    return allocate_and_poison


def _fill_with_poison(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() <= 2 * POISON_END_BYTES:
        storage.fill_(POISON_BYTE)
    else:
        storage[:POISON_END_BYTES].fill_(POISON_BYTE)
        storage[-POISON_END_BYTES:].fill_(POISON_BYTE)


def _installed(distribution: str) -> str:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {distribution}"


def _installed_cupy() -> str:
    """CuPy's version from its metadata: importing it would look for a driver."""
    wheels = [_installed(name) for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy")]
    return next((wheel for wheel in wheels if not wheel.startswith("no ")), "no cupy")


def _devices() -> list[str]:
    cuda_devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [
        f"cpu ({torch.get_num_threads()} threads)",
        *(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in cuda_devices),
    ] + ([] if cuda_devices else ["no CUDA device"])
