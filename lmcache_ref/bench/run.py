"""`lmcache-ref bench`: every backend on every shape, beside a contiguous copy of the same bytes and beside upstream.

Bits are compared before anything is timed; all runners of a row are timed in turn in one process. On a CPU the chunks
are plain host memory; on a device they are on the device too, so that what is timed is gather and scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..backends import explain_backends, use_backend
from ..errors import ArgumentError, ContractViolation
from ..memory import MemoryFormat
from ..transfer import Transfer, gather, scatter
from .measure import PeakMemory, interleaved_medians, synchronize
from .peers import load_fallback, upstream_move
from .shapes import CHUNK_TOKENS, SHAPES, Shape, make_cache

UPSTREAM = "upstream"
COPY = "copy_"


@dataclass(frozen=True)
class BenchRow:
    """One runner on one shape. Rates are 10^9 bytes of the cache moved a second; extra is the peak of what it allocates."""

    shape: str
    order: str
    block_size: int
    tokens: int
    operation: str
    runner: str
    gb_per_second: float
    percent_of_copy: float
    ratio_to_upstream: float | None
    extra_mib: float


def run_bench(
    backends: Sequence[str] | None = None,
    upstream: str | Path | None = None,
    quick: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    device: str = "cpu",
    shapes: Sequence[str] | None = None,
    tokens: int = 4096,
    block_size: int = 16,
    repeats: int = 5,
) -> list[BenchRow]:
    """Measure; one row for each shape, memory order, operation and runner.

    backends: names (default: all that can run on `device`). upstream: folder with upstream's lmcache, timed on the
    layouts it has. quick: 1024 tokens, three repeats. Raises ContractViolation when a runner moves wrong bits,
    BackendError or ArgumentError for an unknown name.
    """
    if quick:
        tokens, repeats = min(tokens, 1024), 3
    unknown = set(shapes or ()) - set(SHAPES)
    if unknown:
        raise ArgumentError(f"shapes: {', '.join(sorted(unknown))} unknown; known: {', '.join(SHAPES)}")
    where = torch.device(device)
    names = list(backends or [backend.name for backend, why in explain_backends(where) if why is None])
    module = load_fallback(upstream) if upstream else None
    rows: list[BenchRow] = []
    for name in shapes or SHAPES:
        shape = SHAPES[name]
        for order in ["-"] if shape.kv == 1 else ["NHD", "HND", "fused"]:
            on_progress(f"{name} {order}")
            rows += _measure(shape, order, names, module, where, tokens, block_size, repeats)
    return rows


def _measure(
    shape: Shape,
    order: str,
    backends: Sequence[str],
    upstream: object | None,
    device: torch.device,
    tokens: int,
    block_size: int,
    repeats: int,
) -> list[BenchRow]:
    """All runners on one cache."""
    num_blocks = -(-tokens // block_size) * 5 // 4
    cache, tensors = make_cache(shape, order, num_blocks, block_size, device, seed=0)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randperm(num_blocks, generator=generator)[: -(-tokens // block_size)]
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:tokens]
    fmt = MemoryFormat.KV_MLA_FMT if shape.kv == 1 else MemoryFormat.KV_2LTD
    sizes = [min(CHUNK_TOKENS, tokens - start) for start in range(0, tokens, CHUNK_TOKENS)]
    chunks = [_chunk(shape, size, device) for size in sizes]

    def call(move: Callable[..., Transfer]) -> None:
        move(cache, slots, chunks, fmt=fmt).synchronize()

    movers = {name: _ours(name, call) for name in backends}
    peer = upstream_move(upstream, cache, tensors, slots, chunks) if upstream else None
    if peer is not None:
        movers[UPSTREAM] = peer
    _check_bits(_ours("reference", call), movers, chunks, tensors)

    nbytes = shape.bytes_per_token * tokens
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    rows = []
    for operation in ("gather", "scatter"):
        runs: dict[str, Callable[[], object]] = {COPY: functools.partial(target.copy_, source)}
        runs.update({name: functools.partial(move, operation) for name, move in movers.items()})
        seconds = interleaved_medians(runs, device, repeats)
        for name in runs:
            with PeakMemory() as memory:
                runs[name]()
            extra = memory.peak_bytes / 2**20
            ratio = seconds[UPSTREAM] / seconds[name] if UPSTREAM in seconds else None
            rows.append(
                BenchRow(
                    shape.name, order, block_size, tokens, operation, name, nbytes / seconds[name] / 1e9,
                    100 * seconds[COPY] / seconds[name], ratio, extra,
                )
            )  # fmt: skip
    return rows


def _ours(name: str, call: Callable[[Callable[..., Transfer]], object]) -> Callable[[str], None]:
    def move(operation: str) -> None:
        with use_backend(name):
            call(gather if operation == "gather" else scatter)

    return move


def _chunk(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.empty(shape.kv, shape.NL, tokens, shape.NH * shape.HS, dtype=shape.dtype, device=device)


def _check_bits(
    reference: Callable[[str], None],
    movers: dict[str, Callable[[str], None]],
    chunks: list[torch.Tensor],
    tensors: list[torch.Tensor],
) -> None:
    """Every runner gathers the bits the reference gathers, and scatters them into wiped pages to where they were."""
    original = [_bytes(tensor).clone() for tensor in tensors]
    expected = expected_pages = None
    for name, move in [("reference", reference), *movers.items()]:
        for chunk in chunks:
            _bytes(chunk).fill_(0xA5)
        move("gather")
        got = [_bytes(chunk).clone() for chunk in chunks]
        for tensor in tensors:
            _bytes(tensor).fill_(0x5A)
        move("scatter")
        synchronize(chunks[0].device)
        pages = [_bytes(tensor).clone() for tensor in tensors]
        for tensor, before in zip(tensors, original, strict=True):
            _bytes(tensor).copy_(before)
        expected, expected_pages = expected or got, expected_pages or pages
        for operation, ours, theirs in (("gather", got, expected), ("scatter", pages, expected_pages)):
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                raise ContractViolation(f"bench: {operation} of {name} moves other bits than the reference")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
