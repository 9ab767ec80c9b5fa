"""A scatter that re-rotates keys on the way, against the specification bit for bit: kernels on the host, `cpu`, `cuda`.

The specification's own law is `tests/test_scatter_rotation.py`, the order of the launches `test_pipeline_order.py`.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import NO_BAD_TOKEN, Launch, Outcome
from rotations import KEY_DTYPES, MAX_POSITION, positions, table
from small_run import ON_GPU, ON_HOST, RotatedWorld, Way
from strided import FORMATS, GEOMETRIES, REQUEST, Case, Request, Sizes, World, assert_same_worlds

from drive import Bench
from helpers import assert_same
from lmcache_fast.cpu import backend as cpu_module
from lmcache_ref.backends import Operations, get_backend
from lmcache_ref.connectors import layerwise
from lmcache_ref.errors import ArgumentError, DuplicateSlotError, SlotRangeError
from lmcache_ref.rerotation import Rerotation
from lmcache_ref.rope import RotarySpec, rotary_table
from lmcache_ref.transfer import reference_scatter
from steps import Open

NL, NB, BS, NH, HS = 3, 7, 3, 3, 20
ROTARY_DIMS = (2, 6, HS)
(HOST,) = ON_HOST
on_gpu = pytest.mark.gpu


@functools.lru_cache
def rope_of(rotary_dim: int, dtype: torch.dtype, is_neox: bool) -> RotarySpec:
    return RotarySpec(table(rotary_dim, dtype), is_neox)


def world_of(case: Case, rope: RotarySpec, way: Way = HOST) -> RotatedWorld:
    return RotatedWorld(case, False, way, rope)


def case_of(geometry: str, dtype: torch.dtype, name: str = "KV_2LTD", pad: int = 0, request: Request = REQUEST) -> Case:
    sizes = Sizes(NL, 2, NB, BS, 1 if pad == 1 else NH, HS)
    return Case(sizes, dtype, GEOMETRIES[geometry], FORMATS[name], request, pad)


def all_of_memory() -> Iterator[tuple[Case, RotarySpec]]:
    """Every geometry, type of keys, pairing and number of rotated dims; chunk formats and padding in turn."""
    kinds = itertools.cycle(itertools.product(("KV_2LTD", "KV_T2D", "KV_2TD"), (0, 1, 3)))
    for geometry, dtype, is_neox, dims in itertools.product(GEOMETRIES, KEY_DTYPES, (True, False), ROTARY_DIMS):
        name, pad = next(kinds)
        yield case_of(geometry, dtype, name, pad), rope_of(dims, torch.float32, is_neox)


def all_types() -> Iterator[tuple[Case, RotarySpec]]:
    """Every type of keys with every type of table, heads together and apart."""
    for geometry, dtype, table_dtype, is_neox in itertools.product(
        ("nhd", "hnd"), KEY_DTYPES, KEY_DTYPES, (True, False)
    ):
        yield case_of(geometry, dtype), rope_of(HS, table_dtype, is_neox)


EVERYTHING = [*all_of_memory(), *all_types()]


def test_everything_is_this_much():
    assert len(EVERYTHING) == 12 * 4 * 2 * 3 + 2 * 4 * 4 * 2


def expected_of(case: Case, rope: RotarySpec) -> World:
    world = world_of(case, rope)
    reference_scatter(world.plan())
    return world


def moved_bytes(case: Case) -> int:
    """Of all keys, which is also that of all values."""
    request, num_layers = case.request, 1 if case.format.one_layer else case.sizes.NL
    tokens = [token for start, end in request.spans for token in range(max(start, request.skip), end)]
    return sum(request.slots[token] >= 0 for token in tokens) * num_layers * case.sizes.D * case.dtype.itemsize


# ------------------------------------------------------------------------------------------------ the kernels on the host

#: tokens of a tile, blocks, threads, planes of a unit, whether chunks travel with the launch
LAUNCHES = ((1, 1, 32, 4, True), (3, 2, 64, 1, False), (4, 31, 96, 2, True), (256, 3, 256, 3, True))


def compare_kernels(case: Case, rope: RotarySpec, launch: Launch) -> None:
    """Keys by the kernel that rotates, values by the ordinary one; each moves its own and nothing else."""
    world, num_layers = world_of(case, rope), 1 if case.format.one_layer else NL
    moved = Outcome(0, moved_bytes(case), 0, NO_BAD_TOKEN)
    assert launch.scatter_rotated(world.plan()) == moved
    assert replace(launch, planes=(num_layers, 2 * num_layers)).move(world.plan(), "scatter") == moved
    assert_same_worlds(world, expected_of(case, rope), f"{launch} {case} {rope}")


@pytest.mark.parametrize("part", range(8))
def test_kernels(part):
    launches = itertools.cycle(LAUNCHES)
    for (case, rope), (tile, blocks, threads, planes, inline) in zip(EVERYTHING[part::8], launches, strict=False):
        compare_kernels(case, rope, Launch(None, tile, blocks, threads, None, inline, None, planes))


def test_a_range_of_key_planes_leaves_the_others():
    case, rope = case_of("unlike_layers", torch.bfloat16), rope_of(6, torch.float32, True)
    world = world_of(case, rope)
    plan = world.plan()
    for planes in ((2, 3), (0, 2)):
        stored = Launch(planes=planes).scatter_rotated(plan).stored_bytes
        assert stored * NL == moved_bytes(case) * (planes[1] - planes[0])
    assert Launch(planes=(NL, 2 * NL)).move(plan, "scatter").stored_bytes == moved_bytes(case)
    assert_same_worlds(world, expected_of(case, rope), "in two ranges")


@pytest.mark.parametrize("slot", [21, 1 << 31, (1 << 63) - 1])
def test_kernels_skip_slots_out_of_range_and_name_the_first(slot):
    slots = list(REQUEST.slots)
    slots[4] = slots[9] = slot
    rope = rope_of(6, torch.float32, True)
    bad, good = (
        case_of("hnd", torch.float16, request=replace(REQUEST, slots=[-1 if skips and s == slot else s for s in slots]))
        for skips in (False, True)
    )
    world = world_of(bad, rope)
    assert Launch().scatter_rotated(world.plan()) == Outcome(0, moved_bytes(good), 0, 4)
    Launch(planes=(NL, 2 * NL)).move(world.plan(), "scatter")
    assert_same_worlds(world, expected_of(good, rope), f"slot {slot}")


@pytest.mark.parametrize("position", [MAX_POSITION, -1, 1 << 40])
def test_kernels_skip_what_cannot_be_rotated_and_name_the_first(position):
    """A plan that was not checked: the pairs of such a token stay; what is not rotated moves."""
    case, rope = case_of("nhd", torch.float32), rope_of(6, torch.float32, False)
    world = world_of(case, rope)
    plan = world.plan()
    plan.rotation.old_positions[[6, 11]] = position
    flag = array("Q", [NO_BAD_TOKEN])
    assert Launch().scatter_rotated(plan, flag).bad_token == NO_BAD_TOKEN
    assert list(flag) == [6]
    expected = expected_of(case, rope)
    pages, wanted = (w.cache.planes[1][0].clone() for w in (world, expected))
    before = world_of(case, rope).cache.planes[1][0]
    for token in (6, 11):
        block, offset = divmod(REQUEST.slots[token], BS)
        wanted[block, offset, :, :6] = before[block, offset, :, :6]
    assert torch.equal(pages.view(torch.int32), wanted.view(torch.int32))


# ------------------------------------------------------------------------------------------------ backends


@pytest.fixture(scope="module")
def cpu() -> Operations:
    return get_backend("cpu")


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("streaming", [False, True])
def test_cpu(streaming, part, cpu, monkeypatch):
    monkeypatch.setattr(cpu_module, "ONE_THREAD_BYTES", 0)
    monkeypatch.setattr(cpu_module, "TILE_TOKENS", 3)
    if streaming:
        monkeypatch.setattr(cpu_module, "STREAM_BYTES", 0)
    for case, rope in EVERYTHING[part::8]:
        world = world_of(case, rope)
        cpu.scatter(world.plan())
        assert_same_worlds(world, expected_of(case, rope), f"{case} {rope}")


def test_cpu_real_sizes(cpu):
    """More pairs than are in hand at once; rows of whole cache lines."""
    slots = torch.randperm(32 * 16, generator=torch.Generator().manual_seed(5)).tolist()
    case = Case(
        Sizes(2, 2, 32, 16, 4, 256), torch.bfloat16, GEOMETRIES["hnd"], FORMATS["KV_2LTD"], Request(slots, ((0, 300),))
    )
    rope = rope_of(160, torch.float32, True)
    world = world_of(case, rope)
    cpu.scatter(world.plan())
    assert_same_worlds(world, expected_of(case, rope), "real sizes")


def refuse(backend: Operations, way: Way, monkeypatch) -> None:
    """Slots on the host that are out of range or twice, and a gather: nothing is written."""
    rope = rope_of(6, torch.float32, True)
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    for slot, error in ((NB * BS, SlotRangeError), (REQUEST.slots[4], DuplicateSlotError), (None, ArgumentError)):
        slots = list(REQUEST.slots)
        slots[9] = slots[9] if slot is None else slot
        case = case_of("nhd", torch.bfloat16, request=replace(REQUEST, slots=slots))
        world = world_of(case, rope, way)
        with pytest.raises(error):
            (backend.gather if slot is None else backend.scatter)(world.plan())
        assert_same_worlds(world, world_of(case, rope), str(error))


def test_cpu_refuses_what_it_must(cpu, monkeypatch):
    assert cpu.rotates
    refuse(cpu, HOST, monkeypatch)


def blended(name: str, monkeypatch, **changed) -> tuple[torch.Tensor, int]:
    """The engine's memory after a load at other positions, with gaps, and how often `rerotate` was called. changed: of the
    backend's operations."""
    calls, backend = [], get_backend(name)
    used = replace(backend, rerotate=lambda *given: calls.append(given) or backend.rerotate(*given), **changed)
    monkeypatch.setattr(layerwise, "get_backend", lambda device: used)
    bench = Bench("buffer", rope=RotarySpec(rotary_table(64, 8)))
    opened = Open(bench, "load", [(1, 3), (4, 6), (9, 10)])
    for row in opened.objects:
        for obj in row[:2]:
            obj.metadata.cached_positions = obj.metadata.cached_positions + 20
    opened.finish()
    return bench.engine[0].clone(), len(calls)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_blend_calls_rerotate_only_where_the_scatter_does_not_rotate(name, monkeypatch):
    expected, _ = blended("reference", monkeypatch, rotates=False)
    for rotates, num_calls in ((True, 0), (False, 3)):
        found, calls = blended(name, monkeypatch, rotates=rotates)
        assert calls == num_calls
        assert_same(found.flatten(), expected.flatten(), f"rotates={rotates}")


