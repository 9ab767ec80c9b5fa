"""THE table: every paged layout and every chunk format, one row each, written as an einops-style axis pattern.

A row says how the engine's memory is *named*; nothing here computes an address or branches on a layout's name.
`discovery.py` decides which row a set of tensors is; `kv_cache.py` holds the planes that come out.

Axis names (upstream's): `nl` layers, `nb` blocks, `bs` block size in tokens, `nh` KV heads, `hs` head size, `t` tokens,
`two` K and V, `nbbs` flat slots (NB*BS), `1` an axis of size one. `(a b)` is one tensor axis that holds two names.
A row without `two` is MLA: one plane, NH = 1 unless named.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .errors import ArgumentError, LayoutError
from .memory import MemoryFormat
from .metadata import EngineType

#: canonical order of a whole cache: planes are `view[l, k]`, each `[NB, BS, NH, HS]`
CACHE_AXES = ("nl", "two", "nb", "bs", "nh", "hs")
#: canonical order of a chunk: `view[k, l]` is `[T, NH, HS]`
CHUNK_AXES = ("two", "nl", "t", "nh", "hs")

_NAMES = {*CACHE_AXES, "nbbs", "1"}
#: the letters by which `KV_LAYOUTS` calls the axes
AXIS_LETTERS = {"nl": "L", "nb": "B", "nh": "H", "bs": "N"}

#: memory orders an engine can state as `kv_layout`, as the order of the letters L layers, B blocks, H heads, N tokens
KV_LAYOUTS = {
    "NHD": "BNH",
    "HND": "BHN",
    "LBHNC": "LBHN",
    "LBNHC": "LBNH",
    "LHBNC": "LHBN",
    "BLHNC": "BLHN",
    "BLNHC": "BLNH",
    "BHLNC": "BHLN",
}

Axes = tuple[tuple[str, ...], ...]


@functools.cache
def parse_pattern(pattern: str) -> Axes:
    """`"nb nh bs (two hs)"` -> `(("nb",), ("nh",), ("bs",), ("two", "hs"))`.

    Raises ArgumentError when the text is anything but names, `1` and one level of parentheses.
    """
    words = re.findall(r"\([^()]*\)|[^\s()]+|[()]", pattern)
    axes = tuple(tuple(word.strip("()").split()) for word in words)
    if not axes or "(" in words or ")" in words or not all(axes):
        raise ArgumentError(f"pattern {pattern!r}: only names and one level of parentheses are allowed")
    return axes


@dataclass(frozen=True)
class Layout:
    """One row: how an engine lays out its paged KV cache.

    name: upstream's grammar (`_X_` separates list levels from tensor axes).
    pattern: the axes of each tensor, outermost first.
    nesting: the axes that are list levels, outermost first; `"(two nl)"` is one flat list K0..Kn V0..Vn.
    engines: engines that hand out this row; empty means it is reached only by `hints["layout"]`.
    upstream_id: the value in upstream's format enum, if it has one.
    logical_in: engines that show these axis *names* whatever the strides are (their logical order).
    """

    name: str
    pattern: str
    nesting: tuple[str, ...] = ()
    engines: tuple[EngineType, ...] = ()
    upstream_id: int | None = None
    logical_in: tuple[EngineType, ...] = field(default=(), repr=False)

    @cached_property
    def axes(self) -> Axes:
        """The tensor axes, each a tuple of names."""
        return parse_pattern(self.pattern)

    @cached_property
    def levels(self) -> Axes:
        """The list levels, each a tuple of names."""
        levels = [parse_pattern(level) for level in self.nesting]
        if any(len(axes) != 1 for axes in levels):
            raise ArgumentError(f"nesting {self.nesting!r}: two names of one list level stand in parentheses")
        return tuple(axes[0] for axes in levels)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every axis name, list levels first."""
        return tuple(name for group in (*self.levels, *self.axes) for name in group)

    @property
    def is_mla(self) -> bool:
        """One plane a layer instead of K and V."""
        return "two" not in self.names

    @property
    def is_fused(self) -> bool:
        """K and V stand side by side inside the last axis."""
        return self.axes[-1] == ("two", "hs")

    def letters(self, sizes: Mapping[str, int] | None = None) -> str:
        """L, B, H, N in the order in which the tensor's axes stand; with `sizes`, without those of size one."""
        return "".join(
            AXIS_LETTERS[name]
            for group in self.axes
            for name in group
            if name in AXIS_LETTERS and (sizes is None or sizes[name] > 1)
        )

    def stands_in(self, kv_layout: str) -> bool:
        """Whether the axes stand, left to right, in the memory order that `kv_layout` names. Axes that the row or the
        order lacks do not count."""
        return letters_stand_in(self.letters(), kv_layout)

    def __str__(self) -> str:
        lists = "".join(f"list[{level}] of " for level in self.nesting)
        return f"{self.name} = {lists}[{self.pattern}]"


