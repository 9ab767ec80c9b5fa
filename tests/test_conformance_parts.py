"""The parts of the conformance suite: the comparison, addresses and memory, requests, ids of cases.

Whether the whole catches what it must is `test_conformance.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from lmcache_ref import layouts
from lmcache_ref.conformance import Case, all_cases, assert_same_bits, expected_count, run
from lmcache_ref.conformance.cases import CHUNKS, DTYPES, PATTERNS, SIZES
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
from lmcache_ref.errors import ArgumentError, ContractViolation, LayoutError
from lmcache_ref.layouts import CHUNK_FORMATS, LAYOUTS, register_layout, unregister_layout

ROW = "NL_X_TWO_NB_BS_NH_HS"

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
        assert all(r.ok for r in run(["reference"], [case for case in cases if case.cache_dtype == torch.float16]))
    finally:
        unregister_layout("NL_X_NH_NB_BS_HS_TWO_X")


def test_sizes_have_no_two_axes_alike():
    for sizes in SIZES.values():
        lengths = [sizes.nl, sizes.nb, sizes.bs, sizes.nh, sizes.hs]
        assert len({*lengths, 2}) == 6
        assert sizes.nb * sizes.bs >= MIN_SLOTS
