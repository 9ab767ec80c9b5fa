"""The kernels under compute-sanitizer: memcheck and racecheck over `small_run.py`, clean, and both seen to report a fault.

A sanitizer that does not start is a failure with its own words, never a pass. What the run moves is tested here without a
GPU too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import small_run

from lmcache_ref.backends import get_backend
from lmcache_ref.errors import SlotRangeError
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter

ROOT = Path(__file__).resolve().parents[2]
FOUND = 9  # the exit status of a sanitizer that found something
SUMMARY = {
    "memcheck": r"ERROR SUMMARY: (\d+) error",
    "racecheck": r"RACECHECK SUMMARY: (\d+) hazard",
}
LIMIT_SECONDS = 240
NUM_MOVES, NUM_BAD, NUM_ROTATED, NUM_ROTATIONS = 216, 108, 96, 32


def sanitizer() -> str | None:
    """compute-sanitizer: of PATH, of the toolkit."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), *(str(Path(toolkit, "bin")) for toolkit in toolkits if toolkit)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def watched(tool: str, what: str) -> tuple[int, int, str]:
    """`small_run.py what` under a tool: exit status, how much the tool found, and all that was printed. Fails where the
    tool did not run to its summary."""
    program = sanitizer()
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    options = [f"--tool={tool}", f"--error-exitcode={FOUND}", "--report-api-errors=no", "--launch-timeout=120"]
    options += ["--destroy-on-device-error=kernel", "--print-limit=20"]
    command = [program, *options, sys.executable, str(Path(small_run.__file__)), what]
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # torch hands out parts of large blocks, within which nothing is out of bounds: here each tensor is its own allocation
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        started = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            status = started.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(started.pid, signal.SIGKILL)  # what it watches too
            started.wait()
        file.seek(0)
        printed = file.read()
    if status is None:
        pytest.fail(f"{tool} did not end within {LIMIT_SECONDS} s:\n{printed[-4000:]}", pytrace=False)
    return status, judged(tool, printed), printed


def judged(tool: str, printed: str) -> int:
    """How many errors or hazards the tool counts. Fails where it does not say so, or what it watched did not end."""
    summary = re.findall(SUMMARY[tool], printed)
    if not summary or "ran to the end" not in printed:
        pytest.fail(f"{tool} refused, or what it watched broke; this machine has not passed:\n{printed[-4000:]}", False)
    return int(summary[0])


@pytest.mark.gpu
@pytest.mark.parametrize("tool", SUMMARY)
def test_a_small_run_is_clean(tool):
    status, num_found, printed = watched(tool, "moves")
    assert (status, num_found) == (0, 0), printed[-4000:]
    done = f"{NUM_MOVES} moves, {NUM_BAD} with bad slots, {NUM_ROTATED} that rotate, {NUM_ROTATIONS} rotations"
    assert f"{done}: the bits of the specification" in printed, printed[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "fault", "words"),
    [
        ("memcheck", "writes_past_the_end", r"Invalid __global__ write of size 4 bytes"),
        ("racecheck", "races", r"Race reported between"),
    ],
)
def test_a_planted_fault_is_reported(tool, fault, words):
    """The control: on this machine, from this Python, in memory that torch allocated."""
    status, num_found, printed = watched(tool, fault)
    assert status == FOUND and num_found > 0, printed[-4000:]
    assert re.search(words, printed) and fault in printed, printed[-4000:]


# ------------------------------------------------------------------------------------------------ without a GPU


def test_the_run_and_its_comparison(monkeypatch):
    cpu = get_backend("cpu")
    num_moves = small_run.moves(cpu, small_run.ON_HOST)
    assert num_moves * len(small_run.ON_GPU) == NUM_MOVES
    assert num_moves * len(small_run.PLACES) == NUM_BAD
    num_rotated = small_run.rotated_scatters(cpu, small_run.ON_HOST)
    assert num_rotated * len(small_run.ON_GPU) == NUM_ROTATED
    monkeypatch.setattr(small_run, "PLACES", dict.fromkeys(small_run.PLACES, lambda memory: memory))
    assert small_run.bad_slots(Lenient()) == NUM_BAD
    assert small_run.rotations(cpu, "pageable") == NUM_ROTATIONS


class Lenient:
    """The specification, but that bad slots are skipped and named when somebody waits."""

    def move(self, plan, specified):
        bad = (plan.slots >= plan.cache.num_slots).nonzero().flatten().tolist()
        specified(replace(plan, slots=plan.slots.where(plan.slots < plan.cache.num_slots, -1)))
        return Late(f"slots[{bad[0]}] = {int(plan.slots[bad[0]])}")

    def gather(self, plan):
        return self.move(plan, reference_gather)

    def scatter(self, plan):
        return self.move(plan, reference_scatter)


class Late(Transfer):
    def __init__(self, message):
        self.message = message

    def synchronize(self):
        raise SlotRangeError(self.message)


class Idle:
    """A backend that moves nothing."""

    def gather(self, plan):
        return Transfer()

    scatter = gather

    def rerotate(self, *arguments):
        pass


def test_the_run_sees_a_backend_that_does_nothing(monkeypatch):
    for only in ("gather", "scatter"):
        monkeypatch.setattr(small_run, "REFERENCE", {only: small_run.REFERENCE[only]})
        with pytest.raises(AssertionError, match=f"{only} .*elements differ"):
            small_run.moves(Idle(), small_run.ON_HOST)
        monkeypatch.undo()
    with pytest.raises(AssertionError, match="elements differ"):
        small_run.rotations(Idle(), "pageable")
    with pytest.raises(AssertionError, match="elements differ"):
        small_run.rotated_scatters(Idle(), small_run.ON_HOST)
    monkeypatch.setattr(small_run, "PLACES", dict.fromkeys(small_run.PLACES, lambda memory: memory))
    with pytest.raises(AssertionError, match="nothing was said"):
        small_run.bad_slots(Idle())


@pytest.mark.parametrize(
    ("tool", "printed", "found"),
    [
        ("memcheck", "ran to the end\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("memcheck", "ran to the end\n========= ERROR SUMMARY: 1 error\n", 1),
        ("racecheck", "ran to the end\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 2),
        ("memcheck", "========= Error: Target application terminated before first instrumented API call\n", None),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", None),
        ("racecheck", "ran to the end\n", None),
    ],
)
def test_a_summary_is_read_and_its_absence_is_a_failure(tool, printed, found):
    if found is None:
        with pytest.raises(pytest.fail.Exception, match="this machine has not passed"):
            judged(tool, printed)
    else:
        assert judged(tool, printed) == found
