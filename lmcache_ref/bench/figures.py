"""What is measured, figure by figure, on one setting: each mover's bits first, then all movers in turn.

A figure that fails is a reading with an error; the others go on. Which settings there are is `run.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..transfer import Transfer
from .checks import check_layerwise, check_move
from .measure import HostClock, Seconds, interleaved
from .movers import LayerwiseMover, Mover, PlainCopies
from .settings import Job, Setting

COPY, ALONE = PlainCopies.name, "alone"
NAMES = {"gather": "store", "scatter": "load"}
MATMUL_ROUNDS = 5

Move = tuple[str, str]  # operation, and which job of the setting


@dataclass(frozen=True)
class Reading:
    """One number. value: in `unit`. seconds: the median behind it. error: why there is no number, kind and message."""

    figure: str
    runner: str
    unit: str
    value: float | None = None
    seconds: float | None = None
    percent_of_ceiling: float | None = None
    error: str | None = None


class Matmuls:
    """A loop of matmuls `[size, size]`, as a model would run."""

    def __init__(self, clock: HostClock, size: int = 4096, count: int = 100):
        self.count, self.size = count, size
        self._a, self._b, self._out = (
            torch.randn(size, size, device=clock.device).to(torch.bfloat16) for _ in range(3)
        )

    def run(self) -> None:
        for _ in range(self.count):
            torch.matmul(self._a, self._b, out=self._out)


@dataclass
class Scene:
    """A setting and who moves in it. ceilings: GB/s by name, as `measure.ceilings` gives them.

    held_bytes: of device memory that each mover has kept from earlier settings; updated.
    """

    setting: Setting
    movers: Sequence[Mover]
    clock: HostClock
    ceilings: dict[str, float]
    repeats: int
    matmuls: Matmuls | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)
    _faults: dict[tuple[str, Move], Exception | None] = field(default_factory=dict)

    def job(self, name: str) -> Job:
        return getattr(self.setting, name)

    @property
    def backends(self) -> list[Mover]:
        return [mover for mover in self.movers if not mover.is_peer]

    def fault(self, mover: Mover, moves: Iterable[Move]) -> Exception | None:
        """What is wrong with a mover's bits, or how it fails, in the first move that does; each looked at once."""
        for operation, job in moves:
            key = (mover.name, (operation, job))
            if key not in self._faults:
                check = functools.partial(check_move, self.setting, mover, operation, self.job(job))
                self._faults[key] = _outcome(check)
            if self._faults[key] is not None:
                return self._faults[key]
        return None

    def time(
        self,
        movers: Sequence[Mover],
        moves: Sequence[Move],
        run: Callable[[Mover], object],
        once: Callable[[Callable[[], Any]], float],
        repeats: int = 0,
        beside: dict[str, Callable[[], object]] | None = None,
    ) -> Seconds:
        """Median seconds of `run(mover)` for each mover whose bits are right, by `once`; what is wrong with the others."""
        failed: Seconds = {m.name: fault for m in movers if (fault := self.fault(m, moves)) is not None}
        runs: dict[str, Callable[[], object]] = {
            m.name: functools.partial(run, m) for m in movers if m.name not in failed
        }
        return interleaved({**(beside or {}), **runs}, once, repeats or self.repeats) | failed