def letters_stand_in(letters: str, kv_layout: str) -> bool:
    """Whether `letters` come in the order that `kv_layout` names; letters that only one of the two has do not count."""
    order = KV_LAYOUTS[kv_layout]
    return [x for x in letters if x in order] == [x for x in order if x in letters]


def canonical_view(tensor: torch.Tensor, axes: Axes, sizes: Mapping[str, int], order: Sequence[str]) -> torch.Tensor:
    """`tensor`, its axes named by `axes`, seen in the axis order `order`; always a view, never a copy.

    Only unflatten, select, permute and unsqueeze are used: none of them can copy, so a write into the result is a
    write into `tensor`. Names in `order` that `axes` lacks become axes of size one. `nbbs` is seen as NB blocks of one slot.
    """
    for position in reversed(range(len(axes))):
        if len(axes[position]) > 1:
            tensor = tensor.unflatten(position, [sizes[name] for name in axes[position]])
    names = ["nb" if name == "nbbs" else name for group in axes for name in group]
    while "1" in names:
        position = names.index("1")
        tensor = tensor.select(position, 0)
        names.pop(position)
    tensor = tensor.permute([names.index(name) for name in order if name in names])
    for position, name in enumerate(order):
        if name not in names:
            tensor = tensor.unsqueeze(position)
    return tensor


def _checked(row: Layout) -> Layout:
    """`row`, or ArgumentError naming what is wrong with its pattern."""
    names = row.names

    def refuse(why: str) -> None:
        raise ArgumentError(f"layout {row.name!r}: pattern {row.pattern!r}, nesting {row.nesting!r}: {why}")

    for name in names:
        if name not in _NAMES:
            refuse(f"unknown axis {name!r}; known: {', '.join(sorted(_NAMES))}")
        if name != "1" and names.count(name) > 1:
            refuse(f"axis {name!r} appears twice")
    if row.axes[-1][-1] != "hs":
        refuse("the innermost axis must be 'hs'")
    if ("nbbs" in names) == ("nb" in names) or ("nbbs" in names) == ("bs" in names):
        refuse("needs either 'nbbs' or both 'nb' and 'bs'")
    if "nl" not in names:
        refuse("needs the layer axis 'nl', as a tensor axis or a list level")
    for level in row.levels:
        if not {*level} <= {"nl", "two", "1"}:
            refuse("list levels can only be 'nl', 'two', '(two nl)' or '1'")
    return row


#: name -> row, in display order
LAYOUTS: dict[str, Layout] = {}


def register_layout(
    name: str,
    pattern: str,
    *,
    nesting: Sequence[str] = (),
    engines: Sequence[EngineType | str] = (),
    upstream_id: int | None = None,
    logical_in: Sequence[EngineType | str] = (),
) -> Layout:
    """Add one row to the table; discovery, every backend, `verify`, `demo` and the tests pick it up.

    >>> register_layout("NL_X_NH_NB_BS_HS_TWO_X", "nh nb bs hs", nesting=("nl", "two"))   # doctest: +SKIP

    Raises ArgumentError for a malformed pattern, or a name or upstream_id that another row has.
    """
    row = _checked(
        Layout(
            name,
            pattern,
            tuple(nesting),
            tuple(EngineType(engine) for engine in engines),
            upstream_id,
            tuple(EngineType(engine) for engine in logical_in),
        )
    )
    if name in LAYOUTS and LAYOUTS[name] != row:
        raise ArgumentError(f"layout {name!r} is already registered as {LAYOUTS[name]}")
    for other in LAYOUTS.values():
        if upstream_id is not None and other.upstream_id == upstream_id and other.name != name:
            raise ArgumentError(f"layout {name!r}: upstream_id {upstream_id} belongs to {other.name}")
    LAYOUTS[name] = row
    return row


def unregister_layout(name: str) -> None:
    """Take a row out of the table again (tests, notebooks). Raises ArgumentError for an unknown name."""
    find_layout(name)
    del LAYOUTS[name]


