"""The specification of the move between paged memory and chunks. It runs as written, on any device torch has.

    gather  (engine -> chunk):  chunk[kv, layer][t]                          = planes[layer][kv][slot[t] // BS, slot[t] % BS]
    scatter (chunk -> engine):  planes[layer][kv][slot[t] // BS, slot[t] % BS] = chunk[kv, layer][t]

for every token t of every chunk, except tokens before the skipped prefix and tokens of negative slot. The rules:

1. Bytes, not numbers: no conversion; NaN payloads and -0.0 survive.             (DtypeError)
2. slot < 0: the token is skipped; its chunk row, or the cache, keeps what it had. (ContractViolation by a checker)
3. slot >= NB*BS is never followed.                                              (SlotRangeError)
4. One scatter writes a slot at most once.                                       (DuplicateSlotError)
5. Whatever is not named stays: other slots, padding, other layers, guard bytes. (ContractViolation by a checker)
6. Tokens before `skip_prefix_n_tokens` are not moved, nor are their slots looked at. (SkipPrefixError)
7. No token is no work; ragged, several, gapped chunks are ordinary.             (ChunkError when one is off the mapping)
8. Any strides a view can have, HS contiguous, nothing overlapping.              (StrideError)
9. Wrong input raises before anything is written.                                (ArgumentError, LayoutError, ...)

A scatter may carry a rotation: the keys (kv 0) that it moves are then re-rotated on the way, and nothing else differs.

What is checked lives in `plan.py`, how an engine's memory becomes planes in `discovery.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backends import get_backend
from .bits import word_views
from .errors import BackendError
from .kv_cache import PagedKVCache
from .memory import MemoryFormat, MemoryObj
from .plan import ChunkSpan, TransferPlan, check_slots, refuse_rotation
from .rerotation import Rerotation


class Transfer:
    """Handle of a transfer under way. This one is finished, as every transfer of the reference is."""

    def wait(self) -> None:
        """Make the current stream wait for the transfer; raise the errors already known. The host does not wait."""

    def synchronize(self) -> None:
        """Make the host wait for the transfer; raise what went wrong on the device."""

    def done(self) -> bool:
        """Whether the bytes have arrived."""
        return True


def gather(
    cache: PagedKVCache,
    slots: torch.Tensor,
    chunks: Sequence[torch.Tensor | MemoryObj],
    *,
    fmt: MemoryFormat,
    layers: Sequence[int] | int | None = None,
    starts: Sequence[int] | None = None,
    skip_prefix_n_tokens: int = 0,
) -> Transfer:
    """Engine to chunks, by the selected backend.

    cache: the paged memory. slots: int64 `[tokens of the request]`, any device; other integer types are widened.
    chunks: tensors or memory objects shaped as `fmt` says, where NL is `len(layers)`; **written**, except rows of
    skipped tokens. layers: which layers (default all); a one-layer format needs exactly one.
    starts: `starts[i]` is the request's token in row 0 of chunk i (default: one chunk after the other).
    skip_prefix_n_tokens: tokens of the request below it are not moved.

    Sees everything the current stream wrote before the call. Raises by the rules above, before anything is written
    (slot values on a GPU: at `wait` or `synchronize`). Until the handle is done a chunk is the transfer's, rows of skipped
    tokens included: a backend may read them and write them back.
    """
    plan = TransferPlan.build(
        cache, slots, chunks, fmt=fmt, layers=layers, starts=starts, skip_prefix_n_tokens=skip_prefix_n_tokens
    )
    return get_backend(device=cache.device).gather(plan)


def scatter(
    cache: PagedKVCache,
    slots: torch.Tensor,
    chunks: Sequence[torch.Tensor | MemoryObj],
    *,
    fmt: MemoryFormat,
    layers: Sequence[int] | int | None = None,
    starts: Sequence[int] | None = None,
    skip_prefix_n_tokens: int = 0,
    rotation: Rerotation | None = None,
) -> Transfer:
    """Chunks to engine, by the selected backend; arguments as in `gather`. The cache's slots are **written**.

    rotation: re-rotate the keys that move on the way; the bits are those of a scatter and then `rope.rerotate` on the moved
    keys in place. Positions on a device make the host wait. BackendError when the backend's scatter knows no rotation.
    Later work on the current stream sees the slots once `wait` was called on the handle.
    """
    plan = TransferPlan.build(
        cache,
        slots,
        chunks,
        fmt=fmt,
        layers=layers,
        starts=starts,
        skip_prefix_n_tokens=skip_prefix_n_tokens,
        rotation=rotation,
    )
    backend = get_backend(device=cache.device)
    if rotation is not None and not backend.rotates:
        raise BackendError(
            f"backend {backend.name!r} does not re-rotate keys while it scatters (registered without rotates=True); "
            f"scatter without a rotation, then call its rerotate on the keys"
        )
    return backend.scatter(plan)


# -------------------------------------------------------------------------------------- the reference backend


@torch.inference_mode()
def reference_gather(plan: TransferPlan) -> Transfer:
    """Engine to chunks, as the rules say."""
    refuse_rotation(plan)
    check_slots(plan, duplicates=False)
    for span in plan.spans:
        token, block, offset = tokens_to_move(plan, span)
        for layer, planes in enumerate(plan.planes):
            for kv, plane in enumerate(planes):
                source, target = word_views(plane, span.chunk[kv, layer])
                target[token] = source[block, offset].to(target.device)
    return Transfer()


@torch.inference_mode()
def reference_scatter(plan: TransferPlan) -> Transfer:
    """Chunks to engine, as the rules say."""
    check_slots(plan, duplicates=True)
    for span in plan.spans:
        token, block, offset = tokens_to_move(plan, span)
        for layer, planes in enumerate(plan.planes):
            for kv, plane in enumerate(planes):
                rows = span.chunk[kv, layer]
                if plan.rotation is not None and kv == 0:
                    rows = rows.clone(memory_format=torch.contiguous_format)
                    plan.rotation.turn(rows, span.start)
                target, source = word_views(plane, rows)
                target[block, offset] = source[token].to(target.device)
    return Transfer()


def tokens_to_move(plan: TransferPlan, span: ChunkSpan) -> tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]:
    """The tokens that move: their rows in the chunk, and the block and the offset in it of each one's slot."""
    slot = plan.slots[span.start : span.end].cpu()
    moves = slot >= 0
    moves[: max(0, plan.skip_prefix_n_tokens - span.start)] = False
    token: torch.Tensor | slice = moves.nonzero().squeeze(1).to(span.chunk.device)
    if bool(moves.all()):
        token = slice(None)  # the same rows, without a copy of them
    block, offset = slot[moves] // plan.cache.block_size, slot[moves] % plan.cache.block_size
    return token, block.to(plan.cache.device), offset.to(plan.cache.device)
