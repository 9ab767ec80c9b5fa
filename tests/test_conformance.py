"""The suite under test: broken backends and misread layouts that it must catch, each under the rule that it breaks.

Also its parts: ids of cases, addresses, memory, `assert_same_bits`. What real backends do is `test_differential.py`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from lmcache_ref import backends, layouts
from lmcache_ref.conformance import Case, all_cases, assert_same_bits, expected_count, run, run_case
from lmcache_ref.conformance.cases import CHUNKS, DTYPES, PATTERNS, SIZES, Sizes, axis_names
from lmcache_ref.conformance.engine import (
    GEOMETRIES,
    GUARD_ELEMENTS,
    ChunkMemory,
    EngineMemory,
    addresses,
    engine_pattern,
    sentinel,
)
from lmcache_ref.conformance.scenes import MIN_SLOTS, Scene
from lmcache_ref.conformance.suite import row_hints
from lmcache_ref.errors import (
    ArgumentError,
    BackendError,
    ContractViolation,
    LayoutError,
    LMCacheRefError,
    SlotRangeError,
)
from lmcache_ref.layouts import CHUNK_FORMATS, LAYOUTS, register_layout, unregister_layout
from lmcache_ref.plan import check_slots
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter

ROW = "NL_X_TWO_NB_BS_NH_HS"


# ------------------------------------------------------------------------------------------- broken backends


class Honest:
    """A backend that keeps the contract, one row at a time; each fault below overrides one step of it."""

    direction = ""

    def rerotate(self, *arguments):
        raise AssertionError("not part of the suite")

    def gather(self, plan):
        self.direction = "gather"
        return self.move(plan)

    def scatter(self, plan):
        self.direction = "scatter"
        return self.move(plan)

    def move(self, plan):
        self.check(plan)
        for span in plan.spans:
            for row in range(self.rows(span)):
                token = self.token(plan, span, row)
                slot = int(plan.slots[token])
                if self.moves(plan, token, slot):
                    self.move_token(plan, span, row, slot)
                else:
                    self.skipped(plan, span, row, slot)
        self.after(plan)
        return self.handle()

    def move_token(self, plan, span, row, slot):
        block, offset = self.place(plan, slot)
        for place, planes in enumerate(self.planes(plan)):
            for kv, plane in enumerate(self.kv(planes)):
                ends = plane[block, offset], span.chunk[kv, place, row]
                source, target = ends if self.direction == "gather" else ends[::-1]
                self.copy(target, source)

    def check(self, plan):
        check_slots(plan, duplicates=False)

    def rows(self, span):
        return span.end - span.start

    def token(self, plan, span, row):
        return span.start + row

    def moves(self, plan, token, slot):
        return slot >= 0 and token >= plan.skip_prefix_n_tokens

    def place(self, plan, slot):
        return divmod(slot, plan.cache.block_size)

    def planes(self, plan):
        return plan.planes

    def kv(self, planes):
        return planes

    def copy(self, target, source):
        target.view(torch.uint8).copy_(source.view(torch.uint8))

    def skipped(self, plan, span, row, slot):
        pass

    def after(self, plan):
        pass

    def handle(self):
        return Transfer()


class NegativeSlotsWrap(Honest):
    def moves(self, plan, token, slot):
        return token >= plan.skip_prefix_n_tokens

    def place(self, plan, slot):
        return divmod(slot % plan.cache.num_slots, plan.cache.block_size)


class SlotZeroIsSkipped(Honest):
    def moves(self, plan, token, slot):
        return slot > 0 and super().moves(plan, token, slot)


class KAndVSwapped(Honest):
    def kv(self, planes):
        return planes[::-1]


class OffByOneSlot(Honest):
    def place(self, plan, slot):
        return super().place(plan, (slot + 1) % plan.cache.num_slots)


def memory_of(plane):
    """All of the storage under a view, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(plane.untyped_storage())


