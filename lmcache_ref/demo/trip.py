"""One line of the demo: what an engine holds, and its way through a connector and back.

`RoundTrip` is the way of every layout; `blend.py` has another. Which lines there are, and their results: `run.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from ..discovery import flatten
from ..layouts import Layout
from ..memory import PAGE_BYTES, HostMemoryAllocator, MemoryAllocator, PinMemoryAllocator
from . import model as llama
from .connectors import CHUNK_TOKENS, DemoConnector, Engine, Sizes, Spans
from .raw import MixedRaw, Raw

NB, BS = 13, 16
LATENT = 2 * llama.NH * llama.HS
SENTINEL_BYTE = 0xA5
CONTROL_TOKEN = 1  # early, so that every later token looks at it
MORE_TIMES = 3  # for the clock alone: what is compared comes of the first call, which may compile kernels
SPANS = [(at, min(at + CHUNK_TOKENS, llama.PROMPT_TOKENS)) for at in range(0, llama.PROMPT_TOKENS, CHUNK_TOKENS)]


class Exhibit(NamedTuple):
    """What one line of the demo shows. raw None: nothing to fill pages by. BS None: layers differ in it."""

    name: str
    layout: Layout
    raw: Raw | MixedRaw | None
    note: str = ""
    BS: int | None = BS
    trip: type[RoundTrip] | None = None

    @property
    def sizes(self) -> Sizes:
        """Of the engine's tensors."""
        heads = (1, LATENT) if self.layout.is_mla else (llama.NH, llama.HS)
        return Sizes(llama.NL, self.BS, *heads)


