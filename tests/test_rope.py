"""Re-rotation: bit for bit against a scalar oracle, and within stated bounds of complex-number rotation.

The oracle is plain Python: one float operation at a time, each rounded through `struct`. The bounds are those of
the contract (float64 1e-12, float32 1e-5 of the pair's norm, narrower keys one rounding). Every checker here is
also run on implementations that are wrong on purpose, and must refuse them.
"""

from __future__ import annotations

import itertools
import math
import struct
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lmcache_ref.errors import ArgumentError, DtypeError, StrideError
from lmcache_ref.rope import RotarySpec, rerotate, rotary_table

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
BITS[torch.float64] = torch.int64
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {"default": None, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3, "yarn": YARN}
MAX_POSITION = 4096


# ------------------------------------------------------------------------------------------- helpers


def assert_same_bits(got: Tensor, expected: Tensor, case: str) -> None:
    """Same dtype, shape and bits: NaN payloads and the sign of zero count."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), case
    got_bits, expected_bits = got.view(BITS[got.dtype]), expected.view(BITS[got.dtype])
    bad = (got_bits != expected_bits).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        digits = got.element_size() * 2
        mask = (1 << 8 * got.element_size()) - 1
        raise AssertionError(
            f"{case}: {len(bad)}/{got.numel()} differ, first at (t, nh, hs) = {at}: expected "
            f"{expected_bits[at].item() & mask:0{digits}x}, got {got_bits[at].item() & mask:0{digits}x}"
        )


def random_keys(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: int = 0) -> Tensor:
    """Normal numbers, scaled by powers of two up to 2 ** +-spread."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spread:
        exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
        values = torch.ldexp(values, exponents)
    return values.to(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, quiet and signalling NaNs with payloads, infinities, -0.0 and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=BITS[dtype])
    infinity = torch.tensor(float("inf"), dtype=dtype).view(BITS[dtype]).item()
    special = [info.min, 0, 1, info.min + 1, infinity, infinity + 1, infinity - (-info.min), info.max, -1]
    bits.view(-1)[: len(special)] = torch.tensor(special, dtype=BITS[dtype])
    return bits.view(dtype)


def random_positions(count: int, seed: int, low: int = 1000, high: int = MAX_POSITION) -> Tensor:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))


def pair_dims(rotary_dim: int, is_neox: bool) -> list[tuple[int, int]]:
    half = rotary_dim // 2
    return [(j, j + half) if is_neox else (2 * j, 2 * j + 1) for j in range(half)]


# ------------------------------------------------------------------------------------------- the scalar oracle


