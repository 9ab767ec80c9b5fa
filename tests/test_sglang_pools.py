"""SGLang's own pools through both SGLang connectors: as recorded, and the real classes where `sglang` is at hand.

`LMCACHE_SGLANG` may name the folders to import it from, as in PYTHONPATH: an unzipped wheel, and what it needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmcache_ref.backends import register_backend, unregister_backend, use_backend
from lmcache_ref.connectors import SGLangGPUConnector
from lmcache_ref.errors import LayoutError
from lmcache_ref.plan import ChunkSpan
from lmcache_ref.rope import rerotate
from lmcache_ref.transfer import Transfer, reference_gather, reference_scatter
from sglang_pools import NL, check, description, recorded

HERE = Path(__file__).resolve().parent
RECORDED = list(recorded())


def test_there_are_as_many_pools_as_there_should_be():
    """Two page sizes: MHA of 1 and 2 heads in two versions, fp8, MLA. Forms: 3 or 2, two connectors, staged or not."""
    assert len(RECORDED) == 2 * (2 * 2 + 1 + 1)
    assert sum(len(list(check(pools))) for pools in RECORDED) == 2 * (5 * 3 + 2) * 4


@pytest.mark.parametrize("pools", RECORDED, ids=lambda pools: pools.name)
def test_recorded_pools(pools):
    assert [(what, error) for what, error in check(pools) if error] == []


@pytest.mark.parametrize("layer", range(NL))
def test_a_layer_that_does_not_arrive_is_seen(layer):
    """The check of this file can fail."""

    def scatter(plan):
        """Whole-model: all layers but one; one layer at a time: none."""
        planes = tuple(row for number, row in enumerate(plan.planes) if number != layer % len(plan.planes))
        spans = tuple(
            ChunkSpan(
                span.chunk[:, [n for n in range(len(plan.planes)) if n != layer % len(plan.planes)]],
                span.start,
                span.end,
            )
            for span in plan.spans
        )
        return reference_scatter(replace(plan, planes=planes, spans=spans)) if planes else Transfer()

    register_backend("lossy", SimpleNamespace(gather=reference_gather, scatter=scatter, rerotate=rerotate))
    try:
        with use_backend("lossy"):
            found = [error for pools in RECORDED[:2] for _, error in check(pools)]
    finally:
        unregister_backend("lossy")
    assert set(found) == {f"K of layer {layer} differs", "K of layer 0 differs"}


def test_k_and_v_of_different_width_are_refused_by_name():
    """SGLang can build such pools (v_head_dim); an object [2, NL, T, D] cannot hold them."""
    k = [torch.zeros(65, 2, 64, dtype=torch.float16) for _ in range(NL)]
    v = [torch.zeros(65, 2, 32, dtype=torch.float16) for _ in range(NL)]
    connector = SGLangGPUConnector(128, NL, dtype=torch.float16)
    for lists in (k + v, [k, v]):
        with pytest.raises(
            LayoutError, match=r"kv_caches\[3\] has shape \(65, 2, 32\), kv_caches\[0\] has \(65, 2, 64\)"
        ):
            connector.initialize_kvcaches_ptr(kvcaches=lists)


def test_the_real_pools():
    given = os.environ.get("LMCACHE_SGLANG", "")
    if not given and importlib.util.find_spec("sglang") is None:
        pytest.skip("no SGLang: it cannot be imported, and LMCACHE_SGLANG is not set")
    paths = [given, str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, HERE / "sglang_pools.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["wrong"] for line in lines] == [{}] * len(lines)
    assert sum(line["checks"] for line in lines) == 2 * (3 * 3 + 2) * 4
    as_recorded = [description(pools) for pools in RECORDED]
    assert [line["pool"] for line in lines if line["pool"] not in as_recorded] == []