def byte_beyond(tensor, step):
    """Flip one byte of the storage, `step` bytes from the start of the tensor."""
    memory_of(tensor)[tensor.storage_offset() * tensor.element_size() + step] ^= 0xFF


class WritesAByteBefore(Honest):
    """Before the tensor that lies first: the guard band in front, or between two tensors."""

    def after(self, plan):
        target = plan.spans[-1].chunk if self.direction == "gather" else plan.planes[-1][-1]
        if target.numel():
            byte_beyond(target, -1)


class WritesAByteOfPadding(Honest):
    """Between two rows of the destination, where the odd geometry has padding and the dense one the next row."""

    def after(self, plan):
        target = plan.spans[-1].chunk[0, 0] if self.direction == "gather" else plan.planes[0][0][0, 0]
        if target.numel() and target.stride(0) > target[0].numel():
            byte_beyond(target, target[0].numel() * target.element_size())


class ForgetsTheLastToken(Honest):
    def rows(self, span):
        return max(0, super().rows(span) - 1)


class IgnoresTheSkippedPrefix(Honest):
    def moves(self, plan, token, slot):
        return 0 <= slot < plan.cache.num_slots


class LooksAtSlotsOfThePrefix(Honest):
    def check(self, plan):
        if plan.slots.numel() and plan.slots.max() >= plan.cache.num_slots:
            raise SlotRangeError("somewhere in slots")


class RoundTripsThroughFloat(Honest):
    def copy(self, target, source):
        target.copy_(source.float() + 0.0)


class ZeroesSkippedRows(Honest):
    def skipped(self, plan, span, row, slot):
        if slot < 0:
            span.chunk[:, :, row].zero_()


class ZeroesThePrefix(Honest):
    def skipped(self, plan, span, row, slot):
        if slot >= 0:
            span.chunk[:, :, row].zero_()


class IgnoresStarts(Honest):
    def move(self, plan):
        start = 0
        spans = []
        for span in plan.spans:
            length = span.end - span.start
            spans.append(type(span)(span.chunk, start, start + length))
            start += length
        return super().move(type(plan)(plan.cache, plan.planes, tuple(spans), plan.slots, plan.skip_prefix_n_tokens))


class LayersReversed(Honest):
    def planes(self, plan):
        return plan.planes[::-1]


class IgnoresTheChoiceOfLayers(Honest):
    def planes(self, plan):
        return plan.cache.planes[: len(plan.planes)]


class BlockAndOffsetSwapped(Honest):
    def place(self, plan, slot):
        return slot % plan.cache.num_blocks, slot // plan.cache.num_blocks


class DropsTheLastLayer(Honest):
    def planes(self, plan):
        return plan.planes[:-1] if len(plan.planes) > 1 else ()


class ClearsOtherLayers(Honest):
    def move_token(self, plan, span, row, slot):
        super().move_token(plan, span, row, slot)
        for planes in plan.cache.planes:
            if not any(planes is chosen for chosen in plan.planes):
                planes[0][self.place(plan, slot)] = 0


