"""The laws of case 28: re-rotation within stated bounds of complex-number rotation.

The bounds are those of the contract (float64 1e-12, float32 1e-5 of the pair's norm, narrower keys one rounding);
implementations that are wrong on purpose must break them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lmcache_ref.rope import RotarySpec, rerotate, rotary_table
from rope_mutants import (
    doing_nothing,
    implement,
    rounding_in_between,
    with_old_and_new_swapped,
    with_sines_first,
    with_the_other_pairing,
    without_n,
)
from rope_oracle import (
    MAX_POSITION,
    SCALINGS,
    SIGNIFICAND_BITS,
    as_complex,
    assert_same_bits,
    pair_dims,
    random_keys,
    random_positions,
)


def turns_at(positions: Tensor, table: Tensor) -> Tensor:
    """What position p multiplies a pair by, `[T, 1, pair]`."""
    cos, sin = table.double()[positions].chunk(2, dim=-1)
    return torch.complex(cos, sin)[:, None]


def from_complex(pairs: Tensor, keys: Tensor, is_neox: bool) -> Tensor:
    """A copy of `keys` whose rotary dims are `pairs`, rounded once."""
    first, second = (list(dims) for dims in zip(*pair_dims(2 * pairs.shape[-1], is_neox), strict=True))
    result = keys.clone()
    result[..., first], result[..., second] = pairs.real.to(keys.dtype), pairs.imag.to(keys.dtype)
    return result


def case_28(dtype: torch.dtype, is_neox: bool, scaling: str, rotary_dim: int, backwards: bool):
    """(keys rotated to p, p, q, spec, the same keys before any rotation as complex numbers)."""
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    rope = RotarySpec(rotary_table(MAX_POSITION, rotary_dim, None, SCALINGS[scaling], table_dtype), is_neox)
    p, q = random_positions(32, 3).sort().values, random_positions(32, 4).sort().values
    p, q = torch.minimum(p, q), torch.maximum(p, q) + 1
    if backwards:
        p, q = q, p
    raw = random_keys((32, 2, 64), dtype, seed=5)
    raw_pairs = as_complex(raw, rotary_dim, is_neox)
    return from_complex(raw_pairs * turns_at(p, rope.cos_sin_cache), raw, is_neox), p, q, rope, raw_pairs


def check_against_direct(implementation, relative_bound: float, case) -> None:
    """K at p moved to q, against K rotated to q directly: within `relative_bound` of the pair's norm."""
    keys, p, q, rope, raw_pairs = case
    before = keys.clone()
    implementation(keys, p, q, rope)
    direct = raw_pairs * turns_at(q, rope.cos_sin_cache)
    error = (as_complex(keys, rope.rotary_dim, rope.is_neox) - direct).abs() / direct.abs()
    assert error.max() <= relative_bound, f"relative error {error.max():.3g} > {relative_bound}"
    rest = slice(rope.rotary_dim, None)
    assert_same_bits(keys[..., rest].contiguous(), before[..., rest].contiguous(), "dims that are not rotated")


def check_one_rounding(implementation, case) -> None:
    """Narrow keys, against the float64 re-rotation of the same stored bits: half a unit in the last place, for the
    one rounding, and 16 roundings of the float32 arithmetic, which count where x' is small beside its pair."""
    keys, p, q, rope, _ = case
    before = keys.clone()
    stored = as_complex(before, rope.rotary_dim, rope.is_neox)
    exact_pairs = stored / turns_at(p, rope.cos_sin_cache) * turns_at(q, rope.cos_sin_cache)
    exact = from_complex(exact_pairs, before.double(), rope.is_neox)
    norm = from_complex(torch.complex(exact_pairs.abs(), exact_pairs.abs()), before.double(), rope.is_neox)
    implementation(keys, p, q, rope)
    _, exponent = torch.frexp(exact)
    smallest = torch.finfo(keys.dtype).smallest_normal
    exponent = exponent.clamp(min=int(math.log2(smallest)) + 1)
    half_unit = 2.0 ** (exponent - SIGNIFICAND_BITS[keys.dtype] - 1).double()
    excess = (keys.double() - exact).abs() - (half_unit + 16 * 2**-24 * norm)
    rotary, rest = slice(0, rope.rotary_dim), slice(rope.rotary_dim, None)
    assert excess[..., rotary].max() <= 0, f"more than one rounding, by {excess.max():.3g}"
    assert_same_bits(keys[..., rest].contiguous(), before[..., rest].contiguous(), "dims that are not rotated")


def check_case_28(implementation, dtype, is_neox, scaling, rotary_dim, backwards) -> None:
    case = case_28(dtype, is_neox, scaling, rotary_dim, backwards)
    if dtype in SIGNIFICAND_BITS:
        check_one_rounding(implementation, case)
    else:
        check_against_direct(implementation, {torch.float64: 1e-12, torch.float32: 1e-5}[dtype], case)


CASE_28 = list(
    itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        (True, False),
        SCALINGS,
        (64, 24),
        (True, False),
    )
)


@pytest.mark.parametrize(("dtype", "is_neox", "scaling", "rotary_dim", "backwards"), CASE_28)
def test_case_28(dtype, is_neox, scaling, rotary_dim, backwards):
    check_case_28(rerotate, dtype, is_neox, scaling, rotary_dim, backwards)


def test_case_28_is_what_it_says():
    assert len(CASE_28) == len(set(CASE_28)) == 4 * 2 * 4 * 2 * 2
    for backwards in (True, False):
        _, p, q, rope, _ = case_28(torch.float32, True, "yarn", 24, backwards)
        assert len(p) == 32 and min(p.min(), q.min()) >= 1000
        assert bool((q < p).all() if backwards else (q > p).all())
        n = rope.cos_sin_cache[:, :12] ** 2 + rope.cos_sin_cache[:, 12:] ** 2
        assert ((n - (0.1 * math.log(4) + 1) ** 2).abs() < 1e-5).all()  # YaRN's scale is in the table


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize(
    "mutant",
    (with_the_other_pairing, with_old_and_new_swapped, with_sines_first, implement(without_n), doing_nothing),
    ids=("pairing", "swapped", "sines-first", "without-n", "nothing"),
)
def test_case_28_catches_mutants(mutant, dtype):
    for is_neox in (True, False):
        with pytest.raises(AssertionError, match=r"relative error|one rounding"):
            check_case_28(mutant, dtype, is_neox, "yarn", 24, True)


@pytest.mark.parametrize("dtype", SIGNIFICAND_BITS, ids=str)
def test_one_rounding_catches_two(dtype):
    for is_neox in (True, False):
        with pytest.raises(AssertionError, match="more than one rounding"):
            check_case_28(implement(rounding_in_between), dtype, is_neox, "default", 24, True)


def test_a_rounded_table_is_undone_exactly():
    """A bfloat16 table shrinks and stretches pairs by up to 0.4 %; n takes that back, so errors do not add up."""
    rope = RotarySpec(rotary_table(MAX_POSITION, 64, dtype=torch.bfloat16))
    raw = random_keys((32, 2, 64), torch.float32, seed=6)
    keys = from_complex(as_complex(raw, 64, True) * turns_at(torch.full((32,), 7), rope.cos_sin_cache), raw, True)
    path = [torch.full((32,), 7), *(random_positions(32, seed) for seed in range(20))]
    for p, q in itertools.pairwise(path):
        rerotate(keys, p, q, rope)
    direct = as_complex(raw, 64, True) * turns_at(path[-1], rope.cos_sin_cache)
    assert ((as_complex(keys, 64, True) - direct).abs() / direct.abs()).max() < 1e-5
