"""Where each (layer, K or V, token, head) of a paged cache lives in memory: a list of cells, and an SVG of it.

The cells come from the planes of a `PagedKVCache`, so a picture shows what the specification believes, not a drawing made
for the documentation. Nothing here knows a layout by name; how a terminal shows a picture is in `picture_rich.py`.
"""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from .discovery import flatten
from .errors import ArgumentError, LayoutError
from .kv_cache import PagedKVCache
from .layouts import Layout
from .metadata import EngineType

#: a cache small enough to be read cell by cell
EXAMPLE_SIZES = {"nl": 2, "nb": 2, "bs": 4, "nh": 2, "hs": 2}

#: a picture of more cells is of no use to a reader
MOST_CELLS = 4096


class Cell(NamedTuple):
    """HS elements that stand side by side: one token and head of one plane. Cells sort in memory order.

    tensor: which of the engine's allocations, in the order the engine lists them.
    offset_bytes: from the first byte of that allocation.
    layer, kv (0 is K or the only plane, 1 is V), slot, head: what is stored here.
    hs: the elements of the head, half open; always all of them, since HS has stride 1.
    """

    tensor: int
    offset_bytes: int
    layer: int
    kv: int
    slot: int
    head: int
    hs: tuple[int, int]


def example_caches(layout: Layout, sizes: Mapping[str, int] = EXAMPLE_SIZES) -> Any:
    """Tensors such as an engine with this row allocates: float16 zeros in memory order, nested as the row says.

    sizes: NL, NB, BS, NH, HS by lower-case name. Raises ArgumentError when one is missing or not positive.
    """
    for name in EXAMPLE_SIZES:
        if not isinstance(sizes.get(name), int) or sizes[name] < 1:
            raise ArgumentError(f"sizes[{name!r}] must be a positive int, got {sizes.get(name)!r}")
    every = {**sizes, "two": 2, "1": 1, "nbbs": sizes["nb"] * sizes["bs"]}

    def extent(group: Sequence[str]) -> int:
        return math.prod(every[name] for name in group)

    def nest(levels: Sequence[Sequence[str]]) -> Any:
        if not levels:
            return torch.zeros([extent(group) for group in layout.axes], dtype=torch.float16)
        return [nest(levels[1:]) for _ in range(extent(levels[0]))]

    return nest(layout.levels)


def find_cells(kv_caches: Any, cache: PagedKVCache) -> list[Cell]:
    """Every cell of `cache`, in memory order: allocation by allocation, at rising addresses.

    kv_caches: the engine's tensors that `cache` was read from; they give the allocations their order. Reads no element.
    Raises LayoutError when a plane lies in none of them, or there are more than `MOST_CELLS` cells.
    """
    count = cache.num_layers * cache.kv_size * cache.num_slots * cache.num_heads
    if count > MOST_CELLS:
        raise LayoutError(f"{cache} has {count} cells of one token and head; a picture shows at most {MOST_CELLS}")
    places = _allocations(kv_caches)
    extents = (cache.num_blocks, cache.block_size, cache.num_heads)
    cells = []
    for layer, kv in itertools.product(range(cache.num_layers), range(cache.kv_size)):
        plane = cache.planes[layer][kv]
        start = plane.untyped_storage().data_ptr()
        if start not in places:
            raise LayoutError(f"plane [layer {layer}, kv {kv}] lies in none of the given tensors")
        for block, token, head in itertools.product(*map(range, extents)):
            offset_bytes = int(plane[block, token, head].storage_offset()) * plane.element_size()
            slot = block * cache.block_size + token
            cells.append(Cell(places[start], offset_bytes, layer, kv, slot, head, (0, cache.head_size)))
    return sorted(cells)


def _allocations(kv_caches: Any) -> dict[int, int]:
    """Address of each allocation -> its place in the order of the engine's tensors."""
    starts = [leaf.untyped_storage().data_ptr() for leaf in flatten(kv_caches)[0]]
    return {start: place for place, start in enumerate(dict.fromkeys(starts))}


# ------------------------------------------------------------------------------------------------ the picture


