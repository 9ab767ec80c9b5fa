"""Speed, measured: shapes of real models, bits checked first, medians beside ceilings and beside the peer."""

from .run import Options, Report, Row, run_bench

__all__ = ["Options", "Report", "Row", "run_bench"]
