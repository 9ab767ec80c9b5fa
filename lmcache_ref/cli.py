"""The command line, `lmcache-ref`: layouts, verify, demo, bench, doctor.

Only this file and `picture_rich.py` need typer and rich, the extra `cli`. It parses, calls and shows; what is shown is
computed in `picture`, `conformance`, `demo`, `bench` and `doctor`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from .backends import AUTO, explain_backends, get_backend, requested_backend
from .doctor import examine, list_devices
from .errors import ArgumentError, BackendError, ContractViolation, LMCacheRefError
from .layouts import KV_LAYOUTS, LAYOUTS, Layout, find_layout
from .picture import Picture, svg

OK, FAILED, USAGE = 0, 1, 2

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

    from .picture_rich import render
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    _missing: str | None = error.name
else:
    _missing = None
    # How an option reads on the command line, said once. Commands are registered in `application`.
    AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]
    Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="Backend; may be repeated.")]
    LayoutNames = Annotated[list[str] | None, typer.Option("--layout", "-l", help="Layout; may be repeated.")]
    Device = Annotated[str, typer.Option("--device", help="Where the KV cache lies, such as cpu or cuda:0.")]
    OneName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A layout; without it, the whole table.")]
    SvgFile = Annotated[Path | None, typer.Option("--svg", help="Also write the picture of NAME to this file.")]
    CaseId = Annotated[str | None, typer.Option("--case", help="Run this one case, as a failure printed it.")]
    Connector = Annotated[str, typer.Option("--connector", help="Who carries the cache; all: each in turn.")]
    OneBackend = Annotated[str | None, typer.Option("--backend", "-b", help="Backend; by default LMCACHE_BACKEND.")]
    Seed = Annotated[int, typer.Option("--seed", help="Of weights, prompt and slots.")]
    Peer = Annotated[str | None, typer.Option("--peer", "--upstream", help="Folder of an unpacked lmcache wheel.")]
    Shapes = Annotated[list[str] | None, typer.Option("--shape", help="Model shape; may be repeated.")]
    Orders = Annotated[list[str] | None, typer.Option("--order", help="Memory order; may be repeated.")]
    BlockSizes = Annotated[list[int] | None, typer.Option("--block-size", help="Tokens a block; may be repeated.")]
    Tokens = Annotated[list[int] | None, typer.Option("--tokens", help="Tokens to move; may be repeated.")]
    Figures = Annotated[list[str] | None, typer.Option("--figure", help="What to measure; may be repeated.")]
    Repeats = Annotated[int | None, typer.Option("--repeats", help="Runs that a median is of.")]
    SlotsOn = Annotated[str, typer.Option("--slots", help="Where the slot mapping lives: cpu or device.")]
    Quick = Annotated[bool, typer.Option("--quick", help="Few tokens, few repeats.")]
    NoMatmul = Annotated[bool, typer.Option("--no-matmul", help="Without the matmul loop beside transfers.")]
    PlotFile = Annotated[str | None, typer.Option("--plot", help="Also draw the rates: a file .svg or .png.")]


def main() -> None:
    """The console script `lmcache-ref`. Exits with 2 and says what to install when typer or rich is missing."""
    if _missing:
        print(f"lmcache-ref needs {_missing}; install the extra: pip install 'lmcache-ref[cli]'", file=sys.stderr)
        raise SystemExit(USAGE)
    application()()


def application() -> typer.Typer:
    """The commands, each with its errors turned into one line and exit code 2."""
    app = typer.Typer(
        name="lmcache-ref",
        help="Look at KV cache layouts, check and time the backends that move them.",
        epilog="Exit codes: 0 all is well, 1 something checked is wrong, 2 the command could not be run as given.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (layouts, verify, demo, bench, doctor):
        app.command()(_clean(command))
    return app


def _clean(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose expected errors are a message on stderr (with --json a document too) and the exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except (LMCacheRefError, ImportError, OSError) as error:
            kind = type(error).__name__
            Console(stderr=True).print(Text.assemble((f"{kind}: ", "bold red"), str(error)), soft_wrap=True)
            if options.get("as_json"):
                _print_json({"error": {"kind": kind, "message": str(error)}})
            raise typer.Exit(FAILED if isinstance(error, ContractViolation) else USAGE) from None

    return run


# ------------------------------------------------------------------------------------------------ layouts


def layouts(name: OneName = None, svg_file: SvgFile = None, as_json: AsJson = False) -> None:
    """The layout table, or one layout as a picture of memory.

    Exit codes: 0; 2 for an unknown layout or a file that cannot be written.
    """
    if name is None:
        if svg_file:
            raise ArgumentError(f"--svg {svg_file}: needs the NAME of a layout; known: {', '.join(LAYOUTS)}")
        rows = [_facts(row) for row in LAYOUTS.values()]
        if as_json:
            return _print_json(rows)
        return _screen().print(_table(f"{len(rows)} layouts", [_in_words(row) for row in rows]))
    row = find_layout(name)
    picture = Picture.of_example(row)
    if svg_file:
        svg_file.write_text(svg(picture), encoding="utf-8")
    if as_json:
        cells = [{**cell._asdict(), "label": picture.label(cell)} for cell in picture.cells]
        return _print_json({**_facts(row), "tensors": picture.tensors, "cells": cells})
    screen = _screen()
    for key, value in _in_words(_facts(row)).items():
        screen.print(Text.assemble((f"{key:<18}", "bold"), _text(value)))
    for line in render(picture, screen.width):
        screen.print(line)
    if svg_file:
        screen.print(Text(f"\nwritten to {svg_file}"))


def _facts(row: Layout) -> dict[str, Any]:
    return {
        "name": row.name,
        "pattern": row.pattern,
        "nesting": list(row.nesting),
        "engines": [engine.value for engine in row.engines],
        "upstream_id": row.upstream_id,
        "kv_planes": 1 if row.is_mla else 2,
        "kv_layout": [order for order in KV_LAYOUTS if row.stands_in(order)],
        "logical_order_of": [engine.value for engine in row.logical_in],
    }


def _in_words(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "kv_layout": "any"} if facts["kv_layout"] == list(KV_LAYOUTS) else facts


# ------------------------------------------------------------------------------------------------ verify and demo


def verify(
    backend: Backends = None,
    layout: LayoutNames = None,
    case: CaseId = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Check backends against the contract, bit for bit. Default: every backend that can run on the device.

    Exit codes: 0 no violation; 1 a violation; 2 an unknown name, or a backend that cannot run here.
    """
    from . import conformance

    _check_device(device)
    backends = _usable_backends(backend, device)
    wanted = [find_layout(name).name for name in layout or ()]
    cases = [conformance.Case.parse(case)] if case else conformance.all_cases()
    cases = [one for one in cases if not wanted or one.layout in wanted]
    if not cases:
        raise ArgumentError(f"--case {case} is not of --layout {', '.join(wanted)}: nothing to run")
    results = []
    with _progress("verify", len(cases) * len(backends)) as advance:
        for result in conformance.run(backends, cases, device=device):
            results.append(result)
            advance()
    good = len(results) == len(cases) * len(backends) and all(result.ok for result in results)
    if as_json:
        listed = [{**dataclasses.asdict(result), "case": str(result.case)} for result in results]
        _print_json({"ok": good, "device": device, "backends": backends, "cases": len(cases), "results": listed})
    else:
        _show_verdicts(results)
    raise typer.Exit(OK if good else FAILED)


