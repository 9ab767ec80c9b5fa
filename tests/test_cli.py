"""The command line: what each command prints, its exit codes, `--json`, and the missing extra.

What the commands show is tested where it is computed; here failures are planted, and must come out as exit codes. Longer
than most files, since five commands share its helpers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import einops
import pytest
import torch
from typer.testing import CliRunner

from lmcache_ref import LAYOUTS, Transfer, bench, cli, conformance, demo, register_backend
from lmcache_ref.backends import unregister_backend
from lmcache_ref.bench.shapes import SHAPES, Shape
from lmcache_ref.demo import DemoResult
from lmcache_ref.errors import LayoutError
from lmcache_ref.picture import Picture
from lmcache_ref.picture_rich import render
from lmcache_ref.rope import rerotate
from lmcache_ref.transfer import reference_scatter

GATHER = "LBHNC-gather-KV_2LTD-uint8-plain"
SCATTER = "LBHNC-scatter-KV_2LTD-uint8-plain"
COMMANDS = ("layouts", "verify", "demo", "bench", "doctor")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of ours, and none that makes rich believe in a terminal."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def backend():
    """Registers backends that are forgotten when the test ends."""
    names = []

    def register(name, load, **options):
        register_backend(name, load, **options)
        names.append(name)

    yield register
    for name in names:
        unregister_backend(name)


def run(*arguments: str):
    return CliRunner().invoke(cli.application(), list(arguments))


def run_json(*arguments: str, exit_code: int = 0):
    """The one document on stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


# layouts


