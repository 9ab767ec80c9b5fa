"""The suite under test: broken backends and misread layouts that it must catch, each under the rule that it breaks.

The backends are in `broken_backends.py`; the parts of the suite are tested in `test_conformance_parts.py`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import broken_backends as broken
from lmcache_ref import backends
from lmcache_ref.conformance import Case, all_cases, expected_count, run, run_case
from lmcache_ref.conformance.cases import PATTERNS, Sizes, axis_names
from lmcache_ref.conformance.engine import GEOMETRIES, EngineMemory
from lmcache_ref.conformance.scenes import MIN_SLOTS
from lmcache_ref.conformance.suite import row_hints
from lmcache_ref.errors import (
    ArgumentError,
    BackendError,
    ContractViolation,
    LayoutError,
    LMCacheRefError,
    SlotRangeError,
)
from lmcache_ref.layouts import LAYOUTS, register_layout, unregister_layout
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter

ROW = "NL_X_TWO_NB_BS_NH_HS"

G, S = "gather", "scatter"
FAULTS = [
    (broken.NegativeSlotsWrap, G, 2, "has slot -[0-9]+, its row was written"),
    (broken.NegativeSlotsWrap, S, 2, "has slot -[0-9]+, which wraps to slot"),
    (broken.SlotZeroIsSkipped, G, 2, "of slot 0 was not moved"),
    (broken.SlotZeroIsSkipped, S, 2, "of slot 0 was not moved"),
    (broken.KAndVSwapped, G, 1, "which is two=0, nl=(.), t.*\n.*\n.*holds the bytes of nl=\\1, two=1"),
    (broken.KAndVSwapped, S, 1, "which is nl=(.), two=0, nb.*\n.*\n.*holds the bytes of two=1, nl=\\1"),
    (broken.OffByOneSlot, G, 1, "the row holds the bytes of nl=0, two=0, nb=., bs=., nh=0, slot"),
    (broken.OffByOneSlot, S, 1, "the row holds the bytes of two=0, nl=0, t="),
    (broken.WritesAByteBefore, G, 5, "outside of every tensor: in a guard band or padding of the chunks"),
    (broken.WritesAByteBefore, S, 5, "outside of every tensor: in a guard band or padding of the engine's cache"),
    (broken.WritesAByteOfPadding, G, 5, "outside of every tensor: .* 1 elements beyond two=0, nl=0, t="),
    (
        broken.WritesAByteOfPadding,
        S,
        5,
        "outside of every tensor: .* 1 elements beyond nl=0, two=0, nb=0, bs=0, nh=0, hs=15",
    ),
    (broken.ForgetsTheLastToken, G, 7, "was not moved: its row was never written"),
    (broken.ForgetsTheLastToken, S, 7, "was not moved: its row was never written"),
    (broken.IgnoresTheSkippedPrefix, G, 6, "below skip_prefix_n_tokens = 6, its row was written"),
    (broken.IgnoresTheSkippedPrefix, S, 6, "is below skip_prefix_n_tokens = 6"),
    (broken.LooksAtSlotsOfThePrefix, G, 6, "a legal request raised SlotRangeError: somewhere in slots"),
    (broken.LooksAtSlotsOfThePrefix, S, 6, "a legal request raised SlotRangeError: somewhere in slots"),
    (broken.RoundTripsThroughFloat, G, 1, "was moved wrongly"),
    (broken.RoundTripsThroughFloat, S, 1, "was moved wrongly"),
    (broken.ZeroesSkippedRows, G, 2, "has slot -[0-9]+, its row was written"),
    (broken.ZeroesSkippedRows, S, 5, "the source of the move was written"),
    (broken.ZeroesThePrefix, G, 6, "its row was written"),
    (broken.IgnoresStarts, G, 7, "was not moved"),
    (broken.IgnoresStarts, S, 1, "holds the bytes of two=0, nl=1, t="),
    (broken.LayersReversed, G, 1, "which is two=0, nl=0, t.*\n.*\n.*holds the bytes of nl=2, two=0"),
    (broken.LayersReversed, S, 1, "which is nl=0, two=0, nb.*\n.*\n.*holds the bytes of two=0, nl=2"),
    (broken.IgnoresTheChoiceOfLayers, G, 1, "which is two=0, nl=0, t.*\n.*\n.*holds the bytes of nl=0, two=0"),
    (broken.IgnoresTheChoiceOfLayers, S, 1, "which is nl=0, two=0, nb.*\n.*\n.*holds the bytes of two=0, nl=0"),
    (broken.ClearsOtherLayers, S, 5, "layer 1 is not one of the layers \\(2, 0\\)"),
    (broken.BlockAndOffsetSwapped, G, 1, "the row holds the bytes of nl=0, two=0"),
    (broken.BlockAndOffsetSwapped, S, 7, "was not moved"),
    (broken.DropsTheLastLayer, G, 7, "which is two=0, nl=2, t"),
    (broken.DropsTheLastLayer, S, 7, "which is nl=2, two=0, nb"),
    (broken.CopiesHalfOfTheHeads, G, 7, "nh=2, hs=0 .*\n.*was not moved"),
    (broken.CopiesHalfOfTheHeads, S, 7, "nh=2, hs=0, slot .*\n.*was not moved"),
    (broken.CopiesHalfOfEveryHead, G, 1, "nh=0, hs=8 .*\n.*was moved wrongly"),
    (broken.CopiesHalfOfEveryHead, S, 1, "nh=0, hs=8, slot .*\n.*was moved wrongly"),
    (broken.WritesTheSource, G, 5, "the source of the move was written"),
    (broken.WritesTheSource, S, 5, "the source of the move was written"),
    (broken.TakesSlotsForDense, G, 7, "a legal request raised SlotRangeError"),
    (broken.TakesSlotsForDense, S, 7, "a legal request raised SlotRangeError"),
    (broken.TakesBlocksForDense, G, 1, "was moved wrongly"),
    (broken.TakesBlocksForDense, S, 5, "outside of every tensor"),
    (broken.DoesNotRefuseSlots, G, 3, "must raise SlotRangeError, nothing was raised"),
    (broken.DoesNotRefuseSlots, S, 3, "must raise SlotRangeError, nothing was raised"),
    (broken.SlotsOf32Bits, G, 3, "must raise SlotRangeError, nothing was raised"),
    (broken.SlotsOf32Bits, S, 3, "must raise SlotRangeError, nothing was raised"),
    (broken.FollowsThenRefuses, G, 3, "the call was wrong input, this was written all the same"),
    (broken.FollowsThenRefuses, S, 3, "the call was wrong input, this was written all the same"),
    (broken.Crashes, G, 7, "a legal request raised ZeroDivisionError: in the guest"),
    (broken.NeverDone, S, 9, "not done\\(\\) after synchronize"),
]


_guests = itertools.count()


@pytest.fixture
def guest():
    """Registers backends for one test: `guest(object) -> name`, a name of its own each time."""
    names = []

    def register(operations):
        names.append(f"guest{next(_guests)}")
        backends.register_backend(
            names[-1], SimpleNamespace(**{o: getattr(operations, o) for o in backends.OPERATIONS})
        )
        return names[-1]

    yield register
    for name in names:
        backends.unregister_backend(name)


def first_failure(backend, cases):
    for result in run([backend], cases):
        if not result.ok:
            return result.error
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_honest_backend_passes(guest, layout):
    cases = [case for case in all_cases({layout: LAYOUTS[layout]}) if case.cache_dtype == torch.bfloat16]
    assert len(cases) in (6, 4)
    assert first_failure(guest(broken.Honest()), cases) is None


@pytest.mark.parametrize(
    ("fault", "direction", "rule", "text"), FAULTS, ids=[f"{fault.__name__}-{d}" for fault, d, _, _ in FAULTS]
)
def test_a_fault_is_caught_under_its_rule(guest, fault, direction, rule, text):
    backend = guest(fault())
    case = Case.parse(f"{ROW}-{direction}-KV_2LTD-bfloat16")
    with pytest.raises(ContractViolation) as caught:
        run_case(case, backend)
    message = str(caught.value)
    assert f"rule {rule} is broken" in message, message
    assert re.search(text, message), message
    # the last line runs the very case that failed
    again = re.fullmatch(r"  again: lmcache-ref verify --case (\S+) --backend (\S+)", message.splitlines()[-1])
    assert again is not None, message
    narrowed = Case.parse(again[1])
    assert narrowed.pattern in PATTERNS
    with pytest.raises(ContractViolation, match=re.escape(message)):
        run_case(narrowed, again[2])


def test_every_fault_is_tried():
    faults = {kind for kind in broken.Honest.__subclasses__()}
    assert faults == {fault for fault, *_ in FAULTS}
    assert len(FAULTS) == 52


# A fault that only some cases can show must be caught in all of those, whatever the layout.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fault", [broken.OffByOneSlot, broken.ForgetsTheLastToken, broken.WritesAByteBefore, broken.NegativeSlotsWrap]
)
def test_a_fault_is_caught_in_every_case_of_every_layout(guest, layout, fault):
    backend = guest(fault())
    of_bytes = (torch.uint8, torch.uint8)
    cases = [c for c in all_cases({layout: LAYOUTS[layout]}) if (c.cache_dtype, c.chunk_dtype) == of_bytes]
    results = list(run([backend], cases))
    assert len(results) in (6, 4)
    assert not [result.case for result in results if result.ok]


def test_bytes_of_every_float_do_not_survive_arithmetic(guest):
    backend = guest(broken.RoundTripsThroughFloat())
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        with pytest.raises(ContractViolation, match="rule 1 is broken"):
            run_case(Case.parse(f"{ROW}-gather-KV_T2D-{dtype}-plain"), backend)


def test_the_reference_has_to_find_duplicates_and_others_need_not(guest, monkeypatch):
    case = Case.parse(f"{ROW}-scatter-KV_2LTD-float16-errors")
    name = guest(broken.Honest())
    run_case(case, name)
    monkeypatch.setitem(backends.BACKENDS, "reference", backends.BACKENDS[name])
    monkeypatch.setattr(backends, "_loaded", {})
    with pytest.raises(ContractViolation, match=r"rule 4 is broken.*\n.*must raise DuplicateSlotError, nothing was"):
        run_case(case, "reference")


def test_an_error_may_come_as_late_as_synchronize(guest):
    class Failing(Transfer):
        def __init__(self, error):
            self.error = error

        def synchronize(self):
            raise self.error

    class Late(broken.Honest):
        def move(self, plan):
            try:
                return super().move(plan)
            except SlotRangeError as error:
                return Failing(error)

    run_case(Case.parse(f"{ROW}-gather-KV_2LTD-float16"), guest(Late()))


def test_an_error_of_another_class_is_not_enough(guest):
    class Vague(broken.Honest):
        def check(self, plan):
            try:
                super().check(plan)
            except SlotRangeError as error:
                raise RuntimeError("device error") from error

    with pytest.raises(ContractViolation, match="must raise SlotRangeError, it raised RuntimeError: device error"):
        run_case(Case.parse(f"{ROW}-gather-KV_2LTD-float16"), guest(Vague()))


# ---------------------------------------------------------------------------------------------- layout mutants


def swapped(row, one, other):
    """The row's pattern and nesting with two of its axis names exchanged."""
    names = {one: other, other: one}

    def swap(text):
        return re.sub(r"\w+", lambda name: names.get(name[0], name[0]), text)

    return swap(row.pattern), tuple(swap(level) for level in row.nesting)


