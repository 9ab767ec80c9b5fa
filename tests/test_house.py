"""The promises of conftest.py: each is seen to hold, and each check to fail.

Small suites run here under a copy of the real conftest.py and pyproject.toml. Nothing here tests the library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CHECK_SKIPS = ROOT / ".ci" / "check_skips.py"
ALLOW_LIST = ROOT / ".ci" / "skips.txt"

ONE_GPU_TEST = """
    import pytest

    @pytest.fixture
    def cache():
        print("the fixture ran")

    @pytest.mark.gpu
    def test_on_gpu(cache): pass

    def test_anywhere(): pass
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"copy_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load(ROOT / "tests" / "conftest.py")


def evaluate_in(module_name: str, expression: str, **names: object) -> torch.Tensor:
    """The value of an expression, as if a line of that module had it."""
    return eval(expression, {"__name__": module_name, "torch": torch, **names})


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return list(tensor.untyped_storage())


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty test suite under the real conftest.py and the real pytest settings."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return pytester


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")


# The gpu marker


def test_without_a_gpu_its_tests_skip_with_the_reason_that_ci_allows(suite, no_gpu):
    suite.makepyfile(test_inner=ONE_GPU_TEST)
    result = suite.runpytest_inprocess("test_inner.py", "-rs", "-s", "--junitxml=report.xml")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * no CUDA device"])
    result.stdout.no_fnmatch_line("*the fixture ran*")
    subprocess.run([sys.executable, CHECK_SKIPS, suite.path / "report.xml", ALLOW_LIST], check=True)


def test_require_gpu_makes_them_errors(suite, no_gpu):
    suite.makepyfile(test_inner=ONE_GPU_TEST)
    result = suite.runpytest_inprocess("test_inner.py", "-s", "--require-gpu")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*no CUDA device, and --require-gpu was given"])
    result.stdout.no_fnmatch_line("*the fixture ran*")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("option", [[], ["--require-gpu"]], ids=["plain", "require-gpu"])
def test_with_a_gpu_they_run(suite, two_gpus, option):
    suite.makepyfile(test_inner=ONE_GPU_TEST)
    result = suite.runpytest_inprocess("test_inner.py", "-s", *option)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*the fixture ran*"])


def test_a_marker_with_a_typing_error_is_refused(suite):
    suite.makepyfile(test_inner=ONE_GPU_TEST.replace("mark.gpu", "mark.gqu"))
    result = suite.runpytest_inprocess("test_inner.py")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*'gqu' not found in `markers`*"])


# The report header


def header(suite: pytest.Pytester) -> pytest.LineMatcher:
    suite.makepyfile(test_inner="def test_nothing(): pass")
    return suite.runpytest_inprocess("test_inner.py").stdout


def test_header_names_backend_and_every_variable_of_ours(suite, monkeypatch):
    monkeypatch.setenv("LMCACHE_BACKEND", "reference")
    monkeypatch.setenv("LMCACHE_VALDIATE", "1")
    header(suite).fnmatch_lines(
        ["backend: LMCACHE_BACKEND=reference", "environment: *LMCACHE_BACKEND=reference*LMCACHE_VALDIATE=1*"]
    )


def test_header_says_when_no_variable_is_set(suite, monkeypatch):
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    header(suite).fnmatch_lines(["backend: LMCACHE_BACKEND=(unset, so auto)", "environment: no LMCACHE_[*] variable"])


def test_header_names_versions(suite, monkeypatch):
    real_version = importlib.metadata.version

    def version(name):
        if name == "hypothesis" or (name.startswith("cupy") and name != "cupy-cuda13x"):
            raise importlib.metadata.PackageNotFoundError(name)
        return {"einops": "1.2", "cupy-cuda13x": "3.4"}.get(name) or real_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    header(suite).fnmatch_lines(
        [
            f"versions: python {platform.python_version()}, torch {torch.__version__}, "
            "einops 1.2, cupy-cuda13x 3.4, no hypothesis"
        ]
    )


