"""LMCache's own transfer function as a mover beside ours: its pure-Python fallback on a CPU, its compiled `c_ops` on a GPU.

Either is loaded from where the user has it, never shipped, and called as its connectors call it: once a chunk.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from ..transfer import Transfer
from .measure import HostClock
from .movers import EventTransfer, Mover
from .settings import Job, Setting

PEER = "peer"
FALLBACK = "non_cuda_equivalents.py"
COMPILED = "c_ops"

#: rows that the fallback can read -> how it wants one layer's tensor
_FLAT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NL_X_TWO_NB_BS_NH_HS": lambda tensor: tensor.flatten(1, 2).flatten(2),  # [2, NB*BS, D]
    "NL_X_NB_BS_HS": lambda tensor: tensor.flatten(0, 1),  # [NB*BS, D]
}
#: rows of one tensor a layer that `make_cache` makes; the compiled functions take their addresses
_COMPILED = ("NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NL_X_NB_BS_HS")


def load_fallback(path: str | Path) -> Any:
    """The module `lmcache/non_cuda_equivalents.py` under `path` (an unpacked wheel, or a site-packages folder).

    It wants numba and lmcache's device globals; where they are absent, empty stand-ins let it load (its transfer
    functions use neither). Raises ArgumentError when the file is not there.
    """
    file = _find(path, FALLBACK)
    stand_ins: dict[str, dict[str, Any]] = {
        "numba": {"njit": lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda call: call},
        "lmcache": {"torch_dev": torch.cuda, "torch_device_type": "cpu"},
    }
    added = []
    for name, attributes in stand_ins.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
            added.append(name)
    try:
        return _load("lmcache_upstream_fallback", file)
    finally:
        for name in added:
            del sys.modules[name]


def load_compiled(path: str | Path) -> Any:
    """The extension module `lmcache/c_ops*.so` under `path`, beside the torch that is loaded.

    Raises ArgumentError when there is none, or none for this Python, or it does not fit this torch.
    """
    file = _find(path, f"{COMPILED}*.so")
    if not any(file.name == COMPILED + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        raise ArgumentError(f"peer: {file.name} is not for Python {sys.version_info[0]}.{sys.version_info[1]}")
    if COMPILED in sys.modules:
        return sys.modules[COMPILED]
    try:
        return _load(COMPILED, file)
    except ImportError as error:
        sys.modules.pop(COMPILED, None)
        raise ArgumentError(f"peer: {file.name} does not load beside torch {torch.__version__}: {error}") from error


def load_peer(path: str | Path, device: torch.device) -> Any:
    """The peer's module for a device; ArgumentError when it is not there or does not load."""
    return load_compiled(path) if device.type == "cuda" else load_fallback(path)


def peer_mover(module: Any, setting: Setting, clock: HostClock) -> Mover | None:
    """The peer on a setting; None for a layout that it does not have."""
    assert setting.cache.layout is not None
    row = setting.cache.layout.name
    if not hasattr(module.GPUKVFormat, row):
        return None
    if clock.asynchronous:
        return CompiledPeer(module, setting, clock) if row in _COMPILED else None
    return FallbackPeer(module, setting) if row in _FLAT else None


class PeerMover(Mover):
    """One call a chunk."""

    name, is_peer = PEER, True

    def __init__(self) -> None:
        self._parts: dict[Job, list[tuple[torch.Tensor, int, int]]] = {}

    def parts(self, job: Job) -> list[tuple[torch.Tensor, int, int]]:
        """Each chunk and its tokens `[start, end)`; worked out once, so that it takes none of the peer's time."""
        if job not in self._parts:
            ends = list(itertools.accumulate(chunk.shape[2] for chunk in job.chunks))
            self._parts[job] = list(zip(_plain(job.chunks), [0, *ends[:-1]], ends, strict=True))
        return self._parts[job]


class FallbackPeer(PeerMover):
    """Tensors of flat slots, on the host; done when a call returns."""

    def __init__(self, module: Any, setting: Setting):
        super().__init__()
        assert setting.cache.layout is not None
        flatten = _FLAT[setting.cache.layout.name]
        self._module = module
        self._tensors = [flatten(tensor) for tensor in _plain(setting.tensors)]
        self._format = getattr(module.GPUKVFormat, setting.cache.layout.name)

    def move(self, operation: str, job: Job) -> Transfer:
        direction = _direction(self._module, operation)
        for chunk, start, end in self.parts(job):
            self._module.multi_layer_kv_transfer(
                chunk,
                self._tensors,
                job.slots[start:end],
                job.cache.device,
                job.cache.num_slots,
                direction,
                self._format,
                job.cache.block_size,
            )
        return Transfer()


class CompiledPeer(PeerMover):
    """Addresses, one a layer, on the device; the slots too. A stream for each direction, as in its connectors; chunks in
    device memory on the current one. Its connectors make the host wait after each stored chunk: that is left out."""

    def __init__(self, module: Any, setting: Setting, clock: HostClock):
        super().__init__()
        assert setting.cache.layout is not None
        self._module, self._clock = module, clock
        addresses = [tensor.data_ptr() for tensor in setting.tensors]
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(setting.device)
        self._format = getattr(module.GPUKVFormat, setting.cache.layout.name)
        self._streams = {operation: clock.new_stream() for operation in ("gather", "scatter")}
        self._slots = [slots.to(setting.device) for slots in setting.slots]

    def move(self, operation: str, job: Job) -> Transfer:
        if job.near:
            self._launch(operation, job)
            return EventTransfer(self._clock)
        stream = self._streams[operation]
        self._clock.follow(stream)
        with self._clock.on(stream):
            self._launch(operation, job)
            return EventTransfer(self._clock)

    def _launch(self, operation: str, job: Job) -> None:
        cache, direction, slots = job.cache, _direction(self._module, operation), self._slots[job.which]
        for chunk, start, end in self.parts(job):
            self._module.multi_layer_kv_transfer(
                chunk,
                self._addresses,
                slots[start:end],
                cache.device,
                cache.num_slots,
                direction,
                self._format,
                block_size=cache.block_size,
                head_size=cache.head_size,
                skip_prefix_n_tokens=0,
            )


def _plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """fp8 as the same bytes in uint8, which the peer has."""
    if tensors[0].dtype.itemsize > 1:
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


def _direction(module: Any, operation: str) -> Any:
    return module.TransferDirection.D2H if operation == "gather" else module.TransferDirection.H2D


def _find(path: str | Path, pattern: str) -> Path:
    """The file in the folder `path` or in `lmcache` below it."""
    found = [file for folder in (Path(path), Path(path) / "lmcache") for file in sorted(folder.glob(pattern))]
    if not found:
        raise ArgumentError(f"peer: no {pattern} at {path}; give the folder of an unpacked lmcache wheel")
    return found[0]


def _load(name: str, file: Path) -> Any:
    """The module in a file, known to others under its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
