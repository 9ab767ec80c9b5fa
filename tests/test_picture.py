"""Pictures of memory: cells against memory orders written out by hand, their geometry, and the SVG.

The orders below are literal: no pattern, no plane and no stride takes part in stating them. How a terminal and the command
line show a picture is `test_cli.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import pytest
import torch

from lmcache_ref import LAYOUTS, PagedKVCache, register_layout
from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.layouts import find_layout, unregister_layout
from lmcache_ref.picture import EXAMPLE_SIZES, MOST_CELLS, Cell, Picture, colour, example_caches, find_cells, svg

#: NL=2 NB=2 BS=2 NH=2: tokens 0 and 1 are block 0, tokens 2 and 3 block 1
SMALL = {"nl": 2, "nb": 2, "bs": 2, "nh": 2, "hs": 2}

#: layout -> for each allocation what stands in it, `layer K|V token head`, from the first byte to the last
ORDERS = {
    # one tensor a layer, NHD: the heads of a token stand together
    "NL_X_TWO_NB_BS_NH_HS": [
        "0Kt0h0 0Kt0h1 0Kt1h0 0Kt1h1 0Kt2h0 0Kt2h1 0Kt3h0 0Kt3h1 0Vt0h0 0Vt0h1 0Vt1h0 0Vt1h1 0Vt2h0 0Vt2h1 0Vt3h0 0Vt3h1",
        "1Kt0h0 1Kt0h1 1Kt1h0 1Kt1h1 1Kt2h0 1Kt2h1 1Kt3h0 1Kt3h1 1Vt0h0 1Vt0h1 1Vt1h0 1Vt1h1 1Vt2h0 1Vt2h1 1Vt3h0 1Vt3h1",
    ],
    # the same, HND: the tokens of a head stand together, within a block
    "NL_X_TWO_NB_NH_BS_HS": [
        "0Kt0h0 0Kt1h0 0Kt0h1 0Kt1h1 0Kt2h0 0Kt3h0 0Kt2h1 0Kt3h1 0Vt0h0 0Vt1h0 0Vt0h1 0Vt1h1 0Vt2h0 0Vt3h0 0Vt2h1 0Vt3h1",
        "1Kt0h0 1Kt1h0 1Kt0h1 1Kt1h1 1Kt2h0 1Kt3h0 1Kt2h1 1Kt3h1 1Vt0h0 1Vt1h0 1Vt0h1 1Vt1h1 1Vt2h0 1Vt3h0 1Vt2h1 1Vt3h1",
    ],
    # all layers in one tensor, block by block
    "NB_NL_TWO_BS_NH_HS": [
        "0Kt0h0 0Kt0h1 0Kt1h0 0Kt1h1 0Vt0h0 0Vt0h1 0Vt1h0 0Vt1h1 1Kt0h0 1Kt0h1 1Kt1h0 1Kt1h1 1Vt0h0 1Vt0h1 1Vt1h0 1Vt1h1 "
        "0Kt2h0 0Kt2h1 0Kt3h0 0Kt3h1 0Vt2h0 0Vt2h1 0Vt3h0 0Vt3h1 1Kt2h0 1Kt2h1 1Kt3h0 1Kt3h1 1Vt2h0 1Vt2h1 1Vt3h0 1Vt3h1",
    ],
    # K and V of a token and head side by side; a layer is the third thing to move on
    "BHLNC": [
        "0Kt0h0 0Vt0h0 0Kt1h0 0Vt1h0 1Kt0h0 1Vt0h0 1Kt1h0 1Vt1h0 0Kt0h1 0Vt0h1 0Kt1h1 0Vt1h1 1Kt0h1 1Vt0h1 1Kt1h1 1Vt1h1 "
        "0Kt2h0 0Vt2h0 0Kt3h0 0Vt3h0 1Kt2h0 1Vt2h0 1Kt3h0 1Vt3h0 0Kt2h1 0Vt2h1 0Kt3h1 0Vt3h1 1Kt2h1 1Vt2h1 1Kt3h1 1Vt3h1",
    ],
    # one flat list: the layers' K, then the layers' V
    "TWO_NL_X_NBBS_NH_HS": [
        "0Kt0h0 0Kt0h1 0Kt1h0 0Kt1h1 0Kt2h0 0Kt2h1 0Kt3h0 0Kt3h1",
        "1Kt0h0 1Kt0h1 1Kt1h0 1Kt1h1 1Kt2h0 1Kt2h1 1Kt3h0 1Kt3h1",
        "0Vt0h0 0Vt0h1 0Vt1h0 0Vt1h1 0Vt2h0 0Vt2h1 0Vt3h0 0Vt3h1",
        "1Vt0h0 1Vt0h1 1Vt1h0 1Vt1h1 1Vt2h0 1Vt2h1 1Vt3h0 1Vt3h1",
    ],
    # one plane a layer, one head
    "NL_X_NB_BS_HS": ["0Kt0h0 0Kt1h0 0Kt2h0 0Kt3h0", "1Kt0h0 1Kt1h0 1Kt2h0 1Kt3h0"],
}


def order_of(layout_name: str) -> list[str]:
    picture = Picture.of_example(find_layout(layout_name), SMALL)
    return [
        " ".join(f"{cell.layer}{'KV'[cell.kv]}t{cell.slot}h{cell.head}" for cell in picture.of_tensor(tensor))
        for tensor in range(len(picture.tensors))
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_cells_stand_in_the_order_written_by_hand(name):
    assert order_of(name) == ORDERS[name]


def test_a_row_with_two_axes_swapped_is_seen_in_the_order():
    register_layout("SWAPPED", "two nb nh bs hs", nesting=("nl",))
    try:
        assert order_of("SWAPPED") == ORDERS["NL_X_TWO_NB_NH_BS_HS"] != ORDERS["NL_X_TWO_NB_BS_NH_HS"]
    finally:
        unregister_layout("SWAPPED")


@pytest.mark.parametrize("name", LAYOUTS)
def test_cells_tile_the_memory_of_every_row(name):
    """Each byte belongs to one cell, and each (layer, K or V, slot, head) is one cell."""
    picture = Picture.of_example(LAYOUTS[name])
    planes, heads = (1, 1) if LAYOUTS[name].is_mla else (2, 2)
    assert len(picture.cells) == 2 * planes * 8 * heads
    for tensor in range(len(picture.tensors)):
        cells = picture.of_tensor(tensor)
        assert [cell.offset_bytes for cell in cells] == [4 * i for i in range(len(cells))]
    held = Counter((cell.layer, cell.kv, cell.slot, cell.head) for cell in picture.cells)
    assert held == Counter(
        (layer, kv, slot, head)
        for layer in range(2)
        for kv in range(planes)
        for slot in range(8)
        for head in range(heads)
    )
    assert {cell.hs for cell in picture.cells} == {(0, 2)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_writing_through_a_plane_lands_at_the_byte_its_cell_names(name):
    caches = example_caches(LAYOUTS[name])
    hints = {"layout": name, "num_layers": 2, "num_kv_heads": 2, "tokens_per_block": 4, "head_dim": 2}
    engine = LAYOUTS[name].engines[0] if LAYOUTS[name].engines else "vllm"
    cache = PagedKVCache.from_engine(caches, engine, hints)
    leaves = flat(caches)
    for cell in find_cells(caches, cache):
        block, token = divmod(cell.slot, cache.block_size)
        cache.planes[cell.layer][cell.kv][block, token, cell.head] = 7.0
        found = [(t, i) for t, leaf in enumerate(leaves) for i in leaf.flatten().nonzero().flatten().tolist()]
        assert found == [(cell.tensor, cell.offset_bytes // 2), (cell.tensor, cell.offset_bytes // 2 + 1)]
        cache.planes[cell.layer][cell.kv][block, token, cell.head] = 0.0


def flat(caches):
    return [caches] if isinstance(caches, torch.Tensor) else [leaf for item in caches for leaf in flat(item)]


# The engine's own memory


def test_views_of_one_pool_are_one_allocation_and_padding_leaves_gaps():
    """Two layers of MLA in one pool of float32: blocks padded from 4 to 6 elements, layer 1 before layer 0."""
    pool = torch.zeros(2 * 2 * 6)
    layers = [pool.as_strided((2, 2, 1, 2), (6, 2, 2, 1), start) for start in (12, 0)]  # [NB, BS, NH=1, HS]
    cache = PagedKVCache(tuple((layer,) for layer in layers))
    picture = Picture.of(layers, cache)
    assert picture.title == "planes"
    assert picture.tensors == ("kv_caches[0]  [2, 2, 1, 2]",)
    assert picture.cell_bytes == 8
    assert [(cell.offset_bytes, cell.layer, cell.slot) for cell in picture.cells] == [
        (0, 1, 0),
        (8, 1, 1),
        (24, 1, 2),
        (32, 1, 3),
        (48, 0, 0),
        (56, 0, 1),
        (72, 0, 2),
        (80, 0, 3),
    ]


def test_a_plane_outside_the_given_tensors_is_an_error():
    cache = PagedKVCache.from_vllm([torch.zeros(2, 3, 4, 5, 8)], num_layers=1)
    with pytest.raises(LayoutError, match=r"plane \[layer 0, kv 0\] lies in none of the given tensors"):
        find_cells([torch.zeros(2, 3, 4, 5, 8)], cache)


def test_a_cache_too_large_to_be_read_is_an_error():
    cells = 2 * 100 * 16 * 8
    caches = [torch.zeros(2, 100, 16, 8, 4)]
    with pytest.raises(LayoutError, match=f"has {cells} cells of one token and head; .* at most {MOST_CELLS}"):
        find_cells(caches, PagedKVCache.from_vllm(caches))


@pytest.mark.parametrize("wrong", [{"nh": 0}, {"bs": -1}, {"hs": None}, {"nl": 1.5}])
def test_example_sizes_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(ArgumentError, match=rf"sizes\['{name}'\] must be a positive int"):
        example_caches(LAYOUTS["LBHNC"], {**EXAMPLE_SIZES, **wrong})


# Labels, lines, groups


def labels(picture: Picture, cells: list[Cell]) -> str:
    return ", ".join(picture.label(cell) for cell in cells)


def test_labels_name_the_head_only_where_there_are_several():
    fused, mla = (Picture.of_example(LAYOUTS[name], SMALL) for name in ("BHLNC", "NL_X_NB_BS_HS"))
    assert labels(fused, list(fused.cells[:3])) == "K t0 h0, V t0 h0, K t1 h0"
    assert labels(mla, list(mla.cells[:3])) == "KV t0, KV t1, KV t2"


def test_lines_end_where_an_axis_moves_on():
    picture = Picture.of_example(LAYOUTS["NL_X_TWO_NB_NH_BS_HS"])
    cells = picture.of_tensor(0)
    assert [len(line) for line in picture.lines(cells, 32)] == [32]
    assert [len(line) for line in picture.lines(cells, 31)] == [16, 16]
    assert [len(line) for line in picture.lines(cells, 15)] == [8, 8, 8, 8]
    line = picture.lines(cells, 7)[1]
    assert labels(picture, line) == "K t0 h1, K t1 h1, K t2 h1, K t3 h1"
    assert picture.shared(cells, picture.cells) == "layer 0"
    assert picture.shared(line, cells) == "K, block 0, head 1"
    assert [cell for line in picture.lines(cells, 3) for cell in line] == cells


def test_groups_are_what_the_outermost_axis_of_a_line_separates():
    picture = Picture.of_example(LAYOUTS["BHLNC"])
    line = picture.lines(picture.of_tensor(0), 16)[1]
    groups = picture.groups(line)
    assert [picture.shared(group, line) for group in groups] == ["layer 0", "layer 1"]
    assert labels(picture, groups[1][:3]) == "K t0 h1, V t0 h1, K t1 h1"
    assert picture.groups(groups[1][:1]) == [groups[1][:1]]


# The SVG

SVG = "{http://www.w3.org/2000/svg}"


def svg_cells(text: str) -> list[ElementTree.Element]:
    return [g for g in ElementTree.fromstring(text).iter(f"{SVG}g") if g.get("class") == "cell"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_svg_has_a_cell_for_each_cell_in_order(name):
    picture = Picture.of_example(LAYOUTS[name])
    drawn = svg_cells(svg(picture))
    assert len(drawn) == (16 if LAYOUTS[name].is_mla else 64)
    written = [" ".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in drawn]
    assert written == [picture.label(cell) for cell in picture.cells]
    places = [(float(rect.get("y")), float(rect.get("x"))) for group in drawn for rect in group.iter(f"{SVG}rect")]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", LAYOUTS)
def test_svg_is_self_contained_and_everything_lies_inside_it(name):
    text = svg(Picture.of_example(LAYOUTS[name]))
    root = ElementTree.fromstring(text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") != "page"]
    assert all(float(r.get("x")) + float(r.get("width")) <= width for r in boxes)
    assert all(float(r.get("y")) + float(r.get("height")) <= height for r in boxes)
    # 5.5 pixels a character is less than any text here needs, so this finds a page that is far too narrow
    assert all(float(t.get("x")) + 5.5 * len(t.text or "") <= width for t in root.iter(f"{SVG}text"))


def test_svg_escapes_what_a_user_calls_a_layout():
    row = register_layout('A<B>&"C"', "nl two nb bs nh hs")
    try:
        root = ElementTree.fromstring(svg(Picture.of_example(row)))
        assert 'A<B>&"C"' in [text.text for text in root.iter(f"{SVG}text")]
    finally:
        unregister_layout(row.name)


def test_svg_names_the_layer_in_the_cell_where_no_bracket_does():
    row = register_layout("LAYERS_INNERMOST", "two nb bs nh nl hs")
    try:
        drawn = svg_cells(svg(Picture.of_example(row)))
        written = [" ".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in drawn[:3]]
        assert written == ["K L0 t0 h0", "K L1 t0 h0", "K L0 t0 h1"]
    finally:
        unregister_layout(row.name)


def test_each_plane_head_and_token_has_its_own_colour_and_legible_ink():
    pictures = [Picture.of_example(LAYOUTS[name]) for name in ("NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_HS")]
    colours = {
        (picture.title, cell.kv, cell.slot, cell.head): colour(picture, cell)
        for picture in pictures
        for cell in picture.cells
    }
    assert len(colours) == 32 + 8
    assert len({fill for fill, _ in colours.values()}) == len(colours)
    assert all(contrast(fill, ink) >= 4.5 for fill, ink in colours.values())
    assert contrast("#777777", "#888888") < 4.5


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours, 1 to 21."""

    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
