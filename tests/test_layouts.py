"""The layout table against offsets typed as numbers, the mutants of each row, and the rules of `register_layout`.

The numbers were worked out from what the row's name says, not from its pattern. How a row is chosen is tested in
`test_discovery.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from lmcache_ref.discovery import discover, flatten
from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.layouts import (
    KV_LAYOUTS,
    LAYOUTS,
    find_layout,
    parse_pattern,
    register_layout,
    unregister_layout,
)
from lmcache_ref.metadata import EngineType

BUILT_IN = tuple(LAYOUTS)

# (layer, kv, slot, head, element) at NL=3, NB=5, BS=4, NH=2, HS=8: the first, three inner ones, the last. With one
# plane a layer kv and head are 0.
POINTS = ((0, 0, 0, 0, 0), (1, 0, 6, 1, 3), (0, 1, 9, 1, 0), (2, 1, 13, 0, 5), (2, 1, 19, 1, 7))
SIZES = {"num_kv_heads": 2, "tokens_per_block": 4}  # what the fused TensorRT-LLM axis needs to be told


class Row(NamedTuple):
    """What an engine hands out, and for each of POINTS (place in the list, element offset in that tensor)."""

    lists: tuple[int, ...]
    shape: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


TABLE = {
    "NB_NL_TWO_BS_NH_HS": Row((), (5, 3, 2, 4, 2, 8), ((0, 0), (0, 555), (0, 856), (0, 1493), (0, 1919))),
    "NL_X_TWO_NB_BS_NH_HS": Row((3,), (2, 5, 4, 2, 8), ((0, 0), (1, 107), (0, 472), (2, 533), (2, 639))),
    "NL_X_NB_TWO_BS_NH_HS": Row((3,), (5, 2, 4, 2, 8), ((0, 0), (1, 171), (0, 344), (2, 469), (2, 639))),
    "NL_X_NB_BS_HS": Row((3,), (5, 4, 8), ((0, 0), (1, 51), (0, 72), (2, 109), (2, 159))),
    "TWO_X_NL_X_NBBS_NH_HS": Row((2, 3), (20, 2, 8), ((0, 0), (1, 107), (3, 152), (5, 213), (5, 319))),
    "NL_X_NBBS_ONE_HS": Row((3,), (20, 1, 8), ((0, 0), (1, 51), (0, 72), (2, 109), (2, 159))),
    "NL_X_TWO_NB_NH_BS_HS": Row((3,), (2, 5, 2, 4, 8), ((0, 0), (1, 115), (0, 488), (2, 525), (2, 639))),
    "NL_X_NB_TWO_NH_BS_HS": Row((3,), (5, 2, 2, 4, 8), ((0, 0), (1, 179), (0, 360), (2, 461), (2, 639))),
    "NB_NL_TWO_NH_BS_HS": Row((), (5, 3, 2, 2, 4, 8), ((0, 0), (0, 563), (0, 872), (0, 1485), (0, 1919))),
    "TWO_X_NL_X_NB_BS_NH_HS": Row((2, 3), (5, 4, 2, 8), ((0, 0), (1, 107), (3, 152), (5, 213), (5, 319))),
    "NL_X_NB_NH_BS_TWO_HS": Row((3,), (5, 2, 4, 16), ((0, 0), (1, 227), (0, 344), (2, 413), (2, 639))),
    "NL_X_NB_BS_NH_TWO_HS": Row((3,), (5, 4, 2, 16), ((0, 0), (1, 211), (0, 312), (2, 429), (2, 639))),
    "NL_X_NH_NB_BS_TWO_HS": Row((3,), (2, 5, 4, 16), ((0, 0), (1, 419), (0, 472), (2, 221), (2, 639))),
    "NB_NH_NL_TWO_BS_HS": Row((), (5, 2, 3, 2, 4, 8), ((0, 0), (0, 659), (0, 1000), (0, 1325), (0, 1919))),
    "TWO_NL_X_NBBS_NH_HS": Row((6,), (20, 2, 8), ((0, 0), (1, 107), (3, 152), (5, 213), (5, 319))),
    "TWO_NL_X_NB_BS_NH_HS": Row((6,), (5, 4, 2, 8), ((0, 0), (1, 107), (3, 152), (5, 213), (5, 319))),
    "NL_X_NB_BS_ONE_HS": Row((3,), (5, 4, 1, 8), ((0, 0), (1, 51), (0, 72), (2, 109), (2, 159))),
    "ONE_X_NL_X_NBBS_ONE_HS": Row((1, 3), (20, 1, 8), ((0, 0), (1, 51), (0, 72), (2, 109), (2, 159))),
    "ONE_X_NL_X_NB_BS_ONE_HS": Row((1, 3), (5, 4, 1, 8), ((0, 0), (1, 51), (0, 72), (2, 109), (2, 159))),
    "NB_NL_TWO_NHBSHS": Row((), (5, 3, 2, 64), ((0, 0), (0, 563), (0, 872), (0, 1485), (0, 1919))),
    "LBHNC": Row((), (3, 5, 2, 4, 16), ((0, 0), (0, 867), (0, 344), (0, 1693), (0, 1919))),
    "LBNHC": Row((), (3, 5, 4, 2, 16), ((0, 0), (0, 851), (0, 312), (0, 1709), (0, 1919))),
    "LHBNC": Row((), (3, 2, 5, 4, 16), ((0, 0), (0, 1059), (0, 472), (0, 1501), (0, 1919))),
    "BLHNC": Row((), (5, 3, 2, 4, 16), ((0, 0), (0, 611), (0, 856), (0, 1437), (0, 1919))),
    "BLNHC": Row((), (5, 3, 4, 2, 16), ((0, 0), (0, 595), (0, 824), (0, 1453), (0, 1919))),
    "BHLNC": Row((), (5, 2, 3, 4, 16), ((0, 0), (0, 675), (0, 984), (0, 1309), (0, 1919))),
}

UPSTREAM_IDS = {
    0: "NB_NL_TWO_BS_NH_HS",
    1: "NL_X_TWO_NB_BS_NH_HS",
    2: "NL_X_NB_TWO_BS_NH_HS",
    3: "NL_X_NB_BS_HS",
    4: "TWO_X_NL_X_NBBS_NH_HS",
    5: "NL_X_NBBS_ONE_HS",
    6: "NL_X_TWO_NB_NH_BS_HS",
    7: "NL_X_NB_TWO_NH_BS_HS",
    8: "NB_NL_TWO_NH_BS_HS",
    9: "TWO_X_NL_X_NB_BS_NH_HS",
    10: "NL_X_NB_NH_BS_TWO_HS",
}


def nested(shape, lists):
    """Fresh tensors in lists of those lengths."""
    return [nested(shape, lists[1:]) for _ in range(lists[0])] if lists else torch.empty(shape, dtype=torch.float32)


def wrong_places(layout: str, row: Row) -> list[str]:
    """The points that the planes of `layout`, read from such tensors, put elsewhere than the table says."""
    tensors = nested(row.shape, row.lists)
    leaves = flatten(tensors)[0]
    engine = (*LAYOUTS[layout].engines, EngineType.VLLM)[0]
    planes = discover(tensors, engine, {"layout": layout, **(SIZES if row.shape[-1] == 64 else {})}).planes
    wrong = []
    for (layer, kv, slot, head, element), (leaf, offset) in zip(POINTS, row.places, strict=True):
        if len(planes[0]) == 1:
            kv = head = 0
        try:
            plane = planes[layer][kv]
            plane = plane[divmod(slot, plane.shape[1])]
            address = plane[head, element].data_ptr()
        except IndexError:
            address = None
        if address != leaves[leaf].data_ptr() + 4 * offset:
            wrong.append(f"layer {layer}, kv {kv}, slot {slot}, head {head}, element {element}")
    return wrong


def test_the_table_here_has_exactly_the_built_in_rows():
    assert set(TABLE) == set(BUILT_IN) and len(BUILT_IN) == 26
    assert all(len(row.places) == len(POINTS) for row in TABLE.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_element_stands_where_the_name_says(name):
    row = TABLE[name]
    assert wrong_places(name, row) == []
    elements = math.prod(row.shape)  # the last point is the last element of the last tensor
    assert row.places[-1] == (math.prod(row.lists) - 1, elements - 1)


def mutants(name: str) -> list[tuple[str, tuple[str, ...]]]:
    """Pattern and nesting of the row with two different names swapped, in every way that leaves `hs` alone."""
    text = " | ".join((*LAYOUTS[name].nesting, LAYOUTS[name].pattern))
    found = []
    for one, other in itertools.combinations([word for word in re.finditer(r"\w+", text) if word[0] != "hs"], 2):
        if one[0] != other[0]:
            between = text[one.end() : other.start()]
            swapped = text[: one.start()] + other[0] + between + one[0] + text[other.end() :]
            *nesting, pattern = swapped.split(" | ")
            found.append((pattern, tuple(nesting)))
    return found


def caught(name: str, pattern: str, nesting: tuple[str, ...]) -> str:
    """How a row that claims to be `name` is caught: it is no row, no reading of such tensors, or other places."""
    try:
        register_layout("MUTANT", pattern, nesting=nesting, engines=LAYOUTS[name].engines)
    except ArgumentError:
        return "no row"
    try:
        return "other places" if wrong_places("MUTANT", TABLE[name]) else ""
    except LayoutError:
        return "no reading"
    finally:
        unregister_layout("MUTANT")


def test_every_mutant_of_every_row_is_caught():
    verdicts = {
        (name, pattern, nesting): caught(name, pattern, nesting)
        for name in BUILT_IN
        for pattern, nesting in mutants(name)
    }
    assert [mutant for mutant, verdict in verdicts.items() if not verdict] == []
    assert Counter(verdicts.values()) == {"other places": 98, "no reading": 78, "no row": 52}
    by_places = {name for (name, _, _), verdict in verdicts.items() if verdict == "other places"}
    # these have only axes of size one to swap with, which the tensors' shape alone contradicts
    assert set(BUILT_IN) - by_places == {"NL_X_NBBS_ONE_HS", "ONE_X_NL_X_NBBS_ONE_HS"}


def test_upstream_ids_are_0_to_10_each_once():
    found = [(row.upstream_id, row.name) for row in LAYOUTS.values() if row.upstream_id is not None]
    assert sorted(found) == sorted(UPSTREAM_IDS.items())


# register_layout

HEADS_FIRST = {"name": "NL_X_NH_NB_BS_HS_TWO_X", "pattern": "nh nb bs hs", "nesting": ("nl", "two")}


@pytest.fixture
def heads_first():
    yield register_layout(**HEADS_FIRST)
    unregister_layout(HEADS_FIRST["name"])


def test_a_registered_row_is_found_read_and_taken_out_again(heads_first):
    assert find_layout(heads_first.name) is heads_first
    tensors = nested((2, 5, 4, 8), (3, 2))
    found = discover(tensors, "vllm", {"layout": heads_first.name})
    assert found.layout is heads_first
    assert found.planes[2][1][4, 3, 1, 7].data_ptr() == tensors[2][1].data_ptr() + 4 * 319
    assert found.planes[1][0][1, 2, 1, 3].data_ptr() == tensors[1][0].data_ptr() + 4 * (160 + 32 + 16 + 3)
    unregister_layout(heads_first.name)
    with pytest.raises(LayoutError, match="unknown layout 'NL_X_NH_NB_BS_HS_TWO_X'; known: NB_NL_TWO_BS_NH_HS, "):
        find_layout(heads_first.name)
    register_layout(**HEADS_FIRST)


def test_a_row_for_an_engine_is_picked_up_without_being_named():
    register_layout("mine", "1 nb bs nh hs", nesting=("two", "nl"), engines=["sglang"], logical_in=["sglang"])
    try:
        found = discover(nested((1, 5, 4, 2, 8), (2, 3)), "sglang")
        assert (found.layout.name, found.planes[0][0].shape) == ("mine", (5, 4, 2, 8))
    finally:
        unregister_layout("mine")


def test_the_same_row_twice_is_one_row(heads_first):
    assert register_layout(**HEADS_FIRST) == heads_first
    assert len(LAYOUTS) == 27


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "nh nb bs two hs"}, "axis 'two' appears twice"),
        ({"pattern": "nh nb bs nb hs"}, "axis 'nb' appears twice"),
        ({"pattern": "nh nb bs nl hs"}, "axis 'nl' appears twice"),
        ({"pattern": "nh nb bs dim hs"}, "unknown axis 'dim'; known: 1, bs, hs, nb, nbbs, nh, nl, two"),
        ({"pattern": "nh nb hs bs"}, "the innermost axis must be 'hs'"),
        ({"pattern": "nh nb bs (hs 1)"}, "the innermost axis must be 'hs'"),
        ({"pattern": "nh nb hs"}, "needs either 'nbbs' or both 'nb' and 'bs'"),
        ({"pattern": "nh bs hs"}, "needs either 'nbbs' or both 'nb' and 'bs'"),
        ({"pattern": "nh nbbs bs hs"}, "needs either 'nbbs' or both 'nb' and 'bs'"),
        ({"pattern": "nh nbbs nb bs hs"}, "needs either 'nbbs' or both 'nb' and 'bs'"),
        ({"pattern": "nh hs"}, "needs either 'nbbs' or both 'nb' and 'bs'"),
        ({"nesting": ("two",)}, "needs the layer axis 'nl', as a tensor axis or a list level"),
        ({"nesting": ("nl", "nh"), "pattern": "nb bs hs"}, r"list levels can only be 'nl', 'two', '\(two nl\)' or '1'"),
        ({"nesting": ("nl two",)}, "two names of one list level stand in parentheses"),
        ({"nesting": ("nl", "")}, "pattern '': only names and one level of parentheses are allowed"),
        ({"pattern": ""}, "pattern '': only names and one level of parentheses are allowed"),
        ({"pattern": "nh nb bs ()"}, "only names and one level of parentheses are allowed"),
        ({"pattern": "nh (nb (bs hs))"}, "only names and one level of parentheses are allowed"),
        ({"pattern": "nh nb bs (hs"}, "only names and one level of parentheses are allowed"),
        ({"pattern": "nh nb) bs hs"}, "only names and one level of parentheses are allowed"),
        ({"engines": ["vllm", "tgi"]}, "engine: 'tgi' is unknown; known: vllm, sglang, trtllm, mock"),
        ({"upstream_id": 7}, "upstream_id 7 belongs to NL_X_NB_TWO_NH_BS_HS"),
        ({"name": "LBHNC"}, "layout 'LBHNC' is already registered as LBHNC = "),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_what_is_no_row_is_refused_and_leaves_the_table_alone(changes, message):
    with pytest.raises(ArgumentError, match=message):
        register_layout(**{**HEADS_FIRST, **changes})
    assert tuple(LAYOUTS) == BUILT_IN


def test_an_unknown_row_cannot_be_taken_out():
    with pytest.raises(LayoutError, match="unknown layout 'nothing'; known: "):
        unregister_layout("nothing")


def test_patterns_are_read_as_einops_reads_them():
    assert parse_pattern("nb nh bs (two hs)") == (("nb",), ("nh",), ("bs",), ("two", "hs"))
    assert parse_pattern("(nh bs hs)") == (("nh", "bs", "hs"),)
    assert parse_pattern("nbbs 1 hs") == (("nbbs",), ("1",), ("hs",))


# Memory orders

STANDS_IN = {
    # row: every kv_layout whose order its axes have
    "NB_NL_TWO_BS_NH_HS": "NHD BLNHC",
    "NL_X_TWO_NB_BS_NH_HS": "NHD LBNHC BLNHC",
    "NL_X_NB_TWO_BS_NH_HS": "NHD LBNHC BLNHC",
    "NL_X_NB_BS_HS": "NHD HND LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC",
    "TWO_X_NL_X_NBBS_NH_HS": "NHD HND LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC",
    "NL_X_TWO_NB_NH_BS_HS": "HND LBHNC BLHNC BHLNC",
    "NB_NL_TWO_NH_BS_HS": "HND BLHNC",
    "NL_X_NB_NH_BS_TWO_HS": "HND LBHNC BLHNC BHLNC",
    "NL_X_NB_BS_NH_TWO_HS": "NHD LBNHC BLNHC",
    "NL_X_NH_NB_BS_TWO_HS": "LHBNC",
    "NB_NH_NL_TWO_BS_HS": "HND BHLNC",
    "NB_NL_TWO_NHBSHS": "HND BLHNC",
    "LBHNC": "HND LBHNC",
    "LBNHC": "NHD LBNHC",
    "LHBNC": "LHBNC",
    "BLHNC": "HND BLHNC",
    "BLNHC": "NHD BLNHC",
    "BHLNC": "HND BHLNC",
}


@pytest.mark.parametrize("name", STANDS_IN)
def test_which_memory_orders_a_row_stands_in(name):
    row = LAYOUTS[name]
    assert " ".join(order for order in KV_LAYOUTS if row.stands_in(order)) == STANDS_IN[name]


def test_axes_of_size_one_have_no_place_in_the_order():
    row = LAYOUTS["BLHNC"]
    assert row.letters() == "BLHN"
    assert row.letters({"nb": 3, "nl": 1, "nh": 2, "bs": 1}) == "BH"


def test_what_a_row_says_of_itself():
    assert str(LAYOUTS["TWO_NL_X_NBBS_NH_HS"]) == "TWO_NL_X_NBBS_NH_HS = list[(two nl)] of [nbbs nh hs]"
    assert {name for name, row in LAYOUTS.items() if row.is_mla} == {
        "NL_X_NB_BS_HS",
        "NL_X_NBBS_ONE_HS",
        "NL_X_NB_BS_ONE_HS",
        "ONE_X_NL_X_NBBS_ONE_HS",
        "ONE_X_NL_X_NB_BS_ONE_HS",
    }
    assert {name for name, row in LAYOUTS.items() if row.is_fused} == {
        *("NL_X_NB_NH_BS_TWO_HS", "NL_X_NB_BS_NH_TWO_HS", "NL_X_NH_NB_BS_TWO_HS"),
        *("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
    }
