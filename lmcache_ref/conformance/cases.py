"""What is tested: every row of the layout table x direction x chunk format x dtype, each a `Case` with an id that spells it.

Sizes live here too. How a case is run is `suite.py`; what the engine's memory looks like is `engine.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..errors import ArgumentError
from ..layouts import LAYOUTS, Layout, find_layout
from ..memory import MemoryFormat

DIRECTIONS = ("gather", "scatter")

DTYPES = (
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: (dtype of the cache, dtype of the chunk): equal, or fp8 and its uint8 storage, either way round
DTYPE_PAIRS = (
    *((dtype, dtype) for dtype in DTYPES),
    *((fp8, torch.uint8) for fp8 in _FP8),
    *((torch.uint8, fp8) for fp8 in _FP8),
)


@dataclass(frozen=True)
class ChunkFormat:
    """One form a chunk can have, as the contract states it: its axes, whether it holds all layers, K and V or one plane."""

    name: str
    fmt: MemoryFormat
    pattern: str
    whole_model: bool
    planes: int


#: label in the id -> format; stated here a second time, so that a row lost from the table of chunk formats shows
CHUNKS = {
    chunk.name: chunk
    for chunk in (
        ChunkFormat("KV_2LTD", MemoryFormat.KV_2LTD, "two nl t (nh hs)", True, 2),
        ChunkFormat("KV_T2D", MemoryFormat.KV_T2D, "t two (nh hs)", False, 2),
        ChunkFormat("KV_2TD", MemoryFormat.KV_2TD, "two t (nh hs)", False, 2),
        ChunkFormat("KV_MLA_FMT", MemoryFormat.KV_MLA_FMT, "two nl t (nh hs)", True, 1),
        ChunkFormat("KV_MLA_FMT_TD", MemoryFormat.KV_MLA_FMT, "(two t) (nh hs)", False, 1),
    )
}


@dataclass(frozen=True)
class Sizes:
    """Lengths of the axes. All different and none 2, so that only the right reading fits."""

    nl: int
    nb: int
    bs: int
    nh: int
    hs: int

    def of(self, row: Layout) -> dict[str, int]:
        """Lengths of `nl two nb bs nh hs` for this row: TWO is 1 without K and V, NH is 1 unless the row names it."""
        names = axis_names(row)
        return {
            "nl": self.nl,
            "two": 2 if "two" in names else 1,
            "nb": self.nb,
            "bs": self.bs,
            "nh": self.nh if "nh" in names else 1,
            "hs": self.hs,
        }


SIZES = {
    "tiny": Sizes(nl=3, nb=7, bs=4, nh=5, hs=16),
    "real": Sizes(nl=5, nb=24, bs=16, nh=8, hs=128),
}

#: the scenes of a case, in the order they are run; see `scenes.py` and `suite.py`
PATTERNS = ("plain", "mixed", "prefix", "empty", "errors")
ALL = "all"


@dataclass(frozen=True)
class Case:
    """One point of the product. `id` spells it: `layout-direction-chunk-dtype[-chunk dtype][-sizes][-pattern]`.

    layout: a row of the table. direction: gather (engine to chunk) or scatter (chunk to engine). chunk: a key of
    `CHUNKS`. cache_dtype, chunk_dtype: a pair of `DTYPE_PAIRS`. sizes: a key of `SIZES`. pattern: one of `PATTERNS`,
    or "all" of them.
    """

    layout: str
    direction: str
    chunk: str
    cache_dtype: torch.dtype
    chunk_dtype: torch.dtype
    sizes: str = "tiny"
    pattern: str = ALL

    @property
    def id(self) -> str:
        """The case as text, on the command line and in messages; `Case.parse` reads it."""
        parts = [self.layout, self.direction, self.chunk, dtype_name(self.cache_dtype)]
        if self.chunk_dtype != self.cache_dtype:
            parts.append(dtype_name(self.chunk_dtype))
        if self.sizes != "tiny":
            parts.append(self.sizes)
        if self.pattern != ALL:
            parts.append(self.pattern)
        return "-".join(parts)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `text` spells. ArgumentError names the part that is unknown, LayoutError an unknown layout."""
        match = re.fullmatch(r"(.+)-(gather|scatter)-(\w+)-(\w+)((?:-\w+)*)", text.strip())
        if match is None:
            raise ArgumentError(f"case {text!r}; a case reads LAYOUT-gather|scatter-CHUNK-DTYPE, such as {_EXAMPLE}")
        layout, direction, chunk, dtype, rest = match.groups()
        _known(text, "chunk format", chunk, CHUNKS)
        _known(text, "dtype", dtype, _DTYPE_NAMES)
        cache_dtype = _DTYPE_NAMES[dtype]
        case = cls(find_layout(layout).name, direction, chunk, cache_dtype, cache_dtype)
        for part in rest.split("-")[1:]:
            if part in _DTYPE_NAMES:
                case = replace(case, chunk_dtype=_DTYPE_NAMES[part])
            elif part in SIZES:
                case = replace(case, sizes=part)
            else:
                _known(text, "last part", part, (*PATTERNS, ALL, *SIZES, *_DTYPE_NAMES))
                case = replace(case, pattern=part)
        return case._checked(text)

    def _checked(self, text: str) -> Case:
        """This case, or ArgumentError when layout, chunk and dtypes do not belong together."""
        if (self.cache_dtype, self.chunk_dtype) not in DTYPE_PAIRS:
            raise ArgumentError(f"case {text!r}: a {self.chunk_dtype} chunk does not hold a {self.cache_dtype} cache")
        planes = SIZES[self.sizes].of(find_layout(self.layout))["two"]
        if CHUNKS[self.chunk].planes != planes:
            allowed = ", ".join(name for name, chunk in CHUNKS.items() if chunk.planes == planes)
            raise ArgumentError(f"case {text!r}: {self.layout} has chunks {allowed}")
        return self

    def __str__(self) -> str:
        return self.id


def all_cases(layouts: Mapping[str, Layout] | None = None, sizes: str = "tiny") -> list[Case]:
    """The complete product over `layouts`, by default every row of the table, those registered by the user included."""
    return [
        Case(name, direction, chunk.name, cache_dtype, chunk_dtype, sizes)
        for name, row in (LAYOUTS if layouts is None else layouts).items()
        for direction in DIRECTIONS
        for chunk in CHUNKS.values()
        if chunk.planes == SIZES[sizes].of(row)["two"]
        for cache_dtype, chunk_dtype in DTYPE_PAIRS
    ]


def expected_count(layouts: Mapping[str, Layout] | None = None) -> int:
    """How many cases there must be, from the text of the table alone: 2 directions, 3 chunk formats with K and V or
    2 without, 7 dtypes and 2 x 2 pairs of fp8 and uint8."""
    rows = (LAYOUTS if layouts is None else layouts).values()
    formats = sum(3 if "two" in f"{row.nesting} {row.pattern}" else 2 for row in rows)
    return 2 * formats * (7 + 2 * 2)


def axis_names(row: Layout) -> list[str]:
    """Every axis name in the row's text, list levels first."""
    return re.findall(r"\w+", " ".join((*row.nesting, row.pattern)))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _known(text: str, what: str, part: str, names: Mapping[str, object] | tuple[str, ...]) -> None:
    if part not in names:
        raise ArgumentError(f"case {text!r}: unknown {what} {part!r}; known: {', '.join(names)}")


_DTYPE_NAMES = {dtype_name(dtype): dtype for dtype in DTYPES}
_EXAMPLE = "NL_X_TWO_NB_BS_NH_HS-gather-KV_2LTD-bfloat16"