def round_to_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def round_to_float16(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def round_to_bfloat16(value: float) -> float:
    """A float32 value, rounded half to even to its upper 16 bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    upper, lower = bits >> 16, bits & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


ROUND_TO_KEY = {
    torch.bfloat16: round_to_bfloat16,
    torch.float16: round_to_float16,
    torch.float32: lambda value: value,
    torch.float64: lambda value: value,
}


def oracle(keys: Tensor, old: Tensor, new: Tensor, rope: RotarySpec) -> Tensor:
    """A re-rotated copy. Python's floats are float64; rounding each float64 result to float32 once more gives the
    float32 result of + - * / exactly (53 >= 2 * 24 + 2 bits: the double rounding is harmless)."""
    r = (lambda value: value) if keys.dtype == torch.float64 else round_to_float32
    narrow = ROUND_TO_KEY[keys.dtype]
    table = [[r(value) for value in row] for row in rope.cos_sin_cache.tolist()]
    half = rope.rotary_dim // 2
    values = keys.tolist()
    for t, (p, q) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        if p == q:
            continue
        for head in values[t]:
            for j, (first, second) in enumerate(pair_dims(rope.rotary_dim, rope.is_neox)):
                c_old, s_old, c_new, s_new = table[p][j], table[p][half + j], table[q][j], table[q][half + j]
                x, y = head[first], head[second]
                n = r(r(c_old * c_old) + r(s_old * s_old))
                x0 = r(r(r(x * c_old) + r(y * s_old)) / n)
                y0 = r(r(r(y * c_old) - r(x * s_old)) / n)
                head[first] = narrow(r(r(x0 * c_new) - r(y0 * s_new)))
                head[second] = narrow(r(r(y0 * c_new) + r(x0 * s_new)))
    return torch.tensor(values, dtype=torch.float64).to(keys.dtype)


def check_oracle(
    implementation, dtype: torch.dtype, is_neox: bool, scaling: str, rotary_dim: int, table_dtype: torch.dtype
) -> int:
    """Raise unless `implementation` gives the oracle's bits; returns how many values were rotated."""
    table = rotary_table(64, rotary_dim, scaling=SCALINGS[scaling], dtype=table_dtype)
    rope = RotarySpec(table, is_neox)
    shape = (24, 2, 16)
    keys = random_keys(shape, dtype, seed=rotary_dim, spread=4 if dtype == torch.float16 else 12)
    keys[0], keys[1, 0], keys[2] = 0.0, -0.0, torch.finfo(dtype).tiny / 4  # zeros of both signs, subnormals
    old, new = random_positions(24, 1, 0, 64), random_positions(24, 2, 0, 64)
    expected = oracle(keys, old, new, rope)
    implementation(keys, old, new, rope)
    case = f"{dtype}-{'neox' if is_neox else 'gptj'}-{scaling}-rotary{rotary_dim}-table {table_dtype}"
    assert_same_bits(keys, expected, case)
    return int((old != new).sum()) * 2 * rotary_dim


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


def implement(formula):
    """An in-place re-rotation by index lists around `formula(x, y, c_old, s_old, c_new, s_new, key dtype)`."""

    def rerotate_by_formula(keys, old, new, rope):
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        first, second = (list(dims) for dims in zip(*pair_dims(rope.rotary_dim, rope.is_neox), strict=True))
        cos, sin = rope.cos_sin_cache.to(wide).chunk(2, dim=-1)
        c_old, s_old, c_new, s_new = (part[at][:, None] for at in (old, new) for part in (cos, sin))
        x, y = keys[..., first].to(wide), keys[..., second].to(wide)
        x_new, y_new = formula(x, y, c_old, s_old, c_new, s_new, keys.dtype)
        moved = (old != new)[:, None, None]
        keys[..., first] = torch.where(moved, x_new.to(keys.dtype), keys[..., first])
        keys[..., second] = torch.where(moved, y_new.to(keys.dtype), keys[..., second])

    return rerotate_by_formula


def as_written(x, y, c_old, s_old, c_new, s_new, dtype):
    n = c_old * c_old + s_old * s_old
    x0, y0 = (x * c_old + y * s_old) / n, (y * c_old - x * s_old) / n
    return x0 * c_new - y0 * s_new, y0 * c_new + x0 * s_new


def without_n(x, y, c_old, s_old, c_new, s_new, dtype):
    x0, y0 = x * c_old + y * s_old, y * c_old - x * s_old
    return x0 * c_new - y0 * s_new, y0 * c_new + x0 * s_new


def by_the_reciprocal(x, y, c_old, s_old, c_new, s_new, dtype):
    inverse = 1 / (c_old * c_old + s_old * s_old)
    x0, y0 = (x * c_old + y * s_old) * inverse, (y * c_old - x * s_old) * inverse
    return x0 * c_new - y0 * s_new, y0 * c_new + x0 * s_new


def dividing_last(x, y, c_old, s_old, c_new, s_new, dtype):
    n = c_old * c_old + s_old * s_old
    x0, y0 = x * c_old + y * s_old, y * c_old - x * s_old
    return (x0 * c_new - y0 * s_new) / n, (y0 * c_new + x0 * s_new) / n


def fused_multiply_add(x, y, c_old, s_old, c_new, s_new, dtype):
    """a * b + c * d as fma(a, b, c * d), which float64 does exactly enough for float32 operands."""

    def sum_of_products(a, b, c, d):
        return (a.double() * b.double() + (c * d).double()).to(a.dtype)

    n = sum_of_products(c_old, c_old, s_old, s_old)
    x0 = sum_of_products(x, c_old, y, s_old) / n
    y0 = sum_of_products(y, c_old, -x, s_old) / n
    return sum_of_products(x0, c_new, -y0, s_new), sum_of_products(y0, c_new, x0, s_new)


def rounding_in_between(x, y, c_old, s_old, c_new, s_new, dtype):
    n = c_old * c_old + s_old * s_old
    x0, y0 = (x * c_old + y * s_old) / n, (y * c_old - x * s_old) / n
    x0, y0 = x0.to(dtype).to(x.dtype), y0.to(dtype).to(y.dtype)
    return x0 * c_new - y0 * s_new, y0 * c_new + x0 * s_new


def with_the_other_pairing(keys, old, new, rope):
    rerotate(keys, old, new, RotarySpec(rope.cos_sin_cache, not rope.is_neox))


def with_old_and_new_swapped(keys, old, new, rope):
    rerotate(keys, new, old, rope)


def with_sines_first(keys, old, new, rope):
    rerotate(keys, old, new, RotarySpec(rope.cos_sin_cache.roll(rope.rotary_dim // 2, -1), rope.is_neox))


def rotating_equal_positions_too(keys, old, new, rope):
    """Rows with equal positions go through the arithmetic, as they do where nobody looks at them."""
    everywhere = RotarySpec(rope.cos_sin_cache.repeat(2, 1), rope.is_neox)
    rerotate(keys, old, new + rope.max_position, everywhere)


def doing_nothing(keys, old, new, rope):
    pass


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


# ------------------------------------------------------------------------------------------- the laws of case 28


def as_complex(keys: Tensor, rotary_dim: int, is_neox: bool) -> Tensor:
    """The pairs of `keys` as complex128 numbers `[T, NH, pair]`."""
    first, second = (list(dims) for dims in zip(*pair_dims(rotary_dim, is_neox), strict=True))
    return torch.complex(keys[..., first].double(), keys[..., second].double())


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


# ------------------------------------------------------------------------------------------- errors


GOOD = {"keys": torch.ones(4, 2, 16), "old": torch.arange(4), "new": torch.arange(4) + 4}
BAD_CALLS = {
    "2-D": ({"keys": torch.ones(4, 32)}, ArgumentError, r"keys: \[4, 32\].*\[T, NH, HS\]"),
    "no tensor": ({"keys": [[[1.0]]]}, ArgumentError, "keys: list"),
    "integer keys": ({"keys": torch.ones(4, 2, 16).to(torch.uint8)}, DtypeError, r"keys: dtype torch\.uint8.*bfloat16"),
    "fp8 keys": ({"keys": torch.ones(4, 2, 16).to(torch.float8_e4m3fn)}, DtypeError, "float8_e4m3fn"),
    "complex keys": ({"keys": torch.ones(4, 2, 16, dtype=torch.complex64)}, DtypeError, "complex64"),
    "short heads": ({"keys": torch.ones(4, 2, 8)}, ArgumentError, "HS = 8 is less than .* rotary_dim = 12"),
    "expanded": ({"keys": torch.ones(4, 1, 16).expand(4, 2, 16)}, StrideError, r"\[4, 2, 16\].*\[16, 0, 1\]"),
    "overlapping": ({"keys": torch.ones(99).as_strided((4, 2, 16), (16, 8, 1))}, StrideError, "overlaps"),
    "negative": ({"old": torch.tensor([0, 1, -1, 3])}, ArgumentError, r"old_positions\[2\] = -1 .*0\.\.31"),
    "too large": ({"new": torch.tensor([9, 31, 32, 99])}, ArgumentError, r"new_positions\[2\] = 32 .*0\.\.31"),
    "equal, too large": (
        {"old": torch.tensor([0, 1, 2, 32]), "new": torch.tensor([0, 1, 2, 32])},
        ArgumentError,
        r"old_positions\[3\] = 32 .*0\.\.31",
    ),
    "2-D positions": ({"old": torch.arange(4)[None]}, ArgumentError, r"old_positions: shape \[1, 4\].*\[4\]"),
    "too few": ({"new": torch.arange(3)}, ArgumentError, r"new_positions: shape \[3\].*\[4\]"),
    "float positions": ({"old": torch.arange(4.0)}, ArgumentError, r"old_positions: torch\.float32.*integers"),
    "bool positions": ({"new": torch.ones(4, dtype=torch.bool)}, ArgumentError, r"new_positions: torch\.bool"),
    "list positions": ({"new": [1, 2, 3, 4]}, ArgumentError, "new_positions: list"),
    "n = 0": ({"old": torch.tensor([0, 1, 30, 3])}, ArgumentError, r"old_positions\[2\] = 30: n .*pair 4 .* is 0\.0"),
    "n underflows": ({"old": torch.tensor([0, 29, 2, 3])}, ArgumentError, r"old_positions\[1\] = 29: n .* 0\.0"),
    "n overflows": ({"old": torch.tensor([0, 1, 2, 28])}, ArgumentError, r"old_positions\[3\] = 28: n .* inf"),
    "no spec": ({"rope": torch.ones(32, 12)}, ArgumentError, "rope: Tensor; a RotarySpec"),
}


def table_with_bad_rows() -> Tensor:
    table = rotary_table(32, 12)
    table[30, [4, 10]] = 0.0
    table[29, [4, 10]] = 1e-30
    table[28, [4, 10]] = 1e30
    return table


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_input_is_refused_before_anything_is_written(name):
    changes, error, message = BAD_CALLS[name]
    call = {**GOOD, "rope": RotarySpec(table_with_bad_rows()), **changes}
    keys = call["keys"].clone() if changes.keys().isdisjoint({"keys"}) else call["keys"]
    before = keys.clone() if isinstance(keys, Tensor) else None
    with pytest.raises(error, match=message):
        rerotate(keys, call["old"], call["new"], call["rope"])
    if before is not None:
        assert torch.equal(keys.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def test_the_good_call_is_good():
    keys = GOOD["keys"].clone()
    rerotate(keys, GOOD["old"], GOOD["new"], RotarySpec(table_with_bad_rows()))
    assert not torch.equal(keys, GOOD["keys"])
    assert len(BAD_CALLS) == 20


BAD_SPECS = {
    "no tensor": ([[1.0, 0.0]], True, ArgumentError, "cos_sin_cache: list"),
    "1-D": (torch.ones(4), True, ArgumentError, r"shape \[4\]"),
    "3-D": (torch.ones(4, 2, 2), True, ArgumentError, r"shape \[4, 2, 2\]"),
    "odd width": (torch.ones(4, 5), True, ArgumentError, r"shape \[4, 5\].*even"),
    "no columns": (torch.ones(4, 0), True, ArgumentError, r"shape \[4, 0\]"),
    "no rows": (torch.ones(0, 4), True, ArgumentError, r"shape \[0, 4\]"),
    "integers": (torch.ones(4, 4, dtype=torch.int32), True, DtypeError, "int32"),
    "complex": (torch.ones(4, 4, dtype=torch.complex64), True, DtypeError, "complex64"),
    "NaN": (torch.full((4, 4), float("nan")), True, ArgumentError, "not finite"),
    "infinite": (torch.full((4, 4), float("-inf"), dtype=torch.bfloat16), True, ArgumentError, "not finite"),
    "too large for float32": (torch.full((4, 4), 1e300, dtype=torch.float64), True, ArgumentError, "not finite"),
    "pairing by name": (torch.ones(4, 4), "neox", ArgumentError, "is_neox: 'neox'"),
    "pairing by number": (torch.ones(4, 4), 1, ArgumentError, "is_neox: 1"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_wrong_spec_cannot_be_made(name):
    table, is_neox, error, message = BAD_SPECS[name]
    with pytest.raises(error, match=message):
        RotarySpec(table, is_neox)


def test_a_spec_is_a_frozen_record():
    table = rotary_table(8, 4)
    spec = RotarySpec(table)
    assert (spec.max_position, spec.rotary_dim, spec.is_neox) == (8, 4, True)
    assert spec.cos_sin_cache is table
    with pytest.raises(AttributeError):
        spec.is_neox = False


# ------------------------------------------------------------------------------------------- tables


def hugging_face_module(dim: int, parameters: dict, max_position: int = MAX_POSITION, **config):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * dim,
            num_attention_heads=4,
            head_dim=dim,
            max_position_embeddings=max_position,
            rope_parameters=parameters,
            **config,
        )
    )


HUGGING_FACE_TABLES = {
    "default": (128, {"rope_type": "default", "rope_theta": 10000.0}),
    "default, other base": (64, {"rope_type": "default", "rope_theta": 500000.0}),
    "default, odd size": (80, {"rope_type": "default", "rope_theta": 1000000.0}),
    "linear": (128, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "linear, uneven": (64, {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.7}),
    "Llama 3.1": (
        128,
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    ),
    "Llama 3.2": (64, {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3, short context": (64, {**LLAMA3, "rope_theta": 10000.0}),
    "llama3, uneven": (256, {**LLAMA3, "rope_theta": 10000.0, "factor": 11.3, "low_freq_factor": 1.3}),
    "YaRN, long context": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 131072}),
    "YaRN, tiny context": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 128}),
    "YaRN, no ramp": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 6}),
    "YaRN, shrunk": (64, {**YARN, "rope_theta": 10000.0, "factor": 0.5}),
    "YaRN": (128, {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768}),
    "YaRN, short context": (64, {**YARN, "rope_theta": 10000.0}),
    "YaRN, attention factor": (64, {**YARN, "rope_theta": 10000.0, "attention_factor": 0.7}),
    "YaRN, mscale": (64, {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "YaRN, other betas": (64, {**YARN, "rope_theta": 10000.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    "YaRN, not truncated": (64, {**YARN, "rope_theta": 150000.0, "truncate": False}),
}


@pytest.mark.parametrize("name", HUGGING_FACE_TABLES)
def test_tables_have_the_bits_of_transformers(name):
    dim, parameters = HUGGING_FACE_TABLES[name]
    module = hugging_face_module(dim, dict(parameters))
    cos, sin = module(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    assert torch.equal(cos[0, :, : dim // 2], cos[0, :, dim // 2 :])  # theirs is one half, twice
    theirs = torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), dim=-1)
    assert_same_bits(rotary_table(MAX_POSITION, dim, scaling=parameters), theirs, name)
    assert_same_bits(RotarySpec.from_module(module, is_neox=True).cos_sin_cache, theirs, f"{name}, from_module")


def scalar_radians_per_position(kind: str, j: int, dim: int, base: float) -> float:
    """One pair at a time, from the papers; for the constants of LLAMA3 and YARN above."""
    theta = base ** (-2 * j / dim)
    turns = 1024 * theta / (2 * math.pi)
    if kind == "linear":
        return theta / 4
    if kind == "llama3":
        share = min(max((turns - 1) / (4 - 1), 0), 1)
        return (1 - share) * theta / 8 + share * theta
    if kind == "yarn":
        low = math.floor(dim / 2 * math.log(1024 / (32 * 2 * math.pi), base))
        high = math.ceil(dim / 2 * math.log(1024 / (1 * 2 * math.pi), base))
        interpolated = min(max((j - low) / (high - low), 0), 1)
        return interpolated * theta / 4 + (1 - interpolated) * theta
    return theta


@pytest.mark.parametrize("kind", SCALINGS)
def test_float64_tables_follow_the_papers(kind):
    dim, base = 64, 10000.0
    table = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind], torch.float64)
    scale = 0.1 * math.log(4) + 1 if kind == "yarn" else 1.0
    for position, j in itertools.product((0, 1, 1000, 4095), range(dim // 2)):
        angle = position * scalar_radians_per_position(kind, j, dim, base)
        assert table[position, j].item() == pytest.approx(scale * math.cos(angle), abs=1e-11)
        assert table[position, dim // 2 + j].item() == pytest.approx(scale * math.sin(angle), abs=1e-11)
    in_float32 = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind])
    assert (in_float32 - table).abs().max() < MAX_POSITION * 2**-22  # an angle of 4095 radians, rounded
    rounded = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind], torch.bfloat16)
    assert_same_bits(rounded, in_float32.bfloat16(), "bfloat16 is float32, rounded once")


def test_the_scalar_formulas_reach_every_branch():
    """The scalings of these tests leave fast pairs alone, slow slow pairs down fully, and blend some between."""
    for kind, factor in (("llama3", 8), ("yarn", 4)):
        slowed = [
            scalar_radians_per_position("default", j, 64, 1e4) / scalar_radians_per_position(kind, j, 64, 1e4)
            for j in range(32)
        ]
        assert slowed[0] == 1 and slowed[-1] == pytest.approx(factor)
        assert sum(1.01 < value < factor - 0.01 for value in slowed) >= 3


BAD_SCALINGS = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; supported are default, linear, llama3, yarn"),
    "longrope": ({"type": "longrope"}, "'longrope'"),
    "a list": ({"rope_type": ["yarn"]}, r"\['yarn'\]"),
    "mrope": ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "unknown .'mrope_section'"),
    "factor without a kind": ({"factor": 2.0}, r"'default': missing \[\], unknown \['factor'\]"),
    "linear without factor": ({"rope_type": "linear"}, r"missing \['factor'\]"),
    "no factor given": ({"rope_type": "linear", "factor": None}, r"missing \['factor'\]"),
    "llama3 half": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "missing .'high_freq_factor'"),
    "another's key": ({**YARN, "attn_factor": 1.0}, r"unknown \['attn_factor'\]; its keys are \['factor'"),
    "factor of 0": ({"rope_type": "linear", "factor": 0.0}, "factor = 0.0"),
    "negative factor": ({**YARN, "factor": -4.0}, "factor = -4.0"),
    "factor as text": ({"rope_type": "linear", "factor": "2"}, "factor = '2'"),
    "factor as bool": ({"rope_type": "linear", "factor": True}, "factor = True"),
    "infinite factor": ({"rope_type": "linear", "factor": math.inf}, "factor = inf"),
    "truncate as number": ({**YARN, "truncate": 1}, "truncate = 1"),
    "base of 1": ({"rope_theta": 1.0}, "base = 1.0"),
    "base as text": ({"rope_theta": "1e4"}, "base = '1e4'"),
    "llama3 upside down": ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0 must be greater"),
}


@pytest.mark.parametrize("name", BAD_SCALINGS)
def test_wrong_scalings_are_refused(name):
    scaling, message = BAD_SCALINGS[name]
    with pytest.raises(ArgumentError, match=message):
        rotary_table(16, 8, scaling=scaling)


def test_wrong_sizes_are_refused():
    for rotary_dim in (0, -2, 7, 8.0, None):
        with pytest.raises(ArgumentError, match=f"rotary_dim: {rotary_dim}"):
            rotary_table(16, rotary_dim)
    for max_position in (0, -1, 16.0, None):
        with pytest.raises(ArgumentError, match=f"max_position: {max_position}"):
            rotary_table(max_position, 8)
    with pytest.raises(DtypeError, match="int64"):
        rotary_table(16, 8, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"base: 10000.0 contradicts .* 500000.0"):
        rotary_table(16, 8, base=10000.0, scaling={"rope_theta": 500000.0})


def test_ways_to_say_the_same_table():
    plain = rotary_table(16, 8)
    for scaling in ({}, {"rope_type": "default"}, {"rope_theta": 10000}, {"partial_rotary_factor": 0.5}):
        assert_same_bits(rotary_table(16, 8, scaling=scaling), plain, str(scaling))
    assert_same_bits(rotary_table(16, 8, base=1e4, scaling={"rope_theta": 1e4}), plain, "base twice")
    yarn = rotary_table(16, 8, scaling=YARN)
    old_spelling = {**{key: value for key, value in YARN.items() if key != "rope_type"}, "type": "yarn"}
    assert_same_bits(rotary_table(16, 8, scaling=old_spelling), yarn, "type")
    assert_same_bits(rotary_table(16, 8, scaling={**YARN, "attention_factor": None}), yarn, "None is absent")
    assert not torch.equal(yarn, plain)


# ------------------------------------------------------------------------------------------- engines' modules


class RotaryEmbedding(torch.nn.Module):
    """Has the attributes of vLLM's rotary modules that have one table."""

    def __init__(self, table: Tensor, is_neox_style: bool = True, rotary_dim: int | None = None, **extra):
        super().__init__()
        self.register_buffer("cos_sin_cache", table, persistent=False)
        self.is_neox_style = is_neox_style
        self.rotary_dim = table.shape[-1] if rotary_dim is None else rotary_dim
        for name, value in extra.items():
            setattr(self, name, value)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    pass


class MRotaryEmbedding(RotaryEmbedding):
    pass


class Ernie4_5_VLRotaryEmbedding(MRotaryEmbedding):
    pass


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    pass


class Phi3LongRoPEScaledRotaryEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("long_short_cos_sin_cache", torch.ones(8, 4), persistent=False)
        self.rotary_dim = 4


@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_table_of_a_vllm_module_is_taken_as_it_is(dtype, is_neox):
    table = rotary_table(32, 8, scaling=YARN, dtype=dtype)
    for kind in (RotaryEmbedding, YaRNScalingRotaryEmbedding):
        spec = RotarySpec.from_module(kind(table, is_neox, scaling_factors=[4.0]))
        assert_same_bits(spec.cos_sin_cache, table, kind.__name__)
        assert spec.cos_sin_cache.data_ptr() == table.data_ptr()
        assert spec.is_neox is is_neox


BAD_MODULES = {
    "mrope": (lambda: MRotaryEmbedding(torch.ones(8, 4)), "MRotaryEmbedding: is a MRotaryEmbedding"),
    "mrope's child": (
        lambda: Ernie4_5_VLRotaryEmbedding(torch.ones(8, 4)),
        "Ernie4_5_VLRotaryEmbedding: is a MRotaryEmbedding",
    ),
    "mrope by attribute": (
        lambda: RotaryEmbedding(torch.ones(8, 4), mrope_section=[1, 1]),
        "RotaryEmbedding: mrope",
    ),
    "dynamic": (lambda: DynamicNTKScalingRotaryEmbedding(torch.ones(8, 4)), "is a DynamicNTKScaling"),
    "longrope": (Phi3LongRoPEScaledRotaryEmbedding, "Phi3LongRoPEScaledRotaryEmbedding"),
    "several tables": (
        lambda: RotaryEmbedding(torch.ones(8, 4), scaling_factors=[1.0, 4.0]),
        r"one table per scaling factor, \[1.0, 4.0\]",
    ),
    "other width": (
        lambda: RotaryEmbedding(torch.ones(8, 8), rotary_dim=4),
        r"cos_sin_cache is \[8, 8\], its width not rotary_dim = 4",
    ),
    "one table per head": (lambda: RotaryEmbedding(torch.ones(8, 2, 4)), r"cos_sin_cache is \[8, 2, 4\]"),
    "no rotary module": (lambda: torch.nn.Linear(2, 2), "Linear: has neither all of"),
    "no module": (lambda: None, "NoneType: has neither all of"),
    "Hugging Face dynamic": (
        lambda: hugging_face_module(64, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "LlamaRotaryEmbedding: rope_type is 'dynamic'",
    ),
    "Hugging Face longrope": (
        lambda: hugging_face_module(
            4,
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0, 1.0],
                "long_factor": [2.0, 2.0],
                "original_max_position_embeddings": 1024,
            },
        ),
        "LlamaRotaryEmbedding: rope_type is 'longrope'",
    ),
    "Hugging Face mrope": (lambda: qwen_2_vl_module(), "Qwen2VL.*RotaryEmbedding: mrope"),
    "one rotation per kind of layer": (
        lambda: SimpleNamespace(inv_freq=torch.ones(2), attention_scaling=1.0, rope_type={"full": "default"}),
        "rope_type is {'full': 'default'}",
    ),
}


