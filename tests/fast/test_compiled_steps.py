"""The steps of a call in C++ (csrc/steps.cpp) against those in Python: the same verbs, in the same order, with the same
arguments, whatever the call; and the scenarios of the pipeline with them, on the simulated device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_verbs import SpeaksToCompiledSteps
from pipeline_scenarios import SCENARIOS
from pipeline_worlds import CHUNK_BYTES
from simulated import Event, SimulatedDevice

from lmcache_fast.cuda import native
from lmcache_fast.cuda.backend import CudaBackend, Engine
from lmcache_fast.cuda.device import Arguments, Memory
from lmcache_fast.cuda.holdings import Blocks
from lmcache_fast.cuda.pipeline import Lane
from lmcache_fast.cuda.steps import Steps
from lmcache_fast.descriptors import WORDS_PER_CHUNK, Rotation
from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rerotation import Rerotation
from lmcache_ref.rope import RotarySpec, rotary_table
from lmcache_ref.transfer import reference_gather, reference_scatter

ROPE = RotarySpec(rotary_table(16384, 8))


def library() -> ctypes.CDLL:
    found, reason = native.load()
    assert found is not None, reason
    return found


class RecordingDevice(SpeaksToCompiledSteps):
    """Notes what it is asked to do, and does nothing. Chunks may be as large as an address space."""

    def __init__(self) -> None:
        self.trace: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.on_device: set[int] = set()
        self.pageable: set[int] = set()
        self.launches_left, self.busy = 1 << 30, False
        self.boundary = 0  # between two allocations: no copy crosses it
        self.written: dict[int, bytes] = {}
        self._streams = 0
        self._memory = 1 << 40

    def guard(self) -> Any:
        return contextlib.nullcontext()

    def current(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def new_stream(self, urgent: bool = False) -> int:
        self._streams += 1
        return self._streams

    def new_event(self) -> Event:
        self.events.append(Event(0, 0, len(self.events)))
        return self.events[-1]

    def record(self, stream: int) -> Event:
        event = self.new_event()
        self.record_again(event, stream)
        return event

    def record_again(self, event: Event, stream: int) -> None:
        event.number = len(self.trace)
        event.mask = id(self.trace)
        self.trace.append(("record", stream))

    def wait(self, stream: int, event: Event) -> None:
        recorded = len(self.trace) - event.number if event.mask == id(self.trace) else "by a call before"
        self.trace.append(("wait", stream, recorded))

    def is_done(self, event: Event) -> bool:
        return not self.busy

    def synchronize(self, event: Event) -> None:
        pass

    def copy(self, target: int, source: int, num_bytes: int, stream: int, seams: Any = ()) -> None:
        self._refuse(target, source, num_bytes)
        self.trace.append(("copy", target, source, num_bytes, stream))

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        self._refuse(target, source, min(target_pitch, source_pitch) * height)
        self.trace.append(("copy_rows", target, target_pitch, source, source_pitch, width, height, stream))

    def _refuse(self, target: int, source: int, num_bytes: int) -> None:
        if any(address < self.boundary < address + num_bytes for address in (target, source)):
            raise RuntimeError("two allocations")

    def launch(self, kernel: str, stream: int, arguments: Arguments, num_blocks: int) -> None:
        self.launches_left -= 1
        if self.launches_left < 0:
            raise RuntimeError("this launch fails")
        batch, *more = arguments.structures
        used = 0 if batch.move.chunks else batch.move.num_chunks * WORDS_PER_CHUNK
        said = [bytes(table) if isinstance(table, Rotation) else table.chunks[:used] for table in (batch, *more)]
        if not batch.move.ids:
            said.append(batch.slots[: max(map(sum, zip(said[0][4::7], said[0][5::7], strict=True)))])
        self.trace.append(("launch", kernel, stream, num_blocks, bytes(batch.move), said))

    def write(self, address: int, source: int, num_bytes: int) -> None:
        self.written[address] = ctypes.string_at(source, num_bytes)
        self.trace.append(("write", address, self.written[address]))

    def same(self, address: int, other: int, num_bytes: int) -> bool:
        return self.written.get(address) == ctypes.string_at(other, num_bytes)

    def device_memory(self, num_bytes: int) -> Memory:
        self._memory += num_bytes + 4096
        return Memory(self._memory - num_bytes, num_bytes, None)

    pinned_memory = device_memory

    def bring(self, address: int, words: array) -> None:
        pass

    def constant(self, words: array) -> Memory:
        return self.device_memory(8 * len(words))

    def table(self, rope: RotarySpec) -> torch.Tensor:
        return rope.cos_sin_cache

    def read_word(self, address: int) -> int:
        return -1

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.on_device

    def mapped(self, address: int) -> int | None:
        return None if address in self.pageable else address + (1 << 44)


class Lanes:
    """One lane, its steps in Python and in C++ in turn."""

    def __init__(self, operation: str):
        self.device = RecordingDevice()
        self.lane = Lane(self.device, operation, Blocks(self.device))
        for block in [self.lane._blocks.take(1 << 20) for _ in range(2)]:  # enough: none is made between two traces
            self.lane._blocks.give_back(block)
        self.both = self.lane.steps, native.CompiledSteps(self.device, operation, self.lane._streams, library())

    def traces(self, plan: TransferPlan, on_host: bool, again: bool, busy: bool, launches_left: int) -> list[Any]:
        """What each asks of the device, from the same turn of the ring; and how it ended. again: behind a call of the same
        slots. busy: which is not yet done."""
        found: list[Any] = []
        for steps in self.both:
            self.lane.steps, self.device.trace = self.both[0], []
            self.forget()
            if again:
                with contextlib.suppress(Exception):
                    self.lane.move(plan, on_host)
            self.device.busy = busy
            self.lane.steps = steps
            if self.lane._ring:
                self.lane._ring.turn = 0
            self.device.trace = []
            self.device.launches_left = launches_left
            try:
                transfer = self.lane.move(plan, on_host)
            except Exception as error:
                end: tuple[Any, ...] = (type(error), str(error))
            else:
                events = [len(self.device.trace) - event.number for event in getattr(transfer, "_events", ())]
                end = events, getattr(transfer, "_slots_address", 0), getattr(transfer, "_counted", None)
                transfer.synchronize()
            self.device.launches_left, self.device.busy = 1 << 30, False
            found.append((self.device.trace, end, self.lane._ring.turn if self.lane._ring else 0))
        return found

    def forget(self) -> None:
        """Let nothing be left of earlier calls."""
        lane = self.lane
        for transfer in lane._under_way:
            transfer.finish()
        lane._under_way.clear()
        kept, lane._kept = lane._kept, None
        if kept is not None:
            lane._blocks.give_back(kept.block)
        lane._blocks._free.sort(key=lambda block: -block.pinned.address)  # the last one is taken first


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A cache, chunks and slots; sizes from bytes to many staging places."""
    row = draw(st.sampled_from([2, 12, 16, 256, 2048]))
    kv, num_layers = draw(st.sampled_from([1, 2])), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 40) | st.just(256), min_size=1, max_size=5)) * draw(
        st.sampled_from([1, 1, 9])
    )
    return {
        "row": row,
        "heads_apart": draw(st.booleans()),
        "kv": kv,
        "num_layers": num_layers,
        "layer": draw(st.none() | st.integers(0, num_layers - 1)),
        "lengths": lengths,
        "order": draw(st.permutations(range(3))),
        "gaps": draw(st.tuples(*[st.sampled_from([0, 0, 1])] * 3)),
        "apart": draw(st.sampled_from([0, 0, 3])),
        "skipped": draw(st.sampled_from([0, 0, 3])),
        "bad": draw(st.sampled_from([False, False, False, True])),
        "prefix": draw(st.integers(0, sum(lengths)) | st.just(0)),
        "slots_on_device": draw(st.booleans()),
        "pageable": draw(st.sampled_from([(), (), (0,), (1,), tuple(range(45))])),
        "staging": draw(st.sampled_from([1, 4096, 100_000, 1 << 20, 64 << 20])),
        "zero_copy": draw(st.sampled_from([0, 0, 1 << 40])),
        "validate": draw(st.sampled_from(["0", "0", "1"])),
        "rotated": draw(st.booleans()),
        "again": draw(st.booleans()),
        "fixed": draw(st.booleans()),
        "busy": draw(st.booleans()),
        "launches_left": draw(st.sampled_from([1 << 30] * 3 + [0, 1, 3])),
    }


