"""How variables are read: each change counts at once, on every system."""

from __future__ import annotations

import os

import pytest

from lmcache_ref import environment


@pytest.mark.parametrize("fast", [True, False])
def test_a_change_counts_at_once(fast, monkeypatch):
    if not fast:
        monkeypatch.setattr(environment, "_AS_BYTES", None)  # as where the interpreter keeps text
    monkeypatch.delenv("LMCACHE_TEST", raising=False)
    assert environment.variable("LMCACHE_TEST") == ""
    for value in ("x", "  two words ", "", "ü", os.fsdecode(b"\xff")):
        monkeypatch.setenv("LMCACHE_TEST", value)
        assert environment.variable("LMCACHE_TEST") == value.strip()
    monkeypatch.delenv("LMCACHE_TEST")
    assert environment.variable("LMCACHE_TEST") == ""


def test_the_fast_way_is_there_on_posix():
    assert (environment._AS_BYTES is not None) == (os.name == "posix")
