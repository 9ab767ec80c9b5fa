"""Re-rotation, bit for bit against the scalar oracle, and the bits that it must leave alone.

The oracle is also run on implementations that are wrong on purpose, and must refuse them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lmcache_ref.rope import RotarySpec, rerotate, rotary_table
from rope_mutants import (
    as_written,
    by_the_reciprocal,
    dividing_last,
    doing_nothing,
    fused_multiply_add,
    implement,
    rotating_equal_positions_too,
    rounding_in_between,
    with_old_and_new_swapped,
    with_sines_first,
    with_the_other_pairing,
    without_n,
)
from rope_oracle import (
    BITS,
    LLAMA3,
    MAX_POSITION,
    YARN,
    assert_same_bits,
    check_oracle,
    oracle,
    random_bits,
    random_keys,
    random_positions,
    round_to_bfloat16,
)

ORACLE_CASES = list(
    itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        (True, False),
        ("default", "yarn"),
        (16, 6),
        (torch.float32, torch.bfloat16, torch.float64),
    )
)


@pytest.mark.parametrize(("dtype", "is_neox", "scaling", "rotary_dim", "table_dtype"), ORACLE_CASES)
def test_bits_of_the_scalar_oracle(dtype, is_neox, scaling, rotary_dim, table_dtype):
    assert check_oracle(rerotate, dtype, is_neox, scaling, rotary_dim, table_dtype) > 20 * 2 * rotary_dim


@pytest.mark.parametrize("NH", (1, 3))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_bits_of_the_scalar_oracle_at_full_head_size(dtype, NH):
    """Long enough rows for torch's vector code, and far enough positions for every quadrant."""
    for is_neox in (True, False):
        rope = RotarySpec(rotary_table(MAX_POSITION, 128, 500000.0, LLAMA3), is_neox)
        keys = random_keys((40, NH, 128), dtype, seed=21)
        old, new = random_positions(40, 22), random_positions(40, 23)
        expected = oracle(keys, old, new, rope)
        rerotate(keys, old, new, rope)
        assert_same_bits(keys, expected, f"{dtype}-{is_neox}")


def test_number_of_oracle_cases():
    assert len(ORACLE_CASES) == len(set(ORACLE_CASES)) == 4 * 2 * 2 * 2 * 3


def test_bfloat16_rounding_of_the_oracle_is_half_to_even():
    assert round_to_bfloat16(1 + 2**-8) == 1.0  # a tie, down to the even one
    assert round_to_bfloat16(1 + 3 * 2**-8) == 1 + 2**-6  # a tie, up to the even one
    assert round_to_bfloat16(-(1 + 2**-8 + 2**-20)) == -(1 + 2**-7)
    assert math.copysign(1, round_to_bfloat16(-0.0)) == -1


# ------------------------------------------------------------------------------------------- wrong on purpose


def test_the_formula_as_written_passes_the_oracle():
    """So that the mutants below fail for their formula, not for the frame around it."""
    for dtype, is_neox in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        check_oracle(implement(as_written), dtype, is_neox, "yarn", 6, torch.float32)


MUTANTS = {
    "other pairing": (with_the_other_pairing, torch.float32),
    "old and new swapped": (with_old_and_new_swapped, torch.float32),
    "sines first": (with_sines_first, torch.float32),
    "equal positions rotated": (rotating_equal_positions_too, torch.float32),
    "nothing done": (doing_nothing, torch.float32),
    "without n": (implement(without_n), torch.float32),
    "times the reciprocal of n": (implement(by_the_reciprocal), torch.float32),
    "division last": (implement(dividing_last), torch.float32),
    "fused multiply-add": (implement(fused_multiply_add), torch.float32),
    "rounded in between": (implement(rounding_in_between), torch.bfloat16),
    "rounded in between, half": (implement(rounding_in_between), torch.float16),
}


@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_catches_mutants(name, is_neox):
    implementation, dtype = MUTANTS[name]
    with pytest.raises(AssertionError, match=r"differ, first at \(t, nh, hs\)"):
        check_oracle(implementation, dtype, is_neox, "yarn", 16, torch.float32)


# ------------------------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_equal_positions_and_unrotated_dims_keep_their_bits(dtype, is_neox):
    keys = random_bits((8, 2, 16), dtype, seed=7)
    assert keys[0].isnan().any()
    keys[1::2, :, :12] = random_keys((4, 2, 12), dtype, seed=8)
    before = keys.clone()
    old, new = torch.arange(8), torch.arange(8)
    new[1::2] += 20
    table = rotary_table(64, 12)
    table[::2] = 0.0  # n = 0 does not matter for a row that stays
    rerotate(keys, old, new, RotarySpec(table, is_neox))
    assert_same_bits(keys[0::2].contiguous(), before[0::2].contiguous(), "rows that stay")
    assert_same_bits(keys[..., 12:].contiguous(), before[..., 12:].contiguous(), "dims that are not rotated")
    assert (keys[1::2, :, :12] != before[1::2, :, :12]).any(-1).all()


