"""Up to how many bytes a call is faster when kernels reach host memory themselves than through staging and copy engines.

That depends on the GPU, the link and the host, so it is measured: once for a machine, when its backend is loaded, and kept in
the cache folder. `LMCACHE_FAST_ZERO_COPY_BYTES` overrides it. Which way a call takes then is `steps.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan

from ..environment import cache_folder
from . import native
from .compile import SOURCES, source_text

OPERATIONS = ("gather", "scatter")
SIZES = tuple(1 << power for power in range(16, 26))  # bytes of a call: 64 KiB to 32 MiB
ROW_BYTES, BLOCK_SIZE, NUM_LAYERS = 1024, 16, 4
REPEATS = 15
NOISE = 1.1  # a loss by less may be chance
VERSION = 3  # of what is measured and how

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """zero_copy_bytes: for gather and scatter, the size up to which zero copy is no slower. microseconds: what was measured,
    operation -> bytes -> [staged, zero copy]."""

    zero_copy_bytes: dict[str, int]
    microseconds: dict[str, dict[str, list[float]]]


def calibrate(engine: Any) -> Calibration:
    """The calibration of an `Engine`'s device, which its lanes then follow: out of the cache folder, else measured and put
    there.

    Measuring takes some 200 ms of the idle device, and 32 MiB each of page-locked and of device memory; the host waits.
    """
    file = _file(engine.device.index)
    try:
        found = Calibration(**json.loads(file.read_text()))
        limits = [int(found.zero_copy_bytes[operation]) for operation in OPERATIONS]
    except (OSError, ValueError, TypeError, KeyError):
        found = _measure(engine)
        for lane in engine.lanes.values():
            lane.release()
        _keep(found, file)
        limits = [found.zero_copy_bytes[operation] for operation in OPERATIONS]
    for operation, limit in zip(OPERATIONS, limits, strict=True):
        engine.lanes[operation].zero_copy_bytes = limit
    return found


def _keep(found: Calibration, file: Path) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(found)))
        part.replace(file)
    except OSError as error:
        logger.warning("the calibration is not kept, and will be measured again: %s", error)


def largest_winner(times: dict[int, tuple[float, float]]) -> int:
    """The largest size at which zero copy is no slower than staging, and not clearly slower for any smaller one; else 0."""
    winner = 0
    for size in sorted(times):
        staged, zero_copy = times[size]
        if zero_copy > NOISE * staged:
            break
        if zero_copy <= staged:
            winner = size
    return winner


def _measure(engine: Any) -> Calibration:
    device = torch.device("cuda", engine.device.index)
    num_tokens = max(SIZES) // (2 * NUM_LAYERS * ROW_BYTES)
    shape = (NUM_LAYERS, 2, num_tokens // BLOCK_SIZE, BLOCK_SIZE, 1, ROW_BYTES)
    memory = torch.zeros(shape, dtype=torch.uint8, device=device)
    cache = PagedKVCache(tuple((layer[0], layer[1]) for layer in memory))
    home = torch.zeros(max(SIZES), dtype=torch.uint8, pin_memory=True)
    slots = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))
    limits, measured = {}, {}
    for operation in OPERATIONS:
        times = {}
        for size in SIZES:
            chunk = home[:size].view(2, NUM_LAYERS, -1, ROW_BYTES)
            plan = TransferPlan.build(cache, slots, [chunk], fmt=MemoryFormat.KV_2LTD)
            times[size] = _seconds(engine, operation, plan, 0, size)
        limits[operation] = largest_winner(times)
        measured[operation] = {str(size): [round(1e6 * seconds, 1) for seconds in ways] for size, ways in times.items()}
    return Calibration(limits, measured)


def _seconds(engine: Any, operation: str, plan: TransferPlan, *limits: int) -> Any:
    """Median seconds of a call, its end included, on an idle device, under each limit of zero copy; taken in turn."""
    taken: dict[int, list[float]] = {limit: [] for limit in limits}
    for _ in range(REPEATS + 1):
        for limit in limits:
            engine.lanes[operation].zero_copy_bytes = limit
            torch.cuda.synchronize(engine.device.index)
            started = time.perf_counter()
            engine.move(operation, plan).synchronize()
            taken[limit].append(time.perf_counter() - started)
    return tuple(statistics.median(seconds[1:]) for seconds in taken.values())


def _file(index: int) -> Path:
    """Changes with the device, the driver, the kernels, the steps of a call and what is measured."""
    from cupy.cuda import runtime

    properties = torch.cuda.get_device_properties(index)
    facts = [VERSION, SIZES, properties.name, properties.multi_processor_count, runtime.driverGetVersion()]
    facts += [torch.version.cuda, os.cpu_count(), *map(source_text, (*SOURCES, "steps.cpp"))]
    facts.append(native.load()[0] is not None)
    return cache_folder() / f"calibration-{hashlib.sha256(repr(facts).encode()).hexdigest()[:20]}.json"
