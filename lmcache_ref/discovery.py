"""From an engine's tensors and hints to one row of the table and its planes.

Discovery lists the *readings* of the tensors: assignments of axis names that a row's pattern, the strides and the
known sizes allow. Exactly one must be left; none or several is a `LayoutError` that lists them and says which hint
would decide. Nothing is guessed in silence, and nothing is copied: planes are views.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .bits import same_bytes
from .errors import ArgumentError, LayoutError, StrideError
from .layouts import (
    AXIS_LETTERS,
    CACHE_AXES,
    KV_LAYOUTS,
    LAYOUTS,
    Layout,
    canonical_view,
    find_layout,
    letters_stand_in,
)
from .metadata import EngineType

Planes = tuple[tuple[torch.Tensor, ...], ...]

#: every hint, and what it fixes
HINTS = {
    "kv_layout": "memory order: " + " | ".join(KV_LAYOUTS),
    "layout": "name of a row of the table",
    "num_layers": "NL",
    "num_kv_heads": "NH",
    "tokens_per_block": "BS",
    "head_dim": "HS",
    "hidden_dim_size": "D = NH*HS",
    "dtype": "torch dtype of the cache",
    "use_mla": "True: only rows with one plane a layer; False: only rows with K and V",
}
_SIZE_HINTS = {"num_layers": "nl", "num_kv_heads": "nh", "tokens_per_block": "bs", "head_dim": "hs"}


class Discovery(NamedTuple):
    """What `discover` returns: the row, and `planes[layer][kv]`, each a `[NB, BS, NH, HS]` view of the engine's memory."""

    layout: Layout
    planes: Planes


@dataclass(frozen=True)
class Reading:
    """One way to name the axes of the engine's tensors."""

    layout: Layout
    sizes: dict[str, int]
    planes: Planes

    def __str__(self) -> str:
        sizes = ", ".join(f"{name.upper()}={self.sizes[name]}" for name in ("nl", "nb", "bs", "nh", "hs"))
        return f"{self.layout.name} [{self.layout.pattern}] with {sizes}"


def discover(kv_caches: Any, engine: EngineType | str, hints: Mapping[str, Any] | None = None) -> Discovery:
    """Name the axes of an engine's KV cache.

    kv_caches: the engine's own tensors: one tensor, a list, nested lists, or a mapping layer name -> tensor.
    engine: who made them. hints: any of `HINTS`; sizes strike readings out, `kv_layout` names the memory order,
    `layout` names the row.

    Reads no element and moves nothing. Raises LayoutError (no reading, or several), StrideError (memory no backend
    may address), ArgumentError (unknown hint).
    """
    engine, hints = EngineType(engine), check_hints(hints or {})
    leaves, lengths = flatten(kv_caches)
    check_leaves(leaves)
    if "dtype" in hints and not same_bytes(leaves[0].dtype, hints["dtype"]):
        raise LayoutError(f"the KV cache is {leaves[0].dtype}, expected {hints['dtype']}")
    readings: list[Reading] = []
    struck: list[str] = []
    for layout in candidate_rows(engine, hints):
        for answer in read(layout, engine, hints, leaves, lengths):
            (readings if isinstance(answer, Reading) else struck).append(answer)  # type: ignore[arg-type]
    distinct = {planes_identity(reading.planes): reading for reading in reversed(readings)}
    if len(distinct) != 1:
        what = describe(leaves, lengths)
        raise LayoutError(explain(what, engine, hints, list(reversed(distinct.values())), struck))
    (reading,) = distinct.values()
    return Discovery(reading.layout, reading.planes)


# ------------------------------------------------------------------------------------------------ the input