def plan_of(call: dict[str, Any], device: RecordingDevice, operation: str) -> TransferPlan:
    """The call on memory that is reserved, not written."""
    row, kv, layers = call["row"], call["kv"], call["num_layers"]
    num_heads = 2 if row > 2 else 1
    num_tokens = sum(call["lengths"])
    num_blocks = num_tokens // 8 + 2
    shape = (num_layers := layers, kv, num_blocks, 8, num_heads, row // 2 // num_heads)
    memory = torch.empty(shape, dtype=torch.bfloat16)
    if call["heads_apart"]:
        memory = torch.empty(*shape[:3], num_heads, 8, shape[5], dtype=torch.bfloat16).transpose(3, 4)
    cache = PagedKVCache(tuple(tuple(memory[layer, i] for i in range(kv)) for layer in range(num_layers)))
    chosen = 1 if call["layer"] is not None else layers
    sizes, chunks, position = (kv, chosen), [], 1
    pool = torch.empty(8 << 30, dtype=torch.uint8).view(torch.bfloat16)
    device.pageable.clear()
    for number, length in enumerate(call["lengths"]):
        strides, size = [0, 0, 0], row // 2
        for axis in call["order"]:
            strides[axis] = size + call["gaps"][axis] * (row // 2)
            size = strides[axis] * (*sizes, length)[axis]
        shape = (kv, chosen, length, row // 2)
        chunk = pool[position - 1 :].as_strided(shape, (*strides, 1))
        chunks.append(chunk)
        position += size + call["apart"] * (row // 2)
        if number in call["pageable"]:
            device.pageable.add(chunk.data_ptr())
    slots = torch.randperm(num_blocks * 8)[:num_tokens]
    if call["skipped"]:
        slots[:: call["skipped"]] = -1
    if call["bad"]:
        slots[-1] = num_blocks * 8
    device.on_device = {slots.data_ptr()} if call["slots_on_device"] else set()
    rotation = None
    if call["rotated"] and operation == "scatter" and kv == 2 and row // 2 // num_heads >= 8:
        rotation = Rerotation(torch.arange(num_tokens), torch.arange(num_tokens) + 5, ROPE)
    return TransferPlan.build(
        cache,
        slots,
        chunks,
        fmt=MemoryFormat.KV_2LTD if kv == 2 else MemoryFormat.KV_MLA_FMT,
        layers=None if call["layer"] is None else [call["layer"]],
        skip_prefix_n_tokens=call["prefix"],
        rotation=rotation,
    )


lanes_of = functools.cache(Lanes)


@settings(max_examples=300)
@given(call=calls())
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_the_same_verbs(operation, on_host, call):
    lanes = lanes_of(operation)
    plan = replace(plan_of(call, lanes.device, operation), slots_fixed=call["fixed"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STAGING_BYTES, str(call["staging"]))
        patch.setenv(ZERO_COPY_BYTES, str(call["zero_copy"]))
        patch.setenv("LMCACHE_VALIDATE", call["validate"])
        python, compiled = lanes.traces(plan, on_host, call["again"], call["busy"], call["launches_left"])
    assert compiled == python


@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize("in_rows", [False, True])
def test_copies_across_two_allocations_are_made_part_by_part(in_rows, operation, monkeypatch):
    """Chunks side by side are one copy, equally distant ones a copy in rows; where the driver refuses it, each is one."""
    monkeypatch.setenv(STAGING_BYTES, str(1 << 20))
    lanes = Lanes(operation)
    lanes.lane.steps = lanes.both[1]
    memory = torch.zeros(1, 2, 16, 8, 1, 8, dtype=torch.bfloat16)
    cache = PagedKVCache(tuple((layer[0], layer[1]) for layer in memory))
    pool = torch.zeros(4, 3 if in_rows else 2, 1, 32, 8, dtype=torch.bfloat16)[:, :2]  # 512 bytes a plane: no gaps
    plan = TransferPlan.build(cache, torch.arange(128), list(pool), fmt=MemoryFormat.KV_2LTD)
    lanes.lane.move(plan, on_host=True)
    (whole,) = [
        said for said in lanes.device.trace if said[0] == ("copy_rows" if in_rows else "copy") and said[3] != 1040
    ]
    lanes.device.trace, lanes.device.boundary = [], pool[2].data_ptr()
    lanes.lane.move(plan, on_host=True)
    homes = [
        said[1 if operation == "gather" else 2] for said in lanes.device.trace if said[0] == "copy" and said[3] == 1024
    ]
    assert homes == [chunk.data_ptr() for chunk in pool]
    assert whole[0] not in [said[0] for said in lanes.device.trace if said[0] != "copy"]


def test_the_structs_are_as_long_as_those_of_the_source():
    words = (ctypes.c_int64 * 2)()
    library().lmcache_fast_steps_words(words)
    assert list(words) == [ctypes.sizeof(struct) // 8 for struct in (native.LaneWords, native.CallWords)]


@pytest.fixture
def load_again():
    native.load.cache_clear()
    yield native.load
    native.load.cache_clear()


def test_without_a_compiler_the_steps_are_taken_in_python_and_that_is_said_once(load_again, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        found, reason = load_again()
        assert found is None and "no C++ compiler: looked for no-such-compiler" in reason
    assert [record.message for record in caplog.records] == [
        f"calls are prepared in Python, which takes longer: {reason}"
    ]
    assert CudaBackend().facts()["steps of a call"] == f"in Python, which takes longer: {reason}"
    engine = Engine(SimulatedDevice(), found)
    assert {type(lane.steps) for lane in engine.lanes.values()} == {Steps}


def test_with_a_compiler_they_are_compiled(load_again):
    found, reason = load_again()
    assert found is not None and reason == ""
    assert CudaBackend().facts()["steps of a call"] == "compiled"
    engine = Engine(SimulatedDevice(), found)
    assert {type(lane.steps) for lane in engine.lanes.values()} == {native.CompiledSteps}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("slots_on", ["cpu", "cuda"])
def test_both_move_the_same_bytes_on_a_gpu(slots_on, compiled, monkeypatch):
    """Whichever steps a machine has: many segments, skipped tokens, chunks that the host's and the device's memory hold."""
    monkeypatch.setenv(STAGING_BYTES, "100000")
    if not compiled:
        monkeypatch.setattr(native, "load", lambda: (None, "asked for"))
    backend = CudaBackend()
    memory = torch.randint(0, 256, (3, 2, 40, 16, 2, 64), dtype=torch.uint8, device="cuda")
    cache = PagedKVCache(tuple((layer[0], layer[1]) for layer in memory))
    slots = torch.randperm(640)[:288]
    slots[5::7] = -1
    for home in ({"pin_memory": True}, {}, {"device": "cuda"}):
        pools = [torch.full((6, 2, 3, 48, 128), 77, dtype=torch.uint8, **home) for _ in range(2)]
        plans = [
            TransferPlan.build(cache, slots.to(slots_on), list(pool), fmt=MemoryFormat.KV_2LTD, skip_prefix_n_tokens=60)
            for pool in pools
        ]
        backend.gather(plans[0]).synchronize()
        reference_gather(plans[1])
        assert torch.equal(*pools)
        for pool in pools:
            pool.bitwise_not_()
        before = memory.clone()
        reference_scatter(plans[0])
        wanted = memory.clone()
        memory.copy_(before)
        torch.cuda.synchronize()
        backend.scatter(plans[0]).synchronize()
        assert torch.equal(memory, wanted) and not torch.equal(memory, before)
    (engine,) = backend._engines.values()
    assert isinstance(engine.lanes["gather"].steps, native.CompiledSteps) == compiled


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_legal_order(name, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STAGING_BYTES, str(4 * CHUNK_BYTES))
        patch.delenv("LMCACHE_VALIDATE", raising=False)
        SCENARIOS[name](SimulatedDevice(seed, library=library()))
