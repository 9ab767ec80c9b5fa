"""Whether a mover moves the right bits: asked before anything is timed. Destinations are poisoned, pages compared whole.

What is right is what the reference moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends import get_backend
from ..errors import ContractViolation
from .movers import LayerwiseMover, Mover
from .settings import Job, Setting

CHUNK_POISON, PAGE_POISON = 0xEE, 0x5A


def check_move(setting: Setting, mover: Mover, operation: str, job: Job) -> None:
    """ContractViolation unless `mover` gathers into, or scatters from, the chunks of `job` what the reference does."""
    expected = setting.expected[: len(job.chunks)]
    if operation == "gather":
        _fill_pages(setting)
        _poison(job.chunks)
        mover.move("gather", job).synchronize()
        _require(_same(job.chunks, expected), "gather", mover.name)
        return
    for chunk, rows in zip(job.chunks, expected, strict=True):
        _bytes(chunk).copy_(_bytes(rows))
    _wipe_pages(setting)
    mover.move("scatter", job).synchronize()
    _require(_landed(setting, len(job.chunks), job.which), "scatter", mover.name)


def check_layerwise(setting: Setting, mover: LayerwiseMover, operation: str, name: str) -> None:
    """ContractViolation unless layer after layer does what `check_move` asks for."""
    layers, per_layer = [[obj.get_tensor(0) for obj in row] for row in setting.layers], _by_layer(setting)
    if operation == "gather":
        _fill_pages(setting)
        for tensors in layers:
            _poison(tensors)
        mover.move("gather")
        right = all(_same(tensors, rows) for tensors, rows in zip(layers, per_layer, strict=True))
    else:
        for tensors, rows in zip(layers, per_layer, strict=True):
            for tensor, row in zip(tensors, rows, strict=True):
                _bytes(tensor).copy_(_bytes(row))
        _wipe_pages(setting)
        mover.move("scatter")
        right = _landed(setting, len(setting.expected), setting.whole("scatter").which)
    _require(right, f"layerwise {operation}", name)


def _fill_pages(setting: Setting) -> None:
    """The first set of slots, which all stores are from, holds what is expected, by the reference."""
    for chunk, rows in zip(setting.near.chunks, setting.expected, strict=True):
        _bytes(chunk).copy_(_bytes(rows))
    get_backend("reference", setting.device).scatter(setting.near.plan)


def _landed(setting: Setting, count: int, which: int) -> bool:
    """Whether the first `count` chunks are in the slots of a set, and poison is in every other byte of the pages."""
    expected = setting.expected[:count]
    part = Job.build(setting.cache, setting.near.chunks[:count], setting.slots[which], which, near=True)
    _poison(part.chunks)
    get_backend("reference", setting.device).gather(part.plan)
    if not _same(part.chunks, expected):
        return False
    other_bytes = sum(_bytes(tensor).numel() for tensor in setting.tensors) - part.num_bytes
    return _count_poison(setting.tensors) == other_bytes + _count_poison(expected)


def _count_poison(tensors: Sequence[torch.Tensor]) -> int:
    return sum(int((_bytes(tensor) == PAGE_POISON).sum()) for tensor in tensors)


def _wipe_pages(setting: Setting) -> None:
    for tensor in setting.tensors:
        _bytes(tensor).fill_(PAGE_POISON)


def _by_layer(setting: Setting) -> list[list[torch.Tensor]]:
    """What is expected, `[layer][chunk]`, as a layerwise object holds it."""
    mla = setting.case.shape.kv == 1
    return [
        [(rows[0, layer] if mla else rows[:, layer].transpose(0, 1)).contiguous() for rows in setting.expected]
        for layer in range(setting.case.shape.NL)
    ]


def _poison(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        _bytes(tensor).fill_(CHUNK_POISON)


def _same(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    pairs = zip(tensors, expected, strict=True)
    return all(torch.equal(_bytes(tensor).to(rows.device), _bytes(rows)) for tensor, rows in pairs)


def _require(right: bool, operation: str, name: str) -> None:
    if not right:
        raise ContractViolation(f"{operation} of {name} moves other bits than the reference")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