def check_hints(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The hints that say something; ArgumentError for an unknown key or a value of the wrong kind."""
    known: dict[str, Any] = {}
    for key, value in hints.items():
        if key not in HINTS:
            raise ArgumentError(f"unknown layout hint {key!r}; known: {', '.join(HINTS)}")
        if value is None:
            continue
        if key == "kv_layout":
            value = getattr(value, "name", value)  # engines state it as a string or an enum
            if value not in KV_LAYOUTS:
                raise ArgumentError(f"kv_layout={value!r}; known: {', '.join(KV_LAYOUTS)}")
        elif key == "layout":
            find_layout(value)
        elif key == "dtype":
            if not isinstance(value, torch.dtype):
                raise ArgumentError(f"hint dtype must be a torch.dtype, got {value!r}")
        elif key == "use_mla":
            if not isinstance(value, bool):
                raise ArgumentError(f"hint use_mla must be True or False, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"hint {key} must be a positive int, got {value!r}")
        known[key] = value
    return known


def merged_hints(hints: Mapping[str, Any] | None, stated: Mapping[str, Any]) -> dict[str, Any]:
    """`hints` with what the connector itself knows; LayoutError when the two contradict."""
    merged = check_hints(hints or {})
    for key, value in stated.items():
        if value is None:
            continue
        if key in merged and merged[key] != value:
            raise LayoutError(f"layout_hints[{key!r}] is {merged[key]}, the connector was given {value}")
        merged[key] = value
    return check_hints(merged)


def flatten(kv_caches: Any) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """All tensors in list order, and the lengths of the list levels, outermost first."""
    if isinstance(kv_caches, torch.Tensor):
        return [kv_caches], ()
    if isinstance(kv_caches, Mapping):
        kv_caches = list(kv_caches.values())
    if not isinstance(kv_caches, Sequence) or isinstance(kv_caches, str):
        raise ArgumentError(
            f"kv_caches must be a tensor, a list or a mapping of tensors, got {type(kv_caches).__name__}"
        )
    if not kv_caches:
        raise LayoutError("kv_caches is an empty list")
    if {*map(type, kv_caches)} == {torch.Tensor}:  # as mostly; each call of a connector asks
        return list(kv_caches), (len(kv_caches),)
    parts = [flatten(item) for item in kv_caches]
    if len({lengths for _, lengths in parts}) != 1:
        raise LayoutError(f"kv_caches is a ragged nesting: list lengths {[lengths for _, lengths in parts]}")
    return [leaf for leaves, _ in parts for leaf in leaves], (len(parts), *parts[0][1])


def check_leaves(leaves: Sequence[torch.Tensor]) -> None:
    """All tensors must be alike and addressable (rule 8); raises before anything is read."""
    first = leaves[0]
    for index, leaf in enumerate(leaves):
        for what in ("shape", "dtype", "device"):
            if getattr(leaf, what) != getattr(first, what):
                raise LayoutError(
                    f"kv_caches[{index}] has {what} {_text(getattr(leaf, what))}, kv_caches[0] has "
                    f"{_text(getattr(first, what))}; layers that differ need VLLMPagedMemGPUConnectorV3"
                )
        check_strides(leaf, f"kv_caches[{index}]")


def check_strides(tensor: torch.Tensor, name: str) -> None:
    """HS has stride 1 and no two elements share memory, else StrideError naming shape and strides."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not shape:
        raise LayoutError(f"{name} is a scalar; a KV cache has axes")
    if 0 in shape:
        return  # no element, nothing to address
    if shape[-1] > 1 and strides[-1] != 1:
        raise StrideError(
            f"{name}: shape {shape}, strides {strides}: the innermost axis must have stride 1, has {strides[-1]}"
        )
    reach = 0  # elements that the axes of smaller stride span
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            kind = "an expanded axis (stride 0)" if stride == 0 else f"stride {stride} overlaps its neighbours"
            raise StrideError(f"{name}: shape {shape}, strides {strides}: {kind}; elements share memory")
        reach += stride * (size - 1)


def strides_fall(tensor: torch.Tensor) -> bool:
    """Whether memory order is shape order: strides fall from left to right, axes of size one aside."""
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return all(left >= right for left, right in itertools.pairwise(strides))


# ------------------------------------------------------------------------------------------------ the readings


def candidate_rows(engine: EngineType, hints: Mapping[str, Any]) -> list[Layout]:
    """The row named by `hints["layout"]`, else every row the engine hands out."""
    if "layout" in hints:
        return [find_layout(hints["layout"])]
    return [row for row in LAYOUTS.values() if engine in row.engines]


def read(
    layout: Layout,
    engine: EngineType,
    hints: Mapping[str, Any],
    leaves: Sequence[torch.Tensor],
    lengths: tuple[int, ...],
) -> Iterator[Reading | str]:
    """The reading of the tensors by one row; or why a known size or the memory order strikes it out; or nothing
    at all when the row has another rank or nesting."""
    if lengths == (1,) and not layout.levels and ("layout" in hints or not _listed(leaves[0].dim(), engine)):
        lengths = ()  # a list of one tensor, of a row given by name or of a rank that no listed row has: that tensor
    if len(layout.levels) != len(lengths) or len(layout.axes) != leaves[0].dim():
        return
    try:
        sizes = measure(layout, tuple(leaves[0].shape), lengths, hints)
    except LayoutError as why:
        yield f"{layout.name} [{layout.pattern}]: {why}"
        return
    objection = order_objection(layout, engine, hints, leaves, sizes)
    if objection:
        yield f"{layout.name} [{layout.pattern}]: memory order contradicts {objection}"
        return
    yield Reading(layout, sizes, build_planes(layout, leaves, sizes))


def _listed(rank: int, engine: EngineType) -> bool:
    return any(engine in row.engines and row.levels and len(row.axes) == rank for row in LAYOUTS.values())


def order_objection(
    layout: Layout,
    engine: EngineType,
    hints: Mapping[str, Any],
    leaves: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
) -> str | None:
    """What the row's axis order contradicts; None when it may be what the engine shows.

    Strides that do not fall: only the engine's logical order is shown like that. Strides that fall: the shape may be
    the memory order, which `kv_layout` names. Not stated, vLLM's unfused shapes are NHD; of the others that says
    nothing. A logical row may differ from `kv_layout`, but not in axes longer than one that stand in memory as it has
    them. A row given by name needs no `kv_layout`.
    """
    logical = engine in layout.logical_in
    shown = logical or all(strides_fall(leaf) for leaf in leaves)
    if "layout" in hints:
        fits = shown or engine not in layout.engines
        fits = fits or len(pairs_in_place(layout, leaves, sizes)) == math.comb(len(layout.letters(sizes)), 2)
        return None if fits else "the strides"
    if not shown:
        return "the strides"
    unstated = "NHD" if engine is EngineType.VLLM and not layout.is_fused else None
    stated = hints.get("kv_layout", unstated)
    if stated is None:
        return None
    if logical:
        fits = all(letters_stand_in(pair, stated) for pair in pairs_in_place(layout, leaves, sizes))
    else:
        fits = layout.stands_in(stated)
    return None if fits else f"kv_layout {stated}" if "kv_layout" in hints else "no kv_layout, which means NHD"


def pairs_in_place(layout: Layout, leaves: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[str]:
    """Pairs of letters, such as `"BH"`, whose axes are longer than one and stand in the row in their memory order."""
    strides = []
    for leaf in leaves:
        view = canonical_view(leaf, layout.axes, sizes, CACHE_AXES)
        strides.append({AXIS_LETTERS.get(name): s for name, s in zip(CACHE_AXES, view.stride(), strict=True)})
    pairs = itertools.combinations(layout.letters(sizes), 2)
    return [left + right for left, right in pairs if all(stride[left] > stride[right] for stride in strides)]


def measure(
    layout: Layout, shape: tuple[int, ...], lengths: tuple[int, ...], hints: Mapping[str, Any]
) -> dict[str, int]:
    """Every axis' size from the shapes, checked against the known ones; LayoutError says what contradicts.

    Returned names: all of CACHE_AXES; absent ones are 1, `nbbs` counts as NB with BS = 1.
    """
    known: dict[str, int] = {"two": 2, "1": 1}
    known.update({axis: hints[hint] for hint, axis in _SIZE_HINTS.items() if hint in hints})
    hidden = hints.get("hidden_dim_size")
    if hidden and "nh" in layout.names:
        if "nh" in known and "hs" not in known and hidden % known["nh"] == 0:
            known["hs"] = hidden // known["nh"]
        elif "hs" in known and "nh" not in known and hidden % known["hs"] == 0:
            known["nh"] = hidden // known["hs"]
    if "use_mla" in hints and bool(hints["use_mla"]) != layout.is_mla:
        raise LayoutError(f"{'one plane' if layout.is_mla else 'K and V'} a layer, but use_mla={hints['use_mla']}")
    sizes: dict[str, int] = {}
    for group, length in zip((*layout.levels, *layout.axes), (*lengths, *shape), strict=True):
        sizes.update(_split(group, length, known))
    for axis in CACHE_AXES:
        if axis == "nb" and "nbbs" in sizes:
            sizes["nb"] = sizes.pop("nbbs")
        sizes.setdefault(axis, 1)
    for hint, axis in _SIZE_HINTS.items():
        if hint in hints and axis in layout.names and sizes[axis] != hints[hint]:
            raise LayoutError(f"{axis.upper()} is {sizes[axis]}, expected {hints[hint]} ({hint})")
    if hidden and sizes["nh"] * sizes["hs"] != hidden:
        raise LayoutError(f"D = NH*HS is {sizes['nh']}*{sizes['hs']}, expected {hidden} (hidden_dim_size)")
    return sizes


def _split(group: tuple[str, ...], length: int, known: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the names that share one axis of `length`."""
    if len(group) == 1:
        (name,) = group
        if name in ("two", "1") and length != known[name]:
            raise LayoutError(f"axis {name!r} must be {known[name]}, is {length}")
        return {name: length}
    open_names = [name for name in group if name not in known]
    if len(open_names) > 1:
        wanted = [hint for hint, axis in _SIZE_HINTS.items() if axis in open_names]
        raise LayoutError(f"axis ({' '.join(group)}) = {length} needs the hints {', '.join(wanted)}")
    fixed = math.prod(known[name] for name in group if name in known)
    if length % fixed or (not open_names and length != fixed):
        given = ", ".join(f"{name.upper()}={known[name]}" for name in group if name in known)
        raise LayoutError(f"axis ({' '.join(group)}) = {length} does not divide by {given}")
    return {name: known.get(name, length // fixed) for name in group}


def build_planes(layout: Layout, leaves: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Planes:
    """`planes[layer][kv]`, each a `[NB, BS, NH, HS]` view of one of the engine's tensors."""
    wholes = [canonical_view(leaf, layout.axes, sizes, CACHE_AXES) for leaf in leaves]
    for leaf, whole in zip(leaves, wholes, strict=True):
        assert whole.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr(), f"{layout.name}: a copy"
    listed = [name for level in layout.levels for name in level]

    def plane(layer: int, kv: int) -> torch.Tensor:
        index, inside = 0, {"nl": layer, "two": kv}
        for name in listed:  # walk down the list levels; what they name is not looked up inside the tensor
            index = index * sizes.get(name, 1) + inside.pop(name, 0)
        return wholes[index][inside.get("nl", 0), inside.get("two", 0)]

    planes_per_layer = 1 if layout.is_mla else 2
    return tuple(tuple(plane(layer, kv) for kv in range(planes_per_layer)) for layer in range(sizes["nl"]))


def planes_identity(planes: Planes) -> tuple[Any, ...]:
    """Equal for two readings that address the same bytes in the same way, as the same layers."""
    return tuple(
        tuple(
            (
                plane.data_ptr(),
                tuple(plane.shape),
                tuple(s for s, n in zip(plane.stride(), plane.shape, strict=True) if n > 1),
            )
            for plane in row
        )
        for row in planes
    )


# ------------------------------------------------------------------------------------------------ the messages


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def describe(leaves: Sequence[torch.Tensor], lengths: tuple[int, ...]) -> str:
    """`list[32] of [2, 100, 16, 8, 128] torch.bfloat16, strides (...)`."""
    lists = "".join(f"list[{length}] of " for length in lengths)
    return f"{lists}{list(leaves[0].shape)} {leaves[0].dtype}, strides {leaves[0].stride()}"


def explain(
    what: str,
    engine: EngineType,
    hints: Mapping[str, Any],
    readings: Sequence[Reading],
    struck: Sequence[str],
) -> str:
    """The text of a LayoutError: what was given, what was struck out and why, which hint would decide."""
    given = ", ".join(f"{key}={value}" for key, value in hints.items()) or "none"
    lines = [f"{engine.value} KV cache {what}; hints: {given}"]
    if readings:
        lines.append(f"{len(readings)} readings are left, and they are different memory:")
        lines += [f"  - {reading}" for reading in readings]
        deciding = [hint for hint in deciding_hints(readings) if hint not in hints]
        lines.append(f"give one of the hints {', '.join(deciding)} to decide")
    else:
        lines.append("no reading is left:")
        lines += [f"  - {why}" for why in struck] or ["  - no row of this engine has this rank and nesting"]
        lines.append("see `lmcache-ref layouts` for the table, register_layout() to add a row")
    return "\n".join(lines)


def deciding_hints(readings: Sequence[Reading]) -> list[str]:
    """The hints by which these readings differ."""
    hints = [hint for hint, axis in _SIZE_HINTS.items() if len({r.sizes[axis] for r in readings}) > 1]
    if len({r.layout.stands_in("HND") for r in readings}) > 1:
        hints.append("kv_layout")
    if len({r.layout.is_mla for r in readings}) > 1:
        hints.append("use_mla")
    if len({r.layout.name for r in readings}) > 1:
        hints.append("layout=" + "|".join(r.layout.name for r in readings))
    return hints