def strided_views(buffer: Tensor) -> dict[str, Tensor]:
    """Keys `[6, 2, 16]` as an engine may hold them, in a buffer of 4096 elements."""
    return {
        "tight": buffer[:192].view(6, 2, 16),
        "offset": buffer[37 : 37 + 192].view(6, 2, 16),
        "padded token": buffer.as_strided((6, 2, 16), (80, 16, 1), 5),
        "padded head": buffer.as_strided((6, 2, 16), (80, 40, 1), 5),
        "head-major": buffer[:256].view(2, 8, 16)[:, 1:7].transpose(0, 1),
        "K beside V": buffer[:384].view(6, 2, 2, 16)[:, 0],
        "every other dim": buffer[:384].view(6, 2, 32)[..., 1::2],
        "dims outermost": buffer[:192].view(16, 2, 6).permute(2, 1, 0),
        "half of a head": buffer[:384].view(6, 2, 32)[..., 16:],
    }


@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_in_place_on_any_view(dtype, is_neox):
    rope = RotarySpec(rotary_table(64, 12), is_neox)
    old, new = random_positions(6, 9, 0, 64), random_positions(6, 10, 0, 64)
    values = random_keys((6, 2, 16), dtype, seed=11)
    moved = oracle(values, old, new, rope)
    sentinel = torch.full((4096 * values.element_size(),), 0xA5, dtype=torch.uint8).view(dtype)
    names = list(strided_views(sentinel))
    assert len(names) == 9
    for name in names:
        buffer, expected = sentinel.clone(), sentinel.clone()
        strided_views(buffer)[name].copy_(values)
        strided_views(expected)[name].copy_(moved)
        rerotate(strided_views(buffer)[name], old, new, rope)
        assert_same_bits(buffer, expected, name)


def test_the_whole_buffer_comparison_sees_a_neighbour():
    buffer = torch.zeros(16)
    with pytest.raises(AssertionError, match=r"1/16 differ.*\(3,\).*expected 00000000, got 80000000"):
        assert_same_bits(buffer.clone().index_fill_(0, torch.tensor(3), -0.0), buffer, "neighbour")


@pytest.mark.parametrize("shape", ((0, 2, 16), (3, 0, 16)))
def test_nothing_to_move(shape):
    keys = torch.zeros(()).expand(shape)  # stride 0 overlaps nothing where there is nothing
    positions = torch.arange(shape[0])
    rerotate(keys, positions, positions + 1, RotarySpec(rotary_table(8, 16)))
    assert keys.shape == shape


@pytest.mark.parametrize("position_dtype", (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), ids=str)
def test_positions_of_any_integer_dtype(position_dtype):
    rope = RotarySpec(rotary_table(64, 16))
    keys = random_keys((6, 2, 16), torch.float32, seed=12)
    old, new = random_positions(6, 13, 0, 64), random_positions(6, 14, 0, 64)
    expected = oracle(keys, old, new, rope)
    rerotate(keys, old.to(position_dtype), new.to(position_dtype), rope)
    assert_same_bits(keys, expected, str(position_dtype))


def test_keys_and_tables_that_want_gradients():
    rope = RotarySpec(rotary_table(64, 16).requires_grad_())
    keys = torch.nn.Parameter(random_keys((6, 2, 16), torch.float32, seed=12))
    expected = oracle(keys.detach(), torch.arange(6), torch.arange(6) + 1, rope)
    rerotate(keys, torch.arange(6), torch.arange(6) + 1, rope)
    assert_same_bits(keys.detach(), expected, "parameter")


@pytest.mark.gpu
@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_bits_on_cuda(dtype, is_neox):
    """Keys on the device; positions and table on the host or on the device."""
    rope = RotarySpec(rotary_table(MAX_POSITION, 96, scaling=YARN), is_neox)
    keys = random_keys((512, 4, 128), dtype, seed=15, spread=4)
    old, new = random_positions(512, 16), random_positions(512, 17)
    expected = keys.clone()
    rerotate(expected, old, new, rope)
    for where in ("cpu", "cuda"):
        on_device = keys.cuda()
        there = RotarySpec(rope.cos_sin_cache.to(where), is_neox)
        rerotate(on_device, old.to(where), new.to(where), there)
        assert_same_bits(on_device.cpu(), expected, f"positions and table on {where}")
