"""A backend whose transfers happen as late as its contract allows: what a busy device does, without one.

`gather` and `scatter` only note the plan. The bytes move when the host waits for the transfer, or, after `wait`, when an
operation of the current stream next touches device memory; every torch operation on a tensor that is not in the host pools
counts as one. A transfer that nobody waited for never happens. Two transfers that touch the same bytes, one of them
writing, without a wait between them are an error: on a device their order is chance. Tests of it: `test_deferred.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmcache_ref.backends import register_backend, unregister_backend, use_backend
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rope import rerotate
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter

MOVES = {"gather": reference_gather, "scatter": reference_scatter}


class LateTransfer(Transfer):
    """The handle of a transfer that happens late. error: raised by the first `wait` or `synchronize`."""

    def __init__(self, backend: Deferred, operation: str, plan: TransferPlan, error: Exception | None):
        self.backend, self.operation, self.plan, self.error = backend, operation, plan, error
        self.happened = False

    @functools.cached_property
    def touches(self) -> tuple[set[int], set[int]]:
        """Addresses of the elements that are read, and of those that are written."""
        cache, chunks = elements_of_cache(self.plan), elements_of_chunks(self.plan)
        return (cache, chunks) if self.operation == "gather" else (chunks, cache)

    def wait(self) -> None:
        self.backend.log.append(("wait", self))
        self.backend.order(self)
        self._raise()

    def synchronize(self) -> None:
        self.backend.log.append(("synchronize", self))
        self.backend.order(self)
        self.backend.run_stream()
        self._raise()

    def done(self) -> bool:
        return self.happened

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Deferred:
    """Operations of the backend, and what a test asks about them.

    log: `(what, transfer)` in order; what is gather, scatter, wait, synchronize or happens, or rerotate with None.
    fail: operation number (counted from 0) -> the error its handle raises. refuse: the same, raised by the call.
    """

    def __init__(self, *host_pools: torch.Tensor):
        self.host = {pool.untyped_storage().data_ptr() for pool in host_pools}
        self.log: list[tuple[str, LateTransfer | None]] = []
        self.submitted: list[LateTransfer] = []
        self.unordered: list[LateTransfer] = []  # nobody waited yet
        self.stream: list[LateTransfer] = []  # ordered on the current stream, not run
        self.fail: dict[int, Exception] = {}
        self.refuse: dict[int, Exception] = {}

    def gather(self, plan: TransferPlan) -> LateTransfer:
        return self._submit("gather", plan)

    def scatter(self, plan: TransferPlan) -> LateTransfer:
        return self._submit("scatter", plan)

    def rerotate(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rope: Any) -> None:
        touched = addresses_of(keys)
        for late in self.unordered:
            assert not touched & set.union(*late.touches), f"keys are rotated while a {late.operation} is under way"
        self.log.append(("rerotate", None))
        rerotate(keys, old, new, rope)

    def _submit(self, operation: str, plan: TransferPlan) -> LateTransfer:
        number = len(self.submitted)
        if number in self.refuse:
            raise self.refuse.pop(number)
        late = LateTransfer(self, operation, plan, self.fail.pop(number, None))
        for other in self.unordered:
            (reads, writes), (others_reads, others_writes) = late.touches, other.touches
            race = writes & others_writes | writes & others_reads | reads & others_writes
            assert not race, f"{operation} {number} and a {other.operation} before it touch {len(race)} same elements"
        self.submitted.append(late)
        self.unordered.append(late)
        self.log.append((operation, late))
        return late

    def order(self, late: LateTransfer) -> None:
        """The current stream waits for `late`."""
        if late in self.unordered:
            self.unordered.remove(late)
            self.stream.append(late)

    def run_stream(self) -> None:
        """Whatever the current stream waits for happens now, in order."""
        ready, self.stream = self.stream, []
        for late in ready:
            late.happened = True
            self.log.append(("happens", late))
            with contextlib.suppress(ValueError):  # a slot out of range: `error` tells it
                MOVES[late.operation](late.plan)

    def count(self, what: str) -> int:
        """How often `what` is in the log."""
        return sum(entry == what for entry, _ in self.log)


class _Stream(TorchDispatchMode):
    """Runs the backend's stream before an operation that touches device memory; a view touches nothing."""

    def __init__(self, backend: Deferred):
        super().__init__()
        self.backend = backend

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.backend.stream and not func.is_view:
            tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
            if any(self._on_device(tensor) for tensor in tensors):
                self.backend.run_stream()
        return func(*args, **(kwargs or {}))

    def _on_device(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that a waiting transfer touches and that is no host pool."""
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.backend.host:
            return False
        return any(storage in storages_of(late.plan) for late in self.backend.stream)


@contextlib.contextmanager
def deferred(*host_pools: torch.Tensor, stages: bool = False) -> Iterator[Deferred]:
    """The backend, selected, within the block. stages: it brings its own staging."""
    backend = Deferred(*host_pools)
    register_backend("deferred", backend, stages=stages)
    try:
        with use_backend("deferred"), _Stream(backend):
            yield backend
    finally:
        unregister_backend("deferred")


# ------------------------------------------------------------------------------------------ which memory a plan touches


def addresses_of(tensor: torch.Tensor) -> set[int]:
    """The address of every element."""
    width, addresses = tensor.element_size(), [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = [at + i * stride * width for at in addresses for i in range(size)]
    return set(addresses)


def _moved(plan: TransferPlan) -> Iterator[tuple[Any, list[int], list[int]]]:
    """(span, rows of its chunk, slots) of what moves."""
    slots = plan.slots.tolist()
    for span in plan.spans:
        tokens = [t for t in range(span.start, span.end) if slots[t] >= 0 and t >= plan.skip_prefix_n_tokens]
        yield span, [t - span.start for t in tokens], [slots[t] for t in tokens]


def elements_of_cache(plan: TransferPlan) -> set[int]:
    """Addresses of the elements of every slot that is read or written."""
    size, limit = plan.cache.block_size, plan.cache.num_slots
    slots = [slot for _, _, slots in _moved(plan) for slot in slots if slot < limit]
    planes = [plane for row in plan.planes for plane in row]
    return {a for plane in planes for slot in slots for a in addresses_of(plane[slot // size, slot % size])}


def elements_of_chunks(plan: TransferPlan) -> set[int]:
    """Addresses of the elements of every chunk row that is read or written."""
    return {a for span, rows, _ in _moved(plan) for row in rows for a in addresses_of(span.chunk[:, :, row])}


def storages_of(plan: TransferPlan) -> set[int]:
    """The storages of planes and chunks."""
    tensors = [plane for row in plan.planes for plane in row] + [span.chunk for span in plan.spans]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