@dataclass(frozen=True)
class Picture:
    """The cells of one cache and what a reader needs beside them.

    title: the row's name. subtitle: its lists and axes with their sizes. tensors: the name and shape of each allocation, in
    order. cell_bytes: HS times the element size.
    """

    title: str
    subtitle: str
    tensors: tuple[str, ...]
    cells: tuple[Cell, ...]
    block_size: int
    cell_bytes: int

    @classmethod
    def of(cls, kv_caches: Any, cache: PagedKVCache) -> Picture:
        """The picture of an engine's own tensors; raises as `find_cells` does."""
        leaves, lengths = flatten(kv_caches)
        paths = ["".join(f"[{i}]" for i in path) for path in itertools.product(*map(range, lengths))]
        names: dict[int, str] = {}
        for leaf, path in zip(leaves, paths, strict=True):
            names.setdefault(leaf.untyped_storage().data_ptr(), f"kv_caches{path}  {list(leaf.shape)}")
        sizes = {"nl": cache.num_layers, "two": 2, "1": 1, "nb": cache.num_blocks, "bs": cache.block_size}
        sizes |= {"nbbs": cache.num_slots, "nh": cache.num_heads, "hs": cache.head_size}
        element_bytes = torch.empty(0, dtype=cache.dtype).element_size()
        return cls(
            cache.layout.name if cache.layout else "planes",
            _subtitle(cache.layout, sizes) if cache.layout else repr(cache),
            tuple(names.values()),
            tuple(find_cells(kv_caches, cache)),
            cache.block_size,
            cache.head_size * element_bytes,
        )

    @classmethod
    def of_example(cls, layout: Layout, sizes: Mapping[str, int] = EXAMPLE_SIZES) -> Picture:
        """The picture of a tiny cache in this row; raises as `example_caches` and `find_cells` do."""
        caches = example_caches(layout, sizes)
        engine = layout.engines[0] if layout.engines else EngineType.VLLM
        hints = {"layout": layout.name, "num_layers": sizes["nl"], "num_kv_heads": sizes["nh"]}
        hints |= {"tokens_per_block": sizes["bs"], "head_dim": sizes["hs"]}
        return cls.of(caches, PagedKVCache.from_engine(caches, engine, hints))

    @cached_property
    def varying(self) -> frozenset[str]:
        """The coordinates that are not the same in all cells; the others need no word."""
        return frozenset(_varying([self.coordinates(cell) for cell in self.cells]))

    def coordinates(self, cell: Cell) -> dict[str, int]:
        """What a cell holds, from the layer to the head; `token` is the slot, counted through all blocks."""
        block = cell.slot // self.block_size
        return {"layer": cell.layer, "kv": cell.kv, "block": block, "token": cell.slot, "head": cell.head}

    def kv_name(self, kv: int) -> str:
        """`K` or `V`, or `KV` where there is one plane a layer."""
        return "KV" if "kv" not in self.varying else "KV"[kv]

    def label(self, cell: Cell) -> str:
        """`K t3 h1`; the head only where there are several."""
        head = f" h{cell.head}" if "head" in self.varying else ""
        return f"{self.kv_name(cell.kv)} t{cell.slot}{head}"

    def of_tensor(self, tensor: int) -> list[Cell]:
        """The cells of one allocation, in memory order."""
        return [cell for cell in self.cells if cell.tensor == tensor]

    def shared(self, cells: Sequence[Cell], among: Sequence[Cell]) -> str:
        """What `cells` have in common that `among`, of which they are part, has not: `layer 0, K, block 1`."""
        inside = _varying([self.coordinates(cell) for cell in cells])
        common = _varying([self.coordinates(cell) for cell in among]) - inside
        if "token" in common:
            common.discard("block")
        first = self.coordinates(cells[0])
        return ", ".join(
            self.kv_name(value) if name == "kv" else f"{name} {value}"
            for name, value in first.items()
            if name in common
        )

    def steps(self, cells: Sequence[Cell]) -> list[int]:
        """For each cell, how many coordinates changed since the one before it: the outer the axis that moved on, the more.
        The first has none."""
        places = [self.coordinates(cell) for cell in cells]
        return [0] + [sum(a[n] != b[n] for n in a) for a, b in itertools.pairwise(places)] if places else []

    def lines(self, cells: Sequence[Cell], most: int) -> list[list[Cell]]:
        """`cells` cut where an axis moves on: the longest lines that hold at most `most` cells each."""
        steps = self.steps(cells)
        for least in sorted({*steps, max(steps) + 1} - {0}, reverse=True):
            lines = _cut(cells, [step >= least for step in steps])
            if max(map(len, lines)) <= most:
                return lines
        return [list(cells[i : i + most]) for i in range(0, len(cells), most)]

    def groups(self, line: Sequence[Cell]) -> list[list[Cell]]:
        """`line` cut where the outermost axis that moves within it moves on."""
        steps = self.steps(line)
        return _cut(line, [step == max(steps) for step in steps])


