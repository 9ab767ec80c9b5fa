"""Who moves the bytes: the registry of backends and the one place where `LMCACHE_BACKEND` is read.

A backend brings every operation or none. Named explicitly it runs or raises `BackendError` with the reason; only
`auto` chooses, and it says once what it chose and why. `lmcache_ref` knows no backend but its own reference: others
arrive through `register_backend` or the entry-point group `lmcache_ref.backends`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from .environment import variable
from .errors import ArgumentError, BackendError

AUTO = "auto"
ENVIRONMENT = "LMCACHE_BACKEND"
ENTRY_POINTS = "lmcache_ref.backends"

#: what every backend must offer, by name and signature
OPERATIONS = {
    "gather": "(plan: TransferPlan) -> Transfer",
    "scatter": "(plan: TransferPlan) -> Transfer",
    "rerotate": "(keys, old_positions, new_positions, rope: RotarySpec) -> None",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One row of the registry.

    name: what `LMCACHE_BACKEND` calls it. devices: torch device types it serves; `"*"` is all.
    load: a module or object holding every operation of `OPERATIONS`, the name of a module, or a callable that
    returns either; called on first use. unavailable: says why the backend cannot run here, None when it can; must be cheap.
    speed: `auto` takes the greatest that can run. stages: it brings its own device staging, callers need not.
    rotates: its scatter re-rotates keys where `plan.rotation` asks for it. Without it no such plan comes: connectors
    scatter and then call `rerotate`, which gives the same bits; `lmcache_ref.scatter(rotation=...)` raises BackendError.
    """

    name: str
    load: Any
    devices: tuple[str, ...] = ("*",)
    unavailable: Callable[[], str | None] = lambda: None
    speed: int = 0
    stages: bool = False
    rotates: bool = False

    def serves(self, device: torch.device | str) -> bool:
        """Whether it moves memory of this device."""
        return "*" in self.devices or torch.device(device).type in self.devices


@dataclass(frozen=True)
class Operations:
    """A loaded backend: its operations as callables; see `OPERATIONS` for their signatures. facts: what it has settled for
    this machine, in words, where the backend has such a function."""

    name: str
    stages: bool
    rotates: bool
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    rerotate: Callable[..., Any]
    facts: Callable[[], dict[str, str]] = dict


BACKENDS: dict[str, Backend] = {}
_loaded: dict[str, Operations] = {}
_automatic: dict[str, Operations] = {}  # device type -> what `auto` chose, said once
_lock = threading.RLock()
_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("lmcache_backend", default=None)
_entry_points_read = False


def register_backend(
    name: str,
    load: Any,
    *,
    devices: tuple[str, ...] | list[str] = ("*",),
    unavailable: Callable[[], str | None] = lambda: None,
    speed: int = 0,
    stages: bool = False,
    rotates: bool = False,
) -> Backend:
    """Make a backend known; arguments as in `Backend`. Nothing is imported or loaded yet.

    Raises ArgumentError for a name that is taken or reserved.
    """
    if not name or name == AUTO:
        raise ArgumentError(f"a backend cannot be called {name!r}")
    if isinstance(devices, str):
        raise ArgumentError(f"devices must be a list of device types, got {devices!r}")
    with _lock:
        if name in BACKENDS:
            raise ArgumentError(f"backend {name!r} is already registered")
        _automatic.clear()
        BACKENDS[name] = Backend(name, load, tuple(devices), unavailable, speed, stages, rotates)
        return BACKENDS[name]


def unregister_backend(name: str) -> None:
    """Forget a backend (tests). Raises BackendError for an unknown name."""
    with _lock:
        _find(name)
        del BACKENDS[name]
        _loaded.pop(name, None)
        _automatic.clear()


def requested_backend() -> str:
    """The name asked for: `use_backend`, else `LMCACHE_BACKEND`, else `auto`."""
    return _chosen.get() or variable(ENVIRONMENT) or AUTO


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[Operations | None]:
    """Within the block, `get_backend()` means `name` (this thread and tasks started in it). Yields the loaded backend
    (None for `auto`, which is chosen per device). Raises BackendError as `get_backend` does, before the block runs."""
    operations = None if name == AUTO else get_backend(name)
    token = _chosen.set(name)
    try:
        yield operations
    finally:
        _chosen.reset(token)


