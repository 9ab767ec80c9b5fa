"""`run_demo`: a model's KV cache goes through a connector, for each layout in turn, and the model goes on from it.

    prefill -> paged memory -> store -> chunk objects -> wipe -> load into other slots -> decode

The paged memory is filled and read by the lines of `raw.py`; only the connector under demonstration uses the library.
Printing is the command line's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..backends import get_backend, use_backend
from ..errors import ArgumentError
from ..layouts import LAYOUTS, Layout, find_layout
from . import blend
from . import model as llama
from .connectors import DemoConnector, find_connectors
from .raw import mixed_raw, raw_table
from .trip import BS, LATENT, NB, Exhibit, RoundTrip


@dataclass(frozen=True)
class DemoResult:
    """What one layout showed; `layout` may also be "mixed" (layers that differ) or "blend" (see `blend.py`).

    tokens_equal, logits_equal: every decoded step is, bit for bit, that of the model whose cache never moved; None
    where there is no such model. control_differs: with one bit of one stored key flipped it is not. bytes: moved, in
    each direction; seconds: the best of a few calls. So few bytes show what a call costs, not what a link carries.
    ok: none of the three is False, and the objects and the whole paged memory held exactly what they should (moved
    keys: within one rounding). error: what went wrong, "" if nothing. skipped: not shown, and `note` says why; then ok
    is False and error "". note: what to know.
    """

    layout: str
    connector: str
    backend: str
    tokens_equal: bool | None = False
    logits_equal: bool | None = False
    control_differs: bool = False
    bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    ok: bool = False
    error: str = ""
    skipped: bool = False
    note: str = ""

    @property
    def store_gb_per_second(self) -> float:
        """GB (1e9 bytes) a second; 0 when nothing was stored."""
        return self.bytes / self.store_seconds / 1e9 if self.store_seconds else 0.0

    @property
    def load_gb_per_second(self) -> float:
        """GB (1e9 bytes) a second; 0 when nothing was loaded."""
        return self.bytes / self.load_seconds / 1e9 if self.load_seconds else 0.0


def run_demo(
    layouts: Sequence[str] | None = None,
    connector: str = "VLLMPagedMemGPUConnectorV2",
    backend: str | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[DemoResult], None] | None = None,
    seed: int = 0,
) -> list[DemoResult]:
    """One result a connector and layout, in order; `on_progress` gets each as it comes.

    layouts: names (default: all that the connector takes, and its extra rows). connector: a key of `demo.CONNECTORS`,
    or "all", each with those of `layouts` that it takes. backend: default as requested by the environment. device: of
    model and paged memory. seed: of weights, prompt and slots.

    What goes wrong in one layout is in its result. Raises LayoutError, ArgumentError or BackendError for an unknown
    layout, connector or backend, ArgumentError for a layout that the connector does not take, ImportError without
    transformers, before the model is built.
    """
    device = torch.device(device)
    chosen = choose(layouts, connector)
    results = []
    with use_backend(backend) if backend else contextlib.nullcontext():
        backend = get_backend(device=device).name
        story = llama.run_uninterrupted(seed, device)
        for name, how, exhibit in chosen:
            results.append(show(DemoResult(exhibit.name, name, backend), exhibit, how, story, seed))
            if on_progress:
                on_progress(results[-1])
    return results


def choose(layouts: Sequence[str] | None, connector: str) -> list[tuple[str, DemoConnector, Exhibit]]:
    """Every connector's name, record and exhibit that are to be shown."""
    exhibits = extra_exhibits()
    wanted = [name if name in exhibits else find_layout(name).name for name in layouts or ()]
    exhibits.update({row.name: layout_exhibit(row) for row in LAYOUTS.values()})
    chosen: list[tuple[str, DemoConnector, Exhibit]] = []
    known: dict[str, None] = {}
    for name, how in find_connectors(connector).items():
        takes = [*(row.name for row in LAYOUTS.values() if how.accepts(row)), *how.extras]
        known.update(dict.fromkeys(takes))
        shown = takes if layouts is None else [row for row in wanted if row in takes]
        chosen += [(name, how, exhibits[row]) for row in shown]
    refused = [name for name in wanted if name not in known]
    if refused:
        raise ArgumentError(f"layouts: {', '.join(refused)} not taken by {connector}; it takes: {', '.join(known)}")
    return chosen


def layout_exhibit(layout: Layout) -> Exhibit:
    """A row of the table; without a raw line where there is none."""
    raw = raw_table(llama.NL, NB, BS, llama.NH, llama.HS, LATENT).get(layout.name)
    return Exhibit(layout.name, layout, raw, "one latent row a token: K then V" if layout.is_mla else "")


def extra_exhibits() -> dict[str, Exhibit]:
    """What a connector may show beside the layouts, by name."""
    plain = layout_exhibit(find_layout("NL_X_TWO_NB_BS_NH_HS"))
    mixed = mixed_raw(llama.NL, NB, BS, llama.NH, llama.HS)
    note = f"two groups: K first, blocks of {BS}; K and V in each block of {BS // 2}"
    return {
        "mixed": plain._replace(name="mixed", raw=mixed, note=note, BS=None),
        "blend": plain._replace(name="blend", note=blend.NOTE, trip=blend.BlendTrip),
    }


def show(
    blank: DemoResult,
    exhibit: Exhibit,
    how: DemoConnector,
    story: llama.Uninterrupted,
    seed: int,
) -> DemoResult:
    """`blank` with what one exhibit showed; never raises for what the connector does."""
    if exhibit.raw is None:
        return replace(blank, skipped=True, note="no raw line")
    try:
        with llama.threads(1) as threads:
            trip = (exhibit.trip or RoundTrip)(exhibit, how, story, seed, threads)
            with contextlib.closing(trip.allocator):
                found = trip.travel()
    except Exception as error:  # a failure of the connector is this row's result; the other rows are shown all the same
        return replace(blank, error=f"{type(error).__name__}: {error}", note=exhibit.note)
    shown = (found["tokens_equal"], found["logits_equal"], found["control_differs"])
    return replace(blank, **found, ok=False not in shown and not found["error"], note=exhibit.note)
