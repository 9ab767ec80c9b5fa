"""Any order of stores, lookups, loads, evictions and restarts: what a hit brings back is right, and nothing leaks.

Requests share prefixes and end anywhere; the pools are too small for all of them.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile

import hypothesis
import pytest
import torch
from engine_worlds import CHUNK, KINDS, NL, World, masked
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lmcache_ref.engine.tokens import ChunkNames

#: a path of chunks, and how many more tokens: few enough that prefixes are shared
REQUESTS = strategies.tuples(
    strategies.lists(strategies.integers(0, 1), max_size=4), strategies.integers(0, CHUNK - 1)
).map(lambda r: [10 * depth + side for depth, side in enumerate(r[0]) for _ in range(CHUNK)] + [99] * r[1])
NAMES = strategies.sampled_from(["a", "b"])


class Machine(RuleBasedStateMachine):
    kind = "V2"
    host_chunks = 6
    disk = True
    disk_gib = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp() if self.disk else None
        disk = {"max_local_disk_size": self.disk_gib} if self.disk else {}
        self.world = World(self.kind, folder=self.folder, host_chunks=self.host_chunks, **disk)
        self.stored: set[tuple[int, ...]] = set()  # every chunk ever stored, by its prefix
        self.promised: dict[str, list[list[int]]] = {}  # request -> what its lookups pinned
        self.open: list[tuple] = []  # loads under way

    @property
    def ample(self) -> bool:
        """Whether nothing can have been given up."""
        return self.host_chunks >= 40

    def known(self, tokens: list[int]) -> int:
        """Tokens of the prefix whose chunks were all stored at some time."""
        hits = 0
        while hits + CHUNK <= len(tokens) and tuple(tokens[: hits + CHUNK]) in self.stored:
            hits += CHUNK
        return hits

    @rule(tokens=REQUESTS, skipped_chunks=strategies.integers(0, 1))
    def store(self, tokens: list[int], skipped_chunks: int) -> None:
        skipped = min(skipped_chunks * CHUNK, len(tokens))
        before = self.world.engine.stats()
        stored = self.world.store(tokens, mask=masked(tokens, skipped))
        after = self.world.engine.stats()
        assert after.stored_tokens - before.stored_tokens == stored <= max(0, len(tokens) // CHUNK * CHUNK - skipped)
        chunks = [tuple(tokens[:end]) for end in range(skipped + CHUNK, len(tokens) + 1, CHUNK)]
        if self.ample:
            assert stored == CHUNK * sum(chunk not in self.stored for chunk in chunks)
        self.stored.update(chunks)

    @rule(tokens=REQUESTS, name=NAMES)
    def lookup(self, tokens: list[int], name: str) -> None:
        hits = self.world.engine.lookup(tokens, name)
        assert hits % CHUNK == 0 and hits <= self.known(tokens)
        if self.ample:
            assert hits == self.known(tokens)
        if hits:
            self.promised.setdefault(name, []).append(tokens[:hits])

    @rule(name=NAMES)
    def load_what_was_promised(self, name: str) -> None:
        self.make_way()
        for tokens in self.promised.get(name, []):
            assert self.world.retrieve(tokens) == len(tokens)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.world.engine.release(name)
        self.promised.pop(name, None)

    @rule(tokens=REQUESTS, skipped_chunks=strategies.integers(0, 1))
    def retrieve(self, tokens: list[int], skipped_chunks: int) -> None:
        skipped = min(skipped_chunks * CHUNK, len(tokens))
        self.make_way()
        loaded = self.world.retrieve(tokens, masked(tokens, skipped))
        assert loaded <= len(tokens) // CHUNK * CHUNK - skipped or loaded == 0
        for end in range(skipped + CHUNK, skipped + loaded + 1, CHUNK):
            assert tuple(tokens[:end]) in self.stored

    @rule(tokens=REQUESTS, steps=strategies.integers(1, NL + 1))
    def begin_a_load(self, tokens: list[int], steps: int) -> None:
        """Layer by layer, left open: its chunks stay while others come and go."""
        if self.world.kind.layerwise and not self.open:
            loading = self.world.engine.retrieve_layer(tokens, **self.world.kwargs(self.world.slots(tokens)))
            for _ in range(steps):
                next(loading)
            self.open.append(loading)

    @rule(to_the_end=strategies.booleans())
    def end_a_load(self, to_the_end: bool) -> None:
        while self.open:
            loading = self.open.pop()
            if to_the_end:
                *_, mask = loading
                assert isinstance(mask, torch.Tensor)
            loading.close()

    def make_way(self) -> None:
        """A connector that blends has one load at a time."""
        if self.world.config.enable_blending:
            self.end_a_load(to_the_end=True)

    @rule(tokens=REQUESTS, steps=strategies.integers(1, NL))
    def give_up_a_store(self, tokens: list[int], steps: int) -> None:
        if self.world.kind.layerwise:
            storing = self.world.engine.store_layer(tokens, **self.world.kwargs(self.world.slots(tokens)))
            for _ in range(steps):
                next(storing)
            storing.close()

    @rule()
    def flush(self) -> None:
        self.world.engine.flush()

    @rule()
    def restart(self) -> None:
        self.end_a_load(to_the_end=False)
        self.world.restart()
        self.promised.clear()
        if not self.disk:
            self.stored.clear()

    @invariant()
    def the_books_are_right(self) -> None:
        stats, host = self.world.engine.stats(), self.world.engine.storage.host
        assert host.allocator.memcheck()
        assert stats.host_used_bytes + stats.host_free_bytes == host.allocator.total_bytes
        assert stats.host_used_bytes <= self.world.config.max_local_cpu_bytes
        assert stats.disk_used_bytes <= self.world.config.max_local_disk_bytes
        assert stats.pinned_requests == len(self.promised)
        assert stats.disk_drops == stats.failed_loads == 0

    def teardown(self) -> None:
        self.end_a_load(to_the_end=True)
        for name in ("a", "b"):
            self.world.engine.release(name)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder or "", ignore_errors=True)
            stack.callback(self.world.engine.close)
            self.world.check_books()


SETTINGS = {
    "tight": {},
    "no disk": {"disk": False},
    "ample": {"host_chunks": 40},
    "small disk": {"disk_gib": 4096 / (1 << 30)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_order_of_calls(kind, setting):
    machine = type("Machine", (Machine,), {"kind": kind, **SETTINGS[setting]})
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=5, stateful_step_count=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        ),
    )


def test_the_machine_notices_a_hit_of_other_tokens(monkeypatch):
    """Names that know only how many tokens there are: the bytes are somebody else's."""
    real = ChunkNames.spans
    monkeypatch.setattr(ChunkNames, "spans", lambda self, tokens, salt=None: real(self, [0] * len(tokens), salt))
    machine = type("Machine", (Machine,), {"disk": False})()
    machine.store([0] * CHUNK, 0)
    machine.retrieve([0] * CHUNK, 0)
    with pytest.raises(AssertionError, match="elements differ"):
        machine.retrieve([1] * CHUNK, 0)
    machine.teardown()
