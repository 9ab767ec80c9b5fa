"""`run_demo`: a model's KV cache goes through a connector, for each layout in turn, and the model goes on from it.

    prefill -> paged memory -> store -> chunk objects -> wipe -> load into other slots -> decode

The paged memory is filled and read by the lines of `raw.py`; only the connector under demonstration uses the library.
Printing is the command line's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends import get_backend, use_backend
from ..discovery import flatten
from ..layouts import LAYOUTS, Layout, find_layout
from ..memory import PAGE_BYTES, HostMemoryAllocator, MemoryAllocator, PinMemoryAllocator
from . import model as llama
from .connectors import CHUNK_TOKENS, DemoConnector, Sizes, find_connector
from .raw import Raw, raw_table

NB, BS = 13, 16
LATENT = 2 * llama.NH * llama.HS
SENTINEL_BYTE = 0xA5
CONTROL_TOKEN = 1  # early, so that every later token looks at it
MORE_TIMES = 3  # for the clock alone: what is compared comes of the first call, which may compile kernels
SPANS = [(at, min(at + CHUNK_TOKENS, llama.PROMPT_TOKENS)) for at in range(0, llama.PROMPT_TOKENS, CHUNK_TOKENS)]


@dataclass(frozen=True)
class DemoResult:
    """What one layout showed.

    tokens_equal, logits_equal: every decoded step is, bit for bit, that of the model whose cache never moved.
    control_differs: with one bit of one stored key flipped it is not. bytes: moved, in each direction; seconds: the
    best of a few calls. So few bytes show what a call costs, not what a link carries.
    ok: all three, and the objects and the whole paged memory held exactly what they should. error: what went wrong,
    "" if nothing. skipped: not shown, and `note` says why; then ok is False and error "". note: what to know.
    """

    layout: str
    connector: str
    backend: str
    tokens_equal: bool = False
    logits_equal: bool = False
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
    """One result a layout, in order; `on_progress` gets each as it comes.

    layouts: names (default: the whole table). connector: a key of `demo.CONNECTORS`. backend: default as requested by
    the environment. device: of model and paged memory. seed: of weights, prompt and slots.

    What goes wrong in one layout is in its result. Raises LayoutError, ArgumentError or BackendError for an unknown
    layout, connector or backend, ImportError without transformers, before the model is built.
    """
    device = torch.device(device)
    rows = [find_layout(name) for name in (LAYOUTS if layouts is None else layouts)]
    how = find_connector(connector)
    results = []
    with use_backend(backend) if backend else contextlib.nullcontext():
        backend = get_backend(device=device).name
        story = llama.run_uninterrupted(seed, device)
        for layout in rows:
            results.append(show(DemoResult(layout.name, connector, backend), layout, how, story, device, seed))
            if on_progress:
                on_progress(results[-1])
    return results


def show(
    blank: DemoResult,
    layout: Layout,
    how: DemoConnector,
    story: llama.Uninterrupted,
    device: torch.device,
    seed: int,
) -> DemoResult:
    """`blank` with what one layout showed; never raises for what the connector does."""
    raw = raw_table(llama.NL, NB, BS, llama.NH, llama.HS, LATENT).get(layout.name)
    if raw is None:
        return replace(blank, skipped=True, note="no raw line")
    if not how.accepts(layout):
        return replace(blank, skipped=True, note="not a layout of this connector's engine")
    note = "one latent row a token: K then V" if layout.is_mla else ""
    try:
        trip = RoundTrip(layout, raw, how, story, device, seed)
        with contextlib.closing(trip.allocator):
            found = trip.travel()
    except Exception as error:  # a failure of the connector is this row's result; the other rows are shown all the same
        return replace(blank, error=f"{type(error).__name__}: {error}", note=note)
    shown = found["tokens_equal"] and found["logits_equal"] and found["control_differs"]
    return replace(blank, **found, ok=shown and not found["error"], note=note)


class RoundTrip:
    """One layout's paged memory, slots, connector and objects."""

    def __init__(
        self, layout: Layout, raw: Raw, how: DemoConnector, story: llama.Uninterrupted, device: torch.device, seed: int
    ) -> None:
        self.raw, self.how, self.story, self.device = raw, how, story, device
        self.is_mla = layout.is_mla
        self.rows = llama.latent_of(story.rows) if layout.is_mla else story.rows
        slots = torch.randperm(NB * BS, generator=torch.Generator().manual_seed(seed))
        self.old_slots, self.new_slots = slots[: llama.PROMPT_TOKENS], slots[-llama.PROMPT_TOKENS :]
        assert not {*self.old_slots.tolist()} & {*self.new_slots.tolist()}, "the pages hold the prompt twice"
        sizes = Sizes(llama.NL, BS, 1, LATENT) if layout.is_mla else Sizes(llama.NL, BS, llama.NH, llama.HS)
        self.connector = how.build(layout, sizes, llama.DTYPE)
        self.num_bytes = sum(row.numel() * row.element_size() for pair in self.rows for row in pair)
        self.allocator = self._allocator()
        self.objects = how.allocate(self.connector, self.allocator, SPANS, llama.DTYPE)
        self.pages = raw.allocate(SENTINEL_BYTE, llama.DTYPE, device)

    def _allocator(self) -> MemoryAllocator:
        """Host memory for the objects, whether there is one a chunk or one a chunk and layer."""
        size = self.num_bytes + len(SPANS) * llama.NL * PAGE_BYTES
        return HostMemoryAllocator(size) if self.device.type == "cpu" else PinMemoryAllocator(size)

    def travel(self) -> dict[str, Any]:
        """The whole way, twice: with a damaged object as a control, and for good. Fields of a `DemoResult`."""
        story = self.story
        self.fill(self.pages, self.old_slots)
        store_seconds = [self.move(self.how.store, self.old_slots)]
        faults = self.faults_of_objects()
        store_seconds += [self.move(self.how.store, self.old_slots) for _ in range(MORE_TIMES)]

        flip_sign_of_greatest(self.control_row())
        self.wipe()
        self.move(self.how.load, self.new_slots)
        pairs = zip(self.decode(), story.logits, strict=True)
        control_differs = any(not llama.same_bits(one, other) for one, other in pairs)
        flip_sign_of_greatest(self.control_row())

        self.wipe()
        load_seconds = [self.move(self.how.load, self.new_slots)]
        faults += self.faults_of_pages()
        logits = list(self.decode())
        load_seconds += [self.move(self.how.load, self.new_slots) for _ in range(MORE_TIMES)]
        return {
            "tokens_equal": llama.tokens_of(logits) == llama.tokens_of(story.logits),
            "logits_equal": all(llama.same_bits(*pair) for pair in zip(logits, story.logits, strict=True)),
            "control_differs": control_differs,
            "bytes": self.num_bytes,
            "store_seconds": min(store_seconds),
            "load_seconds": min(load_seconds),
            "error": "; ".join(
                faults + ([] if control_differs else ["a flipped bit of a stored key changed no logit"])
            ),
        }

    def move(self, operation: Callable[..., None], slots: torch.Tensor) -> float:
        """`store` or `load` for the whole prompt, in seconds."""
        slots = slots.to(self.device)
        wait = getattr(torch, self.device.type).synchronize
        wait()
        start = time.perf_counter()
        operation(self.connector, self.objects, SPANS, kvcaches=self.pages, slot_mapping=slots)
        wait()
        return time.perf_counter() - start

    def decode(self) -> Iterator[torch.Tensor]:
        """The model goes on from what the pages hold at the new slots."""
        at = self.new_slots.tolist()
        rows = [
            [torch.stack([self.raw.row(self.pages, layer, k, slot) for slot in at]) for k in range(len(pair))]
            for layer, pair in enumerate(self.rows)
        ]
        rows = llama.rows_of_latent(rows) if self.is_mla else rows
        return llama.decode(self.story.model, llama.cache_of(rows), self.story.first_token)

    def fill(self, pages: Any, slots: torch.Tensor) -> None:
        """The model's rows into the pages, token by token."""
        at = slots.tolist()
        for layer, pair in enumerate(self.rows):
            for k, row in enumerate(pair):
                for token, slot in enumerate(at):
                    self.raw.row(pages, layer, k, slot)[:] = row[token]

    def wipe(self) -> None:
        """Every byte of the pages becomes the sentinel."""
        for leaf in flatten(self.pages)[0]:
            leaf.view(torch.uint8).fill_(SENTINEL_BYTE)

    def control_row(self) -> torch.Tensor:
        """The stored key of CONTROL_TOKEN in layer 0, `[NH*HS]`; a view of the object."""
        return self.how.row(self.objects, 0, 0, CONTROL_TOKEN)[: llama.NH * llama.HS]

    def faults_of_objects(self) -> list[str]:
        """Whether the objects hold the model's rows; store and load that are wrong alike would cancel otherwise."""
        wrong = [
            f"layer {layer}, {'KV'[k]}, token {token}"
            for layer, pair in enumerate(self.rows)
            for k, row in enumerate(pair)
            for token, expected in enumerate(row.flatten(1).cpu())
            if not llama.same_bits(self.how.row(self.objects, layer, k, token), expected)
        ]
        return [f"{len(wrong)} stored rows hold other bytes, the first is {wrong[0]}"] if wrong else []

    def faults_of_pages(self) -> list[str]:
        """Whether the pages hold the model's rows at the new slots, and the sentinel everywhere else."""
        expected = self.raw.allocate(SENTINEL_BYTE, llama.DTYPE, self.device)
        self.fill(expected, self.new_slots)
        pairs = zip(flatten(self.pages)[0], flatten(expected)[0], strict=True)
        wrong = sum(int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in pairs)
        return [f"{wrong} bytes of paged memory are not what the load should leave"] if wrong else []


def flip_sign_of_greatest(row: torch.Tensor) -> None:
    """Flip the highest bit of the element that is greatest in magnitude, in place; flipping again undoes it.

    row: contiguous, on a little-endian host. One byte changes.
    """
    index = int(row.abs().argmax())
    row.view(torch.uint8)[(index + 1) * row.element_size() - 1] ^= 0x80
