"""Discovery, exhaustively: every engine shape at every small size is read rightly or refused.

The shapes and the planes that are true of them are in `worlds.py`, single readings and refusals in `test_readings.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest

from lmcache_ref import discovery
from lmcache_ref.discovery import discover
from lmcache_ref.errors import LayoutError
from lmcache_ref.layouts import LAYOUTS
from lmcache_ref.metadata import EngineType
from worlds import FORMS, PER_HEAD, Planes, World, known_sizes, seen, worlds

FORM_OF = {form.name: form for form in FORMS}

# The rule of readings, exhaustively


class Input(NamedTuple):
    """What discovery gets: worlds that look the same under the same hints are one input."""

    tensors: Any
    engine: str
    hints: dict[str, Any]
    worlds: list[tuple[World, str]]  # with the name of the set of sizes that is known


def all_inputs(forms, longest: int = 4) -> list[Input]:
    """Every form x NL x NB x BS x NH x true `kv_layout` x known sizes, as distinct inputs."""
    inputs: dict[Any, Input] = {}
    for form in forms:
        # how many layers there are matters most where NL is an axis of the tensor
        sizes = [(longest, (2,)), (3, (1,))] if "nl" in form.lists else [(longest, (1, 2, 3))]
        for world in itertools.chain(*(worlds(form, *each) for each in sizes)):
            for known, sizes in known_sizes(world).items():
                for order in form.orders:
                    hints = {**sizes, **({"kv_layout": order} if order else {})}
                    key = (world.looks, tuple(hints.items()))
                    one = inputs.setdefault(key, Input(world.tensors, form.engine, hints, []))
                    one.worlds.append((world, known))
    return list(inputs.values())


def read(one: Input) -> Planes | None:
    """The planes that discovery answers, None when it refuses."""
    try:
        return seen(discover(one.tensors, one.engine, one.hints).planes)
    except LayoutError:
        return None


def misread(inputs: list[Input]) -> list[str]:
    """Every world whose planes are not the ones that discovery answers."""
    return [
        f"{world.form.name}, {world.sizes}, hints {one.hints}"
        for one in inputs
        if (answer := read(one)) is not None
        for world, _ in one.worlds
        if world.planes != answer
    ]


@pytest.fixture(scope="module")
def answers() -> list[tuple[Input, Planes | None]]:
    return [(one, read(one)) for one in all_inputs(FORMS)]


def test_the_forms_cover_the_table():
    assert {form.row for form in [*FORMS, PER_HEAD]} == set(LAYOUTS) and len(FORMS) == 68
    for form in FORMS:
        assert EngineType(form.engine) in LAYOUTS[form.row].engines
    assert LAYOUTS[PER_HEAD.row].engines == ()


def test_no_world_is_misread(answers):
    """Two worlds that look the same and differ can only be refused; else what is answered is the truth."""
    wrong = [
        f"{world.form.name}, {world.sizes}, hints {one.hints}"
        for one, answer in answers
        for world, _ in one.worlds
        if answer is not None and answer != world.planes
    ]
    assert wrong == []
    assert sum(len(one.worlds) for one, _ in answers) == 96675
    assert len(answers) == 61070
    assert sum(answer is not None for _, answer in answers) == 51435


def test_what_a_connector_knows_decides(answers):
    """With the sizes of `from_metadata` and a stated order, what is left open is a block axis of size two, which could
    be K and V, and in a pool whose order is only said to be NHD or HND a layer axis as long as another one."""
    refused: Counter[str] = Counter()
    for one, answer in answers:
        for world, known in one.worlds:
            if known == "metadata" and "kv_layout" in one.hints:
                nl, nb, _, nh = (world.sizes[axis] for axis in ("nl", "nb", "bs", "nh"))
                same = world.form.name.startswith("pool") and len(one.hints["kv_layout"]) == 3 and nl in (nb, nh)
                refused["read" if answer else "NB=2" if nb == 2 else "NL is NB or NH" if same else "no reason"] += 1
    assert refused == {"read": 11149, "NB=2": 468, "NL is NB or NH": 125}


def test_every_world_is_read_when_its_row_is_named():
    count = 0
    for form in [*FORMS, PER_HEAD]:
        for world in worlds(form, 3, (1, 2)):
            sizes = known_sizes(world)["metadata"]
            found = discover(world.tensors, form.engine, {**sizes, "layout": form.row})
            assert (found.layout.name, seen(found.planes)) == (form.row, world.planes), (form.name, world.sizes)
            count += 1
    assert count == 3414


def test_refusals_name_shape_hints_and_a_hint_that_decides(answers):
    """Of several readings, each listed size at least strikes one out, and the named row decides."""
    counts: Counter[str] = Counter()
    for one, answer in answers:
        if answer is not None or len(one.worlds) > 1 or one.worlds[0][0].sizes["nl"] != 2:
            continue
        (world, _) = one.worlds[0]
        with pytest.raises(LayoutError) as refusal:
            discover(one.tensors, one.engine, one.hints)
        lines = str(refusal.value).split("\n")
        shape = list(world.looks[2])
        assert str(shape) in lines[0] and "strides (" in lines[0] and "torch.uint8" in lines[0]
        assert lines[0].endswith("hints: " + (", ".join(f"{k}={v}" for k, v in one.hints.items()) or "none"))
        if lines[1] == "no reading is left:":
            counts["none left"] += 1
            assert "(nh bs hs)" in lines[2] and "needs the hints" in lines[2] and "head_dim" in lines[2]
            continue
        counts["several left"] += 1
        assert lines[1] == f"{len(lines) - 3} readings are left, and they are different memory:"
        offered = lines[-1].removeprefix("give one of the hints ").removesuffix(" to decide").split(", ")
        assert not {hint.partition("=")[0] for hint in offered} & set(one.hints)
        rows = offered[-1].removeprefix("layout=").split("|")
        assert world.form.row in rows
        found = discover(one.tensors, one.engine, {**one.hints, "layout": world.form.row})
        assert seen(found.planes) == world.planes
        truth = {"num_layers": "nl", "num_kv_heads": "nh", "tokens_per_block": "bs", "head_dim": "hs"}
        for hint in set(offered) & set(truth):
            try:
                left = seen(discover(one.tensors, one.engine, {**one.hints, hint: world.sizes[truth[hint]]}).planes)
                assert left == world.planes
            except LayoutError as error:
                assert str(error).count("  - ") < len(lines) - 3
    assert counts == {"none left": 816, "several left": 968}


# The property can fail: three mistakes, of which the first two were made

planes_identity, order_objection = discovery.planes_identity, discovery.order_objection


def layers_forgotten(planes):
    return tuple(plane for layer in planes_identity(planes) for plane in layer)


def fused_heads_never_first(layout, engine, hints, leaves, sizes):
    unstated = layout.is_fused and "kv_layout" not in hints and not (layout.stands_in("NHD") or layout.stands_in("HND"))
    return "no kv_layout" if unstated else order_objection(layout, engine, hints, leaves, sizes)


def the_shape_is_the_memory_order(layout, engine, hints, leaves, sizes):
    return None if layout.stands_in(hints.get("kv_layout", "NHD")) else "the shape"


@pytest.mark.parametrize(
    ("function", "mistake", "forms", "worlds_misread"),
    [
        ("planes_identity", layers_forgotten, ("SGLang flat list", "SGLang MLA, pages"), 42),
        ("order_objection", fused_heads_never_first, ("fused heads first",), 64),
        ("order_objection", the_shape_is_the_memory_order, ("first, HND, logical", "cross HND, logical"), 81),
    ],
)
def test_a_mistake_is_seen_as_misread_worlds(monkeypatch, function, mistake, forms, worlds_misread):
    monkeypatch.setattr(discovery, function, mistake)
    found = misread(all_inputs([FORM_OF[name] for name in forms], longest=2))
    assert {line.partition(", {")[0] for line in found} == set(forms)
    assert len(found) == worlds_misread
