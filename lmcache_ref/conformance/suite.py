"""Runs cases: builds the memory, calls `gather` or `scatter` on the backend under test, compares every byte of both sides.

What must come out is said in `scenes.py`; what a failure says, in `check.py` and `explain.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import transfer
from ..backends import use_backend
from ..errors import (
    ArgumentError,
    BackendError,
    ChunkError,
    ContractViolation,
    DtypeError,
    DuplicateSlotError,
    SkipPrefixError,
    SlotRangeError,
)
from ..kv_cache import PagedKVCache
from ..layouts import Layout, find_layout
from ..metadata import EngineType
from .cases import ALL, CHUNKS, PATTERNS, SIZES, Case, Sizes
from .check import assert_same_bits, violation
from .engine import GEOMETRIES, WORDS, ChunkMemory, EngineMemory, Geometry, addresses, sentinel
from .explain import Explainer
from .scenes import REQUESTS, Scene, empty, plain

#: the backend that must find duplicates without being asked to
STRICT = "reference"
#: a slot that no cache has
NO_SLOT = 1 << 40
#: dtypes that no cache under test has, by width in bytes: never the same bytes as its dtype
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Result:
    """One case run on one backend. error: the message, None when `ok`."""

    case: Case
    backend: str
    ok: bool
    seconds: float
    error: str | None = None


def run(
    backends: Sequence[str],
    cases: Iterable[Case],
    device: str = "cpu",
    on_result: Callable[[Result], None] | None = None,
) -> Iterator[Result]:
    """Run every case on every backend, one `Result` each, as they come. Whatever a backend raises is its result."""
    cases = list(cases)
    for backend in backends:
        for case in cases:
            start = time.perf_counter()
            error = None
            try:
                run_case(case, backend, device)
            except Exception as raised:  # a guest's failure of any kind is reported, and the others are run
                error = str(raised) if isinstance(raised, ContractViolation) else f"{type(raised).__name__}: {raised}"
            result = Result(case, backend, error is None, time.perf_counter() - start, error)
            if on_result:
                on_result(result)
            yield result


def run_case(
    case: Case,
    backend_name: str,
    device: str = "cpu",
    *,
    sizes: Sizes | None = None,
    hints: Mapping[str, Any] | None = None,
) -> None:
    """Run one case, or raise ContractViolation at the first broken rule.

    case.pattern "all" runs each pattern in turn. The cache lies on `device`; chunks and slots lie there and, for a device
    other than the CPU, in another round on the host (pinned for CUDA). sizes: instead of those the case names. hints:
    how to read the engine's tensors, by default as the row of the case. BackendError when the backend cannot run.
    """
    row = find_layout(case.layout)
    sizes = sizes or SIZES[case.sizes]
    hosts = [False] if torch.device(device).type == "cpu" else [False, True]
    with use_backend(backend_name):
        for pattern in PATTERNS if case.pattern == ALL else [case.pattern]:
            part = replace(case, pattern=pattern)
            for geometry in GEOMETRIES if pattern in REQUESTS else GEOMETRIES[1:]:
                for host in hosts:
                    bench = Bench(part, row, sizes, geometry, backend_name, device, host, hints)
                    _PATTERNS[pattern](bench)


class Bench:
    """One case in one geometry: its logical arrays, and how to move, compare and report.

    case: names a single pattern. host: chunks and slots lie on the host although the cache does not.
    """

    def __init__(
        self,
        case: Case,
        row: Layout,
        sizes: Sizes,
        geometry: Geometry,
        backend: str,
        device: str,
        host: bool,
        hints: Mapping[str, Any] | None = None,
    ):
        self.case, self.row, self.geometry = case, row, geometry
        self.backend, self.device, self.host = backend, device, host
        self.host_slots = host or torch.device(device).type == "cpu"
        self.sizes = sizes.of(row)
        self.num_slots = self.sizes["nb"] * self.sizes["bs"]
        self.width_bytes = case.cache_dtype.itemsize
        self.nobody = sentinel(self.width_bytes)
        self.hints = row_hints(row, self.sizes) if hints is None else hints
        self.draw = random.Random(f"{case.id} {geometry.name}")
        self.chunk = CHUNKS[case.chunk]
        self.engine = EngineMemory(row, self.sizes, geometry)

    def side(self, shape: Sequence[int], seed: int, is_source: bool) -> torch.Tensor:
        """A logical array: addresses where bytes come from, sentinels where they go."""
        if is_source:
            return addresses(tuple(shape), self.width_bytes, seed)
        return torch.full(tuple(shape), self.nobody, dtype=WORDS[self.width_bytes])

    def memory(self, scene: Scene) -> Sides:
        """Both sides of a request, before the move."""
        length = self.sizes
        gathers = self.case.direction == "gather"
        shape = (length["two"], len(scene.layers), len(scene.slots), length["nh"], length["hs"])
        return Sides(
            self,
            scene,
            ChunkMemory(self.chunk, shape, scene.spans, self.geometry),
            self.side(self.engine.shape, 1, gathers),
            self.side(shape, 2, not gathers),
        )

    def slots(self, slots: Sequence[int], narrow: bool = False) -> torch.Tensor:
        """The slot mapping as a tensor: int64; in the odd geometry every second element of one, or int32 if `narrow`."""
        values = torch.tensor(slots, dtype=torch.int64, device="cpu" if self.host else self.device)
        if self.geometry is GEOMETRIES[0]:
            return values
        if narrow:
            return values.to(torch.int32)
        return torch.stack([values, torch.full_like(values, NO_SLOT)], 1).flatten()[::2]

    def violation(self, rule: int, line: str) -> Exception:
        return violation(rule, [line], self.case, self.backend, self.device)


class Sides:
    """The two sides of one request in real memory, and what they must hold."""

    def __init__(self, bench: Bench, scene: Scene, chunks: ChunkMemory, cache: torch.Tensor, request: torch.Tensor):
        """cache, request: what the logical cache and the logical chunks hold before the move."""
        self.bench, self.scene, self.chunks = bench, scene, chunks
        self.cache, self.request = cache, request
        self.cache_before = bench.engine.filled(cache, bench.nobody)
        self.chunks_before = chunks.filled(request, bench.nobody)
        self.cache_memory = self.cache_before.clone().to(bench.device)
        if bench.host:
            self.chunk_memory = _pinned(self.chunks_before.clone(), bench.device)
        else:
            self.chunk_memory = self.chunks_before.clone().to(bench.device)
        tensors = bench.engine.tensors(self.cache_memory.view(bench.case.cache_dtype))
        engine = bench.row.engines[0] if bench.row.engines else EngineType.VLLM
        self.paged = PagedKVCache.from_engine(tensors, engine, bench.hints)
        self.chunk_tensors = chunks.tensors(self.chunk_memory.view(bench.case.chunk_dtype))

    def calls(self) -> list[dict[str, Any]]:
        """The keyword arguments of each `gather` or `scatter` that this request needs."""
        scene, whole = self.scene, self.bench.chunk.whole_model
        layers = [list(scene.layers)] if whole else list(scene.layers)
        return [
            {
                "slots": self.bench.slots(scene.slots, scene.narrow),
                "chunks": chunks,
                "fmt": self.bench.chunk.fmt,
                "layers": of_call,
                "starts": [start for start, _ in scene.spans] if scene.starts else None,
                "skip_prefix_n_tokens": scene.skip,
            }
            for of_call, chunks in zip(layers, self.chunk_tensors, strict=True)
        ]

    def move(self, arguments: Mapping[str, Any]) -> None:
        """One call of the public function, and the end of its transfer."""
        handle = getattr(transfer, self.bench.case.direction)(self.paged, **arguments)
        handle.wait()
        handle.synchronize()
        if not handle.done():
            raise self.bench.violation(9, "the transfer is not done() after synchronize()")

    def compare(self, moved: bool, refused: int | None = None) -> None:
        """Both buffers, whole: one as it was, the other as the scene says if `moved`. Raises ContractViolation.

        refused: the call was wrong input; the rule that is broken when anything was written all the same.
        """
        bench = self.bench
        _finish(bench.device)
        gathers = bench.case.direction == "gather"
        source, axes = (self.cache, EngineMemory.axes) if gathers else (self.request, ChunkMemory.axes)
        cache, chunks = self.cache_before, self.chunks_before
        if moved and gathers:
            chunks = self.chunks.filled(self.scene.gathered(self.cache, self.request), bench.nobody)
        elif moved:
            cache = bench.engine.filled(self.scene.scattered(self.cache, self.request), bench.nobody)
        sides: list[tuple[EngineMemory | ChunkMemory, torch.Tensor, torch.Tensor, bool]] = [
            (self.chunks, self.chunk_memory, chunks, gathers),
            (bench.engine, self.cache_memory, cache, not gathers),
        ]
        for memory, found, expected, written in sides:
            found = found.cpu()
            assert_same_bits(
                found,
                expected,
                axes=["buffer element"],
                case=bench.case,
                backend=bench.backend,
                device=bench.device,
                explain=Explainer(self.scene, bench.sizes["bs"], memory, written, found, source, axes, refused),
            )


def _request(bench: Bench) -> None:
    """A request that must be served."""
    _serve(bench, REQUESTS[bench.case.pattern](bench.draw, bench.sizes["nl"], bench.num_slots))


def _nothing(bench: Bench) -> None:
    """Requests with nothing to move."""
    for scene in empty(bench.draw, bench.sizes["nl"], bench.num_slots):
        _serve(bench, scene)


def _serve(bench: Bench, scene: Scene) -> None:
    sides = bench.memory(scene)
    try:
        for arguments in sides.calls():
            sides.move(arguments)
    except (BackendError, ContractViolation):
        raise
    except Exception as error:
        raise bench.violation(scene.rule, f"a legal request raised {type(error).__name__}: {error}") from error
    sides.compare(moved=True)


def _errors(bench: Bench) -> None:
    """Wrong input of every kind: the right exception, and not one byte written."""
    scene = plain(bench.draw, bench.sizes["nl"], bench.num_slots)
    sides = bench.memory(scene)
    call = sides.calls()[0]
    for rule, error, change in _wrong_inputs(bench, scene, call):
        _must_raise(bench, sides, rule, error, {**call, **change})
        sides.compare(moved=False, refused=3 if rule == 3 else 9)


def _wrong_inputs(
    bench: Bench, scene: Scene, call: Mapping[str, Any]
) -> list[tuple[int, type[Exception], dict[str, Any]]]:
    """`(rule, exception, the arguments that are wrong)`; `call` is a legal one."""
    T, limit = len(scene.slots), bench.num_slots
    *chunks, last = call["chunks"]

    def slots(token: int, value: int) -> dict[str, Any]:
        # slots on a device are looked at there, while others are already being moved: so no other is named
        others = list(scene.slots) if bench.host_slots else [-1] * T
        others[token] = value
        return {"slots": bench.slots(others)}

    wrong: list[tuple[int, type[Exception], dict[str, Any]]] = [
        (3, SlotRangeError, slots(T // 2, limit)),
        (3, SlotRangeError, slots(T - 1, (1 << 32) + 1)),  # 1 where only 32 bits are looked at
        (1, DtypeError, {"chunks": [*chunks, last.view(_INTEGERS[bench.width_bytes])]}),
        (9, ChunkError, {"chunks": [*chunks, last[..., :-1]]}),
        (9, ChunkError, {"chunks": [*chunks, last[0]]}),
        (7, ChunkError, {"starts": [T - 1] * len(scene.spans)}),
        (7, ChunkError, {"starts": [0]}),
        (6, SkipPrefixError, {"skip_prefix_n_tokens": -1}),
        (9, ArgumentError, {"layers": [bench.sizes["nl"]]}),
    ]
    if bench.backend == STRICT and bench.case.direction == "scatter":
        wrong.append((4, DuplicateSlotError, {"slots": bench.slots([scene.slots[-1], *scene.slots[1:]])}))
    return wrong


def _must_raise(bench: Bench, sides: Sides, rule: int, error: type[Exception], arguments: dict[str, Any]) -> None:
    """The call raises `error` before or at the end of its transfer; else ContractViolation."""
    try:
        sides.move(arguments)
    except error:
        return
    except BackendError:
        raise
    except Exception as raised:
        line = f"wrong input must raise {error.__name__}, it raised {type(raised).__name__}: {raised}"
        raise bench.violation(rule, line) from raised
    raise bench.violation(rule, f"wrong input must raise {error.__name__}, nothing was raised")


_PATTERNS: dict[str, Callable[[Bench], None]] = {
    **dict.fromkeys(REQUESTS, _request),
    "empty": _nothing,
    "errors": _errors,
}


def row_hints(row: Layout, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The hints by which a row is read without doubt."""
    return {
        "layout": row.name,
        "num_layers": sizes["nl"],
        "num_kv_heads": sizes["nh"],
        "tokens_per_block": sizes["bs"],
        "head_dim": sizes["hs"],
    }


def _pinned(memory: torch.Tensor, device: str) -> torch.Tensor:
    return memory.pin_memory() if torch.device(device).type == "cuda" else memory


def _finish(device: str) -> None:
    """The host waits for everything on the device, work on streams of the backend included."""
    module = getattr(torch, torch.device(device).type, None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()
