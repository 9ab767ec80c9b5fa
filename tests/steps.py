"""One open generator of a layerwise connector, step by step, and the check that nothing of it is left. No test lives here."""

from __future__ import annotations

from typing import Any

import torch

from drive import Bench, Spans
from helpers import assert_same

SLOTS = [5, 0, -1, 27, 11, 2, 19, 8, 1, 26, 14, 3, 22, 17, 9, 4, 20, -1, 13, 7]
#: two requests that share no slot, each of two chunks with a gap
REQUESTS = ([(1, 3), (4, 6)], [(8, 11), (12, 14)])


class Open:
    """A store or load under way, over objects of its own. `step()` advances it; `ended` after the last yield.

    mapping: the tensor of `slots` that is handed over."""

    def __init__(
        self,
        bench: Bench,
        kind: str,
        spans: Spans,
        *,
        first: int = 30000,
        slots: Any = SLOTS,
        mapping: torch.Tensor | None = None,
        **more: Any,
    ):
        self.bench, self.kind, self.spans = bench, kind, spans
        self.slots = slots
        self.objects = bench.allocate(spans)
        self.values = bench.request_values(len(slots), first)
        bench.connector.reap()
        if kind == "load":
            for row, pieces in zip(self.objects, bench.pieces(self.values, spans), strict=True):
                for obj, piece, (start, end) in zip(row, pieces, spans, strict=True):
                    obj.tensor.view(piece.dtype).copy_(piece)
                    obj.metadata.fmt, obj.metadata.cached_positions = bench.fmt, torch.arange(start, end)
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        kwargs = bench.kwargs(torch.tensor(slots) if mapping is None else mapping, **more)
        connector = bench.connector
        self.generator = (
            connector.batched_to_gpu(starts, ends, **kwargs)
            if kind == "load"
            else connector.batched_from_gpu(self.objects, starts, ends, **kwargs)
        )
        self.yields = 0
        self.steps = bench.NL + (2 if kind == "load" else 1)

    @property
    def ended(self) -> bool:
        return self.yields == self.steps

    def step(self, objects: Any = None) -> None:
        """One `next` or `send`. objects: sent instead of the layer's own."""
        layer = self.yields - 1
        if self.kind == "load" and 0 <= layer < self.bench.NL:
            self.generator.send(self.objects[layer] if objects is None else objects)
        else:
            next(self.generator)
        self.yields += 1

    def run(self, steps: int | None = None) -> Open:
        """`steps` steps, or all that are left."""
        for _ in range(self.steps - self.yields if steps is None else steps):
            self.step()
        return self

    def finish(self) -> None:
        """All steps that are left; the generator yields no more than it should."""
        self.run()
        assert next(self.generator, "ended") == "ended"

    def release(self) -> None:
        """Give the objects back."""
        for row in self.objects:
            for obj in row:
                obj.ref_count_down()

    def expected(self, logical: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        """The cache after this load; layers: only so many of them."""
        loaded = self.bench.loaded(logical, self.values, self.spans, self.slots)
        return loaded if layers is None else torch.cat([loaded[:layers], logical[layers:]])


def assert_nothing_is_left(*opened: Open) -> None:
    """Buffers, references and the pool are where they were: only the callers' own references remain."""
    bench = opened[0].bench
    assert bench.connector.buffers.in_use == 0
    counts = [obj.get_ref_count() for one in opened for row in one.objects for obj in row]
    assert set(counts) <= {1}, f"references left: {counts}"
    assert bench.allocator.memcheck()
    for one in opened:
        one.release()
    assert bench.allocator.free_bytes == bench.allocator.total_bytes


def assert_usable(bench: Bench) -> None:
    """A store and a load of new objects come out right, engine and pool."""
    spans, pool = REQUESTS[0], bench.allocator.pool
    cache = bench.cache_values()
    bench.put_engine(cache)
    objects = bench.allocate(spans)
    bench.put_objects(objects, bench.untouched_cache().new_zeros(bench.request_values(20).shape), spans)
    blank = bench.request_values(20).fill_(0)
    bench.store(objects, spans, torch.tensor(SLOTS))
    assert_same(pool, bench.pool_holding(objects, bench.stored(cache, blank, spans, SLOTS), spans), "the pool")
    values = bench.request_values(20, 7)
    bench.put_objects(objects, values, spans)
    bench.load(objects, spans, torch.tensor(SLOTS))
    wanted = bench.engine_holding(bench.loaded(cache, values, spans, SLOTS))
    assert_same(bench.engine[0], wanted[0], "the engine")
    bench.connector.reap()
    for row in objects:
        for obj in row:
            obj.ref_count_down()
    assert bench.connector.buffers.in_use == 0
    assert bench.allocator.free_bytes == bench.allocator.total_bytes
