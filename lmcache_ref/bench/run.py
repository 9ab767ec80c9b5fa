"""The matrix: every shape, memory order, block size and number of tokens, each with every mover, as rows of one report.

What is measured in one cell is `figures.py`; how a report is shown `report.py` and `plot.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..backends import AUTO, explain_backends, get_backend, requested_backend
from ..errors import ArgumentError, BackendError
from ..memory import HostMemoryAllocator, MemoryAllocator, PinMemoryAllocator
from .figures import ALONE, COPY, GROUPS, ON_HOST, Matmuls, Reading, Scene
from .measure import ceilings, clock_of
from .movers import BackendMover, Mover
from .peers import PEER, load_peer, peer_mover
from .settings import Case, Setting
from .shapes import CHUNK_TOKENS, LAYOUTS_BY_ORDER, NO_ORDER, SHAPES

ENVIRONMENT_PREFIX = "LMCACHE_"
HOST_CEILING_BYTES = 256 << 20
HOST_MATMULS = (64, 4)  # size and count: few, since a CPU has better to do
NEED_CEILINGS = frozenset(("store", "load", "both", "chunk"))


@dataclass(frozen=True)
class Options:
    """What to measure; None is the default for the device.

    backends: names; by default what would run on a GPU, all that can run on a CPU. peer: folder of an unpacked lmcache
    wheel. figures: names of `figures.GROUPS`. slots_on: "cpu" or "device" (or its name), where the slot mapping lives.
    """

    device: str = "cpu"
    backends: Sequence[str] | None = None
    shapes: Sequence[str] | None = None
    orders: Sequence[str] | None = None
    block_sizes: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    figures: Sequence[str] | None = None
    repeats: int | None = None
    peer: str | Path | None = None
    slots_on: str = "cpu"

    def shortened(self, quick: bool, no_matmul: bool) -> Options:
        """With fewer tokens and repeats where none were given, or without the matmuls."""
        options = self
        if quick:
            options = dataclasses.replace(options, tokens=self.tokens or (1024,), repeats=self.repeats or 3)
        if no_matmul:
            figures = [name for name in options.completed().figures or () if name != "matmul"]
            options = dataclasses.replace(options, figures=figures)
        return options

    def completed(self) -> Options:
        """With all defaults filled in; ArgumentError for a name or number that cannot be."""
        on_host = torch.device(self.device).type == "cpu"
        full = dataclasses.replace(
            self,
            backends=_backends(self.backends, self.device),
            shapes=self.shapes or tuple(SHAPES),
            orders=self.orders or tuple(LAYOUTS_BY_ORDER),
            block_sizes=self.block_sizes or (16,),
            tokens=self.tokens or ((4096,) if on_host else (8192,)),
            figures=self.figures or (ON_HOST if on_host else tuple(GROUPS)),
            repeats=(5 if on_host else 7) if self.repeats is None else self.repeats,
        )
        _check_names("shapes", full.shapes, SHAPES)
        _check_names("orders", full.orders, LAYOUTS_BY_ORDER)
        _check_names("figures", full.figures, GROUPS)
        _check_names("slots_on", [self.slots_on], ("cpu", "device", self.device))
        repeats = () if self.repeats is None else (self.repeats,)
        for name, numbers in (("block_sizes", full.block_sizes), ("tokens", full.tokens), ("repeats", repeats)):
            if any(number < 1 for number in numbers or ()):
                raise ArgumentError(f"{name}: {numbers}; allowed: numbers from 1 on")
        return full


@dataclass(frozen=True)
class Row:
    """One figure of one runner in one cell. ratio_to_peer: how many times the peer's speed. See `figures.Reading`."""

    shape: str
    order: str
    block_size: int
    tokens: int
    figure: str
    runner: str
    unit: str
    value: float | None = None
    seconds: float | None = None
    percent_of_ceiling: float | None = None
    ratio_to_peer: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """environment: what ran where. ceilings: GB/s of plain copies in this process; on a CPU the runner `copy_` is the one."""

    environment: dict[str, Any]
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every figure of every backend could be measured; the peer's faults are its own."""
        return not any(row.error for row in self.rows if row.runner != PEER)


def run_bench(options: Options, on_progress: Callable[[str], None] = lambda _: None) -> Report:
    """Measure. What fails, wrong bits included, is a row with an error, and the rest goes on.

    on_progress: called with the name of each cell. Raises BackendError or ArgumentError for what cannot be begun.
    """
    options = options.completed()
    device, cases = torch.device(options.device), list(_cases(options))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        peer = load_peer(options.peer, device) if options.peer else None
        host = _host_memory(device, cases)
        try:
            bench = _Bench(options, device, host, peer)
            report = Report(_environment(options, bench), bench.ceilings)
            for case in cases:
                on_progress(str(case))
                report.rows.extend(_rows(case, bench.readings(case)))
                bench.clock.release()
            return report
        finally:
            host.close()