def get_backend(name: str | None = None, device: torch.device | str = "cpu") -> Operations:
    """The backend called `name` (None: as requested by environment or `use_backend`), loaded, for memory on `device`.

    An explicit name runs or raises BackendError with the reason and the known names. `auto` takes the fastest that
    serves the device and can run.
    """
    explicit = name is not None
    name = requested_backend() if name is None else name
    if name == AUTO:
        return _choose(torch.device(device).type)
    backend = _find(name)
    if not explicit and not backend.serves(device):
        raise _refusal(name, f"serves {', '.join(backend.devices)}, the KV cache is on {device}")
    return _load(backend)


def explain_backends(device: torch.device | str = "cpu") -> list[tuple[Backend, str | None]]:
    """Every backend, fastest first, with the reason why it cannot serve `device` here (None: it can)."""
    _read_entry_points()
    ordered = sorted(BACKENDS.values(), key=lambda backend: -backend.speed)
    return [(backend, _why_not(backend, device)) for backend in ordered]


def _why_not(backend: Backend, device: torch.device | str) -> str | None:
    if not backend.serves(device):
        return f"serves {', '.join(backend.devices)}, not {torch.device(device).type}"
    return _cannot_run(backend)


def _cannot_run(backend: Backend) -> str | None:
    try:
        return backend.unavailable()
    except Exception as error:  # a guest's own failure is a reason like any other
        return f"its check failed: {type(error).__name__}: {error}"


def _choose(device_type: str) -> Operations:
    """The fastest backend for a device type; says once what it is and which faster ones cannot run."""
    with _lock:
        if device_type in _automatic:
            return _automatic[device_type]
        passed_over = []
        for backend, why in explain_backends(device_type):
            if not backend.serves(device_type):
                continue
            if why is None:
                try:
                    operations = _load(backend)
                except BackendError as error:  # found out only by loading it, a failed compilation say
                    why = str(error)
            if why is not None:
                passed_over.append(f"{backend.name}: {why}")
                continue
            faster = f"; faster ones cannot run: {'; '.join(passed_over)}" if passed_over else ""
            level = logging.WARNING if passed_over else logging.INFO
            logger.log(level, "%s: backend %r chosen automatically%s", device_type, backend.name, faster)
            return _automatic.setdefault(device_type, operations)
        raise BackendError(f"no backend serves {device_type}: {'; '.join(passed_over) or 'none is registered for it'}")


def _find(name: str) -> Backend:
    _read_entry_points()
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; {_known()}")
    return BACKENDS[name]


def _refusal(name: str, why: str) -> BackendError:
    return BackendError(f"backend {name!r} {why}; {_known()}")


def _known() -> str:
    return f"known: {', '.join(BACKENDS)}, {AUTO}"


def _load(backend: Backend) -> Operations:
    """The backend's operations; BackendError when it cannot run or lacks one."""
    found = _loaded.get(backend.name)
    if found is not None:
        return found
    with _lock:
        why = _cannot_run(backend)
        if why is not None:
            raise _refusal(backend.name, f"cannot run here: {why}")
        try:
            source = importlib.import_module(backend.load) if isinstance(backend.load, str) else backend.load
            source = source() if callable(source) else source
        except Exception as error:  # an import, a missing library, a compilation: whatever it is, it is the reason
            raise _refusal(backend.name, f"cannot be loaded: {type(error).__name__}: {error}") from error
        missing = [name for name in OPERATIONS if not callable(getattr(source, name, None))]
        if missing:
            raise _refusal(backend.name, f"lacks {', '.join(missing)} of {', '.join(OPERATIONS)}")
        operations = {name: getattr(source, name) for name in OPERATIONS}
        facts = getattr(source, "facts", dict)
        loaded = Operations(backend.name, backend.stages, backend.rotates, **operations, facts=facts)
        return _loaded.setdefault(backend.name, loaded)


def _read_entry_points() -> None:
    """Let installed packages register their backends, once. One that fails is listed with its reason, not dropped."""
    global _entry_points_read
    with _lock:
        if _entry_points_read:
            return
        _entry_points_read = True
        for point in entry_points(group=ENTRY_POINTS):
            try:
                point.load()()
            except Exception as error:  # any failure of a guest is its own, and is shown
                reason = f"entry point {point.value} failed: {type(error).__name__}: {error}"
                name = point.value if point.name in (AUTO, *BACKENDS) else point.name
                # nobody knows how fast it would have been: first in line, so that `auto` says it was passed over
                register_backend(name, None, unavailable=functools.partial(str, reason), speed=sys.maxsize)


def _reference() -> Any:
    from types import SimpleNamespace

    from .rope import rerotate
    from .transfer import reference_gather, reference_scatter

    return SimpleNamespace(gather=reference_gather, scatter=reference_scatter, rerotate=rerotate)


register_backend("reference", _reference, rotates=True)
