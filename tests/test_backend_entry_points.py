"""Backends that installed packages bring, those that fail to, and what is left without any optional part.

The registry itself is tested in `test_backends.py`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_ref import backends
from lmcache_ref.backends import explain_backends, get_backend
from lmcache_ref.errors import BackendError
from registry import own_registry

__all__ = ["own_registry"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Call it with `name = value` lines of the entry-point group; modules may be written beside them."""
    site = tmp_path / "site"
    info = site / "guest-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def install(points: str, **modules: str) -> None:
        (info / "entry_points.txt").write_text(f"[lmcache_ref.backends]\n{points}\n")
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
        monkeypatch.setattr(backends, "_entry_points_read", False)
        listed = [point for point in backends.entry_points(group="lmcache_ref.backends") if point.dist.name == "guest"]
        assert listed
        monkeypatch.setattr(backends, "entry_points", lambda group: listed if group == backends.ENTRY_POINTS else [])

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("guest_"):
            del sys.modules[name]


GUEST = """
from types import SimpleNamespace
from lmcache_ref.backends import OPERATIONS, register_backend

def register():
    register_backend("guest", lambda: SimpleNamespace(**{name: print for name in OPERATIONS}), speed=50)
"""


def test_being_installed_is_enough(installed):
    installed("whatever = guest_good:register", guest_good=GUEST)
    assert "guest_good" not in sys.modules
    assert get_backend().name == "guest"
    assert [backend.name for backend, _ in explain_backends()] == ["guest", "reference"]


BAD_GUESTS = {
    "missing-module": (
        "bad = guest_missing:register",
        "",
        "bad",
        "ModuleNotFoundError: No module named 'guest_missing'",
    ),
    "failing-import": (
        "bad = guest_bad:register",
        "import no_such_driver",
        "bad",
        "ModuleNotFoundError: No module named",
    ),
    "syntax-error": ("bad = guest_bad:register", "def register(:", "bad", "SyntaxError: "),
    "no-function": ("bad = guest_bad:register", "", "bad", "AttributeError: "),
    "failing-function": (
        "bad = guest_bad:register",
        "def register():\n    1 / 0",
        "bad",
        "ZeroDivisionError: ",
    ),
    "wrong-arguments": ("bad = guest_bad:register", "def register(registry): ...", "bad", "TypeError: register()"),
    "no-callable": ("bad = guest_bad:register", "register = 3", "bad", "TypeError: 'int' object is not callable"),
    "half-done": (
        "guest = guest_bad:register",
        f"{GUEST}    raise OSError('no driver')",
        "guest_bad:register",
        "OSError: no driver",
    ),
    "name-of-another": ("reference = guest_bad:register", "1 / 0", "guest_bad:register", "ZeroDivisionError: "),
    "name-of-auto": ("auto = guest_bad:register", "1 / 0", "guest_bad:register", "ZeroDivisionError: "),
}


@pytest.mark.parametrize("case", BAD_GUESTS)
def test_a_broken_entry_point_is_listed_with_its_reason(installed, caplog, case):
    points, text, name, reason = BAD_GUESTS[case]
    installed(points, guest_bad=text)
    caplog.set_level(logging.INFO)
    listed = {backend.name: why for backend, why in explain_backends("cpu")}
    value = points.partition(" = ")[2]
    assert listed[name].startswith(f"entry point {value} failed: {reason}")
    with pytest.raises(BackendError, match="cannot run here: entry point") as refusal:
        get_backend(name)
    assert reason in str(refusal.value)
    assert caplog.records == []
    assert get_backend().name == ("guest" if case == "half-done" else "reference")
    (record,) = caplog.records  # `auto` does not hide that something faster is installed and broken
    assert record.levelname == "WARNING" and reason in record.getMessage()
    assert get_backend("reference").name == "reference"


def test_one_broken_entry_point_does_not_cost_the_others(installed):
    points = "a = guest_bad:register\nb = guest_good:register"
    installed(points, guest_bad="1 / 0", guest_good=GUEST)
    assert [(backend.name, why is None) for backend, why in explain_backends()] == [
        ("a", False),
        ("guest", True),
        ("reference", True),
    ]


# Case 36: parts that are missing

WITHOUT = """
import sys
for part in ("cupy", "cupyx", "triton", "vllm", "sglang", "lmcache", "transformers", "typer", "rich", "yaml", "zmq"):
    sys.modules[part] = None  # importing it is an ImportError
import torch, lmcache_ref, lmcache_ref.connectors, lmcache_ref.memory, lmcache_ref.metadata, lmcache_fast
assert not torch.cuda.is_initialized()
print(lmcache_ref.get_backend().name)
try:
    lmcache_ref.get_backend("cuda")
except lmcache_ref.errors.BackendError as error:
    print(error)
"""


def test_case_36_packages_import_without_optional_parts_and_say_what_is_missing(tmp_path):
    """A fresh interpreter without compiler, cupy or any peer: `auto` runs, `cuda` is refused with the reason."""
    program = "import lmcache_ref.errors\n" + WITHOUT
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == 0, ran.stderr
    chose, refusal = ran.stdout.splitlines()
    assert chose in ("reference", "cpu")
    assert refusal.startswith(("unknown backend 'cuda'; known: reference", "backend 'cuda' cannot"))