class RoundTrip:
    """Paged memory, slots, connector and objects; out of `old_slots`, into `new_slots`.

    spans: the chunks that are stored, in tokens of the prompt. threads: of the CPU, for the connector; the demo's own
    work is done by those that torch has at the time.
    """

    spans: ClassVar[Spans] = SPANS
    unnoticed: ClassVar[str] = "a flipped bit of a stored key changed no logit"

    def __init__(
        self, exhibit: Exhibit, how: DemoConnector, story: llama.Uninterrupted, seed: int, threads: int
    ) -> None:
        assert exhibit.raw is not None, "there is nothing to fill pages by"
        self.raw, self.how, self.story, self.threads = exhibit.raw, how, story, threads
        self.device: torch.device = story.model.device
        self.is_mla = exhibit.layout.is_mla
        self.rows = llama.latent_of(story.rows) if self.is_mla else story.rows
        slots = torch.randperm(NB * BS, generator=torch.Generator().manual_seed(seed))
        self.old_slots, self.new_slots = slots[: llama.PROMPT_TOKENS], slots[-llama.PROMPT_TOKENS :]
        assert not {*self.old_slots.tolist()} & {*self.new_slots.tolist()}, "the pages hold the prompt twice"
        tokens = sum(end - start for start, end in self.spans)
        self.num_bytes = tokens * sum(row[0].numel() * row.element_size() for pair in self.rows for row in pair)
        self.pages = self.raw.allocate(SENTINEL_BYTE, llama.DTYPE, self.device)
        rope = llama.rope_of(story.model)
        self.connector = how.build(Engine(exhibit.layout, exhibit.sizes, llama.DTYPE, self.device, rope))
        self.connector.initialize_kvcaches_ptr(kvcaches=self.pages)
        self.allocator = self._allocator()
        self.objects = how.allocate(self.connector, self.allocator, self.spans, llama.DTYPE)

    def _allocator(self) -> MemoryAllocator:
        """Host memory for the objects, whether there is one a chunk or one a chunk and layer."""
        size = self.num_bytes + len(self.spans) * llama.NL * PAGE_BYTES
        return HostMemoryAllocator(size) if self.device.type == "cpu" else PinMemoryAllocator(size)

    def travel(self) -> dict[str, Any]:
        """The whole way, twice: with a damaged object as a control, and for good. Fields of a `DemoResult`."""
        self.fill(self.pages, self.old_slots)
        store_seconds = [self.timed(self.store)]
        faults = self.faults_of_objects()
        store_seconds += [self.timed(self.store) for _ in range(MORE_TIMES)]

        flip_sign_of_greatest(self.control_row())
        self.wipe()
        self.timed(self.load)
        control_differs = self.differs()
        flip_sign_of_greatest(self.control_row())

        self.wipe()
        load_seconds = [self.timed(self.load)]
        faults += self.faults_of_pages()
        tokens_equal, logits_equal = self.compare()
        load_seconds += [self.timed(self.load) for _ in range(MORE_TIMES)]
        return {
            "tokens_equal": tokens_equal,
            "logits_equal": logits_equal,
            "control_differs": control_differs,
            "bytes": self.num_bytes,
            "store_seconds": min(store_seconds),
            "load_seconds": min(load_seconds),
            "error": "; ".join(faults + ([] if control_differs else [self.unnoticed])),
        }

    # ------------------------------------------------------------------------------------------ through the connector

    def store(self, slots: dict[str, torch.Tensor]) -> None:
        """Pages to objects."""
        self.how.store(self.connector, self.objects, self.spans, kvcaches=self.pages, slot_mapping=slots["old"])

    def load(self, slots: dict[str, torch.Tensor]) -> None:
        """Objects to pages."""
        self.how.load(self.connector, self.objects, self.spans, kvcaches=self.pages, slot_mapping=slots["new"])

    def timed(self, move: Callable[[dict[str, torch.Tensor]], None]) -> float:
        """`store` or `load`, in seconds; the slots are on the device before."""
        slots = {"old": self.old_slots.to(self.device), "new": self.new_slots.to(self.device)}
        wait = getattr(torch, self.device.type).synchronize
        with llama.threads(self.threads):
            wait()
            start = time.perf_counter()
            move(slots)
            wait()
            return time.perf_counter() - start

    # ------------------------------------------------------------------------------------------ pages, by raw indexing

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

    def read(self, layer: int, k: int, slots: list[int]) -> torch.Tensor:
        """A copy of what the pages hold at `slots`, `[T, NH, HS]`, with MLA `[T, C]`."""
        return torch.stack([self.raw.row(self.pages, layer, k, slot) for slot in slots])

    # ------------------------------------------------------------------------------------------ what came of it

    def decode(self) -> Iterator[torch.Tensor]:
        """The model goes on from what the pages hold at the new slots."""
        at = self.new_slots.tolist()
        rows = [[self.read(layer, k, at) for k in range(len(pair))] for layer, pair in enumerate(self.rows)]
        rows = llama.rows_of_latent(rows) if self.is_mla else rows
        return llama.decode(self.story.model, llama.cache_of(rows), self.story.first_token)

    def compare(self) -> tuple[bool | None, bool | None]:
        """Whether tokens and logits are those of the model whose cache never moved; None where there is none."""
        logits, story = list(self.decode()), self.story
        tokens_equal = llama.tokens_of(logits) == llama.tokens_of(story.logits)
        return tokens_equal, all(llama.same_bits(*pair) for pair in zip(logits, story.logits, strict=True))

    def differs(self) -> bool:
        """Whether the pages let the damaged object be noticed: here, by any logit."""
        pairs = zip(self.decode(), self.story.logits, strict=True)
        return any(not llama.same_bits(one, other) for one, other in pairs)

    def control_row(self) -> torch.Tensor:
        """The stored key of CONTROL_TOKEN in layer 0, `[NH*HS]`; a view of the object."""
        return self.how.row(self.objects, 0, 0, 0, CONTROL_TOKEN)[: llama.NH * llama.HS]

    def faults_of_objects(self) -> list[str]:
        """Whether the objects hold the model's rows; store and load that are wrong alike would cancel otherwise."""
        wrong = [
            f"layer {layer}, {'KV'[k]}, token {token}"
            for layer, pair in enumerate(self.rows)
            for k, row in enumerate(pair)
            for chunk, (start, end) in enumerate(self.spans)
            for token, expected in enumerate(row[start:end].flatten(1).cpu(), start)
            if not llama.same_bits(self.how.row(self.objects, layer, k, chunk, token - start), expected)
        ]
        return [f"{len(wrong)} stored rows hold other bytes, the first is {wrong[0]}"] if wrong else []

    def faults_of_pages(self) -> list[str]:
        """Whether the pages hold the model's rows at the new slots, and the sentinel everywhere else."""
        expected = self.raw.allocate(SENTINEL_BYTE, llama.DTYPE, self.device)
        self.fill(expected, self.new_slots)
        return self.faults_beside(expected)

    def faults_beside(self, expected: Any) -> list[str]:
        """Whether the pages are `expected`, every byte of them."""
        pairs = zip(flatten(self.pages)[0], flatten(expected)[0], strict=True)
        wrong = sum(int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in pairs)
        return [f"{wrong} bytes of paged memory are not what the load should leave"] if wrong else []


def flip_sign_of_greatest(row: torch.Tensor) -> None:
    """Flip the highest bit of the element that is greatest in magnitude, in place; flipping again undoes it.

    row: contiguous, on a little-endian host. One byte changes.
    """
    index = int(row.abs().argmax())
    row.view(torch.uint8)[(index + 1) * row.element_size() - 1] ^= 0x80
