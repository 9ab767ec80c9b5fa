"""Every layout, direction, chunk format and dtype on every backend that can run here, bit for bit.

The cases and the expected bytes come from `lmcache_ref.conformance`; that it notices faults is `test_conformance.py`.
"""

from __future__ import annotations

import pytest
import torch

from lmcache_ref.backends import explain_backends
from lmcache_ref.conformance import all_cases, expected_count, run, run_case
from lmcache_ref.layouts import LAYOUTS

CASES = all_cases()
CPU_BACKENDS = [backend.name for backend, why_not in explain_backends("cpu") if why_not is None]
# One that cannot run although there is a GPU fails here with its reason; it is not left out.
CUDA_BACKENDS = [backend.name for backend, _ in explain_backends("cuda") if backend.serves("cuda")]


def test_the_product_is_complete():
    """21 rows with K and V x 3 chunk formats + 5 rows of MLA x 2, x 2 directions x 11 pairs of dtypes."""
    assert len(LAYOUTS) == 26
    assert len(CASES) == len({case.id for case in CASES}) == expected_count() == (21 * 3 + 5 * 2) * 2 * 11 == 1606
    assert "reference" in CPU_BACKENDS
    assert "reference" in CUDA_BACKENDS


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu(case, backend):
    run_case(case, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(layout, direction, backend):
    """One test for all chunk formats and dtypes of a layout; every failure is shown."""
    cases = [case for case in CASES if (case.layout, case.direction) == (layout, direction)]
    results = list(run([backend], cases, device="cuda"))
    assert len(results) in (33, 22)
    assert not (failures := [result.error for result in results if not result.ok]), "\n\n".join(failures)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_sizes_on_a_gpu(layout, backend):
    """Blocks and heads as models have them, in bfloat16 and as bytes."""
    wanted = [torch.bfloat16, torch.uint8]
    cases = [
        case
        for case in all_cases({layout: LAYOUTS[layout]}, sizes="real")
        if case.cache_dtype in wanted and case.chunk_dtype == case.cache_dtype
    ]
    results = list(run([backend], cases, device="cuda"))
    assert len(results) in (12, 8)
    assert not (failures := [result.error for result in results if not result.ok]), "\n\n".join(failures)