def _show_verdicts(results: Sequence[Any]) -> None:
    screen = _screen()
    rows: dict[Any, dict[str, Any]] = {}
    for result in results:
        if not result.ok:
            screen.print(Text.assemble(("FAILED ", "bold red"), f"{result.case} on {result.backend}\n{result.error}\n"))
        key = {"backend": result.backend, "direction": result.case.direction}
        row = rows.setdefault(tuple(key.values()), {**key, "passed": 0, "failed": 0, "seconds": 0.0})
        row["passed" if result.ok else "failed"] += 1
        row["seconds"] += result.seconds
    screen.print(_table("conformance", list(rows.values())))


def demo(
    layout: LayoutNames = None,
    connector: Connector = "VLLMPagedMemGPUConnectorV2",
    backend: OneBackend = None,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Store a small model's KV cache, wipe it, load it elsewhere, go on decoding: in every layout, compared bit for bit.

    Exit codes: 0 all as it should be; 1 anything off, or nothing shown; 2 an unknown name, or no transformers.
    """
    from .demo import run_demo

    _check_device(device)
    with _progress("demo", None) as advance:
        results = run_demo(layout, connector, backend, device, lambda *_: advance(), seed)
    shown = [result for result in results if not result.skipped]
    good = bool(shown) and all(result.ok for result in shown)
    if as_json:
        _print_json({"ok": good, "results": [_demo_document(result) for result in results]})
    else:
        for name in dict.fromkeys(result.connector for result in results):
            rows = [_demo_row(result) for result in results if result.connector == name]
            _screen().print(_table(f"demo: {name}, by {results[0].backend}", rows))
    raise typer.Exit(OK if good else FAILED)


def _demo_row(result: Any) -> dict[str, Any]:
    """One line of the table; times in microseconds, since a demo moves little."""
    if result.skipped:
        return {"layout": result.layout, "ok": "skipped", "remark": result.note}
    return {
        "layout": result.layout,
        "tokens equal": result.tokens_equal,
        "logits equal": result.logits_equal,
        "control differs": result.control_differs,
        "bytes": result.bytes,
        "store us": round(result.store_seconds * 1e6),
        "GB/s": round(result.store_gb_per_second, 2),
        "load us": round(result.load_seconds * 1e6),
        "GB/s ": round(result.load_gb_per_second, 2),
        "ok": result.ok,
        "remark": result.error or result.note,
    }


def _demo_document(result: Any) -> dict[str, Any]:
    rates = {"store_gb_per_second": result.store_gb_per_second, "load_gb_per_second": result.load_gb_per_second}
    return {**dataclasses.asdict(result), **rates}


# ------------------------------------------------------------------------------------------------ bench and doctor


def bench(
    backend: Backends = None,
    peer: Peer = None,
    quick: Quick = False,
    device: Device = "cpu",
    shape: Shapes = None,
    order: Orders = None,
    block_size: BlockSizes = None,
    tokens: Tokens = None,
    figure: Figures = None,
    repeats: Repeats = None,
    slots_on: SlotsOn = "cpu",
    no_matmul: NoMatmul = False,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Time the backends: bits checked first, rates beside a ceiling of the same process, LMCache beside them with --peer.

    Exit codes: 0 measured; 1 a figure failed or a backend moves wrong bits; 2 an unknown name, or what cannot run here.
    """
    from .bench import Options, run_bench
    from .bench.plot import check_plot, write_plot

    _check_device(device)
    if plot:
        check_plot(plot)
    options = Options(device, backend, shape, order, block_size, tokens, figure, repeats, peer, slots_on)
    with _progress("bench", None) as advance:
        report = run_bench(options.shortened(quick, no_matmul), advance)
    if as_json:
        _print_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        _show_bench(report)
    if plot:
        write_plot(report, plot)
    raise typer.Exit(OK if report.ok else FAILED)


def _show_bench(report: Any) -> None:
    from .bench.report import failures, heading, tables

    screen = _screen()
    screen.print(Text("\n".join(heading(report))))
    for table in tables(report):
        screen.print(_table(f"\n{table.title}", [dict(zip(table.columns, row, strict=True)) for row in table.rows]))
    for line in failures(report):
        screen.print(Text.assemble(("FAILED ", "bold red"), line))


def doctor(as_json: AsJson = False) -> None:
    """Versions, devices, LMCACHE_* variables, and which backend would run on each kind of device, and why no other.

    Exit codes: 0 the requested backend can run here; 1 it cannot.
    """
    report = examine()
    if as_json:
        _print_json(dataclasses.asdict(report))
    else:
        screen = _screen()
        versions = [{"package": name, "version": version} for name, version in report.versions.items()]
        screen.print(_table("versions; - is not installed", versions))
        screen.print(_table("devices", report.devices))
        variables = [{"variable": name, "value": value} for name, value in report.environment.items()]
        screen.print(_table("environment", variables or [{"variable": "no LMCACHE_* is set"}]))
        rows = []
        for choice in report.choices:
            verdicts = {choice.chosen or "none": choice.problem or "chosen", **choice.passed_over}
            rows += [{"device": choice.device_type, "backend": name, "": why} for name, why in verdicts.items()]
            rows += [{"device": "", "backend": "", "": f"{name}: {fact}"} for name, fact in choice.facts.items()]
        screen.print(_table(f"backends; requested: {report.requested}", rows))
        screen.print(Text("the requested backend can run" if report.ok else "the requested backend cannot run here"))
    raise typer.Exit(OK if report.ok else FAILED)


# ------------------------------------------------------------------------------------------------ shared


def _check_device(device: str) -> None:
    devices = list_devices()
    known = dict.fromkeys(name for d in devices for name in (d["type"], f"{d['type']}:{d.get('index', 0)}"))
    if device not in known:
        raise ArgumentError(f"--device {device!r} is not here; known: {', '.join(known)}")


def _usable_backends(names: list[str] | None, device: str) -> list[str]:
    """The named backends, else the requested one, else all that can run; BackendError when one cannot serve `device`."""
    reasons = {backend.name: why for backend, why in explain_backends(device)}
    if not names:
        requested = requested_backend()
        names = [name for name, why in reasons.items() if why is None] if requested == AUTO else [requested]
    names = list(dict.fromkeys(get_backend(name, device).name for name in names))
    for name in names:
        if reasons[name]:
            raise BackendError(f"backend {name!r} {reasons[name]}")
    return names


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _screen() -> Console:
    """stdout; a pipe or a file gets a fixed width in which the tables fit."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr that goes away when done; yields what moves it on and may name the work at hand."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda now="": bar.update(task, advance=1, description=f"{what} {now}")


def _text(value: Any) -> Text:
    """A value as text that rich does not read as markup."""
    if isinstance(value, bool):
        return Text("yes", "green") if value else Text("no", "bold red")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    if isinstance(value, (list, tuple)):
        return Text(" ".join(map(str, value)) or "-")
    return Text("-" if value in (None, "") else str(value))


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One column for each key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=Text(title, "bold"), title_justify="left", header_style="bold")
    for key in keys:
        number = all(type(row.get(key)) in (int, float, type(None)) for row in rows)
        table.add_column(Text(key.replace("_", " ")), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(key)) for key in keys))
    return table


if __name__ == "__main__":
    main()