def test_header_names_each_gpu(suite, two_gpus):
    header(suite).fnmatch_lines(["devices: cpu (* threads), cuda:0 (Card 0), cuda:1 (Card 1)"])


def test_header_says_when_there_is_no_gpu(suite, no_gpu):
    header(suite).fnmatch_lines(["devices: cpu (* threads), no CUDA device"])


# Poison


@pytest.fixture(scope="module")
def allocated_by_a_module_scoped_fixture() -> torch.Tensor:
    return evaluate_in("lmcache_ref.memory", "torch.empty(9, dtype=torch.uint8)")


@pytest.mark.parametrize("module_name", ["lmcache_ref", "lmcache_ref.memory", "lmcache_fast.cuda.pipeline"])
@pytest.mark.parametrize(
    "expression",
    [
        "torch.empty(7)",
        "torch.empty((2, 3), dtype=torch.float8_e4m3fn)",
        "torch.empty(5, dtype=torch.bool)",
        "torch.empty_like(torch.zeros(3, dtype=torch.int64))",
        "torch.empty_strided((2, 3), (1, 5))",
        "torch.zeros(2).new_empty(4)",
        "torch.zeros(2).new_empty_strided((2, 2), (1, 2))",
    ],
)
def test_fresh_memory_of_the_library_is_poisoned(module_name, expression):
    tensor = evaluate_in(module_name, expression)
    assert set(bytes_of(tensor)) == {0xA5}


def test_fixtures_of_wider_scope_get_poison_too(allocated_by_a_module_scoped_fixture):
    assert bytes_of(allocated_by_a_module_scoped_fixture) == [0xA5] * 9


def test_poison_catches_a_function_that_forgets_to_write():
    """The bug it exists for: a comparison with zeros would pass on memory that happens to hold zeros."""
    forgets_to_write = evaluate_in("lmcache_ref.transfer", "lambda: torch.empty(4)")
    assert not torch.equal(forgets_to_write(), torch.zeros(4))


@pytest.mark.parametrize(
    ("module_name", "byte"),
    [("lmcache_ref.memory", 0xA5), ("lmcache_reference", 0), ("torch.nn.functional", 0), (__name__, 0)],
)
def test_only_calls_of_the_library_are_poisoned(module_name, byte):
    allocate = house._poisoned(torch.zeros)
    assert bytes_of(evaluate_in(module_name, "allocate(2)", allocate=allocate)) == [byte] * 8


def test_poison_fills_both_ends_of_a_large_pool_and_no_more():
    size = 2 * house.POISON_END_BYTES + 3
    pool = evaluate_in(
        "lmcache_ref.memory",
        "allocate(size, dtype=torch.uint8)",
        allocate=house._poisoned(torch.zeros),
        size=size,
    )
    untouched = (pool == 0).nonzero().flatten().tolist()
    assert untouched == [house.POISON_END_BYTES + i for i in range(3)]
    assert int((pool == 0xA5).sum()) == 2 * house.POISON_END_BYTES


def test_poison_leaves_out_and_meta_tensors_alone():
    kept = torch.zeros(3)
    evaluate_in("lmcache_ref.memory", "torch.empty(3, out=kept)", kept=kept)
    assert bytes_of(kept) == [0] * 12
    assert evaluate_in("lmcache_ref.memory", "torch.empty(1 << 40, device='meta')").is_meta


def test_a_device_block_still_decides_where_empty_allocates():
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert evaluate_in("lmcache_ref.memory", "torch.empty(3)").is_meta


# Hypothesis


@pytest.mark.parametrize("ci", ["", "true"], ids=["local", "ci"])
def test_hypothesis_profile(ci):
    code = "import conftest as c; s = c.hypothesis.settings(); print(s.deadline, s.print_blob, s.derandomize)"
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.split() == ["None", "True", str(bool(ci))]


@hypothesis.given(hypothesis.strategies.booleans())
def test_hypothesis_runs_under_the_autouse_fixture(_value):
    assert set(bytes_of(evaluate_in("lmcache_ref", "torch.empty(1)"))) == {0xA5}
