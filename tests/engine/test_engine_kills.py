"""Killed while writing to the disk, restarted over the same folder: nothing wrong is served. The work is a script's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("killed_writer.py")


def killed(folder: Path, kills: int, *options: str) -> dict:
    seed = random.randrange(1 << 30)
    command = [sys.executable, str(SCRIPT), str(folder), str(seed), str(kills), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    result = json.loads(done.stdout)
    assert result["kills"] == len(result["answers"]) == kills
    assert {answer["wrong"] for answer in result["answers"]} == {""}, f"seed {seed}: {result}"
    return result


def test_twenty_kills(tmp_path):
    result = killed(tmp_path, 20)
    assert result["halves"] >= 8, f"too few kills hit a write: {result}"
    assert sum(answer["drops"] for answer in result["answers"]) == 0, "what has a name is whole"
    assert result["answers"][-1]["served"] > 0


def test_without_a_rename_the_checksum_still_holds(tmp_path):
    """The kills do hit files: written in place, some are found damaged, and are not served."""
    result = killed(tmp_path, 8, "in-place")
    assert sum(answer["drops"] for answer in result["answers"]) > 0
    assert result["answers"][-1]["served"] > 0