def _outcome(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except Exception as error:  # a guest's failure is its own result
        return error
    return None


def _scaled(factor: float) -> Callable[[float], float]:
    return lambda seconds: factor * seconds


def _readings(
    figure: str, unit: str, seconds: Seconds, value: Callable[[float], float], ceiling_seconds: float | None = None
) -> Iterator[Reading]:
    """A reading for each runner; percent where there is a ceiling to divide by."""
    for runner, taken in seconds.items():
        if isinstance(taken, Exception):
            yield Reading(figure, runner, unit, error=f"{type(taken).__name__}: {taken}")
        else:
            percent = 100 * ceiling_seconds / taken if ceiling_seconds else None
            yield Reading(figure, runner, unit, value(taken), taken, percent)


# ------------------------------------------------------------------------------------------------ rates


def _rate(
    scene: Scene, figure: str, seconds: Seconds, moved_bytes: int, ceiling_seconds: float | None
) -> Iterator[Reading]:
    return _readings(figure, "GB/s", seconds, lambda taken: moved_bytes / taken / 1e9, ceiling_seconds)


def far(scene: Scene, figure: str, moves: Sequence[Move], ceiling: str) -> Iterator[Reading]:
    """Between host chunks and pages, until all has arrived; several moves run at once."""

    def run(mover: Mover) -> None:
        handles = [mover.move(operation, scene.job(job)) for operation, job in moves]
        for handle in handles:
            handle.synchronize()

    moved = sum(scene.job(job).num_bytes for _, job in moves)
    seconds = scene.time(scene.movers, moves, run, scene.clock.whole)
    yield from _rate(scene, figure, seconds, moved, moved / scene.ceilings[ceiling] / 1e9)


def near(scene: Scene, operation: str) -> Iterator[Reading]:
    """Between chunks and pages of the same memory, one call; bytes count twice, read and written.

    On a host the ceiling is `copy_` of the same bytes, timed in turn with the movers.
    """
    job, clock = scene.job("near"), scene.clock
    once = functools.partial(clock.on_device, calls=len(job.chunks))
    beside: dict[str, Callable[[], object]] = {}
    if not clock.asynchronous:
        source = torch.zeros(job.num_bytes, dtype=torch.uint8, device=clock.device)
        beside[COPY] = functools.partial(torch.zeros_like(source).copy_, source)
    moved = 2 * job.num_bytes
    moves = [(operation, "near")]
    seconds = scene.time(scene.movers, moves, lambda m: m.move(operation, job).wait(), once, beside=beside)
    copied = seconds.get(COPY)
    top = copied if isinstance(copied, float) else moved / scene.ceilings["device"] / 1e9
    yield from _rate(scene, operation, seconds, moved, top)


# ------------------------------------------------------------------------------------------------ times


def host(scene: Scene) -> Iterator[Reading]:
    """Microseconds of the host a chunk: planning and the backend's call together, and each alone.

    On a CPU, where a call moves the bytes itself, the chunks are of one token each.
    """
    light = not scene.clock.asynchronous
    jobs = {operation: "light" if light else NAMES[operation] for operation in NAMES}
    once = scene.clock.until_return

    def per_chunk(figure: str, seconds: Seconds, job: Job) -> Iterator[Reading]:
        return _readings(figure, "us/chunk", seconds, _scaled(1e6 / len(job.chunks)))

    for operation, name in jobs.items():
        job = scene.job(name)
        moves = [(operation, "near" if light else name)]

        def both(mover: Mover, operation: str = operation, job: Job = job) -> Transfer:
            return mover.plan_and_move(operation, job)

        def call(mover: Mover, operation: str = operation, job: Job = job) -> Transfer:
            return mover.move(operation, job)

        yield from per_chunk(f"host {NAMES[operation]}", scene.time(scene.movers, moves, both, once), job)
        yield from per_chunk(f"host {NAMES[operation]} call", scene.time(scene.backends, moves, call, once), job)
    job = scene.job(jobs["gather"])
    plan = scene.time(scene.backends, [], lambda _: job.planned(), scene.clock.whole)
    yield from per_chunk("host plan", plan, job)


def one_chunk(scene: Scene) -> Iterator[Reading]:
    """One chunk from call to arrival: microseconds over what a plain copy of as many bytes takes, timed in turn and waited
    for in the same way."""
    clock = scene.clock
    for operation, name in NAMES.items():
        job = scene.job(f"{name}_one")

        def run(mover: Mover, operation: str = operation, job: Job = job) -> None:
            mover.move(operation, job).synchronize()

        copy = functools.partial(run, PlainCopies(clock, job))
        moves, repeats = [(operation, f"{name}_one")], 4 * scene.repeats
        seconds = scene.time(scene.movers, moves, run, clock.whole, repeats, {COPY: copy})
        copied = seconds.pop(COPY)
        if isinstance(copied, Exception):
            raise copied
        for reading in _readings(f"one chunk {name}", "us over copy", seconds, float):
            taken = reading.seconds
            value = None if taken is None else 1e6 * (taken - copied)
            yield replace(reading, value=value)


def layerwise(scene: Scene) -> Iterator[Reading]:
    """All layers through the layerwise connector: milliseconds, how many times the whole-model call, host time a layer."""
    for operation, ceiling in (("gather", "d2h"), ("scatter", "h2d")):
        yield from _layerwise(scene, operation, ceiling)


def _layerwise(scene: Scene, operation: str, ceiling: str) -> Iterator[Reading]:
    setting, clock, figure = scene.setting, scene.clock, f"layerwise {NAMES[operation]}"
    job = setting.whole(operation)
    layered: dict[Mover, LayerwiseMover] = {}
    failed: Seconds = {}
    for mover in scene.backends:
        by_layer = LayerwiseMover(setting, mover.name)
        fault = _outcome(functools.partial(check_layerwise, setting, by_layer, operation, mover.name))
        if fault is None:
            layered[mover] = by_layer
        else:
            failed[mover.name] = fault
    runs: dict[str, Callable[[], object]] = {}
    for mover, by_layer in layered.items():
        runs[mover.name] = functools.partial(by_layer.move, operation)
        runs[f"{mover.name} whole"] = functools.partial(_whole, mover, operation, job)
    taken = interleaved(runs, clock.whole, scene.repeats)
    seconds: Seconds = {mover.name: taken[mover.name] for mover in layered} | failed
    top = job.num_bytes / scene.ceilings[ceiling] / 1e9 if clock.asynchronous else None
    yield from _readings(figure, "ms", seconds, _scaled(1e3), top)
    for mover in layered:
        whole = taken[f"{mover.name} whole"]
        if isinstance(whole, Exception):
            yield from _readings(f"{figure} / whole", "x", {mover.name: whole}, float)
        else:
            yield from _readings(f"{figure} / whole", "x", {mover.name: taken[mover.name]}, _scaled(1 / whole))
    if clock.asynchronous:
        host_runs = {m.name: functools.partial(by_layer.move, operation, sync=False) for m, by_layer in layered.items()}
        on_host = interleaved(host_runs, functools.partial(_own_time, clock), scene.repeats)
        yield from _readings(f"{figure} host", "us/layer", on_host, _scaled(1e6 / setting.case.shape.NL))
    clock.synchronize()
    for by_layer in layered.values():
        by_layer.release()


def _whole(mover: Mover, operation: str, job: Job) -> None:
    mover.move(operation, job).synchronize()


def _own_time(clock: HostClock, run: Callable[[], object]) -> float:
    """What a run says that it took, begun on an idle device."""
    clock.synchronize()
    taken = run()
    clock.synchronize()
    assert isinstance(taken, float)
    return taken


def matmul(scene: Scene) -> Iterator[Reading]:
    """How many times longer a loop of matmuls takes beside transfers that never pause; in turn with it alone, and with it
    beside plain copies of as many bytes."""
    clock, matmuls = scene.clock, scene.matmuls
    if matmuls is None:
        return
    alone: dict[str, Callable[[], object]] = {ALONE: lambda: clock.on_device(matmuls.run)}
    for operation, name in NAMES.items():
        job = scene.job(name)

        def run(mover: Mover, operation: str = operation, job: Job = job) -> float:
            return _beside(clock, matmuls, mover, operation, job)

        copies = PlainCopies(clock, job)
        beside = alone | {copies.name: functools.partial(run, copies)}
        once = functools.partial(_own_time, clock)
        seconds = scene.time(scene.movers, [(operation, name)], run, once, MATMUL_ROUNDS, beside)
        undisturbed = seconds.pop(ALONE)
        if isinstance(undisturbed, Exception):
            raise undisturbed
        yield Reading("matmul alone", ALONE, "ms", 1e3 * undisturbed, undisturbed)
        yield from _readings(f"matmul beside {name}", "x", seconds, _scaled(1 / undisturbed))


def _beside(clock: HostClock, matmuls: Matmuls, mover: Mover, operation: str, job: Job) -> float:
    """Seconds of the matmuls on the current stream, while transfers run from another one, two of them under way."""
    side = clock.new_stream()
    with clock.on(side):
        handles = [mover.move(operation, job) for _ in range(2)]
    begin = clock.record(timing=True)
    matmuls.run()
    end = clock.record(timing=True)
    while not end.query():
        if handles[0].done():
            handles.pop(0)
            with clock.on(side):
                handles.append(mover.move(operation, job))
    for handle in handles:
        handle.synchronize()
    clock.synchronize()
    return begin.elapsed_time(end) / 1e3


def staging(scene: Scene) -> Iterator[Reading]:
    """Bytes that torch allocates for a mover beside cache and chunks: during a store and a load, and kept since earlier."""
    moves = [("gather", "near"), ("scatter", "near")]
    if scene.clock.asynchronous:
        moves = [("gather", "store"), ("scatter", "load")]

    def run(mover: Mover) -> None:
        for operation, job in moves:
            mover.move(operation, scene.job(job)).synchronize()

    for _, job in moves:
        scene.job(job)  # made before anything is counted
    for mover in scene.movers:
        held = scene.held_bytes.get(mover.name, 0)
        try:
            peak, kept = scene.clock.extra_bytes(functools.partial(run, mover))
        except Exception as error:  # a guest's failure is its own result
            yield from _readings("staging", "MiB", {mover.name: error}, float)
            continue
        scene.held_bytes[mover.name] = max(0, held + kept)  # what was there before the bench may be given back in it
        yield Reading("staging", mover.name, "MiB", (held + peak) / 2**20)


#: by name: readings that are measured together. Staging is first, as it sees a backend take its memory.
GROUPS: dict[str, Callable[[Scene], Iterator[Reading]]] = {
    "staging": staging,
    "store": lambda scene: far(scene, "store", [("gather", "store")], "d2h"),
    "load": lambda scene: far(scene, "load", [("scatter", "load")], "h2d"),
    "both": lambda scene: far(scene, "both", [("gather", "store"), ("scatter", "load")], "both"),
    "gather": lambda scene: near(scene, "gather"),
    "scatter": lambda scene: near(scene, "scatter"),
    "layerwise": layerwise,
    "matmul": matmul,
    "host": host,
    "chunk": one_chunk,
}
ON_HOST = ("staging", "gather", "scatter", "layerwise", "host")
