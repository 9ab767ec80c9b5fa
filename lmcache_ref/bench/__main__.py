"""`python -m lmcache_ref.bench`: the benchmark in plain text, where typer and rich may be missing.

Options as in `lmcache-ref bench`. `main` may also be called, with a list of arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from ..errors import LMCacheRefError
from .plot import check_plot, write_plot
from .report import as_text
from .run import Options, run_bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when all was measured, 1 when a figure failed, 2 for what cannot be begun."""
    parser = argparse.ArgumentParser(prog="python -m lmcache_ref.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    for flag, kind in (("shape", str), ("order", str), ("block-size", int), ("tokens", int), ("backend", str)):
        parser.add_argument(f"--{flag}", type=kind, action="append", help="may be repeated")
    parser.add_argument("--figure", action="append", help="which figures; may be repeated")
    parser.add_argument("--peer", "--upstream", metavar="FOLDER", help="an unpacked lmcache wheel, to compare with")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--slots", default="cpu", help="where the slot mapping lives: cpu or device")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-matmul", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help=".svg or .png")
    given = parser.parse_args(arguments)
    options = Options(
        given.device, given.backend, given.shape, given.order, given.block_size, given.tokens, given.figure,
        given.repeats, given.peer, given.slots,
    )  # fmt: skip
    try:
        options = options.shortened(given.quick, given.no_matmul)
        if given.plot:
            check_plot(given.plot)
        report = run_bench(options, lambda cell: print(cell, file=sys.stderr, flush=True))
        document = {"ok": report.ok, **dataclasses.asdict(report)}
        print(json.dumps(document, indent=2) if given.json else as_text(report))
        if given.plot:
            write_plot(report, given.plot)
    except (LMCacheRefError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
