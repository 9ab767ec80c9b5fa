"""Compiles csrc with NVRTC through cupy and hands out kernels by name. Nothing is launched here.

cupy is imported at first use only, so that importing this module touches neither a GPU nor a compiler.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from lmcache_ref.errors import BackendError

from ..environment import source_folder

SOURCES = ("transfer.cu", "keep.cu", "rotate.cu")
NUM_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
# No contraction of a*b+c: the bits of a rotation are each operation rounded by itself.
OPTIONS = ("--std=c++17", "-fmad=false")


def unavailable() -> str | None:
    """Why nothing can run on CUDA here, None when it can. Cheap; no context is made."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed (the extra `fast` for CUDA 12, `fast-cuda13` for CUDA 13)"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def source_text(name: str, folder: Path | None = None) -> str:
    """A source with its headers in place of their includes, each once: NVRTC and cupy's cache then see all of it."""
    seen: set[str] = set()
    folder = folder or source_folder()

    def inlined(file_name: str) -> str:
        if file_name in seen:
            return ""
        seen.add(file_name)
        text = (folder / file_name).read_text().replace("#pragma once\n", "")
        return re.sub(r'^#include "([\w.]+)"$', lambda match: inlined(match[1]), text, flags=re.MULTILINE)

    return inlined(name)


class Kernels:
    """The kernels of one device, compiled at construction, when it must be current. `find` is safe in any thread.

    guard: makes the device current within a block.
    """

    def __init__(self, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        self._lock, self._guard = threading.Lock(), guard
        self._functions: dict[str, tuple[int, Any]] = {}
        self._modules = [_compiled(name) for name in SOURCES]

    def find(self, name: str) -> int:
        """The driver's handle of a kernel; whichever device is current."""
        known = self._functions.get(name)
        if known is None:
            with self._lock, self._guard():
                function = self._modules[_source_of(name)].get_function(name).kernel
                _load(function)
                known = self._functions[name] = (function.ptr, function)  # the object keeps its module loaded
        return known[0]


def _load(function: Any) -> None:
    """Let the driver load a kernel now, by asking for its registers: at its first launch, loading may make the host wait."""
    from cupy.cuda import driver

    driver.funcGetAttribute(NUM_REGISTERS, function.ptr)


def _source_of(name: str) -> int:
    words = name.split("_")
    return 2 if "rotated" in words else {"gather": 0, "scatter": 0, "keep": 1, "rotate": 2}[words[0]]


def _compiled(name: str) -> Any:
    import cupy

    try:
        module = cupy.RawModule(code=source_text(name), options=OPTIONS, backend="nvrtc")
        module.compile()
    except Exception as error:  # cupy's own, the driver's, a missing NVRTC: whatever it is, its text is the reason
        raise BackendError(f"{name} cannot be compiled by NVRTC: {type(error).__name__}: {error}") from error
    return module
