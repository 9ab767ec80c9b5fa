"""Keys, positions and tables for re-rotation, at any strides; and what is compared afterwards: the whole storage."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers import assert_same
from lmcache_ref.rope import KEY_DTYPES, RotarySpec, rotary_table

T, NH, HS = 13, 3, 20
MAX_POSITION = 64

#: name -> keys `[T, NH, HS]` as a view of a flat buffer that is larger
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tokens outermost": lambda flat: flat.as_strided((T, NH, HS), (NH * HS, HS, 1), 0),
    "heads outermost": lambda flat: flat.as_strided((T, NH, HS), (HS, T * HS, 1), 8),
    "padded, off by one": lambda flat: flat.as_strided((T, NH, HS), (NH * (HS + 3) + 1, HS + 3, 1), 1),
    "every second dim": lambda flat: flat.as_strided((T, NH, HS), (NH * HS * 2, HS * 2, 2), 0),
    "dims outermost": lambda flat: flat.as_strided((T, NH, HS), (NH, 1, NH * T), 0),
}
ROTARY_DIMS = (2, 6, HS)


def storage(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers for the views of `STRIDES`."""
    return numbers(2 * T * NH * (HS + 4) + 64, dtype, seed)


def numbers(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, subnormals and both zeros among them, but nothing that is not finite: the payload of a
    NaN is nobody's promise."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1
    small, large = {torch.float16: (-26, 6), torch.float64: (-1030, 100)}.get(dtype, (-132, 40))
    exponent = torch.randint(small, large, (size,), generator=generator)
    exponent[::3] = 0  # most keys are of ordinary size
    flat = torch.ldexp(mantissa, exponent.to(torch.float64)).to(dtype)
    flat[::17], flat[5::17] = 0.0, -0.0
    return flat


def positions(seed: int, num_tokens: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new; every fourth token stays where it is."""
    generator = torch.Generator().manual_seed(seed)
    old, new = (torch.randint(0, MAX_POSITION, (num_tokens,), generator=generator) for _ in range(2))
    new[::4] = old[::4]
    return old, new


def table(rotary_dim: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """A rotation's table in the upper half of a wider one, so that its rows are apart."""
    wide = torch.full((MAX_POSITION, 2 * rotary_dim), float("nan"), dtype=dtype)
    wide[:, rotary_dim:] = (rotary_table(MAX_POSITION, rotary_dim, dtype=torch.float64) * scale).to(dtype)
    return wide[:, rotary_dim:]


def compare(
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RotarySpec], None],
    specification: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RotarySpec], None],
    strides: str,
    key_dtype: torch.dtype,
    rope: RotarySpec,
    seed: int = 0,
) -> int:
    """Rotate the same keys with both and compare the bits of the whole storage; how many elements were rotated."""
    got, expected = storage(key_dtype, seed), storage(key_dtype, seed)
    before = storage(key_dtype, seed)
    rotate(STRIDES[strides](got), *positions(seed), rope)
    specification(STRIDES[strides](expected), *positions(seed), rope)
    assert_same(got, expected, f"{strides}, keys {key_dtype}, table {rope.cos_sin_cache.dtype}")
    return int((expected != before).sum())


def compare_every_value_of_two_bytes(
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RotarySpec], None],
    specification: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RotarySpec], None],
    dtype: torch.dtype,
) -> int:
    """All finite bit patterns, by a rotation that leaves them near where they are and by two that overflow and underflow;
    how many patterns there were."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[torch.isfinite(patterns)]
    keys = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(3))].view(-1, 1, 2)
    old = torch.zeros(len(keys), dtype=torch.int64)
    for old_row, new_row in (((1.0, 0.0), (0.0, 1.0)), ((0.5, 0.25), (1e-3, 2e-3)), ((1e-3, 2e-3), (0.6, 0.8))):
        rope = RotarySpec(torch.tensor([old_row, new_row]), True)
        got, expected = keys.clone(), keys.clone()
        rotate(got, old, old + 1, rope)
        specification(expected, old, old + 1, rope)
        known = ~expected.isnan()  # an overflow in between gives a NaN, of any payload
        assert torch.equal(got.isnan(), ~known), f"{old_row} to {new_row}: NaNs elsewhere"
        assert_same(got[known], expected[known], f"{old_row} to {new_row}")
    return len(patterns)


__all__ = [
    "KEY_DTYPES",
    "ROTARY_DIMS",
    "STRIDES",
    "compare",
    "compare_every_value_of_two_bytes",
    "numbers",
    "positions",
    "storage",
    "table",
]