def sizes_for(one, other):
    """Lengths under which exchanging two axes cannot be seen in any shape: both are equal."""
    lengths = {"nl": 3, "nb": 7, "bs": 5, "nh": 4, "hs": 16}
    pair = {one, other}
    if "two" in pair:
        lengths.update({name: 2 for name in pair - {"two"} if name in lengths})
    elif "nbbs" in pair:
        lengths.update({name: lengths["nb"] * lengths["bs"] for name in pair if name in lengths})
    elif pair <= {*lengths}:
        lengths.update(dict.fromkeys(pair, lengths[one]))
    while lengths["nb"] * lengths["bs"] < MIN_SLOTS:
        lengths["bs" if "bs" not in pair else "nb"] += 1
    return Sizes(**lengths)


def outcome(row, one, other):
    """How the exchange of two axes comes to light: 'table', 'shape' or 'bits'."""
    pattern, nesting = swapped(row, one, other)
    sizes = sizes_for(one, other)
    try:
        register_layout("MUTANT", pattern, nesting=nesting)
    except ArgumentError:
        return "table"
    try:
        misread(row, "MUTANT", sizes)
    except LayoutError:
        return "shape"
    finally:
        unregister_layout("MUTANT")
    return "bits"


def misread(row, other_name, sizes):
    """Tensors of `row` pass when read as `row`; read as another row their bits are seen to be wrong.

    LayoutError when the shapes already tell.
    """
    hints = {**row_hints(row, sizes.of(row)), "layout": other_name}
    chunk = "KV_2LTD" if "two" in axis_names(row) else "KV_MLA_FMT"
    case = Case(row.name, "gather", chunk, torch.float16, torch.float16, pattern="plain")
    run_case(case, "reference", sizes=sizes)
    with pytest.raises(LMCacheRefError) as caught:
        run_case(case, "reference", sizes=sizes, hints=hints)
    if isinstance(caught.value, LayoutError):
        raise caught.value
    assert "expected bits" in str(caught.value), str(caught.value)