def _subtitle(layout: Layout, sizes: Mapping[str, int]) -> str:
    def text(group: Sequence[str]) -> str:
        words = [name if name == "1" else f"{name.upper()}={sizes[name]}" for name in group]
        return words[0] if len(words) == 1 else f"({' '.join(words)})"

    lists = "".join(f"list[{text(level)}] of " for level in layout.levels)
    return f"{lists}[{', '.join(map(text, layout.axes))}]"


def _varying(places: Sequence[Mapping[str, int]]) -> set[str]:
    return {name for name in places[0] if len({place[name] for place in places}) > 1}


def _cut(cells: Sequence[Cell], starts: Sequence[bool]) -> list[list[Cell]]:
    """`cells` in pieces; a piece begins at the first cell and wherever `starts` is true."""
    pieces: list[list[Cell]] = []
    for cell, new in zip(cells, starts, strict=True):
        if new or not pieces:
            pieces.append([])
        pieces[-1].append(cell)
    return pieces


# ------------------------------------------------------------------------------------------------ colours


def colour(picture: Picture, cell: Cell) -> tuple[str, str]:
    """Fill and ink of a cell as `#rrggbb`: K is blue, V orange, a single plane green; the head turns the hue, later
    tokens are darker. Ink is black or white, whichever is read better on the fill."""
    hue_degrees = {"K": 205, "V": 40, "KV": 150}[picture.kv_name(cell.kv)]
    turn_degrees = -55 if picture.kv_name(cell.kv) == "V" else 55
    heads = 1 + max(other.head for other in picture.cells)
    slots = 1 + max(other.slot for other in picture.cells)
    hue = (hue_degrees + turn_degrees * cell.head / max(heads - 1, 1)) % 360 / 360
    lightness = 0.87 - 0.45 * cell.slot / max(slots - 1, 1)
    rgb = colorsys.hls_to_rgb(hue, lightness, 0.72)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # contrast with white is 1.05 / (luminance + 0.05), with black (luminance + 0.05) / 0.05; they meet at 0.179
    ink = "#000000" if luminance > 0.179 else "#ffffff"
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb), ink


# ------------------------------------------------------------------------------------------------ SVG

CELL_WIDTH, CELL_HEIGHT = 58, 40
MARGIN, CAPTION_WIDTH, GROUP_HEIGHT, LINE_GAP, STEP_GAP = 28, 122, 18, 10, 3
CELLS_PER_LINE = 16

# The page follows the reader's light or dark setting; cells bring their own fill and ink, and read well on both.
STYLE = """
text { font-family: ui-sans-serif, system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; fill: #1d2733; }
.page { fill: #ffffff; }
.title { font-size: 21px; font-weight: 650; }
.code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.name { font-size: 14px; font-weight: 600; }
.note { font-size: 12.5px; fill: #566474; }
.offset { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; fill: #566474; }
.group { font-size: 11.5px; fill: #566474; }
.bracket { stroke: #a9b4c0; stroke-width: 1.5; fill: none; }
.cell rect { stroke: #1d2733; stroke-opacity: 0.35; }
.cell text { text-anchor: middle; }
.cell .what { font-size: 14px; font-weight: 700; }
.cell .which { font-size: 12px; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf1; }
  .page { fill: #12171e; }
  .note, .offset, .group { fill: #9daaba; }
  .bracket { stroke: #566474; }
  .cell rect { stroke: #ffffff; stroke-opacity: 0.25; }
}
"""


def svg(picture: Picture) -> str:
    """The picture as a self-contained SVG document: a panel for each allocation, its cells in memory order, read like text.

    Each cell carries a `<title>`, which browsers show as a tooltip. No script, no font and no file from elsewhere.
    """
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    _text(root, "title", f"{picture.title}: where each token and head lives in memory")
    _text(root, "style", STYLE)
    page = ElementTree.SubElement(root, "rect", {"class": "page", "width": "100%", "height": "100%"})
    _write(root, MARGIN, 46, picture.title, "title")
    _write(root, MARGIN, 70, picture.subtitle, "code")
    width, y = _legend(root, picture, 92)
    for tensor, name in enumerate(picture.tensors):
        right, y = _panel(root, picture, tensor, name, y + 36)
        width = max(width, right)
    notes = (
        "Addresses rise from left to right, then down. The wider a gap, the further out the axis that moves on there.",
        f"One cell is HS={picture.cells[0].hs[1]} elements ({picture.cell_bytes} bytes) of one head h and one token t, "
        "counted through all blocks.",
    )
    for note in notes:
        y += 20
        _write(root, MARGIN, y, note, "note")
        width = max(width, round(MARGIN + 6.3 * len(note)))
    size = {"width": str(width + MARGIN), "height": str(y + MARGIN)}
    root.attrib.update(size, viewBox=f"0 0 {size['width']} {size['height']}")
    page.set("rx", "10")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _panel(root: ElementTree.Element, picture: Picture, tensor: int, name: str, y: int) -> tuple[int, int]:
    """One allocation; returns its right and lower edge."""
    cells = picture.of_tensor(tensor)
    heading = _write(root, MARGIN, y, name, "code name")
    heading.set("xml:space", "preserve")
    what = picture.shared(cells, picture.cells)
    if what:
        _write(root, MARGIN + round(8.7 * len(name)) + 20, y, what, "note")
    y += 12
    right = 0
    for line in picture.lines(cells, CELLS_PER_LINE):
        _write(root, MARGIN, y + GROUP_HEIGHT + 17, f"+{line[0].offset_bytes} B", "offset")
        _write(root, MARGIN, y + GROUP_HEIGHT + 32, picture.shared(line, cells), "group")
        x = MARGIN + CAPTION_WIDTH
        for group in picture.groups(line):
            x = _group(root, picture, group, line, x, y) + 6 * STEP_GAP
        right = max(right, x - 6 * STEP_GAP)
        y += GROUP_HEIGHT + CELL_HEIGHT + LINE_GAP
    return right, y


