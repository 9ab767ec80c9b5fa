"""`python -m lmcache_ref.bench.device`: store, load and both at once between a GPU and pinned host memory, as a table.

Every rate stands beside a ceiling measured in the same process, bits are checked before anything is timed, figures are
medians. 32 chunks of 256 tokens in random blocks. What moves the bytes is whichever backend is selected.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends import Operations, get_backend, requested_backend
from ..errors import ContractViolation
from ..memory import MemoryFormat, PinMemoryAllocator
from ..plan import TransferPlan
from .shapes import CHUNK_TOKENS, SHAPES, Shape, make_cache

NUM_CHUNKS = 32
TOKENS = NUM_CHUNKS * CHUNK_TOKENS
MATMULS = 100
VARIABLES = ("LMCACHE_BACKEND", "LMCACHE_FAST_STAGING_BYTES", "LMCACHE_FAST_ZERO_COPY_BYTES", "LMCACHE_VALIDATE")


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call and all that it set going; warmed up once."""
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def device_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds on the current stream, by events; the queue is kept busy first, so that the host is not measured."""
    taken = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken[1:])


def ceilings(host: torch.Tensor, repeats: int) -> dict[str, float]:
    """GB/s of plain copies: device to pinned host, host to device, both at once (sum), device to device (read + write)."""
    size = min(len(host) // 2, 1 << 30)
    ups, downs = host[:size], host[size : 2 * size]
    one, two = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def down() -> None:
        with torch.cuda.stream(streams[0]):
            downs.copy_(one, non_blocking=True)

    def up() -> None:
        with torch.cuda.stream(streams[1]):
            two.copy_(ups, non_blocking=True)

    def both() -> None:
        down()
        up()

    return {
        "d2h": size / seconds(down, repeats) / 1e9,
        "h2d": size / seconds(up, repeats) / 1e9,
        "both": 2 * size / seconds(both, repeats) / 1e9,
        "device": 2 * size / device_seconds(lambda: two.copy_(one), repeats) / 1e9,
    }


class Setting:
    """One shape in one memory order: a cache, chunks to store to, chunks to load from, and the plans."""

    def __init__(self, shape: Shape, order: str, block_size: int, host: torch.Tensor, slots_on: str):
        self.shape = shape
        self.num_bytes = shape.bytes_per_token * TOKENS
        num_blocks = 2 * TOKENS // block_size + 64
        self.cache, self.tensors = make_cache(shape, order, num_blocks, block_size, torch.device("cuda"), seed=0)
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        self.slots = [slots[:TOKENS].to(slots_on), slots[TOKENS : 2 * TOKENS].to(slots_on)]
        self.fmt = MemoryFormat.KV_MLA_FMT if shape.kv == 1 else MemoryFormat.KV_2LTD
        self.host = [self.chunks(host[i * self.num_bytes : (i + 1) * self.num_bytes]) for i in range(2)]
        self.near = self.chunks(torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda"))
        self.store, self.load = (self.plan(self.host[i], i) for i in range(2))
        self.near_plan = self.plan(self.near, 0)
        self.store_one, self.load_one = (self.plan(self.host[i][:1], i) for i in range(2))

    def chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        s = self.shape
        shape = (NUM_CHUNKS, s.kv, s.NL, CHUNK_TOKENS, s.NH * s.HS)
        return list(flat.view(s.dtype).view(shape))

    def plan(self, chunks: Sequence[torch.Tensor], which: int) -> TransferPlan:
        return TransferPlan.build(self.cache, self.slots[which], chunks, fmt=self.fmt)

    def check(self, backend: Operations) -> None:
        """The bits of a store, a load and both moves in device memory, by the reference's own gather."""
        reference = get_backend("reference", "cuda")
        reference.gather(self.near_plan)
        expected = [as_bytes(chunk).clone() for chunk in self.near]
        for plan, chunks in ((self.store, self.host[0]), (self.near_plan, self.near)):
            for chunk in chunks:
                as_bytes(chunk).fill_(0xEE)
            backend.gather(plan).synchronize()
            require(all(torch.equal(as_bytes(c).cuda(), e) for c, e in zip(chunks, expected, strict=True)), "gather")
        for source, chunks in ((self.host[1], self.host[1]), (self.near, self.near)):
            for chunk, rows in zip(chunks, expected, strict=True):
                as_bytes(chunk).copy_(rows.flip(-1))
            torch.cuda.synchronize()
            backend.scatter(self.plan(source, 1)).synchronize()
            check = self.chunks(torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda"))
            reference.gather(self.plan(check, 1))
            same = [torch.equal(as_bytes(c), e.flip(-1)) for c, e in zip(check, expected, strict=True)]
            require(all(same), "scatter")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def require(same: bool, operation: str) -> None:
    if not same:
        raise ContractViolation(f"bench: {operation} moves other bits than the reference")


def host_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds until a call returns, on an idle device."""
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        handle = call()
        taken.append(time.perf_counter() - started)
        handle.synchronize()
    return statistics.median(taken[1:])


def matmul_slowdown(backend: Operations, plan: TransferPlan, operation: str, alone: float, ab: Any) -> float:
    """How many times longer a loop of matmuls takes beside transfers that never pause."""
    side = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        handles = [getattr(backend, operation)(plan) for _ in range(2)]
    begin.record()
    for _ in range(MATMULS):
        torch.matmul(ab[0], ab[1], out=ab[2])
    end.record()
    while not end.query():
        if handles[0].done():
            handles.pop(0)
            with torch.cuda.stream(side):
                handles.append(getattr(backend, operation)(plan))
    for handle in handles:
        handle.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / alone


@dataclasses.dataclass
class Row:
    """Rates in GB/s, percents of the ceiling, microseconds."""

    name: str
    cells: dict[str, str]


def measure(setting: Setting, backend: Operations, top: dict[str, float], repeats: int, ab: Any, alone: float) -> Row:
    nbytes = setting.num_bytes
    cells: dict[str, str] = {}

    def rate(name: str, moved: float, taken: float, ceiling: str) -> None:
        cells[name] = f"{moved / taken / 1e9:.1f} {100 * moved / taken / 1e9 / top[ceiling]:.1f}%"

    def both() -> None:
        handles = [backend.gather(setting.store), backend.scatter(setting.load)]
        for handle in handles:
            handle.synchronize()

    rate("store", nbytes, seconds(lambda: backend.gather(setting.store).synchronize(), repeats), "d2h")
    rate("load", nbytes, seconds(lambda: backend.scatter(setting.load).synchronize(), repeats), "h2d")
    rate("both", 2 * nbytes, seconds(both, repeats), "both")
    rate("HBM gather", 2 * nbytes, device_seconds(lambda: backend.gather(setting.near_plan), repeats), "device")
    rate("HBM scatter", 2 * nbytes, device_seconds(lambda: backend.scatter(setting.near_plan), repeats), "device")
    store_us = 1e6 * host_seconds(lambda: backend.gather(setting.store), repeats) / NUM_CHUNKS
    load_us = 1e6 * host_seconds(lambda: backend.scatter(setting.load), repeats) / NUM_CHUNKS
    plan_us = 1e6 * seconds(lambda: setting.plan(setting.host[0], 0), repeats) / NUM_CHUNKS
    cells["host us/chunk store, load, plan"] = f"{store_us:.1f} {load_us:.1f} {plan_us:.1f}"
    one = nbytes / NUM_CHUNKS
    store_one = seconds(lambda: backend.gather(setting.store_one).synchronize(), 4 * repeats)
    load_one = seconds(lambda: backend.scatter(setting.load_one).synchronize(), 4 * repeats)
    extra = 1e6 * (store_one - one / top["d2h"] / 1e9), 1e6 * (load_one - one / top["h2d"] / 1e9)
    cells["one chunk: us over copy store, load"] = f"{extra[0]:.0f} {extra[1]:.0f}"
    if ab is not None:
        slow = [
            statistics.median(matmul_slowdown(backend, plan, operation, alone, ab) for _ in range(3))
            for plan, operation in ((setting.store, "gather"), (setting.load, "scatter"))
        ]
        cells["matmul beside store, load"] = f"x{slow[0]:.2f} x{slow[1]:.2f}"
    return Row(setting.shape.name, cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m lmcache_ref.bench.device", description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--orders", default="NHD,HND")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slots", default="cpu", choices=["cpu", "cuda"], help="where the slot mapping lives")
    parser.add_argument("--no-matmul", action="store_true")
    given = parser.parse_args(arguments)
    shapes = [SHAPES[name] for name in given.shapes.split(",")]
    backend = get_backend(device="cuda")
    allocator = PinMemoryAllocator(max(2 << 30, *(2 * shape.bytes_per_token * TOKENS for shape in shapes)))
    host = allocator.require_pool()
    top = ceilings(host, given.repeats)
    ab = alone = None
    if not given.no_matmul:
        ab = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        alone = device_seconds(lambda: [torch.matmul(ab[0], ab[1], out=ab[2]) for _ in range(MATMULS)], 3)
    environment = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; backend {backend.name} ({requested_backend()})")
    print(
        f"{environment or 'no LMCACHE_* variable'}; slots on {given.slots}; {NUM_CHUNKS} chunks of {CHUNK_TOKENS} tokens,"
    )
    print(f"block {given.block_size}; GB/s and % of the ceiling; medians of {given.repeats}")
    print("ceilings: " + ", ".join(f"{name} {value:.1f}" for name, value in top.items()))
    if alone is not None:
        print(f"{MATMULS} bf16 4096^3 matmuls alone: {1e3 * alone:.1f} ms")
    for shape in shapes:
        for order in ["-"] if shape.kv == 1 else given.orders.split(","):
            setting = Setting(shape, order, given.block_size, host, given.slots)
            setting.check(backend)
            row = measure(setting, backend, top, given.repeats, ab, alone or 0.0)
            print(f"{row.name} {order}")
            print("   " + " | ".join(f"{name}: {cell}" for name, cell in row.cells.items()), flush=True)
            del setting
            torch.cuda.empty_cache()
    allocator.close()


if __name__ == "__main__":
    main()
