"""A small run on a GPU, to be watched by compute-sanitizer: `python small_run.py moves`, or one of the planted faults.

Every buffer ends where its allocation ends, so that one byte too far is outside. Whether the sanitizer is content is
looked at in `test_sanitizer.py`, which also runs the moves without a GPU; no test lives here.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import strided
import torch
from rotations import HS, KEY_DTYPES, NH, T, numbers, positions, storage, table
from strided import FORMATS, GEOMETRIES, REQUEST, Case, Sizes, World, assert_same_worlds

from helpers import assert_same
from lmcache_fast.environment import STAGING_BYTES, ZERO_COPY_BYTES
from lmcache_ref import rope as spec
from lmcache_ref.errors import SlotRangeError
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rerotation import Rerotation
from lmcache_ref.rope import RotarySpec
from lmcache_ref.transfer import reference_gather, reference_scatter

REFERENCE = {"gather": reference_gather, "scatter": reference_scatter}
NL, NB, BS = 3, 7, 3
LAYOUTS = (
    ("nhd", "KV_2LTD"),
    ("hnd", "KV_2LTD"),
    ("fused", "KV_2LTD"),
    ("layers_in_block", "KV_T2D"),
    ("off_by_one", "KV_2TD"),
    ("nhd", "KV_MLA_FMT"),
)
#: NH, HS, dtype: heads of 256 bytes in the widest vectors, of 33 and of 6 bytes
ROWS = ((8, 128, torch.bfloat16), (2, 33, torch.uint8), (3, 3, torch.float16))

PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pinned": lambda memory: memory.pin_memory(),
    "pageable": lambda memory: memory,
    "device": lambda memory: memory.cuda(),
}
IN_SEGMENTS, ZERO_COPY = {STAGING_BYTES: "3000"}, {ZERO_COPY_BYTES: str(1 << 30)}


@dataclass(frozen=True)
class Way:
    """Where chunks, slots and the cache are, and the variables that decide which way the bytes take."""

    chunks: str
    slots: str
    cache: str
    variables: dict[str, str]


ON_GPU = (
    Way("pinned", "pageable", "device", IN_SEGMENTS),
    Way("pinned", "device", "device", IN_SEGMENTS),
    Way("pinned", "device", "device", ZERO_COPY),
    Way("pageable", "device", "device", IN_SEGMENTS),
    Way("device", "pageable", "device", {}),
    Way("device", "device", "device", {}),
)
ON_HOST = (Way("pageable", "pageable", "pageable", {}),)


@dataclass
class PlacedWorld(World):
    """A world whose memory is where `way` says."""

    way: Way

    def _memory(self, num_elements: int, is_source: bool) -> torch.Tensor:
        is_cache = is_source == self.gathers
        return PLACES[self.way.cache if is_cache else self.way.chunks](super()._memory(num_elements, is_source))

    def plan(self) -> TransferPlan:
        plan = super().plan()
        return replace(plan, slots=PLACES[self.way.slots](plan.slots))


@dataclass
class RotatedWorld(PlacedWorld):
    """Chunks of finite numbers, and a plan that moves some of their keys to other positions."""

    rope: RotarySpec

    def _memory(self, num_elements: int, is_source: bool) -> torch.Tensor:
        memory = super()._memory(num_elements, is_source)
        return memory.copy_(numbers(num_elements, self.case.dtype, 1)) if is_source else memory

    def plan(self) -> TransferPlan:
        plan = super().plan()
        rotation = Rerotation(*positions(2, len(plan.slots)), self.rope)
        return replace(plan, rotation=rotation.checked(plan.cache, len(plan.slots)))


def cases(direction: str) -> Iterator[Case]:
    for (geometry, name), (num_heads, head_size, dtype) in itertools.product(LAYOUTS, ROWS):
        sizes = Sizes(NL, FORMATS[name].planes, NB, BS, num_heads, head_size)
        chunk_pad = 3 if direction == "gather" and geometry == "hnd" else 0
        yield Case(sizes, dtype, GEOMETRIES[geometry], FORMATS[name], REQUEST, chunk_pad)


def moves(backend: Any, ways: tuple[Way, ...]) -> int:
    """Every layout, direction and way, compared with the specification; how many there were."""
    count = 0
    for way, direction in itertools.product(ways, REFERENCE):
        with mock.patch.dict(os.environ, way.variables):
            for case in cases(direction):
                world, expected = PlacedWorld(case, direction == "gather", way), World(case, direction == "gather")
                getattr(backend, direction)(world.plan()).synchronize()
                REFERENCE[direction](expected.plan())
                assert_same_worlds(world, expected, f"{direction} {way} {case}")
                count += 1
    return count


def bad_slots(backend: Any) -> int:
    """Slots on the device, two of them out of range: they are skipped, and the first is named."""
    count = 0
    for chunks, direction in itertools.product(PLACES, REFERENCE):
        for case in cases(direction):
            slots = list(case.request.slots)
            slots[4], slots[9] = NB * BS, 1 << 40
            bad = replace(case, request=replace(case.request, slots=slots))
            good = replace(case, request=replace(case.request, slots=[-1 if s >= NB * BS else s for s in slots]))
            world = PlacedWorld(bad, direction == "gather", Way(chunks, "device", "device", {}))
            try:
                getattr(backend, direction)(world.plan()).synchronize()
            except SlotRangeError as error:
                assert "slots[4] = 21" in str(error), error
            else:
                raise AssertionError(f"{direction} {case}: nothing was said")
            expected = World(good, direction == "gather")
            REFERENCE[direction](expected.plan())
            assert_same_worlds(world, expected, f"bad slots, {direction} {chunks} {case}")
            count += 1
    return count


def rotated_scatters(backend: Any, ways: tuple[Way, ...]) -> int:
    """Keys that are re-rotated on the way, of every dtype by tables of every dtype; how many there were."""
    count = 0
    for way in ways:
        with mock.patch.dict(os.environ, way.variables):
            for key_dtype, table_dtype in itertools.product(KEY_DTYPES, KEY_DTYPES):
                rope = RotarySpec(table(HS if count % 3 else 6, table_dtype), count % 2 == 0)
                geometry = GEOMETRIES["hnd" if count % 5 < 2 else "nhd"]
                case = Case(Sizes(NL, 2, NB, BS, NH, HS), key_dtype, geometry, FORMATS["KV_2LTD"], REQUEST)
                world, expected = RotatedWorld(case, False, way, rope), RotatedWorld(case, False, ON_HOST[0], rope)
                backend.scatter(world.plan()).synchronize()
                reference_scatter(expected.plan())
                assert_same_worlds(world, expected, f"scatter {way} {case} {rope}")
                count += 1
    return count


def rotations(backend: Any, place: str) -> int:
    """Keys, positions and tables of every dtype; how many rotations there were."""
    count = 0
    old, new = positions(0)
    for key_dtype, table_dtype, is_neox in itertools.product(KEY_DTYPES, KEY_DTYPES, (True, False)):
        rope = RotarySpec(table(HS if is_neox else 6, table_dtype), is_neox)
        expected = storage(key_dtype, 0)[: T * NH * HS].clone()
        keys = PLACES[place](expected.clone())
        backend.rerotate(keys.view(T, NH, HS), PLACES[place](old), PLACES[place](new), rope)
        spec.rerotate(expected.view(T, NH, HS), old, new, rope)
        assert_same(keys, expected, f"keys {key_dtype}, table {table_dtype}, neox {is_neox}")
        count += 1
    return count


# ------------------------------------------------------------------------------------------------ planted faults

FAULTS = {
    "writes_past_the_end": """
        extern "C" __global__ void writes_past_the_end(int* x, long long length) {
            if (threadIdx.x == 0) x[length] = 1;
        }""",
    "races": """
        extern "C" __global__ void races(int* x, long long length) {
            __shared__ int words[64];
            words[threadIdx.x] = threadIdx.x;
            x[threadIdx.x] = words[63 - threadIdx.x];
        }""",
}


def fault(name: str) -> None:
    """Launch a kernel that does what it must not, on a tensor of torch's."""
    import cupy

    length = 1000
    tensor = torch.empty(length, dtype=torch.int32, device="cuda")
    kernel = cupy.RawModule(code=FAULTS[name], backend="nvrtc").get_function(name)
    kernel((1,), (64,), (tensor.data_ptr(), length))
    torch.cuda.synchronize()


def main(what: str) -> None:
    torch.cuda.init()
    if what in FAULTS:
        fault(what)
    else:
        from lmcache_fast.cuda.backend import load

        strided.GUARD_ELEMENTS = 0
        backend = load()
        counts = (
            moves(backend, ON_GPU),
            bad_slots(backend),
            rotated_scatters(backend, ON_GPU),
            rotations(backend, "device"),
        )
        torch.cuda.synchronize()
        print(
            "{} moves, {} with bad slots, {} that rotate, {} rotations: the bits of the specification".format(*counts)
        )
    print("ran to the end")


if __name__ == "__main__":
    main(sys.argv[1])
