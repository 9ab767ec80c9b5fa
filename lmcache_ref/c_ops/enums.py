"""The names by which upstream's callers say what they move: direction, format, shape of the paged memory.

The formats are the rows of the layout table; a row's name is decided there and nowhere else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

from ..errors import ArgumentError
from ..layouts import LAYOUTS, Layout, find_layout


class TransferDirection(Enum):
    """H2D: chunk to engine (scatter). D2H: engine to chunk (gather)."""

    H2D = 0
    D2H = 1


def _format_ids() -> dict[str, int]:
    """Row name -> id: upstream's where it has one, the numbers after upstream's last for the others, in table order."""
    upstream = {row.name: row.upstream_id for row in LAYOUTS.values() if row.upstream_id is not None}
    ours = itertools.count(max(upstream.values()) + 1)
    return {name: upstream[name] if name in upstream else next(ours) for name in LAYOUTS}


GPUKVFormat: type[IntEnum] = IntEnum("GPUKVFormat", _format_ids())  # type: ignore[misc]
GPUKVFormat.__doc__ = "The rows of the layout table; upstream's ids first, then ours in table order."
EngineKVFormat = GPUKVFormat


@dataclass
class PageBufferShapeDesc:
    """Shape of the paged memory behind raw pointers; a plain record that callers fill in field by field.

    kv_size: 2 for K and V, 1 for one plane a layer. nl, nb, bs, nh, hs: NL, NB, BS, NH, HS, HS in elements of
    `element_size` bytes. block_stride_elems: elements from one block to the next, 0 where blocks follow tightly.
    """

    kv_size: int = 0
    nl: int = 0
    nb: int = 0
    bs: int = 0
    nh: int = 0
    hs: int = 0
    element_size: int = 0
    block_stride_elems: int = 0


def checked_direction(direction: Any) -> TransferDirection:
    """`direction` as ours; upstream's own enum is known by its members' names. ArgumentError for anything else."""
    name = getattr(direction, "name", None)
    if not isinstance(name, str) or name not in TransferDirection.__members__:
        raise ArgumentError(f"direction: {direction!r}; allowed: {', '.join(TransferDirection.__members__)}")
    return TransferDirection[name]


def row_of(gpu_kv_format: Any, kv_size: int) -> Layout:
    """The row of the table that `gpu_kv_format` names: a member, its id, or the name of a row registered since.

    A row that holds K and V side by side in its last axis can also be moved as one plane of twice the head size:
    `kv_size` 1 says so. ArgumentError or LayoutError for a format that no row has.
    """
    name = gpu_kv_format
    if not isinstance(name, str):
        try:
            name = GPUKVFormat(int(gpu_kv_format)).name
        except (TypeError, ValueError):
            known = ", ".join(f"{member.name}={member.value}" for member in GPUKVFormat)
            raise ArgumentError(f"gpu_kv_format: {gpu_kv_format!r}; known: {known}") from None
    row = find_layout(name)
    if row.is_fused and kv_size == 1:
        return replace(row, pattern=row.pattern.replace("(two hs)", "hs"))
    return row
