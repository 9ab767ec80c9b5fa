"""Reads pytest's JUnit report, prints every test that was skipped, and fails on a reason that is not allowed.

The allow-list is a file of regular expressions, each under a comment that says why. Standard library only: it
runs with whatever Python is there, as `check_skips.py REPORT.xml ALLOWED.txt`.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


class UnusableInput(Exception):
    """The report or the allow-list cannot be judged; never the same as `no skips`."""


def allowed_reasons(text: str) -> list[re.Pattern[str]]:
    """The patterns of an allow-list. Raises UnusableInput for one without a comment directly above it."""
    patterns = []
    explained = False
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line and not line.startswith("#"):
            if not explained:
                raise UnusableInput(f"line {number}, {line!r}: no comment above it says why")
            patterns.append(re.compile(line))
        explained = line.startswith("#")
    return patterns


def skipped_tests(report: ElementTree.Element) -> list[tuple[str, str]]:
    """(test, reason) for each skipped or xfailed test. Raises UnusableInput for a report without tests."""
    cases = list(report.iter("testcase"))
    if not cases:
        raise UnusableInput("the report lists no test")
    return [
        (f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::"), reason(skip))
        for case in cases
        for skip in case.iter("skipped")
    ]


def reason(skip: ElementTree.Element) -> str:
    """The words given to skip. A module skipped while it is collected has them in a tuple, in the text."""
    if skip.get("message") == "collection skipped":
        _path, _line, words = ast.literal_eval(skip.text or "")
        return words.removeprefix("Skipped: ")
    return skip.get("message", "")


def main(report_path: str, allowed_path: str) -> int:
    try:
        allowed = allowed_reasons(Path(allowed_path).read_text(encoding="utf-8"))
        skips = skipped_tests(ElementTree.parse(report_path).getroot())
    except (OSError, UnusableInput, ElementTree.ParseError) as error:
        print(f"skips: cannot judge: {error}")
        return 2
    for test, why in skips:
        print(f"skipped: {test}: {why}")
    refused = Counter(why for _, why in skips if not any(pattern.fullmatch(why) for pattern in allowed))
    for why, count in refused.items():
        print(f"skips: {count} not allowed: {why!r} matches no line of {allowed_path}")
    print(f"skips: {len(skips)}, of which {refused.total()} not allowed")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
