"""What an installation holds and what an import costs: the wheel, its extras, the modules that come along.

The wheel is built offline, with the build backend that is installed. Behaviour is tested elsewhere.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Which extra brings what. `lmcache-ref[x]` means: everything in x.
EXTRAS = {
    "fast": {"cupy-cuda12x"},
    "fast-cuda13": {"cupy-cuda13x"},
    "cli": {"typer", "rich"},
    "demo": {"lmcache-ref[cli]", "transformers"},
    "engine": {"safetensors", "pyyaml", "pyzmq"},
    "notebooks": {"lmcache-ref[demo]", "nbclient", "ipykernel", "matplotlib"},
    "test": {
        *("lmcache-ref[demo,engine,notebooks]", "pytest", "pytest-xdist", "hypothesis", "hatchling"),
        *("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    },
}
NOT_SHIPPED = {".so", ".o", ".cubin", ".ptx", ".pyc"}


def names(requirements: list[str]) -> set[str]:
    """Requirements without their versions."""
    return {re.match(r"[\w.-]+(\[[\w,-]+\])?", requirement).group() for requirement in requirements}


def test_the_core_needs_torch_and_einops():
    assert names(PROJECT["dependencies"]) == {"torch", "einops"}


def test_extras():
    assert {extra: names(wanted) for extra, wanted in PROJECT["optional-dependencies"].items()} == EXTRAS


def test_each_extra_that_a_document_names_exists():
    named = set()
    for document in ROOT.glob("*.md"):
        text = document.read_text(encoding="utf-8")
        for extras in re.findall(r"(?:lmcache-ref|['\"\s]\.)\[([a-z0-9, -]+)\]", text):
            named |= set(re.split(r",\s*", extras))
    assert "test" in named, "the documents say how to install what the tests need"
    assert named <= EXTRAS.keys()


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="hatchling, the build backend, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def shipped(folder: str, target: str) -> set[str]:
    """Where the wheel should have each file of a folder of the repository."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }


def test_wheel_holds_both_packages_and_the_kernel_sources_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert "lmcache_ref/errors.py" in files
    assert "lmcache_fast/__init__.py" in files
    assert files == (
        shipped("lmcache_ref", "lmcache_ref")
        | shipped("lmcache_fast", "lmcache_fast")
        | shipped("csrc", "lmcache_fast/csrc")
    )


def test_wheel_has_the_licence_and_the_entry_points(wheel):
    (metadata_folder,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    licence = wheel.read(f"{metadata_folder}/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{metadata_folder}/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == {"lmcache-ref": "lmcache_ref.cli:main"}
    assert dict(entry_points["lmcache_ref.backends"]) == {"fast": "lmcache_fast:register"}


# Imports


def modules_after(*statements: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded by then, the standard library aside."""
    code = "\n".join([*statements, "import json, sys", "print(json.dumps(list(sys.modules)))"])
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}
    return loaded - sys.stdlib_module_names


def test_the_check_of_imports_sees_an_import():
    assert "pytest" in modules_after("import pytest") - modules_after("pass")


def test_the_core_imports_torch_einops_and_nothing_else():
    extra = modules_after("import torch, einops", "import lmcache_ref") - modules_after("import torch, einops")
    assert extra == {"lmcache_ref"}


def test_importing_the_fast_package_touches_no_gpu_and_no_compiler():
    extra = modules_after(
        "import subprocess, torch",
        "def refuse(*arguments, **options): raise AssertionError(f'started {arguments}')",
        "subprocess.Popen.__init__ = refuse",
        "import lmcache_fast",
        "lmcache_fast.register()",
        "assert not torch.cuda.is_initialized()",
    )
    assert "lmcache_fast" in extra
    assert "cupy" not in extra
