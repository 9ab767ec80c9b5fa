"""The demo of every connector: each is right over exactly the layouts it takes, and others are refused.

Broken connectors are in `test_demo_broken.py`; the demo's own workings over one connector are in `test_demo.py`.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from demo_rows import FLAT, FLAT_MLA, MLA, PER_LAYER
from lmcache_ref import LAYOUTS, cli
from lmcache_ref.demo import CONNECTORS, model, run_demo
from lmcache_ref.errors import ArgumentError, LayoutError

VLLM_KV = (
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
    "NB_NL_TWO_NH_BS_HS",
    "NL_X_NB_NH_BS_TWO_HS",
    "NL_X_NB_BS_NH_TWO_HS",
    "NL_X_NH_NB_BS_TWO_HS",
    "LBHNC",
    "LBNHC",
    "LHBNC",
    "BLHNC",
    "BLNHC",
    "BHLNC",
)
SGLANG = (
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "TWO_NL_X_NBBS_NH_HS",
    "TWO_NL_X_NB_BS_NH_HS",
    "NL_X_NB_BS_ONE_HS",
    "ONE_X_NL_X_NBBS_ONE_HS",
    "ONE_X_NL_X_NB_BS_ONE_HS",
)
TAKES = {
    "VLLMPagedMemGPUConnectorV3": {*VLLM_KV, MLA, "mixed"},
    "VLLMPagedMemLayerwiseGPUConnector": {*VLLM_KV, MLA},
    "VLLMBufferLayerwiseGPUConnector": {*VLLM_KV, "blend"},
    "SGLangGPUConnector": {*SGLANG},
    "SGLangLayerwiseGPUConnector": {*SGLANG},
}
CASES = [(name, row) for name, rows in TAKES.items() for row in sorted(rows)]


@pytest.fixture(scope="module")
def shown():
    return {name: run_demo(connector=name) for name in TAKES}


# Every connector over its layouts


def test_every_connector_shows_what_it_takes_and_nothing_else(shown):
    assert list(CONNECTORS) == ["VLLMPagedMemGPUConnectorV2", *TAKES]
    assert len(CASES) == 17 + 16 + 16 + 8 + 8
    for name, results in shown.items():
        assert len(results) == len(TAKES[name])
        assert {result.layout for result in results} == TAKES[name]
        in_table = [result.layout for result in results if result.layout in LAYOUTS]
        assert in_table == [row for row in LAYOUTS if row in TAKES[name]], "in the order of the table"


@pytest.mark.parametrize(("name", "row"), CASES)
def test_row_is_right(shown, name, row):
    (result,) = [result for result in shown[name] if result.layout == row]
    assert result.ok, result
    equal = None if row == "blend" else True
    assert (result.tokens_equal, result.logits_equal, result.control_differs) == (equal, equal, True)
    assert (result.connector, result.error, result.skipped) == (name, "", False)
    assert result.bytes == (131072 if row == "blend" else 204800)  # 64 of the 100 tokens
    assert min(result.store_seconds, result.load_seconds) > 0
    assert bool(result.note) == (row in ("blend", "mixed") or LAYOUTS[row].is_mla)


def test_all_runs_each_connector_that_takes_the_layouts():
    results = run_demo([PER_LAYER, FLAT_MLA, "mixed", "blend"], "all")
    V2, V3, one_layer, buffer, sglang, sglang_one_layer = CONNECTORS
    assert [(result.connector, result.layout) for result in results] == [
        (V2, PER_LAYER),
        (V2, FLAT_MLA),
        (V3, PER_LAYER),
        (V3, "mixed"),
        (one_layer, PER_LAYER),
        (buffer, PER_LAYER),
        (buffer, "blend"),
        (sglang, FLAT_MLA),
        (sglang_one_layer, FLAT_MLA),
    ]
    assert [result for result in results if not result.ok] == []


def test_another_seed_is_right_too():
    assert [result for result in run_demo([PER_LAYER, FLAT, "mixed", "blend"], "all", seed=1) if not result.ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_every_connector_on_a_gpu(seed):
    results = run_demo(connector="all", device="cuda", seed=seed)
    assert len(results) == len(LAYOUTS) + len(CASES)
    assert [result for result in results if not result.ok] == []


def test_the_command_line_shows_one_table_a_connector():
    shown = CliRunner().invoke(cli.application(), ["demo", "--connector", "all", "-l", FLAT_MLA])
    assert shown.exit_code == 0
    for name in ("VLLMPagedMemGPUConnectorV2", "SGLangGPUConnector", "SGLangLayerwiseGPUConnector"):
        assert shown.stdout.count(f"demo: {name}, by ") == 1
    assert shown.stdout.count(FLAT_MLA) == 3 == shown.stdout.count("demo: ")
    document = json.loads(
        CliRunner().invoke(cli.application(), ["demo", "--connector", "all", "-l", FLAT_MLA, "--json"]).stdout
    )
    assert [result["ok"] for result in document["results"]] == [True] * 3


# What is refused


@pytest.mark.parametrize(
    ("connector", "rows", "refused", "offered"),
    [
        ("VLLMBufferLayerwiseGPUConnector", [MLA, PER_LAYER], MLA, "BHLNC, blend"),
        ("VLLMPagedMemLayerwiseGPUConnector", [FLAT, "blend"], f"{FLAT}, blend", MLA),
        ("VLLMPagedMemGPUConnectorV3", [FLAT_MLA], FLAT_MLA, "BHLNC, mixed"),
        ("SGLangGPUConnector", [PER_LAYER], PER_LAYER, "TWO_X_NL_X_NBBS_NH_HS, NL_X_NBBS_ONE_HS"),
        ("SGLangLayerwiseGPUConnector", ["mixed", FLAT], "mixed", "ONE_X_NL_X_NB_BS_ONE_HS"),
        ("VLLMPagedMemGPUConnectorV2", ["mixed"], "mixed", "NB_NL_TWO_NHBSHS"),
    ],
)
def test_a_row_that_the_connector_does_not_take_is_refused(monkeypatch, connector, rows, refused, offered):
    monkeypatch.setattr(model, "build_model", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ArgumentError) as error:
        run_demo(rows, connector)
    message = str(error.value)
    assert message.startswith(f"layouts: {refused} not taken by {connector}; it takes: ")
    taken = message.partition("it takes: ")[2].split(", ")
    assert set(taken) == TAKES.get(connector, {*LAYOUTS})
    assert offered in message


def test_unknown_names_are_refused(monkeypatch):
    monkeypatch.setattr(model, "build_model", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ArgumentError, match=r"'V9'.*VLLMPagedMemGPUConnectorV2, .*SGLangLayerwiseGPUConnector, all$"):
        run_demo(connector="V9")
    with pytest.raises(LayoutError, match="'NOPE'"):
        run_demo(["NOPE"], "all")
