"""Re-rotations that are wrong on purpose, and the formula as written in the same frame. No test lives here."""

from __future__ import annotations

import torch

from lmcache_ref.rope import RotarySpec, rerotate
from rope_oracle import pair_dims


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
