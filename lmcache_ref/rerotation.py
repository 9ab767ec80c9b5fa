"""The record that lets a scatter re-rotate keys on the way, and its checks, made before anything moves.

The arithmetic is `rope.rerotate`'s; who scatters, and whether its scatter knows rotations, is `backends.py`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError
from .kv_cache import PagedKVCache
from .rope import RotarySpec, _check_invertible, _cos_sin, check_keys, checked_positions, rerotate


@dataclass(frozen=True, eq=False)
class Rerotation:
    """Where the keys of a request were rotated to, where they belong, and by which table.

    old_positions, new_positions: integers `[tokens of the request]`, any device; in a plan int64 on the host, contiguous.
    Those of tokens that do not move are checked like the others, and not used.
    """

    old_positions: Tensor
    new_positions: Tensor
    rope: RotarySpec

    def checked(self, cache: PagedKVCache, num_tokens: int) -> Rerotation:
        """The same for a request of so many tokens, its positions on the host. The host waits for those of a device.

        Raises what `rope.rerotate` raises for the request's keys, and ArgumentError for a cache without keys (MLA).
        """
        if cache.kv_size != 2:
            raise ArgumentError(
                f"rotation: the cache has {cache.kv_size} plane a layer (MLA), and so no keys to rotate"
            )
        shape = (num_tokens, cache.num_heads, cache.head_size)
        check_keys(torch.empty(shape, dtype=cache.dtype, device="meta"), self.rope)
        old, new = (
            checked_positions(name, getattr(self, name), num_tokens, self.rope).cpu().contiguous()
            for name in ("old_positions", "new_positions")
        )
        check_undoing(old, new, self.rope, cache.dtype)
        return Rerotation(old, new, self.rope)

    def turn(self, keys: Tensor, first_token: int) -> None:
        """Re-rotate keys `[T, NH, HS]` of the request's tokens from `first_token` on, in place."""
        tokens = slice(first_token, first_token + len(keys))
        rerotate(keys, self.old_positions[tokens], self.new_positions[tokens], self.rope)


def check_undoing(old: Tensor, new: Tensor, rope: RotarySpec, key_dtype: torch.dtype) -> None:
    """ArgumentError, as of `rope.rerotate`, where a key moves from a position whose rotation cannot be undone.

    old, new: int64 `[T]` within the table. A table is looked at once, and tokens only where it holds such a position. The
    host waits for what it looks at.
    """
    dtype = torch.float64 if key_dtype == torch.float64 else torch.float32
    known = _undone_everywhere.setdefault(rope, {})
    if dtype not in known:
        norm = _norm(rope, torch.arange(rope.max_position, device=rope.cos_sin_cache.device), dtype)
        known[dtype] = bool(((norm > 0) & norm.isfinite()).all())
    if not known[dtype]:
        moved = (old != new.to(old.device)).nonzero().squeeze(1)
        _check_invertible(_norm(rope, old[moved], dtype), old, moved)


#: table and type of computing -> whether every rotation of the table can be undone
_undone_everywhere: weakref.WeakKeyDictionary[RotarySpec, dict[torch.dtype, bool]] = weakref.WeakKeyDictionary()


def _norm(rope: RotarySpec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """n = cos*cos + sin*sin, each operation rounded, `[T, 1, pair]`."""
    cos, sin = _cos_sin(rope, positions, dtype)
    return cos * cos + sin * sin