class CopiesHalfOfTheHeads(Honest):
    def copy(self, target, source):
        super().copy(target[: len(target) // 2], source[: len(source) // 2])


class CopiesHalfOfEveryHead(Honest):
    def copy(self, target, source):
        half = target.shape[-1] // 2
        super().copy(target[:, :half], source[:, :half])


class WritesTheSource(Honest):
    def copy(self, target, source):
        super().copy(target, source)
        source.view(torch.uint8)[..., -1] ^= 0xFF


class TakesSlotsForDense(Honest):
    def move(self, plan):
        slots = plan.slots.as_strided((len(plan.slots),), (1,))
        return super().move(type(plan)(plan.cache, plan.planes, plan.spans, slots, plan.skip_prefix_n_tokens))


class TakesBlocksForDense(Honest):
    """Addresses a slot as if there were no padding between blocks."""

    def move_token(self, plan, span, row, slot):
        dense = tuple(
            tuple(
                plane.as_strided(plane.shape, (plane.stride(1) * plane.shape[1], *plane.stride()[1:])) for plane in kv
            )
            for kv in plan.planes
        )
        whole = type(plan)(plan.cache, dense, plan.spans, plan.slots, plan.skip_prefix_n_tokens)
        super().move_token(whole, span, row, slot)


class DoesNotRefuseSlots(Honest):
    def check(self, plan):
        pass

    def moves(self, plan, token, slot):
        return slot < plan.cache.num_slots and super().moves(plan, token, slot)


class SlotsOf32Bits(Honest):
    def move(self, plan):
        slots = plan.slots.to(torch.int32).to(torch.int64)
        return super().move(type(plan)(plan.cache, plan.planes, plan.spans, slots, plan.skip_prefix_n_tokens))


class FollowsThenRefuses(Honest):
    """Moves whatever it can and only then finds the slot that is out of range."""

    def check(self, plan):
        pass

    def moves(self, plan, token, slot):
        return slot < plan.cache.num_slots and super().moves(plan, token, slot)

    def after(self, plan):
        check_slots(plan, duplicates=False)


class Crashes(Honest):
    def check(self, plan):
        super().check(plan)
        raise ZeroDivisionError("in the guest")


class NeverDone(Honest):
    def handle(self):
        return type("Pending", (Transfer,), {"done": lambda self: False})()


G, S = "gather", "scatter"
FAULTS = [
    (NegativeSlotsWrap, G, 2, "has slot -[0-9]+, its row was written"),
    (NegativeSlotsWrap, S, 2, "has slot -[0-9]+, which wraps to slot"),
    (SlotZeroIsSkipped, G, 2, "of slot 0 was not moved"),
    (SlotZeroIsSkipped, S, 2, "of slot 0 was not moved"),
    (KAndVSwapped, G, 1, "which is two=0, nl=(.), t.*\n.*\n.*holds the bytes of nl=\\1, two=1"),
    (KAndVSwapped, S, 1, "which is nl=(.), two=0, nb.*\n.*\n.*holds the bytes of two=1, nl=\\1"),
    (OffByOneSlot, G, 1, "the row holds the bytes of nl=0, two=0, nb=., bs=., nh=0, slot"),
    (OffByOneSlot, S, 1, "the row holds the bytes of two=0, nl=0, t="),
    (WritesAByteBefore, G, 5, "outside of every tensor: in a guard band or padding of the chunks"),
    (WritesAByteBefore, S, 5, "outside of every tensor: in a guard band or padding of the engine's cache"),
    (WritesAByteOfPadding, G, 5, "outside of every tensor: .* 1 elements beyond two=0, nl=0, t="),
    (WritesAByteOfPadding, S, 5, "outside of every tensor: .* 1 elements beyond nl=0, two=0, nb=0, bs=0, nh=0, hs=15"),
    (ForgetsTheLastToken, G, 7, "was not moved: its row was never written"),
    (ForgetsTheLastToken, S, 7, "was not moved: its row was never written"),
    (IgnoresTheSkippedPrefix, G, 6, "below skip_prefix_n_tokens = 6, its row was written"),
    (IgnoresTheSkippedPrefix, S, 6, "is below skip_prefix_n_tokens = 6"),
    (LooksAtSlotsOfThePrefix, G, 6, "a legal request raised SlotRangeError: somewhere in slots"),
    (LooksAtSlotsOfThePrefix, S, 6, "a legal request raised SlotRangeError: somewhere in slots"),
    (RoundTripsThroughFloat, G, 1, "was moved wrongly"),
    (RoundTripsThroughFloat, S, 1, "was moved wrongly"),
    (ZeroesSkippedRows, G, 2, "has slot -[0-9]+, its row was written"),
    (ZeroesSkippedRows, S, 5, "the source of the move was written"),
    (ZeroesThePrefix, G, 6, "its row was written"),
    (IgnoresStarts, G, 7, "was not moved"),
    (IgnoresStarts, S, 1, "holds the bytes of two=0, nl=1, t="),
    (LayersReversed, G, 1, "which is two=0, nl=0, t.*\n.*\n.*holds the bytes of nl=2, two=0"),
    (LayersReversed, S, 1, "which is nl=0, two=0, nb.*\n.*\n.*holds the bytes of two=0, nl=2"),
    (IgnoresTheChoiceOfLayers, G, 1, "which is two=0, nl=0, t.*\n.*\n.*holds the bytes of nl=0, two=0"),
    (IgnoresTheChoiceOfLayers, S, 1, "which is nl=0, two=0, nb.*\n.*\n.*holds the bytes of two=0, nl=0"),
    (ClearsOtherLayers, S, 5, "layer 1 is not one of the layers \\(2, 0\\)"),
    (BlockAndOffsetSwapped, G, 1, "the row holds the bytes of nl=0, two=0"),
    (BlockAndOffsetSwapped, S, 7, "was not moved"),
    (DropsTheLastLayer, G, 7, "which is two=0, nl=2, t"),
    (DropsTheLastLayer, S, 7, "which is nl=2, two=0, nb"),
    (CopiesHalfOfTheHeads, G, 7, "nh=2, hs=0 .*\n.*was not moved"),
    (CopiesHalfOfTheHeads, S, 7, "nh=2, hs=0, slot .*\n.*was not moved"),
    (CopiesHalfOfEveryHead, G, 1, "nh=0, hs=8 .*\n.*was moved wrongly"),
    (CopiesHalfOfEveryHead, S, 1, "nh=0, hs=8, slot .*\n.*was moved wrongly"),
    (WritesTheSource, G, 5, "the source of the move was written"),
    (WritesTheSource, S, 5, "the source of the move was written"),
    (TakesSlotsForDense, G, 7, "a legal request raised SlotRangeError"),
    (TakesSlotsForDense, S, 7, "a legal request raised SlotRangeError"),
    (TakesBlocksForDense, G, 1, "was moved wrongly"),
    (TakesBlocksForDense, S, 5, "outside of every tensor"),
    (DoesNotRefuseSlots, G, 3, "must raise SlotRangeError, nothing was raised"),
    (DoesNotRefuseSlots, S, 3, "must raise SlotRangeError, nothing was raised"),
    (SlotsOf32Bits, G, 3, "must raise SlotRangeError, nothing was raised"),
    (SlotsOf32Bits, S, 3, "must raise SlotRangeError, nothing was raised"),
    (FollowsThenRefuses, G, 3, "the call was wrong input, this was written all the same"),
    (FollowsThenRefuses, S, 3, "the call was wrong input, this was written all the same"),
    (Crashes, G, 7, "a legal request raised ZeroDivisionError: in the guest"),
    (NeverDone, S, 9, "not done\\(\\) after synchronize"),
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
    assert first_failure(guest(Honest()), cases) is None


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
    faults = {kind for kind in Honest.__subclasses__()}
    assert faults == {fault for fault, *_ in FAULTS}
    assert len(FAULTS) == 52


# A fault that only some cases can show must be caught in all of those, whatever the layout.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", [OffByOneSlot, ForgetsTheLastToken, WritesAByteBefore, NegativeSlotsWrap])
def test_a_fault_is_caught_in_every_case_of_every_layout(guest, layout, fault):
    backend = guest(fault())
    of_bytes = (torch.uint8, torch.uint8)
    cases = [c for c in all_cases({layout: LAYOUTS[layout]}) if (c.cache_dtype, c.chunk_dtype) == of_bytes]
    results = list(run([backend], cases))
    assert len(results) in (6, 4)
    assert not [result.case for result in results if result.ok]


def test_bytes_of_every_float_do_not_survive_arithmetic(guest):
    backend = guest(RoundTripsThroughFloat())
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        with pytest.raises(ContractViolation, match="rule 1 is broken"):
            run_case(Case.parse(f"{ROW}-gather-KV_T2D-{dtype}-plain"), backend)


def test_the_reference_has_to_find_duplicates_and_others_need_not(guest, monkeypatch):
    case = Case.parse(f"{ROW}-scatter-KV_2LTD-float16-errors")
    name = guest(Honest())
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

    class Late(Honest):
        def move(self, plan):
            try:
                return super().move(plan)
            except SlotRangeError as error:
                return Failing(error)

    run_case(Case.parse(f"{ROW}-gather-KV_2LTD-float16"), guest(Late()))


def test_an_error_of_another_class_is_not_enough(guest):
    class Vague(Honest):
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


# ------------------------------------------------------------------------------------------- assert_same_bits


def test_equal_bits_pass():
    for dtype in (*DTYPES, torch.int16, torch.bool, torch.complex64):
        value = torch.arange(12).view(3, 4).to(dtype)
        assert_same_bits(value, value.clone())
    assert_same_bits(torch.tensor(7), torch.tensor(7))
    assert_same_bits(torch.empty(2, 0), torch.empty(2, 0))
    assert_same_bits(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())


def test_nan_of_equal_payload_passes():
    nan = torch.tensor([0x7FC1, -1], dtype=torch.int16).view(torch.bfloat16)
    assert_same_bits(nan, nan.clone())


@pytest.mark.parametrize(
    ("got", "expected", "text"),
    [
        (torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]), "0x0000000000000003, got 0x0000000000000004"),
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shape: expected \(3, 2\), got \(2, 3\)"),
        (torch.zeros(2, 1), torch.zeros(2), r"shape: expected \(2,\), got \(2, 1\)"),
        (torch.zeros(0, 3), torch.zeros(0, 4), r"shape: expected \(0, 4\), got \(0, 3\)"),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16), "dtype: expected torch.bfloat16"),
        (torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.float8_e4m3fn), "dtype: expected torch.float8"),
        (
            torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16),
            torch.tensor([0x7FC2], dtype=torch.int16).view(torch.bfloat16),
            "expected bits 0x7fc2, got 0x7fc1",
        ),
        (torch.tensor([-0.0]), torch.tensor([0.0]), "expected bits 0x00000000, got 0x80000000"),
        (torch.tensor([True]), torch.tensor([False]), "expected bits 0x00, got 0x01"),
    ],
    ids=["value", "shape", "rank", "empty", "dtype", "fp8", "nan", "minus_zero", "bool"],
)
def test_unequal_bits_fail(got, expected, text):
    with pytest.raises(ContractViolation, match=text):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("bad", [0, 1, 5, 11])