def _group(
    root: ElementTree.Element, picture: Picture, group: Sequence[Cell], among: Sequence[Cell], x: int, y: int
) -> int:
    """Cells in a row under a bracket that says what they share; returns the right edge."""
    left, top = x, y + GROUP_HEIGHT
    one_layer = len({cell.layer for cell in group}) == 1
    for cell, step in zip(group, picture.steps(group), strict=True):
        x += STEP_GAP * step
        _cell(root, picture, cell, x, top, "" if one_layer else f" L{cell.layer}")
        x += CELL_WIDTH
    what = picture.shared(group, among)
    if what and len(group) > 1:
        ElementTree.SubElement(root, "path", {"class": "bracket", "d": f"M{left} {top - 2}v-3h{x - left}v3"})
        _write(root, left + 2, top - 8, what, "group")
    return x


def _cell(root: ElementTree.Element, picture: Picture, cell: Cell, x: int, y: int, layer: str) -> None:
    fill, ink = colour(picture, cell)
    group = ElementTree.SubElement(root, "g", {"class": "cell"})
    place = ", ".join(f"{name} {value}" for name, value in picture.coordinates(cell).items() if name != "kv")
    tip = f"{picture.kv_name(cell.kv)}, {place}, hs {cell.hs[0]}..{cell.hs[1] - 1}: byte {cell.offset_bytes}"
    _text(group, "title", tip)
    box = {"x": x, "y": y, "width": CELL_WIDTH, "height": CELL_HEIGHT, "rx": 4, "fill": fill}
    ElementTree.SubElement(group, "rect", {key: str(value) for key, value in box.items()})
    kv, _, which = picture.label(cell).partition(" ")
    for text, dy, kind in ((kv + layer, 17, "what"), (which, 32, "which")):
        _write(group, x + CELL_WIDTH // 2, y + dy, text, kind).set("style", f"fill: {ink}")


def _legend(root: ElementTree.Element, picture: Picture, y: int) -> tuple[int, int]:
    """A strip of the tokens' shades for each of K and V and each head; returns its right and lower edge."""
    x = MARGIN
    kinds = sorted({(cell.kv, cell.head) for cell in picture.cells})
    for kv, head in kinds:
        strip = {cell.slot: cell for cell in picture.cells if (cell.kv, cell.head) == (kv, head)}
        for place, slot in enumerate(sorted(strip)):
            box = {"x": x + 12 * place, "y": y, "width": 12, "height": 14, "fill": colour(picture, strip[slot])[0]}
            ElementTree.SubElement(root, "rect", {key: str(value) for key, value in box.items()})
        name = picture.kv_name(kv) + (f" head {head}" if "head" in picture.varying else "")
        text = f"{name}, t0 to t{max(strip)}"
        _write(root, x + 12 * len(strip) + 8, y + 12, text, "note")
        x += 12 * len(strip) + 8 + round(6.6 * len(text)) + 26
    return x - 26, y + 14


def _write(root: ElementTree.Element, x: int, y: int, text: str, kind: str) -> ElementTree.Element:
    element = _text(root, "text", text)
    element.attrib.update({"x": str(x), "y": str(y), "class": kind})
    return element


def _text(root: ElementTree.Element, tag: str, text: str) -> ElementTree.Element:
    element = ElementTree.SubElement(root, tag)
    element.text = text
    return element
