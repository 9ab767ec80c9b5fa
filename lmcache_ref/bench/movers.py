"""Who moves: a backend, whole models at once or layer by layer through a connector. The peer is in `peers.py`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from ..backends import Operations, get_backend, use_backend
from ..connectors import VLLMPagedMemLayerwiseGPUConnector
from ..transfer import Transfer
from .measure import HostClock
from .settings import Job, Setting, and_more
from .shapes import layout_hints


class Mover:
    """One that gathers and scatters the chunks of a job. name: as a report shows it."""

    name: str
    is_peer = False

    def move(self, operation: str, job: Job) -> Transfer:
        """Start "gather" or "scatter" of what is planned already, on the current stream."""
        raise AssertionError("every mover moves")

    def plan_and_move(self, operation: str, job: Job) -> Transfer:
        """All that one call of a connector costs the host."""
        return self.move(operation, job)


class BackendMover(Mover):
    """A backend of the registry."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.operations: Operations = get_backend(name, device)

    def move(self, operation: str, job: Job) -> Transfer:
        return self._call(operation, next(job.turns))

    def plan_and_move(self, operation: str, job: Job) -> Transfer:
        return self._call(operation, job.planned())

    def _call(self, operation: str, plan: Any) -> Transfer:
        return self.operations.gather(plan) if operation == "gather" else self.operations.scatter(plan)


class PlainCopies(Mover):
    """As many bytes by torch's own copies, chunk after chunk, from or to one buffer on the device."""

    name = "copy_"

    def __init__(self, clock: HostClock, job: Job):
        self._clock = clock
        largest = max(job.chunks, key=torch.Tensor.numel)
        self._buffer = torch.zeros(largest.numel(), dtype=largest.dtype, device=clock.device)

    def move(self, operation: str, job: Job) -> Transfer:
        for chunk in job.chunks:
            flat = chunk.view(-1)
            near = self._buffer[: flat.numel()]
            target, source = (flat, near) if operation == "gather" else (near, flat)
            target.copy_(source, non_blocking=True)
        return EventTransfer(self._clock)


class EventTransfer(Transfer):
    """Over when all that the current stream was given until now is done."""

    def __init__(self, clock: HostClock):
        self._clock, self._event = clock, clock.record()

    def wait(self) -> None:
        self._clock.wait(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class LayerwiseMover:
    """A backend through `VLLMPagedMemLayerwiseGPUConnector`, between a setting's cache and its objects of one layer each."""

    def __init__(self, setting: Setting, backend: str):
        case = setting.case
        shape = case.shape
        self._setting, self._backend = setting, backend
        self._turns = itertools.cycle([and_more(slots, count) for slots in setting.slots] for count in (0, 5))
        self._connector = VLLMPagedMemLayerwiseGPUConnector(
            shape.NH * shape.HS,
            shape.NL,
            dtype=shape.dtype,
            device=setting.device,
            use_mla=shape.kv == 1,
            layout_hints=layout_hints(shape, case.order, case.block_size),
        )
        self._ends = [sum(case.chunk_sizes[: i + 1]) for i in range(len(case.chunk_sizes))]
        self._starts = [0, *self._ends[:-1]]

    def move(self, operation: str, sync: bool = True) -> float:
        """All layers, from first step to last. Returns the seconds until the last layer was under way, which with
        `sync=False` is the host's time alone."""
        which = self._setting.whole(operation).which
        slots = next(self._turns)[which]
        options = {"kvcaches": self._setting.tensors, "slot_mapping": slots, "sync": sync}
        with use_backend(self._backend):
            return self._store(options) if operation == "gather" else self._load(options)

    def release(self) -> None:
        """Let go of the objects; the device must have finished."""
        self._connector.reap()

    def _store(self, options: dict[str, Any]) -> float:
        layers = self._setting.layers
        started = time.perf_counter()
        steps = self._connector.batched_from_gpu(layers, self._starts, self._ends, **options)
        for _ in layers:
            next(steps)
        taken = time.perf_counter() - started
        next(steps)
        steps.close()
        return taken

    def _load(self, options: dict[str, Any]) -> float:
        layers = self._setting.layers
        started = time.perf_counter()
        steps = self._connector.batched_to_gpu(self._starts, self._ends, **options)
        next(steps)
        for objects in layers:
            steps.send(objects)
        taken = time.perf_counter() - started
        next(steps)
        steps.close()
        return taken
