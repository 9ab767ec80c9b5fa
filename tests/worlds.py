"""Worlds: what an engine may hand out at given sizes, the hints that are true of it, and where its planes then are.

A form is two lists of axis names, the order in memory and the order in which the tensors show them; tensors and planes
follow by stride arithmetic over one flat buffer. Nothing here reads the library's table.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

HS = 4  # elements of a head; NH, BS, NB, NL vary
#: Every world lies in this memory, so that planes can be told apart by their offset.
BASE = torch.zeros(1 << 14, dtype=torch.uint8)

Planes = tuple[tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...], ...]


class Form(NamedTuple):
    """One shape of engine.

    lists: the axes of each list level. memory: all axes, as memory has them. shown: the axes of a tensor, as its shape
    has them. orders: every `kv_layout` that is true of it, None if it may be left out. row: what the shape is called.
    """

    name: str
    engine: str
    lists: str
    memory: str
    shown: str
    orders: tuple[str | None, ...]
    row: str


class World(NamedTuple):
    """A form at some sizes. planes: `[layer][kv]` = (offset, shape [NB, BS, NH, HS], strides of axes longer than one)."""

    form: Form
    sizes: dict[str, int]
    tensors: Any
    looks: tuple[Any, ...]
    planes: Planes


NHD, HND = (None, "NHD"), (None, "HND")
FUSED_HND = (None, "HND", "LBHNC", "BLHNC", "BHLNC")
FUSED_NHD = (None, "NHD", "LBNHC", "BLNHC")
FUSED_HEADS_FIRST = (None, "LHBNC")
LISTED = "nl"

FIRST, SECOND = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_BS_NH_HS"
FUSED = "NL_X_NB_NH_BS_TWO_HS"
CROSS = "NB_NL_TWO_BS_NH_HS"

# fmt: off
FORMS = [
    # vLLM, one tensor a layer, K/V first and second; a logical view shows NHD names whatever the memory order is
    Form("first, NHD", "vllm", LISTED, "nl two nb bs nh hs", "two nb bs nh hs", NHD, FIRST),
    Form("first, HND", "vllm", LISTED, "nl two nb nh bs hs", "two nb nh bs hs", ("HND",), "NL_X_TWO_NB_NH_BS_HS"),
    Form("first, HND, logical", "vllm", LISTED, "nl two nb nh bs hs", "two nb bs nh hs", HND, FIRST),
    Form("first, NHD, interleaved", "vllm", LISTED, "nl nb two bs nh hs", "two nb bs nh hs", NHD, FIRST),
    Form("first, HND, interleaved", "vllm", LISTED, "nl nb two nh bs hs", "two nb bs nh hs", HND, FIRST),
    Form("first, in a pool", "vllm", LISTED, "two nb nl bs nh hs", "two nb bs nh hs", NHD, FIRST),
    Form("second, NHD", "vllm", LISTED, "nl nb two bs nh hs", "nb two bs nh hs", NHD, SECOND),
    Form("second, HND", "vllm", LISTED, "nl nb two nh bs hs", "nb two nh bs hs", ("HND",), "NL_X_NB_TWO_NH_BS_HS"),
    Form("second, HND, logical", "vllm", LISTED, "nl nb two nh bs hs", "nb two bs nh hs", HND, SECOND),
    Form("second over first, NHD", "vllm", LISTED, "nl two nb bs nh hs", "nb two bs nh hs", NHD, SECOND),
    Form("second over first, HND", "vllm", LISTED, "nl two nb nh bs hs", "nb two bs nh hs", HND, SECOND),
    # the layers of one cross-layer tensor as a list
    Form("layer of NHD", "vllm", LISTED, "nb nl two bs nh hs", "nb two bs nh hs", NHD, SECOND),
    Form("layer of HND", "vllm", LISTED, "nb nl two nh bs hs", "nb two nh bs hs", ("HND",), "NL_X_NB_TWO_NH_BS_HS"),
    Form("layer of HND, logical", "vllm", LISTED, "nb nl two nh bs hs", "nb two bs nh hs", HND, SECOND),
    Form("layer of per-head, logical", "vllm", LISTED, "nb nh nl two bs hs", "nb two bs nh hs", HND, SECOND),
    # vLLM, fused K|V, one tensor a layer
    Form("fused HND", "vllm", LISTED, "nl nb nh bs two hs", "nb nh bs (two hs)", FUSED_HND, FUSED),
    Form("fused NHD", "vllm", LISTED, "nl nb bs nh two hs", "nb bs nh (two hs)", FUSED_NHD, "NL_X_NB_BS_NH_TWO_HS"),
    Form("fused NHD, logical", "vllm", LISTED, "nl nb bs nh two hs", "nb nh bs (two hs)", FUSED_NHD, FUSED),
    Form("fused heads first", "vllm", LISTED, "nl nh nb bs two hs", "nh nb bs (two hs)", FUSED_HEADS_FIRST,
         "NL_X_NH_NB_BS_TWO_HS"),
    Form("fused heads first, logical", "vllm", LISTED, "nl nh nb bs two hs", "nb nh bs (two hs)", FUSED_HEADS_FIRST, FUSED),
    # one plane
    Form("vLLM MLA", "vllm", LISTED, "nl nb bs hs", "nb bs hs", (None, "NHD", "HND"), "NL_X_NB_BS_HS"),
    Form("layer of an MLA pool", "vllm", LISTED, "nb nl bs hs", "nb bs hs", NHD, "NL_X_NB_BS_HS"),
    # SGLang: flat slots are blocks of one token
    Form("SGLang flat list", "sglang", "(two nl)", "two nl nb nh hs", "nb nh hs", NHD, "TWO_NL_X_NBBS_NH_HS"),
    Form("SGLang two lists", "sglang", "two nl", "two nl nb nh hs", "nb nh hs", NHD, "TWO_X_NL_X_NBBS_NH_HS"),
    Form("SGLang pages, flat list", "sglang", "(two nl)", "two nl nb bs nh hs", "nb bs nh hs", NHD, "TWO_NL_X_NB_BS_NH_HS"),
    Form("SGLang pages, two lists", "sglang", "two nl", "two nl nb bs nh hs", "nb bs nh hs", NHD, "TWO_X_NL_X_NB_BS_NH_HS"),
    Form("SGLang MLA", "sglang", "nl", "nl nb 1 hs", "nb 1 hs", NHD, "NL_X_NBBS_ONE_HS"),
    Form("SGLang MLA, pages", "sglang", "nl", "nl nb bs 1 hs", "nb bs 1 hs", NHD, "NL_X_NB_BS_ONE_HS"),
    Form("SGLang MLA, nested", "sglang", "1 nl", "1 nl nb hs", "nb 1 hs", NHD, "ONE_X_NL_X_NBBS_ONE_HS"),
    Form("SGLang MLA, pages, nested", "sglang", "1 nl", "1 nl nb bs hs", "nb bs 1 hs", NHD, "ONE_X_NL_X_NB_BS_ONE_HS"),
]
# one cross-layer tensor, as such and as the only one of a list
for lists, where in (("", ""), ("1", " in a list")):
    FORMS += [
        Form(f"cross NHD{where}", "vllm", lists, "nb nl two bs nh hs", "nb nl two bs nh hs", NHD, CROSS),
        Form(f"cross HND{where}", "vllm", lists, "nb nl two nh bs hs", "nb nl two nh bs hs", ("HND",), "NB_NL_TWO_NH_BS_HS"),
        Form(f"cross HND, logical{where}", "vllm", lists, "nb nl two nh bs hs", "nb nl two bs nh hs", HND, CROSS),
        Form(f"cross per-head, logical{where}", "vllm", lists, "nb nh nl two bs hs", "nb nl two bs nh hs", HND, CROSS),
        Form(f"cross layer-first, logical{where}", "vllm", lists, "nl nb two bs nh hs", "nb nl two bs nh hs", NHD, CROSS),
        Form(f"TensorRT-LLM{where}", "trtllm", lists, "nb nl two nh bs hs", "nb nl two nh bs hs", HND, "NB_NL_TWO_NH_BS_HS"),
        Form(f"TensorRT-LLM, flat{where}", "trtllm", lists, "nb nl two nh bs hs", "nb nl two (nh bs hs)", HND,
             "NB_NL_TWO_NHBSHS"),
    ]
# vLLM's six orders of one pool: the pool and the layers of the pool, each in memory order and as a logical view
for order, of_layer, orders in (
    ("nl nb nh bs", FUSED, ("LBHNC", "HND")),
    ("nl nb bs nh", "NL_X_NB_BS_NH_TWO_HS", ("LBNHC", "NHD")),
    ("nl nh nb bs", "NL_X_NH_NB_BS_TWO_HS", ("LHBNC",)),
    ("nb nl nh bs", FUSED, ("BLHNC", "HND")),
    ("nb nl bs nh", "NL_X_NB_BS_NH_TWO_HS", ("BLNHC", "NHD")),
    ("nb nh nl bs", FUSED, ("BHLNC", "HND")),
):
    memory, layer = f"{order} two hs", f"{order.replace('nl ', '')} (two hs)"
    FORMS += [
        Form(f"pool {orders[0]}", "vllm", "", memory, f"{order} (two hs)", (None, *orders), orders[0]),
        Form(f"pool {orders[0]}, logical", "vllm", "", memory, "nl nb nh bs (two hs)", (None, *orders), "LBHNC"),
        Form(f"layer of {orders[0]}", "vllm", LISTED, memory, layer, (None, *orders), of_layer),
        Form(f"layer of {orders[0]}, logical", "vllm", LISTED, memory, "nb nh bs (two hs)", (None, *orders), FUSED),
    ]
#: reached by `layout` alone
PER_HEAD = Form("cross per-head", "vllm", "", "nb nh nl two bs hs", "nb nh nl two bs hs", (), "NB_NH_NL_TWO_BS_HS")
# fmt: on


def groups(text: str) -> list[list[str]]:
    """`"nb (two hs)"` -> `[["nb"], ["two", "hs"]]`."""
    return [word.strip("()").split() for word in re.findall(r"\([^)]*\)|\S+", text)]


def build(form: Form, sizes: dict[str, int]) -> World:
    """The form at these sizes of `nl nb bs nh`, over BASE."""
    sizes = {**sizes, "two": 2, "hs": HS, "1": 1}
    names = form.memory.split()
    strides = {"1": 0}
    extent = 1
    for name in reversed(names):
        strides[name] = extent
        extent *= sizes[name]
    assert extent <= BASE.numel()
    shown, levels = groups(form.shown), groups(form.lists)
    shape = tuple(math.prod(sizes[name] for name in group) for group in shown)
    view = tuple(strides[group[-1]] for group in shown)

    def nest(levels: list[list[str]], offset: int) -> Any:
        if not levels:
            return BASE.as_strided(shape, view, offset)
        spots = itertools.product(*(range(sizes[name]) for name in levels[0]))
        steps = [strides[name] for name in levels[0]]
        return [nest(levels[1:], offset + sum(map(int.__mul__, spot, steps))) for spot in spots]

    block = tuple(sizes[name] if name in names else 1 for name in ("nb", "bs", "nh", "hs"))
    inside = tuple(strides[name] for name in ("nb", "bs", "nh", "hs") if name in names and sizes[name] > 1)
    planes = tuple(
        tuple((layer * strides["nl"] + kv * strides.get("two", 0), block, inside) for kv in range(planes_of(form)))
        for layer in range(sizes["nl"])
    )
    lengths = tuple(math.prod(sizes[name] for name in level) for level in levels)
    looks = (form.engine, lengths, shape, tuple(s if n > 1 else 0 for s, n in zip(view, shape, strict=True)))
    return World(form, sizes, nest(levels, 0), looks, planes)


def planes_of(form: Form) -> int:
    """2 for K and V, 1 for one plane."""
    return 2 if "two" in form.memory.split() else 1


def seen(planes: Any) -> Planes:
    """The library's planes in the terms of `World.planes`."""
    return tuple(
        tuple(
            (
                plane.data_ptr() - BASE.data_ptr(),
                tuple(plane.shape),
                tuple(s for s, n in zip(plane.stride(), plane.shape, strict=True) if n > 1),
            )
            for plane in layer
        )
        for layer in planes
    )


def known_sizes(world: World) -> dict[str, dict[str, Any]]:
    """What callers may know of the sizes, from nothing to everything but the block size."""
    NH = world.sizes["nh"] if "nh" in world.form.memory.split() else 1
    mla = planes_of(world.form) == 1
    connector = {"num_layers": world.sizes["nl"], "hidden_dim_size": NH * HS, "use_mla": mla}
    return {
        "nothing": {},
        "connector": connector,  # what every connector states
        "metadata": connector if mla else {**connector, "num_kv_heads": NH, "head_dim": HS},  # what from_metadata adds
        "heads": {"num_kv_heads": NH},
        "tokens": {"tokens_per_block": world.sizes["bs"]},
    }


def worlds(form: Form, longest: int, layers: tuple[int, ...]) -> Iterator[World]:
    """The form at every size of NB, BS and NH from 1 to `longest`; an axis that it lacks stays 1."""
    axes = form.memory.split()
    for nl in layers:
        for nb, bs, nh in itertools.product(range(1, longest + 1), repeat=3):
            if (bs == 1 or "bs" in axes) and (nh == 1 or "nh" in axes):
                yield build(form, {"nl": nl, "nb": nb, "bs": bs, "nh": nh})