def test_one_bad_element_is_found_wherever_it_is(bad):
    expected = torch.zeros(2, 6)
    got = expected.clone()
    got.view(-1)[bad] = -0.0
    with pytest.raises(ContractViolation) as caught:
        assert_same_bits(got, expected, axes=["nh", "hs"], case="this-case", backend="mine", device="cuda")
    assert str(caught.value).splitlines() == [
        "this-case by backend 'mine' on cuda",
        "  rule 1 is broken: bytes are moved, not changed",
        f"  at nh={bad // 6}, hs={bad % 6}",
        "  expected bits 0x00000000, got 0x80000000",
        "  1 bad of 12 elements",
        "  again: lmcache-ref verify --case this-case --backend mine --device cuda",
    ]


def test_the_rule_and_the_notes_of_the_caller_are_shown():
    with pytest.raises(ContractViolation, match=r"rule 5 is broken: .*\n  at axis0=1\n  row of \(1,\)\n"):
        assert_same_bits(torch.ones(2), torch.eye(2)[0], explain=lambda first: (5, [f"row of {first}"]))


# ------------------------------------------------------------------------------------------ addresses, memory


@pytest.mark.parametrize("width_bytes", [1, 2, 4, 8])
def test_addresses_tell_rows_apart_and_are_never_the_sentinel(width_bytes):
    shape = tuple(SIZES["tiny"].of(LAYOUTS[ROW])[axis] for axis in EngineMemory.axes)
    one, other = addresses(shape, width_bytes, 1), addresses(shape, width_bytes, 2)
    rows = torch.cat([one.reshape(-1, shape[-1]), other.reshape(-1, shape[-1])])
    assert len(rows.unique(dim=0)) == len(rows)
    assert not bool((rows == sentinel(width_bytes)).any())
    assert torch.equal(one, addresses(shape, width_bytes, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_addresses_of_floats_hold_payloads_and_minus_zero(dtype):
    values = addresses((3, 2, 7, 4, 5, 16), dtype.itemsize, 1)
    numbers = values.view(dtype)
    assert len(values[numbers.isnan()].unique()) > 100
    assert bool(((numbers == 0) & numbers.signbit()).any())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_addresses_of_bytes_take_every_value_but_the_sentinel(dtype):
    assert len(addresses((3, 2, 7, 4, 5, 16), dtype.itemsize, 1).unique()) == 255


def test_engine_tensors_of_some_rows_by_hand():
    """`logical[layer, k, b, t, h, d]` where the row's name says, written out for rows of each kind."""
    sizes = SIZES["tiny"].of(LAYOUTS[ROW])
    layer, k, b, t, h, d = 2, 1, 5, 3, 4, 9
    NL, BS, HS = sizes["nl"], sizes["bs"], sizes["hs"]
    where = {
        "NB_NL_TWO_BS_NH_HS": lambda x: x[b, layer, k, t, h, d],
        "NL_X_TWO_NB_BS_NH_HS": lambda x: x[layer][k, b, t, h, d],
        "NL_X_NB_TWO_NH_BS_HS": lambda x: x[layer][b, k, h, t, d],
        "TWO_X_NL_X_NBBS_NH_HS": lambda x: x[k][layer][b * BS + t, h, d],
        "TWO_NL_X_NB_BS_NH_HS": lambda x: x[k * NL + layer][b, t, h, d],
        "NL_X_NB_NH_BS_TWO_HS": lambda x: x[layer][b, h, t, k * HS + d],
        "NB_NL_TWO_NHBSHS": lambda x: x[b, layer, k, (h * BS + t) * HS + d],
    }
    for geometry, (name, look) in itertools.product(GEOMETRIES, where.items()):
        memory = EngineMemory(LAYOUTS[name], sizes, geometry)
        logical = torch.arange(torch.Size(memory.shape).numel()).view(memory.shape)
        found = look(memory.tensors(memory.filled(logical, -1)))
        assert int(found) == int(logical[layer, k, b, t, h, d]), name


def test_engine_tensors_of_mla_rows_by_hand():
    sizes = SIZES["tiny"].of(LAYOUTS["NL_X_NB_BS_HS"])
    assert (sizes["two"], sizes["nh"]) == (1, 1)
    where = {
        "NL_X_NB_BS_HS": lambda x: x[2][5, 3, 9],
        "NL_X_NBBS_ONE_HS": lambda x: x[2][5 * 4 + 3, 0, 9],
        "ONE_X_NL_X_NB_BS_ONE_HS": lambda x: x[0][2][5, 3, 0, 9],
    }
    for name, look in where.items():
        memory = EngineMemory(LAYOUTS[name], sizes, GEOMETRIES[1])
        logical = torch.arange(torch.Size(memory.shape).numel()).view(memory.shape)
        assert int(look(memory.tensors(memory.filled(logical, -1)))) == int(logical[2, 0, 5, 3, 0, 9])


def test_chunks_of_every_format_by_hand():
    """Two chunks, tokens [4, 6) and [0, 3), of three layers; element (k, l, t, h, d) of the request."""
    logical = torch.arange(2 * 3 * 6 * 5 * 16).view(2, 3, 6, 5, 16)
    mla = torch.arange(1 * 3 * 6 * 1 * 16).view(1, 3, 6, 1, 16)
    where = {
        "KV_2LTD": lambda x: x[0][0][1, 2, 1, 3 * 16 + 9],
        "KV_T2D": lambda x: x[2][0][1, 1, 3 * 16 + 9],
        "KV_2TD": lambda x: x[2][0][1, 1, 3 * 16 + 9],
        "KV_MLA_FMT": lambda x: x[0][0][0, 2, 1, 9],
        "KV_MLA_FMT_TD": lambda x: x[2][0][1, 9],
    }
    assert {*where} == {*CHUNKS}
    for geometry, (name, look) in itertools.product(GEOMETRIES, where.items()):
        request = logical if CHUNKS[name].planes == 2 else mla
        memory = ChunkMemory(CHUNKS[name], request.shape, [(4, 6), (0, 3)], geometry)
        found = look(memory.tensors(memory.filled(request, -1)))
        assert int(found) == int(logical[1, 2, 5, 3, 9] if CHUNKS[name].planes == 2 else mla[0, 2, 5, 0, 9])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_lie_apart_inside_guard_bands(layout):
    row = LAYOUTS[layout]
    for geometry in GEOMETRIES:
        memory = EngineMemory(row, SIZES["tiny"].of(row), geometry)
        count = torch.Size(memory.shape).numel()
        buffer = memory.filled(torch.arange(count).view(memory.shape), -1)
        assert sorted(buffer[buffer >= 0].tolist()) == list(range(count))  # each element once: nothing overlaps
        for band in (buffer[:GUARD_ELEMENTS], buffer[-GUARD_ELEMENTS:]):
            assert set(band.tolist()) == {-1}
        inside = buffer[buffer.ge(0).nonzero()[0].item() : buffer.ge(0).nonzero()[-1].item()]
        assert bool((inside == -1).any())  # padding


def test_flat_slots_inside_and_outside_of_parentheses():
    def pattern(text, *nesting):
        return engine_pattern(layouts.Layout("X", text, nesting))

    assert pattern("nbbs nh hs", "nl", "two") == "nl two nb bs nh hs -> nl two (nb bs) nh hs"
    assert pattern("(nl nbbs) two hs") == "nl two nb bs 1 hs -> (nl nb bs) two hs"
    assert pattern("nbbs 1 hs", "nl") == "nl 1 nb bs 1 hs -> nl (nb bs) 1 hs"


# --------------------------------------------------------------------------------------------- scenes, cases


def test_what_becomes_of_each_token_of_a_request():
    scene = Scene("by hand", slots=(5, 0, -1, 3, 9), spans=((3, 5), (0, 3)), layers=(1,), skip=1)
    assert [scene.status(token) for token in range(5)] == ["prefix", "moved", "negative", "moved", "moved"]
    assert list(scene.moves()) == [(1, 0), (3, 3), (4, 9)]
    gapped = Scene("by hand", slots=(5, 0, -1, 3), spans=((3, 4), (0, 1)), layers=(1,))
    assert [gapped.status(token) for token in range(4)] == ["moved", "gap", "gap", "moved"]

    cache = torch.arange(2 * 2 * 5 * 2).view(2, 2, 5, 2, 1, 1)  # element (l, k, slot) is (2*l + k)*10 + slot
    chunks = torch.full((2, 1, 5, 1, 1), -7)
    assert scene.gathered(cache, chunks).flatten().tolist() == [-7, 20, -7, 23, 29, -7, 30, -7, 33, 39]
    written = scene.scattered(torch.zeros_like(cache), torch.arange(1, 11).view(2, 1, 5, 1, 1)).flatten()
    assert {place: int(written[place]) for place in written.nonzero().flatten().tolist()} == {
        20: 2, 23: 4, 29: 5, 30: 7, 33: 9, 39: 10,
    }  # fmt: skip


def test_every_case_is_read_back_from_its_id():
    cases = [*all_cases(), *all_cases(sizes="real")]
    assert len({case.id for case in cases}) == len(cases) == 2 * expected_count()
    for case in cases:
        assert Case.parse(case.id) == Case.parse(str(case)) == case
        for pattern in PATTERNS:
            narrowed = f"{case.id}-{pattern}"
            assert Case.parse(narrowed).id == narrowed


def test_ids_spell_what_is_run():
    case = Case(ROW, "gather", "KV_2LTD", torch.bfloat16, torch.bfloat16)
    assert case.id == "NL_X_TWO_NB_BS_NH_HS-gather-KV_2LTD-bfloat16"
    mixed = Case(ROW, "scatter", "KV_T2D", torch.float8_e5m2, torch.uint8, "real", "mixed")
    assert mixed.id == "NL_X_TWO_NB_BS_NH_HS-scatter-KV_T2D-float8_e5m2-uint8-real-mixed"


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("", ArgumentError, "a case reads LAYOUT-gather"),
        (f"{ROW}-copy-KV_2LTD-bfloat16", ArgumentError, "a case reads LAYOUT-gather"),
        ("NOWHERE-gather-KV_2LTD-bfloat16", LayoutError, "unknown layout 'NOWHERE'"),
        (f"{ROW}-gather-KV_3-bfloat16", ArgumentError, "unknown chunk format 'KV_3'; known: KV_2LTD"),
        (f"{ROW}-gather-KV_2LTD-bfloat17", ArgumentError, "unknown dtype 'bfloat17'; known: uint8"),
        (f"{ROW}-gather-KV_2LTD-bfloat16-most", ArgumentError, "unknown last part 'most'; known: plain"),
        (
            f"{ROW}-gather-KV_2LTD-bfloat16-float16",
            ArgumentError,
            "a torch.float16 chunk does not hold a torch.bfloat16",
        ),
        (f"{ROW}-gather-KV_MLA_FMT-bfloat16", ArgumentError, "has chunks KV_2LTD, KV_T2D, KV_2TD"),
        ("NL_X_NB_BS_HS-gather-KV_2LTD-bfloat16", ArgumentError, "has chunks KV_MLA_FMT, KV_MLA_FMT_TD"),
    ],
)
def test_a_wrong_id_is_refused(text, error, why):
    with pytest.raises(error, match=why):
        Case.parse(text)


