"""What this machine and this environment offer: versions, devices, `LMCACHE_*` variables, and which backend would run.

`examine()` collects, `cli.py` shows. Nothing heavy is imported: versions are read from the metadata of installed packages.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .backends import AUTO, explain_backends, get_backend, requested_backend
from .errors import BackendError

PACKAGES = (
    "lmcache-ref",
    "torch",
    "einops",
    "typer",
    "rich",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
    "triton",
    "transformers",
    "vllm",
    "sglang",
    "lmcache",
)

#: torch modules that may bring devices beside the CPU
ACCELERATORS = ("cuda", "xpu", "hpu", "npu")


@dataclass(frozen=True)
class Choice:
    """The backends for one device type.

    chosen: the one a call on this device would take; None when it would raise, and `problem` says why.
    passed_over: backend -> why it is not that one. facts: what the chosen one has settled for this machine.
    """

    device_type: str
    chosen: str | None
    problem: str | None
    passed_over: dict[str, str]
    facts: dict[str, str]


@dataclass(frozen=True)
class Report:
    """What `examine` found. versions: None for a package that is not installed. requested: by `LMCACHE_BACKEND`, or `auto`.

    ok: the requested backend runs: `auto` on every device type here, a named one on at least one.
    """

    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    environment: dict[str, str]
    requested: str
    ok: bool
    choices: list[Choice]


def examine() -> Report:
    """Look at this process's environment. The requested backends are loaded, which may compile kernels."""
    devices = list_devices()
    choices = [choose(device_type) for device_type in dict.fromkeys(device["type"] for device in devices)]
    requested = requested_backend()
    able = [choice.chosen is not None for choice in choices]
    return Report(
        {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
        devices,
        {name: os.environ[name] for name in sorted(os.environ) if name.startswith("LMCACHE_")},
        requested,
        all(able) if requested == AUTO else any(able),
        choices,
    )


def installed(package: str) -> str | None:
    """Version of an installed distribution, None when there is none. Imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def list_devices() -> list[dict[str, Any]]:
    """The CPU, then each accelerator torch sees: type, index, name, `memory_bytes` and capability where known."""
    found: list[dict[str, Any]] = [
        {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for kind in ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            properties = module.get_device_properties(index)
            device = {"type": kind, "index": index, "name": module.get_device_name(index)}
            device["memory_bytes"] = getattr(properties, "total_memory", None)
            if hasattr(properties, "major"):
                device["capability"] = f"{properties.major}.{properties.minor}"
            found.append(device)
    return found


def choose(device_type: str) -> Choice:
    """Which backend serves `device_type` here, and why each other would not."""
    chosen = problem = None
    facts: dict[str, str] = {}
    try:
        operations = get_backend(device=device_type)
        chosen, facts = operations.name, operations.facts()
    except BackendError as error:
        problem = str(error)
    passed_over = {}
    for backend, why in explain_backends(device_type):
        if backend.name != chosen:
            passed_over[backend.name] = why or _could_run(backend.name, device_type)
    return Choice(device_type, chosen, problem, passed_over, facts)


def _could_run(name: str, device_type: str) -> str:
    """Why a backend that says it can run was not taken: it was not asked for, it is slower, or loading it fails."""
    requested = requested_backend()
    try:
        get_backend(name, device_type)
    except BackendError as error:
        return str(error)
    return "can run, but is not the fastest" if requested == AUTO else f"can run, but {requested} is requested"