@on_gpu
@pytest.mark.parametrize("way", ON_GPU, ids=str)
def test_cuda(way, monkeypatch):
    """Chunks in pinned, pageable and device memory; in segments that hold keys, values or both; slots on both sides."""
    cuda = get_backend("cuda")
    for name, value in way.variables.items():
        monkeypatch.setenv(name, value)
    for case, rope in EVERYTHING:
        world = world_of(case, rope, way)
        cuda.scatter(world.plan()).synchronize()
        assert_same_worlds(world, expected_of(case, rope), f"{way} {case} {rope}")


@on_gpu
@pytest.mark.parametrize("chunks", ["pinned", "device"])
@pytest.mark.parametrize("geometry", ["nhd", "hnd"])
def test_cuda_real_sizes(geometry, chunks):
    slots = torch.randperm(256 * 16, generator=torch.Generator().manual_seed(5)).tolist()
    spans = tuple((start, start + 256) for start in range(0, 2560, 256))
    case = Case(
        Sizes(4, 2, 256, 16, 8, 128), torch.bfloat16, GEOMETRIES[geometry], FORMATS["KV_2LTD"], Request(slots, spans)
    )
    for is_neox in (True, False):
        rope = rope_of(128, torch.float32, is_neox)
        world = world_of(case, rope, Way(chunks, "device", "device", {}))
        get_backend("cuda").scatter(world.plan()).synchronize()
        assert_same_worlds(world, expected_of(case, rope), f"{geometry} {chunks}")


