"""Speed, measured: shapes of real models, medians of interleaved runs, bits checked first."""

from .run import BenchRow, run_bench

__all__ = ["BenchRow", "run_bench"]
