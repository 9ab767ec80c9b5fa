"""The text of csrc/*.cu against the specification, without a GPU: every vector width, tile and grid.

What only a GPU can show (streams, speed) is in `test_cuda_backend.py`; that compilers take the text for each architecture
is in `test_architectures.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from emulated import NO_BAD_TOKEN, Launch, Outcome, rotate
from hypothesis import given
from hypothesis import strategies as st
from rotations import KEY_DTYPES, ROTARY_DIMS, STRIDES, compare, positions, storage, table
from strided import FORMATS, GEOMETRIES, REQUEST, ROWS, Case, Request, Sizes, World, assert_same_worlds

from lmcache_ref import rope as spec
from lmcache_ref.backends import get_backend
from lmcache_ref.rope import RotarySpec

DIRECTIONS = ("gather", "scatter")
REFERENCE = get_backend("reference")


def bytes_to_move(case: Case) -> int:
    request, sizes = case.request, case.sizes
    tokens = [token for start, end in request.spans for token in range(max(start, request.skip), end)]
    num_planes = sizes.TWO * (1 if case.format.one_layer else sizes.NL)
    return sum(request.slots[token] >= 0 for token in tokens) * num_planes * sizes.D * case.dtype.itemsize


def compare_move(case: Case, direction: str, launch: Launch) -> None:
    worlds = [World(case, gathers=direction == "gather") for _ in range(2)]
    outcome = launch.move(worlds[0].plan(), direction)
    assert outcome == Outcome(0, bytes_to_move(case), 0, NO_BAD_TOKEN)
    getattr(REFERENCE, direction)(worlds[1].plan())
    assert_same_worlds(*worlds, f"{direction} {launch} {case}")


# ------------------------------------------------------------------------------------------------ the move


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_any_strides_at_the_widest_vector(geometry, direction):
    for (NH, HS, dtype), chunk_format, chunk_pad in itertools.product(ROWS, FORMATS.values(), (0, 3)):
        sizes = Sizes(3, chunk_format.planes, 7, 3, NH, HS)
        case = Case(sizes, dtype, GEOMETRIES[geometry], chunk_format, REQUEST, chunk_pad)
        compare_move(case, direction, Launch())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("width_bytes", [1, 2, 4, 8, 16])
def test_every_width_tile_and_grid(width_bytes, inline, direction):
    """Heads together and apart; rows of a few vectors and of many; tiles and grids that do not divide the work."""
    for geometry, NH, (tile_tokens, blocks, threads, planes_per_unit) in itertools.product(
        ("nhd", "hnd", "unlike_layers"), (3, 80), ((1, 1, 32, 4), (3, 2, 64, 1), (4, 31, 96, 3), (256, 5, 256, 2))
    ):
        case = Case(Sizes(2, 2, 7, 4, NH, 32), torch.bfloat16, GEOMETRIES[geometry], FORMATS["KV_2LTD"], REQUEST)
        launch = Launch(width_bytes, tile_tokens, blocks, threads, inline=inline, planes_per_unit=planes_per_unit)
        compare_move(case, direction, launch)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("geometry", ["nhd", "hnd", "unlike_layers"])
def test_a_range_of_planes_leaves_the_others(geometry, direction):
    """Ranges that together are all planes move all, whatever the order; each moves its own part only."""
    case = Case(Sizes(3, 2, 7, 4, 2, 8), torch.bfloat16, GEOMETRIES[geometry], FORMATS["KV_2LTD"], REQUEST)
    worlds = [World(case, gathers=direction == "gather") for _ in range(2)]
    plan, stored = worlds[0].plan(), []
    for planes in ((4, 6), (0, 1), (1, 4)):
        stored.append(Launch(planes=planes, blocks=2).move(plan, direction).stored_bytes)
    assert [6 * part for part in stored] == [count * bytes_to_move(case) for count in (2, 1, 3)]
    getattr(REFERENCE, direction)(worlds[1].plan())
    assert_same_worlds(*worlds, f"{direction} {case}")


def test_a_vector_too_wide_is_noticed():
    """The checker's own test: 16 bytes where addresses allow 2."""
    case = Case(Sizes(2, 2, 7, 4, 1, 32), torch.bfloat16, GEOMETRIES["off_by_one"], FORMATS["KV_2LTD"], REQUEST)
    assert Launch(width_bytes=16).move(World(case, gathers=True).plan(), "gather").misaligned_vectors > 0


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=9),
    skip=st.integers(0, 70),
    tile_tokens=st.integers(1, 9),
    direction=st.sampled_from(DIRECTIONS),
    slots=st.permutations([*range(63), *[-1] * 6]),
)
def test_ragged_chunks_and_tiles(spans, skip, tile_tokens, direction, slots):
    taken = 0
    apart = []
    for start, length in sorted(spans):  # chunks may not share a token: a slot is written once
        if start >= taken:
            apart.append((start, start + length))
            taken = start + length
    request = Request(tuple(slots), tuple(apart), skip)
    case = Case(Sizes(2, 2, 9, 7, 2, 8), torch.bfloat16, GEOMETRIES["fused"], FORMATS["KV_2LTD"], request)
    compare_move(case, direction, Launch(tile_tokens=tile_tokens))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slot", [21, 1 << 31, (1 << 32) + 1, (1 << 63) - 1])
