"""pytest plugin: the suite as one test per case and backend, under the options of the kernel author.

    pytest -p lmcache_ref.conformance.plugin --pyargs lmcache_ref.conformance --backend mine --device cuda -k gather

`-k` chooses by case id. The tests are made here; the one test function is in `test_conformance.py`.
"""

from __future__ import annotations

import pytest

from ..backends import explain_backends
from .cases import SIZES, all_cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lmcache_ref conformance")
    group.addoption(
        "--backend",
        dest="conformance_backends",
        action="append",
        metavar="NAME",
        help="backend to test, may be given several times (default: each that serves the device and can run)",
    )
    group.addoption("--device", dest="conformance_device", default="cpu", help="device of the KV cache (default: cpu)")
    group.addoption(
        "--sizes", dest="conformance_sizes", default="tiny", choices=list(SIZES), help="lengths of the axes"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and backend, for functions that ask for `conformance_case`."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    device = option("conformance_device")
    backends = option("conformance_backends") or [b.name for b, why in explain_backends(device) if why is None]
    cases = all_cases(sizes=option("conformance_sizes"))
    metafunc.parametrize("conformance_device", [device], ids=[device])
    metafunc.parametrize("conformance_backend", backends)
    metafunc.parametrize("conformance_case", cases, ids=str)