def qwen_2_vl_module():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = Qwen2VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    return Qwen2VLRotaryEmbedding(config)


@pytest.mark.parametrize("name", BAD_MODULES)
def test_modules_that_one_table_cannot_say_are_refused_by_name(name):
    make, message = BAD_MODULES[name]
    with pytest.raises(ArgumentError, match=message):
        RotarySpec.from_module(make(), is_neox=True)


def test_what_a_module_cannot_tell_must_be_told_and_what_it_tells_stands():
    module = hugging_face_module(64, {"rope_type": "default", "rope_theta": 1e4}, max_position=512)
    with pytest.raises(ArgumentError, match="is_neox: missing; LlamaRotaryEmbedding"):
        RotarySpec.from_module(module)
    with pytest.raises(ArgumentError, match="max_position: 0"):
        RotarySpec.from_module(module, is_neox=True, max_position=0)
    assert RotarySpec.from_module(module, is_neox=False).max_position == 512
    longer = RotarySpec.from_module(module, is_neox=False, max_position=600)
    assert (longer.max_position, longer.rotary_dim, longer.is_neox) == (600, 64, False)
    with pytest.raises(ArgumentError, match=r"is_neox: False; RotaryEmbedding\.is_neox_style is True"):
        RotarySpec.from_module(RotaryEmbedding(torch.ones(8, 4)), is_neox=False)
    with pytest.raises(ArgumentError, match="max_position: 9; the table of RotaryEmbedding"):
        RotarySpec.from_module(RotaryEmbedding(torch.ones(8, 4)), max_position=9)