def test_slots_out_of_range_are_skipped_and_the_first_is_named(slot, direction):
    slots = list(REQUEST.slots)
    slots[4] = slots[9] = slot
    bad, good = (
        Case(
            Sizes(2, 2, 7, 3, 2, 8),
            torch.bfloat16,
            GEOMETRIES["hnd"],
            FORMATS["KV_2LTD"],
            Request(tuple(-1 if skips and s == slot else s for s in slots), REQUEST.spans, REQUEST.skip),
        )
        for skips in (False, True)
    )
    for tile_tokens in (1, 4):
        world, expected = World(bad, direction == "gather"), World(good, direction == "gather")
        outcome = Launch(tile_tokens=tile_tokens).move(world.plan(), direction)
        assert outcome == Outcome(0, bytes_to_move(good), 0, 4)
        getattr(REFERENCE, direction)(expected.plan())
        assert_same_worlds(world, expected, f"slot {slot}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("BS", [3, 4])
def test_block_ids(BS, direction):
    """Ids of whole blocks mean the slots of their tokens, negative ones nothing; one that is out of range is the first bad
    token, though its product with BS fits into 64 bits as a slot."""
    block_ids = [5, -1, 2, 6]
    slots = tuple(-1 if block < 0 else block * BS + offset for block in block_ids for offset in range(BS))
    request = Request(slots, ((1, BS), (BS, 4 * BS - 1)))
    case = Case(Sizes(2, 2, 7, BS, 2, 8), torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], request)
    compare_move(case, direction, Launch(block_ids=torch.tensor(block_ids)))
    wraps = (1 << 64) // 4 if BS == 4 else 7
    world = World(case, direction == "gather")
    bad_ids = torch.tensor([5, 2, wraps, 6])
    assert Launch(block_ids=bad_ids).move(world.plan(), direction).bad_token == 2 * BS


# ------------------------------------------------------------------------------------------------ the re-rotation


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("table_dtype", KEY_DTYPES, ids=str)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_rotation_bits(key_dtype, table_dtype, is_neox):
    for strides, rotary_dim in itertools.product(STRIDES, ROTARY_DIMS):
        rope = RotarySpec(table(rotary_dim, table_dtype), is_neox)
        assert compare(rotate, spec.rerotate, strides, key_dtype, rope) > 0


def test_rotation_skips_what_cannot_be_rotated_and_names_the_first():
    cos_sin = table(6, torch.float32)
    cos_sin[7, [2, 5]] = 0.0  # pair 2 of position 7
    rope = RotarySpec(cos_sin, True)
    old, new = positions(0)
    old[old == 7], new[new == 7] = 8, 8
    flat = storage(torch.bfloat16, 0)
    for token, position, stays in ((9, 7, False), (4, 64, False), (4, 64, True), (3, -1, False)):
        wrong, wanted, bad = old.clone(), new.clone(), []
        wrong[token] = position
        if stays:
            wanted[token] = position
        keys, expected = (STRIDES["tokens outermost"](flat.clone()) for _ in range(2))
        rotate(keys, wrong, wanted, rope, bad)
        assert bad == [token]
        spec.rerotate(expected, old, new, rope)
        others = torch.arange(len(old)) != token
        assert torch.equal(keys[others].view(torch.int16), expected[others].view(torch.int16))
