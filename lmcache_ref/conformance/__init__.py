"""The suite a kernel author runs against their own backend: every layout, direction, chunk format and dtype, bit for bit.

    for result in run(["mine"], all_cases()):
        print(result.case, result.error or "ok")

or `lmcache-ref verify`, or `pytest -p lmcache_ref.conformance.plugin --pyargs lmcache_ref.conformance --backend mine`.
What comes out is compared with an idea of its own (einops and flat slots), never with another backend. Bytes only:
rotations, by `rerotate` or on the way of a scatter, are not in it.
"""

from .cases import Case, all_cases, expected_count
from .check import assert_same_bits
from .suite import Result, run, run_case

__all__ = ["Case", "Result", "all_cases", "assert_same_bits", "expected_count", "run", "run_case"]
