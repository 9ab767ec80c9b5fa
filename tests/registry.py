"""A registry of backends of a test's own, and backends that have every operation and move nothing.

Import `own_registry` into a test module and it applies to all of its tests.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import lmcache_ref
from lmcache_ref import backends
from lmcache_ref.backends import OPERATIONS, get_backend


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Only the reference, nothing chosen, nothing in the environment; as before afterwards."""
    get_backend("reference")  # what is installed has been read by now
    monkeypatch.setattr(backends, "BACKENDS", {"reference": backends.BACKENDS["reference"]})
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setattr(backends, "_automatic", {})
    monkeypatch.delenv("LMCACHE_BACKEND", raising=False)


def operations(**replaced) -> SimpleNamespace:
    """Every operation; none of them moves anything."""
    return SimpleNamespace(**{name: lambda *given: lmcache_ref.Transfer() for name in OPERATIONS} | replaced)
