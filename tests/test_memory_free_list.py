"""The free list: its books, its lock, threads, and a state machine against a naive model.

The state machine predicts each address and compares every live object's bytes after each step; mutants of the free
list show that it can fail.
"""

from __future__ import annotations

import copy
import threading

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lmcache_ref import memory
from lmcache_ref.errors import DoubleFreeError, ObjectError, UseAfterFreeError
from lmcache_ref.memory import AddressSpace, HostMemoryAllocator, MemoryFormat, MemoryObj
from memory_pools import PAGE, U8, take

# The checks, and what they catch


def space_with_a_hole() -> AddressSpace:
    """Four blocks of 64 bytes: used, free, used, free."""
    space = AddressSpace(256, 64)
    starts = [space.take(64) for _ in range(3)]
    assert starts == [(0, 64), (64, 64), (128, 64)]
    space.give_back(64)
    assert space.check() and space._free == [(64, 128), (192, 256)] and space._used == {0: 64, 128: 192}
    return space


BROKEN_BOOKS = {
    "leak": lambda space: space._free.pop(),
    "lost use": lambda space: space._used.pop(0),
    "overlap": lambda space: space._used.update({64: 128}),
    "beyond the end": lambda space: space._free.append((256, 320)),
    "unsorted": lambda space: space._free.reverse(),
    "empty block": lambda space: space._free.insert(1, (192, 192)),
    "neighbours not merged": lambda space: (space._used.pop(128), space._free.insert(1, (128, 192))),
    "unaligned": lambda space: (space._used.update({0: 65}), space._free.__setitem__(0, (65, 128))),
}


@pytest.mark.parametrize("name", BROKEN_BOOKS)
def test_memcheck_fails_on_broken_books(name: str) -> None:
    allocator = HostMemoryAllocator(256, align_bytes=64)
    allocator._space = space_with_a_hole()
    assert allocator.memcheck()
    BROKEN_BOOKS[name](allocator._space)
    assert not allocator.memcheck()


def test_the_books_are_opened_under_the_lock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[str] = set()

    class GuardedSpace(AddressSpace):
        def __getattribute__(self, name: str) -> object:
            if name in ("take", "give_back", "check", "free_bytes"):
                assert allocator.lock._is_owned(), name
                opened.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(memory, "AddressSpace", GuardedSpace)
    allocator = HostMemoryAllocator(4 * PAGE)
    with pytest.raises(AssertionError, match=r"^take"):
        allocator._space.take(1)
    first, second = allocator.batched_allocate([8], U8, 2)
    assert allocator.batched_allocate([8], U8, 3) is None
    first.pin()
    allocator.free(first)
    first.unpin()
    second.ref_count_down()
    assert allocator.memcheck() and allocator.free_bytes == 4 * PAGE and allocator.used_bytes == 0
    assert opened == {"take", "give_back", "check", "free_bytes"}


def test_threads() -> None:
    """Eight threads take, fill, check and release; every byte is their own while they hold it."""
    allocator = HostMemoryAllocator(64 * PAGE)
    rounds, failures, allocated = 200, [], [0] * 8
    shared = take(allocator, 8)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait()
            for i in range(rounds):
                shared.ref_count_up()
                shared.pin()
                objs = allocator.batched_allocate([PAGE + i], U8, 1 + i % 4)
                for obj in objs or ():
                    obj.raw_tensor.fill_(number)
                for obj in objs or ():
                    assert bool((obj.raw_tensor == number).all())
                    allocated[number] += 1
                allocator.batched_free(objs or ())
                shared.unpin()
                shared.ref_count_down()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and min(allocated) > 0
    assert shared.get_ref_count() == 1 and not shared.is_pinned
    assert allocator.memcheck() and allocator.used_bytes == PAGE


# The free list against a naive model


ALIGN = 64
POOL_BYTES = 20 * ALIGN + 24


