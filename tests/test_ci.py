"""The checks of CI itself: .ci/check_skips.py on real pytest reports, .ci/run on stand-ins for its tools.

What the checks are applied to, the library, is tested elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("check_skips", ROOT / ".ci" / "check_skips.py")
check_skips = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_skips)

# .ci/check_skips.py

SKIPS_OF_EVERY_KIND = {
    "test_marks": """
        import pytest

        @pytest.mark.skip(reason="by mark")
        def test_skipped(): pass

        def test_that_skips(): pytest.skip("in the test")

        @pytest.mark.xfail(reason="fails today")
        def test_expected_to_fail(): assert False

        def test_passes(): pass
    """,
    "test_module": """
        import pytest

        pytest.skip("the whole module", allow_module_level=True)
    """,
    "test_import": """
        import pytest

        pytest.importorskip("no_such_module", reason="an import")
    """,
}
EVERY_REASON = ["by mark", "in the test", "fails today", "the whole module", "an import"]


@pytest.fixture
def judged(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]):
    """Runs modules of tests, then check_skips over their report: its exit code and what it printed."""

    def run(allow_list: str, **modules: str) -> tuple[int, str]:
        pytester.makepyfile(**modules)
        pytester.runpytest_inprocess("--junitxml=report.xml")
        allowed = pytester.path / "allowed.txt"
        allowed.write_text(allow_list, encoding="utf-8")
        capsys.readouterr()
        code = check_skips.main(str(pytester.path / "report.xml"), str(allowed))
        return code, capsys.readouterr().out

    return run


def test_every_kind_of_skip_is_printed_and_may_be_allowed(judged):
    code, output = judged("# why\n" + "\n# why\n".join(EVERY_REASON), **SKIPS_OF_EVERY_KIND)
    skipped = [line for line in output.splitlines() if line.startswith("skipped: ")]
    assert sorted(line.rpartition(": ")[2] for line in skipped) == sorted(EVERY_REASON)
    assert "skipped: test_marks::test_skipped: by mark" in skipped
    assert code == 0


@pytest.mark.parametrize("missing", EVERY_REASON)
def test_one_skip_that_is_not_allowed_fails(judged, missing):
    rest = [reason for reason in EVERY_REASON if reason != missing]
    code, output = judged("# why\n" + "\n# why\n".join(rest), **SKIPS_OF_EVERY_KIND)
    assert f"skips: 1 not allowed: {missing!r}" in output
    assert code == 1


@pytest.mark.parametrize("pattern", ["by", "mark", "By mark", ""])
def test_a_pattern_has_to_match_the_whole_reason(judged, pattern):
    code, _ = judged(f"# why\n{pattern}\n", test_marks=SKIPS_OF_EVERY_KIND["test_marks"])
    assert code == 1


@pytest.mark.parametrize("allow_list", ["by mark\n", "# why\n\nby mark\n", "# why\nfirst\nby mark\n"])
def test_a_pattern_without_a_comment_of_its_own_is_refused(judged, allow_list):
    code, output = judged(allow_list, test_marks="def test_passes(): pass")
    assert "no comment above it says why" in output
    assert code == 2


def test_a_report_without_tests_is_refused(judged):
    code, output = judged("", test_none="")
    assert "the report lists no test" in output
    assert code == 2


def test_a_report_that_was_never_written_is_refused(tmp_path):
    assert check_skips.main(str(tmp_path / "report.xml"), str(ROOT / ".ci" / "skips.txt")) == 2


# .ci/run, with a stand-in for each tool that it calls

TOOL = """#!/bin/sh
echo "{tool} $*"
case "{tool} $1" in "$FAILING_TOOL"*) exit 7 ;; esac
"""
PYTEST = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in --junitxml=*) echo "$REPORT" > "${argument#--junitxml=}" ;; esac
done
echo "CI=$CI"
echo "== 1 passed in 0.01s =="
case pytest in $FAILING_TOOL) exit 7 ;; esac
"""
PASSED = '<testsuite><testcase name="test_a"/></testsuite>'
SKIPPED = '<testsuite><testcase name="test_a"><skipped message="too lazy"/></testcase></testsuite>'


def run_ci(tmp_path: Path, failing_tool: str, report: str = PASSED) -> subprocess.CompletedProcess[str]:
    """Runs .ci/run in a copy of its folder. `python -m venv DIR` gives it a folder of stand-ins."""
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {tool: TOOL.format(tool=tool) for tool in ("pip", "ruff", "mypy")}
    scripts["pytest"] = PYTEST
    scripts["python"] = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    scripts["make_venv"] = f'#!/bin/sh\nmkdir -p "$3" && cp -r "{tools}" "$3/bin"\n'
    for name, text in scripts.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / "repo" / ".ci")
    (tmp_path / "scratch").mkdir()
    environment = {
        **os.environ,
        "PYTHON": str(tools / "make_venv"),
        "FAILING_TOOL": failing_tool,
        "REPORT": report,
        "TMPDIR": str(tmp_path / "scratch"),
    }
    return subprocess.run(
        ["bash", str(tmp_path / "repo" / ".ci" / "run")], env=environment, capture_output=True, text=True
    )


def test_ci_passes_and_ends_with_the_closing_line_of_pytest(tmp_path):
    result = run_ci(tmp_path, failing_tool="none")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "== 1 passed in 0.01s =="
    assert "CI=true" in result.stdout
    assert list((tmp_path / "scratch").iterdir()) == []
    assert [path.name for path in (tmp_path / "repo").iterdir()] == [".ci"]


@pytest.mark.parametrize("tool", ["pip", "ruff check", "ruff format", "mypy", "pytest"])
def test_ci_fails_with_any_tool(tmp_path, tool):
    assert run_ci(tmp_path, failing_tool=tool).returncode == 7


@pytest.mark.parametrize(("report", "code"), [(SKIPPED, 1), ("<testsuite/>", 2), ("", 2)])
def test_ci_fails_on_a_skip_that_is_not_allowed_and_on_a_report_it_cannot_read(tmp_path, report, code):
    result = run_ci(tmp_path, failing_tool="none", report=report)
    assert result.returncode == code
    assert result.stdout.splitlines()[-1] == "== 1 passed in 0.01s =="