@functools.cache
def outcomes(layout):
    """Every exchange of two axes of a row that gives another row: the two axes -> how it came to light."""
    row = LAYOUTS[layout]
    pairs = itertools.combinations(dict.fromkeys(axis_names(row)), 2)
    return {pair: outcome(row, *pair) for pair in pairs if swapped(row, *pair) != (row.pattern, row.nesting)}


# One axis of slots and one list of layers: no two axes of these rows can trade places and still make a row.
ONE_WAY_ONLY = {"NL_X_NBBS_ONE_HS", "ONE_X_NL_X_NBBS_ONE_HS"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_swap_of_two_axes_is_caught(layout):
    found = outcomes(layout)
    assert found
    assert ("bits" in found.values()) == (layout not in ONE_WAY_ONLY), found


def test_mutants_are_counted():
    """Most swaps that are no row move the head size from the innermost place, or a token axis into a list."""
    found = Counter(how for layout in LAYOUTS for how in outcomes(layout).values())
    assert found == {"bits": 164, "table": 174, "shape": 5}


def test_a_row_of_the_table_is_not_mistaken_for_another():
    """Where all lengths are equal, many rows have tensors of the same shapes; only the bits tell them apart."""
    sizes = Sizes(nl=5, nb=5, bs=5, nh=5, hs=16)
    pairs = 0
    for one, other in itertools.permutations(LAYOUTS.values(), 2):
        shapes = [EngineMemory(row, sizes.of(row), GEOMETRIES[0]).tensor_shape for row in (one, other)]
        if one.nesting == other.nesting and shapes[0] == shapes[1]:
            misread(one, other.name, sizes)
            pairs += 1
    assert pairs == 42


# ------------------------------------------------------------------------------------------------ run, pytest


def test_run_reports_every_case_of_every_backend(guest):
    cases = [Case.parse(f"{ROW}-{direction}-KV_2LTD-uint8-plain") for direction in ("gather", "scatter")]
    seen = []
    name = guest(broken.Crashes())
    results = list(run([name, "reference", "nobody"], cases, on_result=seen.append))
    assert seen == results
    assert [(r.case, r.backend, r.ok) for r in results] == [
        *((case, name, False) for case in cases),
        *((case, "reference", True) for case in cases),
        *((case, "nobody", False) for case in cases),
    ]
    assert "ZeroDivisionError: in the guest" in results[0].error
    assert results[2].error is None
    assert re.match("BackendError: .*'nobody'", results[4].error)
    assert all(result.seconds >= 0 for result in results)


def test_a_backend_that_cannot_run_is_no_violation():
    backends.register_backend("absent", None, unavailable=lambda: "no such chip")
    try:
        with pytest.raises(BackendError, match="no such chip"):
            run_case(Case.parse(f"{ROW}-gather-KV_2LTD-uint8-errors"), "absent")
    finally:
        backends.unregister_backend("absent")


PLUGIN = ("-p", "lmcache_ref.conformance.plugin", "--pyargs", "lmcache_ref.conformance", "-p", "no:cacheprovider")


def test_plugin_runs_one_test_per_case(pytester):
    result = pytester.runpytest_subprocess(*PLUGIN, "--backend", "reference", "-q", "-k", ROW)
    result.assert_outcomes(passed=66, deselected=expected_count() - 66)


def test_plugin_fails_with_the_message_of_the_suite(pytester):
    pytester.makepyfile(
        half="""
        from types import SimpleNamespace
        from lmcache_ref.backends import register_backend
        from lmcache_ref.transfer import Transfer, reference_gather
        register_backend("half", SimpleNamespace(
            gather=reference_gather, scatter=lambda plan: Transfer(), rerotate=lambda *arguments: None))
        """
    )
    result = pytester.runpytest_subprocess(
        *PLUGIN, "-p", "half", "--backend", "half", "-k", f"{ROW} and KV_T2D and float64", "--device", "cpu"
    )
    result.assert_outcomes(passed=1, failed=1, deselected=expected_count() - 2)
    result.stdout.fnmatch_lines(
        [
            "*ContractViolation: NL_X_TWO_NB_BS_NH_HS-scatter-KV_T2D-float64-plain by backend 'half'*",
            "*again: lmcache-ref verify --case NL_X_TWO_NB_BS_NH_HS-scatter-KV_T2D-float64-plain --backend half*",
        ]
    )


def test_reference_operations_are_those_the_registry_hands_out():
    """The suite goes through the registry: what it ran under the name reference is the specification."""
    operations = backends.get_backend("reference")
    assert (operations.gather, operations.scatter) == (reference_gather, reference_scatter)