class AllocatorMachine(RuleBasedStateMachine):
    """The model is a list of live blocks; a block's place is found by trying every aligned address in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = HostMemoryAllocator(POOL_BYTES, align_bytes=ALIGN)
        self.allocator.pool.fill_(0)
        self.live: list[dict] = []
        self.dead: list[MemoryObj] = []
        self.stamp = 0

    def lowest_place(self, size_bytes: int, taken: list[tuple[int, int]]) -> int | None:
        for start in range(0, POOL_BYTES - size_bytes + 1, ALIGN):
            if all(start + size_bytes <= low or high <= start for low, high in taken):
                return start
        return None

    def expected_blocks(self, size_bytes: int, count: int) -> list[tuple[int, int]] | None:
        taken = [(entry["address"], entry["end"]) for entry in self.live if entry["size"]]
        found = []
        for _ in range(count):
            start = self.lowest_place(size_bytes, taken) if size_bytes else 0
            if start is None:
                return None
            end = min(start + (size_bytes + ALIGN - 1) // ALIGN * ALIGN, POOL_BYTES)
            found.append((start, end))
            taken += [(start, end)] if size_bytes else []
        return found

    @rule(size_bytes=st.integers(0, POOL_BYTES + ALIGN), count=st.integers(1, 3))
    def allocate_large(self, size_bytes: int, count: int) -> None:
        self.allocate(size_bytes, count)

    @rule(size_bytes=st.integers(0, 3 * ALIGN), count=st.integers(0, 4))
    def allocate(self, size_bytes: int, count: int) -> None:
        expected = self.expected_blocks(size_bytes, count)
        objs = self.allocator.batched_allocate([size_bytes], U8, count, MemoryFormat.BINARY)
        if expected is None:
            assert objs is None
            return
        assert [obj.metadata.address for obj in objs] == [start for start, _ in expected]
        for obj, (start, end) in zip(objs, expected, strict=True):
            self.stamp = self.stamp % 250 + 1
            obj.raw_tensor.fill_(self.stamp)
            self.live.append(
                dict(obj=obj, address=start, end=end, size=size_bytes, stamp=self.stamp, refs=1, pins=0, freed=False)
            )

    def pick(self, data: st.DataObject) -> dict:
        return self.live[data.draw(st.integers(0, len(self.live) - 1), label="object")]

    def drop_if_unheld(self, entry: dict) -> None:
        if entry["refs"] == entry["pins"] == 0:
            self.live.remove(entry)
            self.dead.append(entry["obj"])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ref_count_up(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry["obj"].ref_count_up()
        entry["refs"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ref_count_down(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["refs"] == 0:
            with pytest.raises(DoubleFreeError):
                entry["obj"].ref_count_down()
            return
        entry["obj"].ref_count_down()
        entry["refs"] -= 1
        self.drop_if_unheld(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry["obj"].pin()
        entry["pins"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["pins"] == 0:
            with pytest.raises(ObjectError):
                entry["obj"].unpin()
            return
        entry["obj"].unpin()
        entry["pins"] -= 1
        self.drop_if_unheld(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        if entry["freed"] or entry["refs"] == 0:
            with pytest.raises(DoubleFreeError):
                self.allocator.free(entry["obj"])
            return
        self.allocator.free(entry["obj"])
        entry["freed"] = True
        entry["refs"] -= 1
        self.drop_if_unheld(entry)

    @invariant()
    def books_are_right(self) -> None:
        assert self.allocator.memcheck()
        used = sum(entry["end"] - entry["address"] for entry in self.live)
        assert (self.allocator.used_bytes, self.allocator.free_bytes) == (used, POOL_BYTES - used)

    @invariant()
    def every_live_byte_is_its_owners(self) -> None:
        for entry in self.live:
            obj = entry["obj"]
            assert (obj.get_ref_count(), obj.metadata.pin_count) == (entry["refs"], entry["pins"])
            assert obj.raw_tensor.tolist() == [entry["stamp"]] * entry["size"]

    @invariant()
    def the_dead_stay_dead(self) -> None:
        for obj in self.dead[-3:]:
            assert not obj.is_valid()
            with pytest.raises(UseAfterFreeError):
                _ = obj.tensor


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40)


class SpaceThatRoundsDown(AddressSpace):
    def take(self, length_bytes: int) -> tuple[int, int] | None:
        return super().take(length_bytes // self.align_bytes * self.align_bytes)


class SpaceThatFitsLast(AddressSpace):
    def take(self, length_bytes: int) -> tuple[int, int] | None:
        self._free.reverse()
        block = super().take(length_bytes)
        self._free.reverse()
        return block


class SpaceThatNeverMerges(AddressSpace):
    def give_back(self, start: int) -> None:
        self._free.append((start, self._used.pop(start)))
        self._free.sort()


class SpaceThatNeverFrees(AddressSpace):
    def give_back(self, start: int) -> None:
        assert start in self._used


class SpaceThatForgetsUse(AddressSpace):
    """Hands the same bytes out again, with books that look right."""

    def take(self, length_bytes: int) -> tuple[int, int] | None:
        before = copy.deepcopy((self._used, self._free))
        block = super().take(length_bytes)
        self._used, self._free = before
        return block

    def give_back(self, start: int) -> None:
        pass


MUTANTS = [
    SpaceThatRoundsDown,
    SpaceThatFitsLast,
    SpaceThatNeverMerges,
    SpaceThatNeverFrees,
    SpaceThatForgetsUse,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_state_machine_catches(mutant: type[AddressSpace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AddressSpace", mutant)
    quick = settings(max_examples=200, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AllocatorMachine, settings=quick)
