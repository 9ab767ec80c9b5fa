"""A report in words: tables of strings, for rich in `cli.py` or as plain text here, and the errors behind the cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .figures import ALONE
from .run import Report, Row

NOTE = (
    "GB/s and percent of the ceiling, medians; gather and scatter (chunks on the cache's device) count bytes read and "
    "written. (n): n times the peer's speed."
)
CELL = ("shape", "order", "block_size", "tokens")
#: table -> its columns; the figures in one cell are separated by " / "
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "rates": {name: (name,) for name in ("store", "load", "both", "gather", "scatter")},
    "layer by layer; beside matmuls; memory": {
        "layerwise ms: store / load": ("layerwise store", "layerwise load"),
        "times the whole-model call": ("layerwise store / whole", "layerwise load / whole"),
        "host us a layer": ("layerwise store host", "layerwise load host"),
        "matmul loop beside, times alone": ("matmul beside store", "matmul beside load"),
        "staging MiB": ("staging",),
    },
    "host time, and one chunk": {
        "host us a chunk: store / load": ("host store", "host load"),
        "of it the call": ("host store call", "host load call"),
        "of it the plan": ("host plan",),
        "one chunk, us over the copy: store / load": ("one chunk store", "one chunk load"),
    },
}


@dataclass(frozen=True)
class TextTable:
    """columns and rows of cells, all strings."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def heading(report: Report) -> list[str]:
    """Where and how it was measured, in lines."""
    facts = report.environment
    variables = " ".join(f"{name}={value}" for name, value in facts["variables"].items())
    lines = [
        f"{facts['device']}; torch {facts['torch']}, python {facts['python']}; backend {', '.join(facts['backends'])} "
        f"({facts['requested_backend']})" + (f"; peer {facts['peer']}" if facts["peer"] else ""),
        f"{variables or 'no LMCACHE_* variable'}; slots on {facts['slots_on']}; chunks of {facts['chunk_tokens']} tokens; "
        f"medians of {facts['repeats']}",
    ]
    if report.ceilings:
        lines.append("ceilings, GB/s: " + ", ".join(f"{name} {value:.1f}" for name, value in report.ceilings.items()))
    alone = [row.value for row in report.rows if row.runner == ALONE and row.value]
    if alone:
        lines.append(f"matmul loop: {facts['matmuls']}, alone {min(alone):.1f} to {max(alone):.1f} ms")
    return [*lines, NOTE]


def tables(report: Report) -> list[TextTable]:
    """A line for each cell of the matrix and runner, a column for each figure or pair of them that was measured."""
    constant = constants(report.rows)
    words = "".join(f", {name.replace('_', ' ')} {value}" for name, value in constant.items())
    names = [name for name in CELL if name not in constant]
    made = [_table(f"{title}{words}", columns, report.rows, names) for title, columns in COLUMNS.items()]
    return [table for table in made if table.rows]


def failures(report: Report) -> list[str]:
    """A line for each reading that could not be made."""
    return [
        f"{row.shape} {row.order} block {row.block_size} tokens {row.tokens}, {row.runner}, {row.figure}: {row.error}"
        for row in report.rows
        if row.error
    ]


def as_text(report: Report) -> str:
    """All of it as plain text."""
    parts = ["\n".join(heading(report))]
    for table in tables(report):
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (table.columns, *table.rows)
        ]
        parts.append("\n".join([table.title, *lines]))
    return "\n\n".join([*parts, "\n".join(failures(report))]).rstrip()


def constants(rows: Sequence[Row]) -> dict[str, Any]:
    """What is the same in all rows, but for shape and order, which name a line."""
    found = {name: {getattr(row, name) for row in rows} for name in ("block_size", "tokens")}
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _table(title: str, columns: dict[str, tuple[str, ...]], rows: Sequence[Row], names: list[str]) -> TextTable:
    """`columns` of the rows, but for those that no row has."""
    known = {row.figure for row in rows}
    used = {header: figures for header, figures in columns.items() if known & set(figures)}
    wanted = {figure for figures in used.values() for figure in figures}
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        if row.figure in wanted:
            key = (*(getattr(row, name) for name in names), row.runner)
            lines.setdefault(key, {})[row.figure] = _cell(row)
    cells = [
        [*map(str, key), *(" / ".join(line[f] for f in figures if f in line) or "-" for figures in used.values())]
        for key, line in lines.items()
    ]
    return TextTable(title, [*(name.replace("_", " ") for name in (*names, "runner")), *used], cells)


def _cell(row: Row) -> str:
    if row.error or row.value is None:
        return (row.error or "nothing").partition(":")[0]
    digits = {"x": 2, "us over copy": 0}.get(row.unit, 1)
    parts = [f"{row.value:.{digits}f}"]
    if row.percent_of_ceiling is not None:
        parts.append(f"{row.percent_of_ceiling:.1f}%")
    if row.ratio_to_peer is not None:
        parts.append(f"({row.ratio_to_peer:.2f})")
    return " ".join(parts)