@pytest.mark.parametrize("is_neox", (True, False), ids=("llama", "cohere"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_keys_that_a_transformers_model_rotated(dtype, is_neox):
    """K rotated by the model's own code at p, moved to q, against the model's own code at q."""
    from transformers import CohereConfig
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    if is_neox:
        module, code = hugging_face_module(64, {**YARN, "rope_theta": 1e4}), modeling_llama
    else:
        config = CohereConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=MAX_POSITION)
        module, code = modeling_cohere.CohereRotaryEmbedding(config), modeling_cohere
    raw = random_keys((1, 2, 32, 64), dtype, seed=18)  # [batch, NH, T, HS]

    def rotated_by_the_model(positions: Tensor) -> Tensor:
        cos, sin = module(raw, positions[None])
        return code.apply_rotary_pos_emb(raw, raw, cos, sin)[1][0].transpose(0, 1)  # [T, NH, HS]

    p, q = random_positions(32, 19), random_positions(32, 20)
    keys, expected = rotated_by_the_model(p).clone(), rotated_by_the_model(q)
    spec = RotarySpec.from_module(module, is_neox=is_neox)
    rerotate(keys, p, q, RotarySpec(spec.cos_sin_cache.to(dtype), spec.is_neox))
    got, want = as_complex(keys, 64, is_neox), as_complex(expected, 64, is_neox)
    error = ((got - want).abs() / want.abs()).max()
    # bfloat16: the model rounds each product and sum at p and at q, we once.
    assert error < {torch.float32: 1e-5, torch.bfloat16: 8 * 2**-8}[dtype]