class _Bench:
    """What all cells share."""

    def __init__(self, options: Options, device: torch.device, host: MemoryAllocator, peer: Any):
        self.device, self.host, self.peer = device, host, peer
        self.figures, self.repeats, self.slots_on = options.figures or (), options.repeats or 1, options.slots_on
        self.clock = clock_of(device)
        self.movers: list[Mover] = [BackendMover(name, device) for name in options.backends or ()]
        needed = self.clock.asynchronous or NEED_CEILINGS & set(self.figures)
        self.ceilings = ceilings(self.clock, host.require_pool(), self.repeats) if needed else {}
        size = HOST_MATMULS if device.type == "cpu" else ()
        self.matmuls = Matmuls(self.clock, *size) if "matmul" in self.figures else None
        self.held_bytes: dict[str, int] = {}

    def readings(self, case: Case) -> list[Reading]:
        """All figures of a cell; when it cannot be set up, an error for each backend."""
        try:
            setting = Setting(case, self.device, self.host, self._slots_device(), far=self.clock.asynchronous)
        except Exception as error:  # no memory, say; the next cell may be smaller
            return [_failed("setting", mover, error) for mover in self.movers]
        try:
            return list(self._measure(setting))
        finally:
            self.clock.synchronize()
            setting.close()

    def _measure(self, setting: Setting) -> Iterator[Reading]:
        movers = list(self.movers)
        try:
            peer = peer_mover(self.peer, setting, self.clock) if self.peer else None
            movers += [peer] if peer else []
        except Exception as error:  # the peer's own fault
            yield Reading("setting", PEER, "", error=f"{type(error).__name__}: {error}")
        scene = Scene(setting, movers, self.clock, self.ceilings, self.repeats, self.matmuls, self.held_bytes)
        for name, measure in GROUPS.items():
            if name not in self.figures:
                continue
            try:
                yield from measure(scene)
            except Exception as error:  # the other figures go on
                yield from (_failed(name, mover, error) for mover in self.movers)

    def _slots_device(self) -> str:
        return "cpu" if self.slots_on == "cpu" else str(self.device)


def _failed(figure: str, mover: Mover, error: Exception) -> Reading:
    return Reading(figure, mover.name, "", error=f"{type(error).__name__}: {error}")


def _cases(options: Options) -> Iterator[Case]:
    for name in options.shapes or ():
        shape = SHAPES[name]
        for order in [NO_ORDER] if shape.kv == 1 else options.orders or ():
            for block_size in options.block_sizes or ():
                for tokens in options.tokens or ():
                    yield Case(shape, order, block_size, tokens)


def _rows(case: Case, readings: Sequence[Reading]) -> list[Row]:
    """With the cell's name and, where the peer has the same figure, how many times its speed."""
    peer = {reading.figure: reading.seconds for reading in readings if reading.runner == PEER and reading.seconds}
    rows = []
    for reading in readings:
        seconds, of_peer = reading.seconds, peer.get(reading.figure)
        ratio = of_peer / seconds if of_peer and seconds and reading.runner not in (PEER, COPY, ALONE) else None
        cell = (case.shape.name, case.order, case.block_size, case.tokens)
        rows.append(Row(*cell, ratio_to_peer=ratio, **dataclasses.asdict(reading)))
    return rows


def _host_memory(device: torch.device, cases: Sequence[Case]) -> MemoryAllocator:
    """One pool for all cases, pinned beside a GPU; on a CPU pages that are not used are not taken."""
    least = HOST_CEILING_BYTES if device.type == "cpu" else 2 << 30
    size = max([least, *(case.host_bytes for case in cases)])
    return HostMemoryAllocator(size) if device.type == "cpu" else PinMemoryAllocator(size)


def _backends(names: Sequence[str] | None, device: str) -> list[str]:
    """The names, if each can serve the device. By default the requested one; where that is `auto`, on a CPU all that can
    run, elsewhere, as the reference takes minutes, the one that a call would take."""
    reasons = {backend.name: why for backend, why in explain_backends(device)}
    if not names and requested_backend() == AUTO and torch.device(device).type == "cpu":
        return [name for name, why in reasons.items() if why is None]
    for name in names or ():
        get_backend(name, device)  # raises for one that is unknown or cannot run
        if reasons[name]:
            raise BackendError(f"backend {name!r} {reasons[name]}")
    return list(dict.fromkeys(names or [get_backend(device=device).name]))


def _check_names(option: str, given: Sequence[str] | None, known: Any) -> None:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise ArgumentError(f"{option}: {', '.join(unknown)} unknown; known: {', '.join(known)}")


def _environment(options: Options, bench: _Bench) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": bench.clock.describe(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backends": [mover.name for mover in bench.movers],
        "requested_backend": requested_backend(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(ENVIRONMENT_PREFIX)},
        "slots_on": "cpu" if options.slots_on == "cpu" else torch.device(options.device).type,
        "chunk_tokens": CHUNK_TOKENS,
        "repeats": options.repeats,
        "peer": _peer_version(options.peer) if options.peer else None,
    }
    if bench.matmuls is not None:
        facts["matmuls"] = f"{bench.matmuls.count} bf16 {bench.matmuls.size}^3"
    return facts


def _peer_version(folder: str | Path) -> str:
    """`lmcache 0.4.5`, from the wheel's own metadata where that lies beside it."""
    for place in (Path(folder), Path(folder).parent):
        for found in sorted(place.glob("lmcache-*.dist-info")):
            return found.name.removesuffix(".dist-info").replace("-", " ")
    return "lmcache of unknown version"
