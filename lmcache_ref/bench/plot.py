"""A report as a picture: bars in percent of the ceiling, the ceiling as a line, the peer's bar beside ours; SVG or PNG.

matplotlib is imported here and only when asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .figures import COPY
from .peers import PEER
from .report import constants
from .run import Report, Row
from .shapes import NO_ORDER

SUFFIXES = (".svg", ".png")
WORDS = {
    "store": "store to host memory",
    "load": "load from host memory",
    "both": "store and load at once",
    "gather": "gather, chunks beside the cache",
    "scatter": "scatter, chunks beside the cache",
}
COLOURS = ("#2b6cb0", "#6b46c1", "#2f855a", "#b7791f")
PEER_COLOUR, CEILING_COLOUR = "#b9bec7", "#c53030"
BAR = 0.8  # of the room that a line has
LINE_INCHES, PANEL_INCHES = 0.21, 2.35
MOST_PERCENT = 130.0  # what is faster, because it fits in a processor's cache, is cut off there


def check_plot(file: str | Path) -> None:
    """Before anything is measured: ArgumentError for a file that cannot be, or without matplotlib."""
    if Path(file).suffix not in SUFFIXES:
        raise ArgumentError(f"--plot {file}: allowed: a file that ends in {' or '.join(SUFFIXES)}")
    if not Path(file).absolute().parent.is_dir():
        raise ArgumentError(f"--plot {file}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib; install the extra: pip install 'lmcache-ref[notebooks]'")


def write_plot(report: Report, file: str | Path) -> None:
    """Write the picture; raises as `check_plot`, or OSError."""
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for row in report.rows if row.percent_of_ceiling is not None and row.runner != COPY]
    panels = [name for name in WORDS if any(row.figure == name for row in rows)]
    if not panels:
        raise ArgumentError(f"--plot {file}: no figure with a ceiling was measured; such are {', '.join(WORDS)}")
    rows = [row for row in rows if row.figure in panels]
    constant = constants(rows)
    lines = list(dict.fromkeys(_label(row, constant) for row in rows))
    runners = sorted(dict.fromkeys(row.runner for row in rows), key=lambda name: name == PEER)
    height = 1.5 + (LINE_INCHES * max(2, len(runners)) + 0.12) * len(lines)
    figure = Figure(figsize=(2.1 + PANEL_INCHES * len(panels), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=True):
        _panel(axis, name, [(_label(r, constant), r) for r in rows if r.figure == name], lines, runners)
    axes[0].set_yticks(range(len(lines)), lines)
    axes[0].set_ylim(len(lines) - 0.45, -0.55)
    handles: list[Any] = [Patch(color=_colour(runner, runners), label=_name(runner, report)) for runner in runners]
    handles.append(Line2D([], [], color=CEILING_COLOUR, linewidth=1.2, label="ceiling: plain copies"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel(_where(report, constant), fontsize=7.5, color="#555555")
    figure.savefig(file, dpi=160, metadata={"Date": None} if Path(file).suffix == ".svg" else None)


def _panel(axis: Any, name: str, bars: Sequence[tuple[str, Row]], lines: list[str], runners: list[str]) -> None:
    """One figure: a group of bars for each line, one bar for each runner, its numbers inside or beside."""
    height = BAR / len(runners)
    most = min(MOST_PERCENT, max(106.0, *(1.03 * (row.percent_of_ceiling or 0) for _, row in bars)))
    for label, row in bars:
        percent = row.percent_of_ceiling or 0.0
        i, length = runners.index(row.runner), min(percent, most)
        y = lines.index(label) - BAR / 2 + height * (i + 0.5)
        axis.barh(y, length, 0.92 * height, color=_colour(row.runner, runners), zorder=2)
        inside = length > 62
        axis.text(
            min(length, 99) - 1.5 if inside else length + 1.5,  # not across the ceiling's line
            y,
            f"{percent:.1f} %   {_rate(row)}",
            ha="right" if inside else "left",
            va="center",
            fontsize=6.5,
            color="white" if inside and row.runner != PEER else "#222222",
            zorder=4,
        )
    axis.axvline(100, color=CEILING_COLOUR, linewidth=1.2, zorder=3)
    axis.set_title(WORDS[name], fontsize=9.5)
    axis.set_xlabel("% of the ceiling; GB/s", fontsize=7.5)
    axis.set_xlim(0, most)
    axis.set_xticks([0, 25, 50, 75, 100])
    axis.grid(axis="x", color="#e4e6ea", linewidth=0.6, zorder=0)
    axis.tick_params(labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _rate(row: Row) -> str:
    value = row.value or 0.0
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _colour(runner: str, runners: Sequence[str]) -> str:
    return PEER_COLOUR if runner == PEER else COLOURS[runners.index(runner) % len(COLOURS)]


def _name(runner: str, report: Report) -> str:
    return f"peer, {report.environment['peer']}" if runner == PEER else f"backend {runner}"


def _label(row: Row, constant: Mapping[str, Any]) -> str:
    """Shape and order, and below them what differs between rows."""
    order = "" if row.order == NO_ORDER else f" {row.order}"
    differs = [f"{row.block_size} tokens a block"] if "block_size" not in constant else []
    differs += [f"{row.tokens} tokens"] if "tokens" not in constant else []
    return "\n".join([f"{row.shape}{order}", *([", ".join(differs)] if differs else [])])


def _where(report: Report, constant: Mapping[str, Any]) -> str:
    facts = report.environment
    tops = ", ".join(f"{name} {value:.1f}" for name, value in report.ceilings.items())
    same = "".join(f"; {name.replace('_', ' ')} {value}" for name, value in constant.items())
    return f"{facts['device']}, torch {facts['torch']}{same}" + (f"; ceilings in GB/s: {tops}" if tops else "")