def test_every_chunk_format_of_the_table_is_covered():
    stated = Counter(chunk.fmt for chunk in CHUNKS.values())
    assert stated == {fmt: len(patterns) for fmt, patterns in CHUNK_FORMATS.items()}


def test_a_row_of_the_user_is_tested_like_any_other():
    before = expected_count()
    register_layout("NL_X_NH_NB_BS_HS_TWO_X", "nh nb bs hs", nesting=("nl", "two"))
    try:
        cases = [case for case in all_cases() if case.layout == "NL_X_NH_NB_BS_HS_TWO_X"]
        assert len(cases) == 66 == expected_count() - before
        assert first_failure("reference", [case for case in cases if case.cache_dtype == torch.float16]) is None
    finally:
        unregister_layout("NL_X_NH_NB_BS_HS_TWO_X")


def test_sizes_have_no_two_axes_alike():
    for sizes in SIZES.values():
        lengths = [sizes.nl, sizes.nb, sizes.bs, sizes.nh, sizes.hs]
        assert len({*lengths, 2}) == 6
        assert sizes.nb * sizes.bs >= MIN_SLOTS


# ------------------------------------------------------------------------------------------------ run, pytest


def test_run_reports_every_case_of_every_backend(guest):
    cases = [Case.parse(f"{ROW}-{direction}-KV_2LTD-uint8-plain") for direction in ("gather", "scatter")]
    seen = []
    name = guest(Crashes())
    results = list(run([name, "reference", "nobody"], cases, on_result=seen.append))
    assert seen == results
    assert [(r.case, r.backend, r.ok) for r in results] == [
        *((case, name, False) for case in cases),
        *((case, "reference", True) for case in cases),
        *((case, "nobody", False) for case in cases),
    ]
    assert "ZeroDivisionError: in the guest" in results[0].error
    assert results[2].error is None
    assert results[4].error.startswith("BackendError: unknown backend 'nobody'")
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
