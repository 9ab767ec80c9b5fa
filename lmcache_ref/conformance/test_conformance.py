"""The one test of the suite; `plugin.py` makes a test of it for each case and backend, and must be loaded."""

from __future__ import annotations

from .cases import Case
from .suite import run_case


def test_conformance(conformance_case: Case, conformance_backend: str, conformance_device: str) -> None:
    run_case(conformance_case, conformance_backend, conformance_device)
