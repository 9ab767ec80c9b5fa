"""A device with the verbs of `lmcache_fast.cuda.device` on the CPU: late, and in any order that streams and events allow.

A seed picks the order. Every operation knows which bytes it reads and writes and what must happen before it; two that
touch the same byte, one of them writing, without an order between them are a `Race`, whichever ran first. A wait or a
record can be left out, to show that it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from native_verbs import SpeaksToCompiledSteps
from simulated_kernels import WORD, run_kernel
from spans import Spans, merged, overlap, span_of

from lmcache_fast.cuda.device import Arguments, Memory
from lmcache_fast.descriptors import Homes, Rotation
from lmcache_ref.rope import RotarySpec

VERBS = ("wait", "record")


class Race(AssertionError):
    """Two operations touch the same bytes without an order, or one leaves the memory that there is."""


@dataclass
class Event:
    """mask: the operations that must have happened. number: of the record that made it."""

    mask: int
    number: int
    handle: int


@dataclass
class Operation:
    """before: the operations that happen before it, a bit each. spans: what it touches, where that is known beforehand."""

    number: int
    label: str
    before: int
    run: Callable[[], tuple[Spans, Spans]]
    spans: tuple[Spans, Spans] | None = None


@dataclass
class Touched:
    number: int
    label: str
    reads: Spans
    writes: Spans


@dataclass
class Use:
    """One call of a verb. site: where in the pipeline. idle: leaving it out changes nothing, as another order implies it."""

    verb: str
    site: str
    idle: bool


@dataclass
class SimulatedDevice(SpeaksToCompiledSteps):
    """seed: of the order. device_tensors: addresses of tensors that the host must not look at. left_out: (verb, number)."""

    seed: int = 0
    left_out: tuple[str, int] | None = None
    pageable: Spans = field(default_factory=list)
    launches_left: int | None = None  # then launching fails; None: it never does
    capturing: bool = False  # the current stream's work goes into a graph
    held: bool = False  # nothing happens but what the host waits for
    library: ctypes.CDLL | None = None  # of the compiled steps, for engines on this device; None: in Python

    index = 0
    num_multiprocessors = 2

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.device_tensors: set[int] = set()
        self.regions: list[tuple[int, int, Any]] = []
        self.queues: dict[int, deque[Operation]] = {0: deque()}
        self.masks: dict[int, int] = {0: 0}
        self.host = 0  # what the host knows to have happened
        self.executed = 0
        self.count = 0
        self.history: list[Touched] = []
        self.uses: dict[str, list[Use]] = {verb: [] for verb in VERBS}
        self.stream = 0  # the current one
        self.guarded = 0  # depth; 0: another device may be current
        self.launches: list[str] = []
        self.tables: dict[RotarySpec, torch.Tensor] = {}
        self.events: list[Event] = []

    # ------------------------------------------------------------------------------------------ the verbs

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        self.guarded += 1
        try:
            yield
        finally:
            self.guarded -= 1

    def is_capturing(self) -> bool:
        return self.capturing

    def current(self) -> int:
        return self.stream

    def new_stream(self, urgent: bool = False) -> int:
        stream = len(self.queues)
        self.queues[stream], self.masks[stream] = deque(), 0
        return stream

    def new_event(self) -> Event:
        self.events.append(Event(0, -1, len(self.events)))
        return self.events[-1]

    def record(self, stream: int) -> Event:
        self._require_guard(stream)
        event = self.new_event()
        self.record_again(event, stream, depth=3)
        return event

    def record_again(self, event: Event, stream: int, depth: int = 2) -> None:
        event.number = number = self._use("record", True, depth)
        self._progress()
        event.mask = 0 if self.left_out == ("record", number) else self.masks[stream]

    def wait(self, stream: int, event: Event) -> None:
        self._require_guard(stream)
        number = self._use("wait", idle=not event.mask & ~(self.masks[stream] | self.host))
        self.uses["record"][event.number].idle &= self.uses["wait"][number].idle
        if self.left_out != ("wait", number):
            self.masks[stream] |= event.mask
        self._progress()

    def is_done(self, event: Event) -> bool:
        self._progress()
        done = not event.mask & ~self.executed
        if done:
            self._learn(event)
        return done

    def synchronize(self, event: Event) -> None:
        while event.mask & ~self.executed:
            self._step()
        self._learn(event)

    def copy(self, target: int, source: int, num_bytes: int, stream: int, seams: Sequence[int] = ()) -> None:
        assert all(0 < seam < num_bytes for seam in seams)
        self.copy_rows(target, num_bytes, source, num_bytes, num_bytes, 1, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        assert width <= target_pitch and width <= source_pitch
        reads = [(source + i * source_pitch, source + i * source_pitch + width) for i in range(height)]
        writes = [(target + i * target_pitch, target + i * target_pitch + width) for i in range(height)]

        def run() -> tuple[Spans, Spans]:
            for (begin, end), (to, _) in zip(reads, writes, strict=True):
                self.require(begin, end)
                self.require(to, to + width)
                ctypes.memmove(to, begin, end - begin)
            return reads, writes

        self._enqueue(stream, "copy", run, (merged(reads), merged(writes)))

    def launch(self, kernel: str, stream: int, arguments: Arguments, num_blocks: int) -> None:
        assert num_blocks > 0
        if self.launches_left is not None:
            self.launches_left -= 1
            if self.launches_left < 0:
                raise RuntimeError("this launch fails")
        batch, *more = (type(structure).from_buffer_copy(structure) for structure in arguments.structures)
        name = kernel.split("_")[0]
        assert list(map(type, more)) == ([Rotation] if "rotated" in kernel else [Homes] if name == "keep" else [])
        self.launches.append(kernel)
        self._enqueue(stream, kernel, lambda: run_kernel(self, kernel, batch, *more))

    def device_memory(self, num_bytes: int) -> Memory:
        return self.register(torch.full((num_bytes + 512,), 0xA5, dtype=torch.uint8), 512)

    def bring(self, address: int, words: array[int]) -> None:
        self.write(address, words.buffer_info()[0], len(words) * WORD)

    def constant(self, words: array[int]) -> Memory:
        memory = self.device_memory(len(words) * WORD)
        self.bring(memory.address, words)
        return memory

    def table(self, rope: RotarySpec) -> torch.Tensor:
        if rope not in self.tables:
            self.tables[rope] = rope.cos_sin_cache.clone()
            self.register(self.tables[rope])
        return self.tables[rope]

    def pinned_memory(self, num_bytes: int) -> Memory:
        return self.device_memory(num_bytes)

    def write(self, address: int, source: int, num_bytes: int) -> None:
        self._host("host writes", [], [(address, address + num_bytes)])
        ctypes.memmove(address, source, num_bytes)

    def same(self, address: int, other: int, num_bytes: int) -> bool:
        self._host("host compares", [(address, address + num_bytes)], [])
        return ctypes.string_at(address, num_bytes) == ctypes.string_at(other, num_bytes)

    def read_word(self, address: int) -> int:
        self._host("host reads", [(address, address + WORD)], [])
        return ctypes.c_int64.from_address(address).value

    fetch = read_word

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.device_tensors

    def mapped(self, address: int) -> int | None:
        return None if any(begin <= address < end for begin, end in self.pageable) else address

    def _require_guard(self, stream: int) -> None:
        """Every device has a stream 0, and calls it so; which one is meant says the device that is current."""
        if stream == 0 and not self.guarded:
            raise Race("stream 0 of whichever device is current")

    # ------------------------------------------------------------------------------------------ what tests do

    def register(self, tensor: torch.Tensor, align: int = 1) -> Memory:
        """Make a tensor's memory reachable; an aligned part of it."""
        begin = -(-tensor.data_ptr() // align) * align
        num_bytes = tensor.numel() * tensor.element_size() - (align if align > 1 else 0)
        self.regions.append((begin, begin + num_bytes, tensor))
        return Memory(begin, num_bytes, tensor)

    def work(self, action: Callable[[], Any], reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """An operation of the current stream on whole tensors."""
        spans = [span_of(t) for t in reads], [span_of(t) for t in writes]

        def run() -> tuple[Spans, Spans]:
            action()
            return spans

        self._enqueue(self.stream, "work of the current stream", run, spans)

    def host_writes(self, tensor: torch.Tensor, value: int) -> None:
        """The host overwrites a tensor, as the next owner of its memory would."""
        self._host("host writes a tensor", [], [span_of(tensor)])
        tensor.view(torch.uint8).fill_(value)

    def host_reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of what the host sees now."""
        self._host("host reads a tensor", [span_of(tensor)], [])
        return tensor.clone()

    def finish(self) -> None:
        """Everything happens."""
        while any(self.queues.values()):
            self._step()
        self.host = self.executed

    # ------------------------------------------------------------------------------------------ order

    def _use(self, verb: str, idle: bool, depth: int = 2) -> int:
        frame = sys._getframe(depth)
        site = f"{verb} in {frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else frame.f_code.co_name}"
        self.uses[verb].append(Use(verb, f"{site}, line {frame.f_lineno}", idle))
        return len(self.uses[verb]) - 1

    def _learn(self, event: Event) -> None:
        """The host knows now that an event has happened."""
        if event.mask & ~self.host:
            self.uses["record"][event.number].idle = False
        self.host |= event.mask

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def _enqueue(
        self, stream: int, label: str, run: Callable[[], Any], spans: tuple[Spans, Spans] | None = None
    ) -> None:
        number = self._next()
        before = self.masks[stream] | self.host
        self.queues[stream].append(Operation(number, f"{label} [{number}, stream {stream}]", before, run, spans))
        self.masks[stream] = before | 1 << number
        self._progress()

    def _host(self, label: str, reads: Spans, writes: Spans) -> None:
        number = self._next()
        self._check(Touched(number, f"{label} [{number}]", reads, writes), self.host)
        self.executed |= 1 << number
        self.host |= 1 << number

    def _progress(self) -> None:
        if self.held:
            return
        for _ in range(self.draw.choice((0, 0, 1, 2, 5))):
            if any(self.queues.values()):
                self._step()

    def _step(self) -> None:
        """One operation that may run now."""
        ready = [queue for queue in self.queues.values() if queue and not queue[0].before & ~self.executed]
        operation = self.draw.choice(ready).popleft()
        if operation.spans:
            self._check(Touched(operation.number, operation.label, *operation.spans), operation.before)
            operation.run()
        else:
            self._running = operation
            reads, writes = operation.run()
            self._check(Touched(operation.number, operation.label, merged(reads), merged(writes)), operation.before)
        self.executed |= 1 << operation.number

    def _check(self, touched: Touched, before: int, keep: bool = True) -> None:
        """Against everything that ran, and what is still to run and known, without an order to this."""
        others = [t for t in self.history if not before >> t.number & 1 and t.number != touched.number]
        for queue in self.queues.values():
            for other in queue:
                if other.spans and not other.before >> touched.number & 1:
                    others.append(Touched(other.number, other.label, *other.spans))
        for other in others:
            for a, b in ((touched.writes, other.writes), (touched.writes, other.reads), (touched.reads, other.writes)):
                if overlap(a, b):
                    raise Race(f"no order between {touched.label} and {other.label}")
        if keep:
            self.history.append(touched)

    # ------------------------------------------------------------------------------------------ what kernels ask

    def require(self, begin: int, end: int) -> None:
        """Race unless these bytes are somebody's memory."""
        if not any(low <= begin and end <= high for low, high, _ in self.regions):
            raise Race(f"[{begin:#x}, {end:#x}) is nobody's memory")

    def words(self, address: int, count: int) -> list[int]:
        """What stands in memory now."""
        self.require(address, address + count * WORD)
        return list((ctypes.c_int64 * count).from_address(address))

    def may_read(self, spans: Spans) -> None:
        """Race unless the operation that runs may read these bytes now."""
        running = self._running
        self._check(Touched(running.number, running.label, spans, []), running.before, keep=False)
