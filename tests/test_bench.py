"""The benchmark: every figure in every cell, bits checked before anything is timed, faults as rows, the peer beside.

Shapes are tiny, and what is measured of them means nothing. The figures of a GPU run here too, by a clock that says of
the host that it is one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from lmcache_ref import Transfer, c_ops, register_backend
from lmcache_ref.backends import get_backend, unregister_backend
from lmcache_ref.bench import Options, Report, Row, run, run_bench
from lmcache_ref.bench.__main__ import main
from lmcache_ref.bench.figures import GROUPS
from lmcache_ref.bench.measure import HostClock
from lmcache_ref.bench.report import as_text
from lmcache_ref.bench.shapes import SHAPES, Shape
from lmcache_ref.errors import ArgumentError, BackendError

TINY = [
    Shape("tiny", 2, 2, 2, 8, torch.bfloat16),
    Shape("tiny-fp8", 2, 2, 2, 8, torch.float8_e4m3fn),
    Shape("tiny-mla", 3, 1, 1, 24, torch.bfloat16),
]
RATES = ["store", "load", "both", "gather", "scatter"]
HOST_TIMES = ["host store", "host store call", "host load", "host load call", "host plan"]
LAYERWISE = [f"layerwise {way}{what}" for way in ("store", "load") for what in ("", " / whole", " host")]
DEVICE_FIGURES = {
    *RATES,
    *HOST_TIMES,
    *LAYERWISE,
    *(f"{what} {way}" for what in ("matmul beside", "one chunk") for way in ("store", "load")),
    "staging",
}
OF_PEER = {*RATES, "matmul beside store", "matmul beside load", "host store", "host load"}
OF_PEER |= {"one chunk store", "one chunk load"}
EVERYTHING = Options(
    backends=["reference"], shapes=[shape.name for shape in TINY], tokens=[300], repeats=1, figures=tuple(GROUPS)
)
SMALL = dataclasses.replace(EVERYTHING, shapes=["tiny"], orders=["NHD"], figures=None)


class AsynchronousHost(HostClock):
    """Has everything measured that is measured on a GPU."""

    asynchronous = True


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch):
    for shape in TINY:
        monkeypatch.setitem(SHAPES, shape.name, shape)
    monkeypatch.setattr(run, "HOST_CEILING_BYTES", 1 << 20)


@pytest.fixture
def like_a_gpu(monkeypatch):
    monkeypatch.setattr(run, "clock_of", AsynchronousHost)


@pytest.fixture
def backend():
    """Registers backends that are forgotten when the test ends."""
    names = []

    def register(name, **operations):
        real = get_backend("reference")
        whole = {"gather": real.gather, "scatter": real.scatter, "rerotate": real.rerotate}
        register_backend(name, lambda: SimpleNamespace(**(whole | operations)))
        names.append(name)

    yield register
    for name in names:
        unregister_backend(name)


def figures_of(report: Report, runner: str) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for row in report.rows:
        if row.runner == runner:
            found.setdefault((row.shape, row.order), set()).add(row.figure)
    return found


def is_sound(row: Row) -> bool:
    """A number behind which there is time; "over the copy" may be less than nothing."""
    if row.error is not None or row.value is None or not math.isfinite(row.value):
        return False
    if row.figure == "staging":
        return row.value >= 0
    return bool(row.seconds and row.seconds > 0) and (row.value > 0 or row.unit == "us over copy")


CELLS = {
    *itertools.product(("tiny", "tiny-fp8"), ("NHD", "HND", "fused")),
    ("tiny-mla", "-"),
}

# The matrix


def test_on_a_cpu_every_cell_has_every_figure():
    report = run_bench(dataclasses.replace(EVERYTHING, figures=None, tokens=[300, 7], block_sizes=[4, 16]))
    expected = {"gather", "scatter", "staging", *HOST_TIMES, *(name for name in LAYERWISE if "host" not in name)}
    assert figures_of(report, "reference") == dict.fromkeys(CELLS, expected)
    assert figures_of(report, "copy_") == {key: {"gather", "scatter"} for key in CELLS}
    assert {(row.block_size, row.tokens) for row in report.rows} == {(4, 300), (4, 7), (16, 300), (16, 7)}
    assert len(report.rows) == 4 * len(CELLS) * (len(expected) + 2)
    assert all(map(is_sound, report.rows))
    assert all(row.percent_of_ceiling == 100 for row in report.rows if row.runner == "copy_")
    assert all(row.percent_of_ceiling for row in report.rows if row.figure in ("gather", "scatter"))
    assert report.ok and report.ceilings == {}


def test_on_a_gpu_every_cell_has_every_figure(like_a_gpu):
    cells = []
    report = run_bench(EVERYTHING, cells.append)
    assert figures_of(report, "reference") == dict.fromkeys(CELLS, DEVICE_FIGURES)
    assert figures_of(report, "alone") == {cell: {"matmul alone"} for cell in CELLS}
    assert figures_of(report, "copy_") == {cell: {"matmul beside store", "matmul beside load"} for cell in CELLS}
    assert all(map(is_sound, report.rows))
    assert len(report.rows) == len(CELLS) * (len(DEVICE_FIGURES) + 4) and len(cells) == len(CELLS)
    with_ceiling = {row.figure for row in report.rows if row.percent_of_ceiling}
    assert with_ceiling == {*RATES, "layerwise store", "layerwise load"}
    assert list(report.ceilings) == ["d2h", "h2d", "both", "device"]
    assert "matmul loop: 4 bf16 64^3, alone " in as_text(report)
    assert report.environment["slots_on"] == "cpu"


def test_rates_percents_and_times_belong_together(like_a_gpu):
    rows = {row.figure: row for row in run_bench(dataclasses.replace(SMALL, figures=tuple(GROUPS))).rows}
    report_bytes = 300 * TINY[0].bytes_per_token
    for figure in RATES:
        moved = report_bytes * (1 if figure in ("store", "load") else 2)
        assert rows[figure].value == pytest.approx(moved / rows[figure].seconds / 1e9)
    assert rows["layerwise store"].value == pytest.approx(1e3 * rows["layerwise store"].seconds)
    assert rows["host store"].value == pytest.approx(1e6 * rows["host store"].seconds / 2)  # chunks of 256 and 44
    top = run_bench(dataclasses.replace(SMALL, figures=("store",)))
    percent = 100 * top.rows[0].value / top.ceilings["d2h"]
    assert top.rows[0].percent_of_ceiling == pytest.approx(percent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": ["nope"]}, "shapes: nope unknown; known: llama3-8b, "),
        ({"orders": ["DHN"]}, "orders: DHN unknown; known: NHD, HND, fused"),
        ({"figures": ["speed"]}, "figures: speed unknown; known: staging, store, "),
        ({"slots_on": "disk"}, "slots_on: disk unknown; known: cpu, device"),
        ({"tokens": [256, 0]}, r"tokens: \[256, 0\]; allowed: numbers from 1 on"),
        ({"repeats": 0}, r"repeats: \(0,\); allowed: numbers from 1 on"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_asked_for(change, message):
    with pytest.raises(ArgumentError, match=message):
        run_bench(dataclasses.replace(SMALL, **change))


def test_which_backends_are_measured(backend, monkeypatch):
    def named(**options):
        return list(Options(**options).completed().backends)

    backend("mine")
    register_backend("elsewhere", None, devices=("cuda",))
    try:
        assert {"reference", "mine"} <= {*named()} and "elsewhere" not in named()
        assert named(backends=["mine", "reference", "mine"]) == ["mine", "reference"]
        monkeypatch.setenv("LMCACHE_BACKEND", "mine")
        assert named() == ["mine"]
        with pytest.raises(BackendError, match="unknown backend 'nope'"):
            named(backends=["nope"])
        register_backend("near", get_backend("reference"), devices=("cuda",))
        with pytest.raises(BackendError, match="backend 'near' serves cuda, not cpu"):
            named(backends=["near"])
    finally:
        for name in ("elsewhere", "near"):
            unregister_backend(name)


# Faults


def gather_then(change):
    def gather(plan):
        handle = get_backend("reference").gather(plan)
        change(plan)
        return handle

    return gather


def scatter_then(change):
    def scatter(plan):
        handle = get_backend("reference").scatter(plan)
        change(plan)
        return handle

    return scatter


def flip_in_the_last_chunk(plan):
    plan.spans[-1].chunk.view(torch.uint8)[-1, -1, -1, -1, -1] ^= 1


def flip_in_the_pages(plan):
    block, offset = divmod(int(plan.slots[plan.spans[-1].end - 1]), plan.cache.block_size)
    plan.planes[-1][-1].view(torch.uint8)[block, offset, -1, -1] ^= 1


def write_elsewhere(plan):
    free = set(range(plan.cache.num_slots)) - set(plan.slots.tolist())
    block, offset = divmod(max(free), plan.cache.block_size)
    plan.planes[0][0].view(torch.uint8)[block, offset, 0, 0] ^= 1


FAULTS = {
    "nothing gathered": ({"gather": lambda plan: Transfer()}, "gather", "store"),
    "a bit gathered": ({"gather": gather_then(flip_in_the_last_chunk)}, "gather", "store"),
    "nothing scattered": ({"scatter": lambda plan: Transfer()}, "scatter", "load"),
    "a bit scattered": ({"scatter": scatter_then(flip_in_the_pages)}, "scatter", "load"),
    "written elsewhere": ({"scatter": scatter_then(write_elsewhere)}, "scatter", "load"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_bits_are_not_timed_and_spare_the_rest(backend, like_a_gpu, fault):
    operations, operation, way = FAULTS[fault]
    backend("wrong", **operations)
    options = dataclasses.replace(SMALL, backends=["wrong", "reference"], figures=tuple(GROUPS))
    report = run_bench(options)
    assert not report.ok
    bad = {row.figure for row in report.rows if row.error}
    assert all("ContractViolation: " in row.error and row.value is None for row in report.rows if row.error)
    names = (f"layerwise {way}", f"matmul beside {way}", f"host {way}", f"host {way} call", f"one chunk {way}")
    assert bad == {way, "both", operation, *names}
    assert all(is_sound(row) for row in report.rows if row.runner == "reference")
    assert f"{operation} of wrong moves other bits than the reference" in as_text(report)


def test_one_failing_figure_does_not_lose_the_others(backend, like_a_gpu):
    def one_chunk_is_too_few(plan):
        if len(plan.spans) == 1:
            raise RuntimeError("one chunk is too few")
        return get_backend("reference").gather(plan)

    backend("picky", gather=one_chunk_is_too_few)
    options = dataclasses.replace(SMALL, backends=["picky"], figures=tuple(GROUPS))
    report = run_bench(options)
    errors = {row.figure: row.error for row in report.rows if row.error}
    assert errors == {"one chunk store": "RuntimeError: one chunk is too few"}
    assert {row.figure for row in report.rows if row.runner == "picky"} == DEVICE_FIGURES and not report.ok


def test_a_figure_that_cannot_begin_is_an_error_of_each_backend(monkeypatch):
    def no_memory(scene):
        raise MemoryError("no memory")

    monkeypatch.setitem(GROUPS, "layerwise", no_memory)
    report = run_bench(SMALL)
    assert [(row.runner, row.figure, row.error) for row in report.rows if row.error] == [
        ("reference", "layerwise", "MemoryError: no memory")
    ]
    assert {"gather", "scatter", "host plan"} <= {row.figure for row in report.rows}


def test_a_cell_that_cannot_be_set_up_does_not_lose_the_others(monkeypatch):
    class NoRoom(run.Setting):
        def __init__(self, case, *arguments, **options):
            if case.order == "HND":
                raise MemoryError("no memory")
            super().__init__(case, *arguments, **options)

    monkeypatch.setattr(run, "Setting", NoRoom)
    report = run_bench(dataclasses.replace(SMALL, orders=["HND", "NHD"]))
    assert [(row.order, row.figure) for row in report.rows if row.error] == [("HND", "setting")]
    assert "gather" in figures_of(report, "reference")["tiny", "NHD"]
    assert "tiny HND block 16 tokens 300, reference, setting: MemoryError: no memory" in as_text(report)


def test_staging_counts_what_a_backend_kept_from_earlier_cells_and_not_what_it_gave_back_from_before(monkeypatch):
    mib = 1 << 20
    script = iter([(0, -3 * mib), (5 * mib, 4 * mib), (mib, 0)])  # peak and kept, one cell after another

    class Scripted(AsynchronousHost):
        def extra_bytes(self, run):
            run()
            return next(script)

    monkeypatch.setattr(run, "clock_of", Scripted)
    report = run_bench(dataclasses.replace(SMALL, orders=["NHD", "HND", "fused"], figures=["staging"]))
    assert [row.value for row in report.rows] == [0.0, 5.0, 5.0]


# The peer


def fallback_folder(tmp_path, body=""):
    """An unpacked wheel whose pure-Python functions are our own doors."""
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache-0.4.5.dist-info").mkdir()
    text = (
        "import numba, lmcache\nfrom lmcache_ref.c_ops import GPUKVFormat, TransferDirection, multi_layer_kv_transfer\n"
    )
    (tmp_path / "lmcache" / "non_cuda_equivalents.py").write_text(text + body)
    return tmp_path


def test_the_peer_of_a_cpu_is_its_fallback_on_the_layouts_that_it_has(tmp_path):
    report = run_bench(dataclasses.replace(EVERYTHING, figures=None, peer=fallback_folder(tmp_path)))
    expected = {"gather", "scatter", "staging", "host store", "host load"}
    cells = {("tiny", "NHD"), ("tiny-fp8", "NHD"), ("tiny-mla", "-")}
    assert figures_of(report, "peer") == dict.fromkeys(cells, expected)
    assert report.ok and report.environment["peer"] == "lmcache 0.4.5"
    compared = {row.figure for row in report.rows if row.ratio_to_peer}
    assert compared == expected - {"staging"}
    assert {(row.shape, row.order) for row in report.rows if row.ratio_to_peer} == cells


def test_the_peer_of_a_gpu_is_called_by_addresses_and_compared_in_every_figure_that_both_have(like_a_gpu, monkeypatch):
    calls = []

    def recorded(chunk, addresses, slots, device, num_slots, direction, kv_format, **options):
        calls.append((addresses.tolist(), slots.shape[0], options))
        return c_ops.multi_layer_kv_transfer(
            chunk, addresses, slots, device, num_slots, direction, kv_format, **options
        )

    formats = SimpleNamespace(**{f.name: f for f in c_ops.GPUKVFormat if f.value < 9})  # as many as 0.4.5 has
    module = SimpleNamespace(
        GPUKVFormat=formats, TransferDirection=c_ops.TransferDirection, multi_layer_kv_transfer=recorded
    )
    monkeypatch.setattr(run, "load_peer", lambda folder, device: module)
    report = run_bench(dataclasses.replace(EVERYTHING, peer="folder"))
    cells = {cell for cell in CELLS if cell[1] != "fused"}
    assert figures_of(report, "peer") == {key: {*OF_PEER, "staging"} for key in cells}
    assert report.ok and all(map(is_sound, report.rows))
    assert {row.figure for row in report.rows if row.ratio_to_peer} == OF_PEER
    for row in report.rows:
        if row.ratio_to_peer:
            beside = next(r for r in report.rows if r == dataclasses.replace(r, **cell_of(row)) and r.runner == "peer")
            assert row.ratio_to_peer == beside.seconds / row.seconds
    assert {tokens for _, tokens, _ in calls} == {256, 44}
    assert {len(addresses) for addresses, _, _ in calls} == {2, 3}
    assert all(options["skip_prefix_n_tokens"] == 0 and options["head_size"] in (8, 24) for *_, options in calls)


def cell_of(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in ("shape", "order", "block_size", "tokens", "figure")}


def test_a_peer_that_moves_wrong_bits_is_said_and_not_timed(tmp_path):
    body = "def multi_layer_kv_transfer(chunk, *rest): chunk.view(dtype=__import__('torch').uint8).zero_()\n"
    report = run_bench(dataclasses.replace(SMALL, peer=fallback_folder(tmp_path, body)))
    wrong = {row.figure: row.error for row in report.rows if row.runner == "peer" and row.error}
    assert set(wrong) == {"gather", "scatter", "host store", "host load"}
    assert set(wrong.values()) == {
        f"ContractViolation: {operation} of peer moves other bits than the reference"
        for operation in ("gather", "scatter")
    }
    assert report.ok, "the peer's faults are its own"
    assert not any(row.ratio_to_peer for row in report.rows)


def test_a_peer_that_cannot_be_set_up_does_not_lose_the_others(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no peer today")

    monkeypatch.setattr(run, "peer_mover", refuse)
    report = run_bench(dataclasses.replace(SMALL, peer=fallback_folder(tmp_path)))
    assert [(row.figure, row.error) for row in report.rows if row.runner == "peer"] == [
        ("setting", "RuntimeError: no peer today")
    ]
    assert "gather" in figures_of(report, "reference")["tiny", "NHD"] and report.ok


# As a module, and on a GPU


def test_run_as_a_module(backend, capsys):
    arguments = ["--shape", "tiny", "--order", "NHD", "--tokens", "20", "--repeats", "1", "--figure", "gather"]
    assert main([*arguments, "--backend", "reference"]) == 0
    shown = capsys.readouterr()
    assert "rates, block size 16, tokens 20" in shown.out and shown.err == "tiny NHD block 16 tokens 20\n"
    backend("wrong", gather=lambda plan: Transfer())
    assert main([*arguments, "--backend", "wrong", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and {"environment", "ceilings", "rows"} < set(document)
    assert main([*arguments, "--backend", "nope"]) == 2
    assert capsys.readouterr().err.startswith("BackendError: unknown backend 'nope'")


@pytest.mark.gpu
def test_on_a_real_gpu():
    options = dataclasses.replace(EVERYTHING, device="cuda", backends=None, slots_on="device", block_sizes=[16, 64])
    report = run_bench(options)
    assert not [row for row in report.rows if row.error]
    [name] = report.environment["backends"]
    assert figures_of(report, name) == dict.fromkeys(CELLS, DEVICE_FIGURES)
    assert all(map(is_sound, report.rows))
    assert report.environment["slots_on"] == "cuda"