@on_gpu
def test_cuda_refuses_what_it_must(monkeypatch):
    cuda = get_backend("cuda")
    assert cuda.rotates
    refuse(cuda, Way("pinned", "pageable", "device", {}), monkeypatch)


@on_gpu
def test_cuda_names_a_bad_slot_on_the_device():
    slots = list(REQUEST.slots)
    slots[4], slots[9] = NB * BS, 1 << 40
    rope = rope_of(HS, torch.float32, True)
    bad = case_of("hnd", torch.bfloat16, request=replace(REQUEST, slots=slots))
    good = case_of("hnd", torch.bfloat16, request=replace(REQUEST, slots=[-1 if s >= NB * BS else s for s in slots]))
    for chunks in ("pinned", "device"):
        world = world_of(bad, rope, Way(chunks, "device", "device", {}))
        with pytest.raises(SlotRangeError, match=r"slots\[4\] = 21"):
            get_backend("cuda").scatter(world.plan()).synchronize()
        assert_same_worlds(world, expected_of(good, rope), chunks)


@on_gpu
def test_cuda_positions_on_the_device_and_a_table_there():
    """Whoever owns the positions may overwrite them after the call."""
    case, rope = case_of("nhd", torch.bfloat16), rope_of(HS, torch.float32, True)
    world = world_of(case, RotarySpec(rope.cos_sin_cache.cuda(), True), Way("pinned", "device", "device", {}))
    plan = world.plan()
    old, new = (p.cuda() for p in positions(2, len(plan.slots)))
    rotation = Rerotation(old, new, world.rope).checked(plan.cache, len(plan.slots))
    transfer = get_backend("cuda").scatter(replace(plan, rotation=rotation))
    old.zero_()
    new.zero_()
    transfer.synchronize()
    assert_same_worlds(world, expected_of(case, rope), "positions on the device")