def find_layout(name: str) -> Layout:
    """The row called `name`; LayoutError lists the known names."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise LayoutError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}") from None


def _table() -> None:
    V, S, T = EngineType.VLLM, EngineType.SGLANG, EngineType.TRTLLM
    row = register_layout
    per_layer: dict[str, Any] = {"nesting": ("nl",), "engines": (V,)}
    # fmt: off
    # name                        pattern                 lists and engines; upstream's id; whose logical order it is
    row("NB_NL_TWO_BS_NH_HS",     "nb nl two bs nh hs",   engines=(V,), upstream_id=0, logical_in=(V,))
    row("NL_X_TWO_NB_BS_NH_HS",   "two nb bs nh hs",      **per_layer, upstream_id=1, logical_in=(V,))
    row("NL_X_NB_TWO_BS_NH_HS",   "nb two bs nh hs",      **per_layer, upstream_id=2, logical_in=(V,))
    row("NL_X_NB_BS_HS",          "nb bs hs",             **per_layer, upstream_id=3, logical_in=(V,))
    row("TWO_X_NL_X_NBBS_NH_HS",  "nbbs nh hs",           nesting=("two", "nl"), engines=(S,), upstream_id=4, logical_in=(S,))
    row("NL_X_NBBS_ONE_HS",       "nbbs 1 hs",            nesting=("nl",), engines=(S,), upstream_id=5, logical_in=(S,))
    row("NL_X_TWO_NB_NH_BS_HS",   "two nb nh bs hs",      **per_layer, upstream_id=6)
    row("NL_X_NB_TWO_NH_BS_HS",   "nb two nh bs hs",      **per_layer, upstream_id=7)
    row("NB_NL_TWO_NH_BS_HS",     "nb nl two nh bs hs",   engines=(V, T), upstream_id=8, logical_in=(T,))
    row("TWO_X_NL_X_NB_BS_NH_HS", "nb bs nh hs",          nesting=("two", "nl"), engines=(S,), upstream_id=9, logical_in=(S,))
    row("NL_X_NB_NH_BS_TWO_HS",   "nb nh bs (two hs)",    **per_layer, upstream_id=10, logical_in=(V,))
    # rows upstream has no number for
    row("NL_X_NB_BS_NH_TWO_HS",   "nb bs nh (two hs)",    **per_layer)
    row("NL_X_NH_NB_BS_TWO_HS",   "nh nb bs (two hs)",    **per_layer)
    row("NB_NH_NL_TWO_BS_HS",     "nb nh nl two bs hs")
    row("TWO_NL_X_NBBS_NH_HS",    "nbbs nh hs",           nesting=("(two nl)",), engines=(S,), logical_in=(S,))
    row("TWO_NL_X_NB_BS_NH_HS",   "nb bs nh hs",          nesting=("(two nl)",), engines=(S,), logical_in=(S,))
    row("NL_X_NB_BS_ONE_HS",      "nb bs 1 hs",           nesting=("nl",), engines=(S,), logical_in=(S,))
    row("ONE_X_NL_X_NBBS_ONE_HS", "nbbs 1 hs",            nesting=("1", "nl"), engines=(S,), logical_in=(S,))
    row("ONE_X_NL_X_NB_BS_ONE_HS", "nb bs 1 hs",          nesting=("1", "nl"), engines=(S,), logical_in=(S,))
    row("NB_NL_TWO_NHBSHS",       "nb nl two (nh bs hs)", engines=(T,), logical_in=(T,))
    # vLLM's standard orders of one pool; C = (two hs)
    row("LBHNC",                  "nl nb nh bs (two hs)", engines=(V,), logical_in=(V,))
    row("LBNHC",                  "nl nb bs nh (two hs)", engines=(V,))
    row("LHBNC",                  "nl nh nb bs (two hs)", engines=(V,))
    row("BLHNC",                  "nb nl nh bs (two hs)", engines=(V,))
    row("BLNHC",                  "nb nl bs nh (two hs)", engines=(V,))
    row("BHLNC",                  "nb nh nl bs (two hs)", engines=(V,))
    # fmt: on


_table()

#: chunk object formats: the patterns a chunk tensor of that format can have, whole-model or one layer
CHUNK_FORMATS: dict[MemoryFormat, tuple[str, ...]] = {
    MemoryFormat.KV_2LTD: ("two nl t (nh hs)",),
    MemoryFormat.KV_T2D: ("t two (nh hs)",),
    MemoryFormat.KV_2TD: ("two t (nh hs)",),
    MemoryFormat.KV_MLA_FMT: ("1 nl t (nh hs)", "t (nh hs)"),
}