def test_layouts_lists_every_row():
    result = run("layouts")
    assert result.exit_code == 0
    lines = [[word.strip() for word in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [line[0] for line in lines] == list(LAYOUTS)
    shown = {line[0]: line[1:] for line in lines}
    assert shown["NL_X_NB_NH_BS_TWO_HS"] == [
        "nb nh bs (two hs)",
        "nl",
        "vllm",
        "10",
        "2",
        "HND LBHNC BLHNC BHLNC",
        "vllm",
    ]
    assert shown["NL_X_NB_BS_HS"] == ["nb bs hs", "nl", "vllm", "3", "1", "any", "vllm"]
    assert shown["NB_NH_NL_TWO_BS_HS"] == ["nb nh nl two bs hs", "-", "-", "-", "2", "HND BHLNC", "-"]


def test_layouts_json():
    rows = {row["name"]: row for row in run_json("layouts")}
    assert list(rows) == list(LAYOUTS)
    assert rows["TWO_X_NL_X_NB_BS_NH_HS"] == {
        "name": "TWO_X_NL_X_NB_BS_NH_HS",
        "pattern": "nb bs nh hs",
        "nesting": ["two", "nl"],
        "engines": ["sglang"],
        "upstream_id": 9,
        "kv_planes": 2,
        "kv_layout": ["NHD", "LBNHC", "BLNHC"],
        "logical_order_of": ["sglang"],
    }
    assert rows["NL_X_NB_BS_HS"]["kv_planes"] == 1


def test_one_layout_is_shown_as_cells_in_memory_order():
    result = run("layouts", "NL_X_TWO_NB_NH_BS_HS")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if " B  K t" in line or " B  V t" in line]
    assert len(lines) == 4
    assert " ".join(lines[0].split()) == (
        "+0 B K t0 h0 K t1 h0 K t2 h0 K t3 h0 K t0 h1 K t1 h1 K t2 h1 K t3 h1 "
        "K t4 h0 K t5 h0 K t6 h0 K t7 h0 K t4 h1 K t5 h1 K t6 h1 K t7 h1 K"
    )
    assert "upstream_id       6" in result.stdout


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_terminal_shows_each_cell_once_in_order_and_within_the_width(name, width):
    picture = Picture.of_example(LAYOUTS[name])
    texts = list(render(picture, width))
    shown = re.findall(r"KV t\d|[KV] t\d h\d", "\n".join(text.plain for text in texts))
    assert shown == [picture.label(cell) for cell in picture.cells]
    cell_lines = [text.plain for text in texts if re.match(r" *\+\d+ B", text.plain)]
    assert cell_lines and max(map(len, cell_lines)) <= width


def test_cells_are_coloured_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", run("layouts", "LBHNC").stdout))) == 32


def test_one_layout_json():
    document = run_json("layouts", "LBHNC")
    assert document["pattern"] == "nl nb nh bs (two hs)"
    assert document["tensors"] == ["kv_caches  [2, 2, 2, 4, 4]"]
    assert len(document["cells"]) == 64
    assert document["cells"][1] == {
        "tensor": 0,
        "offset_bytes": 4,
        "layer": 0,
        "kv": 1,
        "slot": 0,
        "head": 0,
        "hs": [0, 2],
        "label": "V t0 h0",
    }


def test_svg_is_written(tmp_path):
    path = tmp_path / "picture.svg"
    result = run("layouts", "LBHNC", "--svg", str(path))
    assert result.exit_code == 0
    assert str(path) in result.stdout.replace("\n", "")
    root = ElementTree.parse(path).getroot()
    assert sum(group.get("class") == "cell" for group in root.iter("{http://www.w3.org/2000/svg}g")) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layouts", "NOPE"], "LayoutError: unknown layout 'NOPE'; known: NB_NL_TWO_BS_NH_HS, "),
        (["layouts", "--svg", "x.svg"], "ArgumentError: --svg x.svg: needs the NAME of a layout; known: NB_NL"),
        (["layouts", "LBHNC", "--svg", "/no/such/folder/x.svg"], "FileNotFoundError: "),
        (["verify", "--case", "NOPE"], "ArgumentError: case 'NOPE'"),
        (["verify", "--layout", "NOPE"], "LayoutError: unknown layout 'NOPE'; known: "),
        (["verify", "--backend", "nope"], "BackendError: "),
        (["verify", "--device", "abacus"], "ArgumentError: --device 'abacus' is not here; known: cpu"),
        (["verify", "--case", GATHER, "--layout", "LBNHC"], "ArgumentError: --case LBHNC-gather"),
        (["demo", "--device", "abacus"], "ArgumentError: --device 'abacus' is not here; known: cpu"),
        (["demo", "--layout", "NOPE"], "LayoutError: unknown layout 'NOPE'; known: "),
        (["demo", "--connector", "NOPE"], "NOPE"),
        (["demo", "--backend", "nope"], "BackendError: "),
        (["bench", "--quick", "--backend", "nope"], "BackendError: "),
        (["bench", "--shape", "nope"], "ArgumentError: shapes: nope unknown; known: "),
        (["bench", "--plot", "a.pdf"], "ArgumentError: --plot a.pdf: allowed: a file that ends in .svg or .png"),
        (["bench", "--device", "abacus"], "ArgumentError: --device 'abacus' is not here; known: cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_message_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert "nope" not in arguments or re.search("'?nope'?.*known: ", result.stderr)
    error = run_json(*arguments, exit_code=2)["error"]
    assert f"{error['kind']}: {error['message']}" == result.stderr.strip()


def test_an_unknown_option_is_exit_code_2():
    assert run("verify", "--bakcend", "x").exit_code == 2
    assert run("verfiy").exit_code == 2


def test_messages_are_not_read_as_markup(monkeypatch):
    def refuse(name):
        raise LayoutError("list[2] of [two nb] [/red] [bold]x")

    monkeypatch.setattr(cli, "find_layout", refuse)
    assert run("layouts", "LBHNC").stderr == "LayoutError: list[2] of [two nb] [/red] [bold]x\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_documents_exit_codes(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Exit codes: 0" in result.stdout
    assert "--json" in result.stdout


# verify


def nothing_gathered():
    """A backend that says a gather is done and has moved nothing."""
    return SimpleNamespace(gather=lambda plan: Transfer(), scatter=reference_scatter, rerotate=rerotate)


def test_verify_passes_the_reference():
    result = run("verify", "--backend", "reference", "--case", GATHER)
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "reference" in line]
    assert [word.strip() for word in line.split("│")][1:5] == ["reference", "gather", "1", "0"]


def test_verify_fails_a_broken_backend_and_says_where(backend):
    backend("lazy", nothing_gathered)
    result = run("verify", "--backend", "lazy", "--case", GATHER)
    assert result.exit_code == 1
    assert f"FAILED {GATHER}" in result.stdout
    assert f"lmcache-ref verify --case {GATHER} --backend lazy" in " ".join(result.stdout.split())
    (line,) = [line for line in result.stdout.splitlines() if "│" in line]
    assert [word.strip() for word in line.split("│")][1:5] == ["lazy", "gather", "0", "1"]


def test_verify_json_counts_each_backend_and_case(backend, monkeypatch):
    backend("lazy", nothing_gathered)
    cases = [conformance.Case.parse(text) for text in (GATHER, SCATTER, GATHER.replace("LBHNC", "LBNHC"))]
    monkeypatch.setattr(conformance, "all_cases", lambda: cases)
    document = run_json("verify", "-b", "lazy", "-b", "reference", "-l", "LBHNC", exit_code=1)
    assert document["ok"] is False
    assert document["backends"] == ["lazy", "reference"]
    assert document["cases"] == 2
    verdicts = [(result["backend"], result["case"], result["ok"]) for result in document["results"]]
    assert verdicts == [
        ("lazy", GATHER, False),
        ("lazy", SCATTER, True),
        ("reference", GATHER, True),
        ("reference", SCATTER, True),
    ]
    assert [bool(result["error"]) for result in document["results"]] == [True, False, False, False]
    assert run_json("verify", "-b", "reference", "-l", "LBHNC")["ok"] is True


def test_verify_that_ran_less_than_it_should_fails(monkeypatch):
    monkeypatch.setattr(conformance, "run", lambda backends, cases, device: iter(()))
    assert run_json("verify", "-b", "reference", "--case", GATHER, exit_code=1)["results"] == []


def test_verify_takes_the_requested_backend_or_all_that_can_run(backend, monkeypatch):
    asked = []
    monkeypatch.setattr(conformance, "run", lambda backends, cases, device: asked.append(backends) or iter(()))
    known = {"reference": None, "lazy": None, "absent": "no such card"}
    backend("lazy", nothing_gathered)
    rows = [(SimpleNamespace(name=name), why) for name, why in known.items()]
    monkeypatch.setattr(cli, "explain_backends", lambda device: rows)
    run("verify", "--case", GATHER)
    monkeypatch.setenv("LMCACHE_BACKEND", "reference")
    run("verify", "--case", GATHER)
    run("verify", "--case", GATHER, "-b", "lazy", "-b", "lazy")
    assert asked == [["reference", "lazy"], ["reference"], ["lazy"]]


def test_verify_refuses_a_backend_that_cannot_run_here(backend):
    backend("absent", nothing_gathered, unavailable=lambda: "no such card")
    backend("elsewhere", nothing_gathered, devices=("xpu",))
    for name, reason in (("absent", "no such card"), ("elsewhere", "serves xpu, not cpu")):
        result = run("verify", "--backend", name, "--case", GATHER)
        assert result.exit_code == 2
        assert f"backend '{name}'" in result.stderr and reason in result.stderr


# demo and bench

GOOD = DemoResult("LBHNC", "V2", "reference", True, True, True, 1000, 0.5, 0.25, True)
OFF = dataclasses.replace(GOOD, layout="LBNHC", control_differs=False, ok=False, error="a flipped bit changed nothing")
SKIPPED = DemoResult("BHLNC", "V2", "reference", skipped=True, note="no raw line")


@pytest.mark.parametrize(
    ("results", "exit_code"),
    [([GOOD], 0), ([GOOD, SKIPPED], 0), ([GOOD, OFF], 1), ([OFF], 1), ([SKIPPED], 1)],
    ids=["good", "good and skipped", "one off", "off", "nothing shown"],
)
def test_demo_exit_codes(monkeypatch, results, exit_code):
    def run_demo(layouts, connector, backend, device, on_progress, seed):
        assert (layouts, connector, backend, device, seed) == (["LBHNC"], "V3", "cpu", "cpu", 3)
        for result in results:
            on_progress(result)
        return results

    monkeypatch.setattr(demo, "run_demo", run_demo)
    arguments = ["demo", "-l", "LBHNC", "--connector", "V3", "-b", "cpu", "--seed", "3"]
    document = run_json(*arguments, exit_code=exit_code)
    assert document["ok"] is (exit_code == 0)
    for shown, result in zip(document["results"], results, strict=True):
        rates = {name: getattr(result, name) for name in ("store_gb_per_second", "load_gb_per_second")}
        assert shown == {**dataclasses.asdict(result), **rates}
    shown = run(*arguments)
    assert shown.exit_code == exit_code
    for result in results:
        (line,) = [line for line in shown.stdout.splitlines() if f"│ {result.layout} " in line]
        assert "skipped" in line if result.skipped else line.count(" no ") == 2 * (not result.ok)
        assert (result.error or result.note) in line


def test_demo_runs():
    document = run_json("demo", "--layout", "LBHNC", "--backend", "reference")
    assert [(result["layout"], result["ok"]) for result in document["results"]] == [("LBHNC", True)]


def test_demo_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("demo", "--layout", "LBHNC", "--backend", "reference")
    assert result.exit_code == 2
    assert "pip install 'lmcache-ref[demo]'" in result.stderr


def test_bench_hands_its_options_on_and_shows_what_it_gets(backend, monkeypatch):
    backend("a", nothing_gathered)
    wanted = bench.Options(
        "cpu", ["a"], ["mla"], ["NHD", "HND"], [16, 64], [256], ["store"], 2, "folder", "device"
    )  # fmt: skip

    def run_bench(options, on_progress):
        assert options == wanted
        on_progress("mla NHD")
        facts = {"device": "Card", "torch": "2", "python": "3", "backends": ["a"], "requested_backend": "auto"}
        facts |= {"variables": {}, "slots_on": "cpu", "chunk_tokens": 256, "repeats": 2, "peer": None}
        rows = [bench.Row("mla", "-", 16, 256, "store", "a", "GB/s", 12.3456789, 1.0, 95.0)]
        rows += [bench.Row("mla", "-", 64, 256, "store", "a", "GB/s", error="ValueError: x")]
        return bench.Report(facts, {"d2h": 13.0}, rows)

    monkeypatch.setattr(bench, "run_bench", run_bench)
    options = "-b a --peer folder --shape mla --order NHD --order HND --block-size 16 --block-size 64 --tokens 256"
    options += " --figure store --repeats 2 --slots device"
    document = run_json("bench", *options.split(), exit_code=1)
    assert document["ok"] is False and document["ceilings"] == {"d2h": 13.0}
    assert [row["value"] for row in document["rows"]] == [12.3456789, None]
    result = run("bench", *options.replace("--peer", "--upstream").split())
    assert result.exit_code == 1
    assert re.search(r"shape +┃ order +┃ block size +┃ runner +┃ store ", result.stdout)
    assert re.search(r"mla +│ - +│ 16 +│ a +│ 12\.3 95\.0% ", result.stdout)
    assert "FAILED mla - block 64 tokens 256, a, store: ValueError: x" in result.stdout


def test_bench_that_finds_wrong_bits_fails(backend, monkeypatch):
    backend("lazy", nothing_gathered)
    monkeypatch.setitem(SHAPES, "tiny", Shape("tiny", NL=1, kv=1, NH=1, HS=16, dtype=torch.uint8))
    assert run("bench", "--quick", "--shape", "tiny", "-b", "reference").exit_code == 0
    result = run("bench", "--quick", "--shape", "tiny", "-b", "lazy")
    assert result.exit_code == 1
    assert "lazy, gather: ContractViolation: gather of lazy moves other bits" in " ".join(result.stdout.split())


# doctor


def test_doctor_names_versions_devices_and_variables(monkeypatch):
    monkeypatch.setenv("LMCACHE_BACKEND", "reference")
    monkeypatch.setenv("LMCACHE_VALDIATE", "1")
    document = run_json("doctor")
    torch_version = importlib.metadata.version("torch")  # without the build that torch itself adds
    assert document["versions"]["torch"] == torch_version and torch.__version__.startswith(torch_version)
    assert document["versions"]["einops"] == einops.__version__
    assert document["devices"][0]["type"] == "cpu"
    assert document["environment"] == {"LMCACHE_BACKEND": "reference", "LMCACHE_VALDIATE": "1"}
    assert document["requested"] == "reference"
    assert document["choices"][0]["device_type"] == "cpu"
    assert document["choices"][0]["chosen"] == "reference"
    shown = run("doctor")
    assert shown.exit_code == 0
    for text in (torch_version, "LMCACHE_VALDIATE", "backends; requested: reference", "can run"):
        assert text in shown.stdout


def test_doctor_reads_versions_without_importing():
    heavy = "{'transformers', 'triton', 'cupy', 'vllm', 'rich', 'typer'}"
    code = f"import sys, lmcache_ref.doctor as d, lmcache_ref.picture; before = {heavy} & sys.modules.keys(); "
    code += f"[d.installed(name) for name in d.PACKAGES]; print(before, {heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() set()\n"


@pytest.mark.parametrize("requested", ["nope", "absent", "partial"])
def test_doctor_fails_when_the_requested_backend_cannot_run(backend, monkeypatch, requested):
    backend("absent", nothing_gathered, unavailable=lambda: "no such card")
    backend("partial", SimpleNamespace(gather=print))
    monkeypatch.setenv("LMCACHE_BACKEND", requested)
    reason = {"nope": "known: reference", "absent": "no such card", "partial": "lacks scatter, rerotate"}[requested]
    choice = run_json("doctor", exit_code=1)["choices"][0]
    assert choice["chosen"] is None
    assert reason in choice["problem"]
    shown = run("doctor")
    assert shown.exit_code == 1
    assert "cannot run here" in shown.stdout


def test_doctor_says_why_auto_passed_the_others_over(backend):
    backend("absent", nothing_gathered, unavailable=lambda: "no such card", speed=1000)
    backend("partial", SimpleNamespace(gather=print), speed=999)
    backend("quick", nothing_gathered, speed=998)
    backend("elsewhere", nothing_gathered, devices=("xpu",), speed=997)
    choice = run_json("doctor")["choices"][0]
    assert choice["chosen"] == "quick"
    assert choice["passed_over"]["absent"] == "no such card"
    assert "lacks scatter, rerotate" in choice["passed_over"]["partial"]
    assert choice["passed_over"]["elsewhere"] == "serves xpu, not cpu"
    assert choice["passed_over"]["reference"] == "can run, but is not the fastest"


def test_doctor_with_a_gpu(backend, monkeypatch):
    """Two cards are pretended; a backend that serves only them is fine although the CPU cannot have it."""
    properties = SimpleNamespace(total_memory=1 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    backend("card", nothing_gathered, devices=("cuda",))
    monkeypatch.setenv("LMCACHE_BACKEND", "card")
    document = run_json("doctor")
    card = {"type": "cuda", "name": "Card 1", "index": 1, "memory_bytes": 1 << 30, "capability": "9.0"}
    assert document["devices"][2] == card
    on_cpu, on_cuda = document["choices"][:2]
    assert (on_cpu["chosen"], on_cuda["chosen"]) == (None, "card")
    assert on_cuda["passed_over"]["reference"] == "can run, but card is requested"


# The program itself


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_ref.cli", "layouts", "NL_X_NB_BS_HS", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)["cells"]) == 16
    assert done.stderr == ""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_main_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from lmcache_ref.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'lmcache-ref[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
