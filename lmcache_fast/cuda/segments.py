"""Cuts chunks in host memory into segments of staging memory, and says which copies bring a piece there or back.

Whole numbers only: addresses, strides, bytes. No stream, no device and no layout is known here.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import NamedTuple

from lmcache_ref.plan import TransferPlan

ALIGN_BYTES = 256  # of a piece in its segment


class Home(NamedTuple):
    """The moved part of one chunk, `[TWO, NL, num_tokens, row]`, where its owner has it."""

    address: int
    kv_stride: int
    layer_stride: int
    token_stride: int
    first_token: int
    num_tokens: int


class Copy(NamedTuple):
    """`height` runs of `width` bytes, each side with its own distance from one to the next."""

    home_offset: int
    packed_offset: int
    width: int
    height: int
    home_pitch: int
    packed_pitch: int


class Packing(NamedTuple):
    """Strides of a piece without gaps, its axes in the order they have at home, and the copies in between."""

    kv_stride: int
    layer_stride: int
    token_stride: int
    num_bytes: int
    copies: tuple[Copy, ...]


class Piece(NamedTuple):
    """Some tokens of a chunk, packed at `offset` of their segment."""

    home: Home
    packing: Packing
    offset: int


class Segment(NamedTuple):
    """Pieces that share one launch and one place in the ring."""

    pieces: list[Piece]
    num_bytes: int


def homes_of(plan: TransferPlan) -> list[Home]:
    """The plan's chunks, each from its first token after the skipped prefix on; those without such a token are left out."""
    homes = []
    for span in plan.spans:
        chunk = span.chunk
        width = chunk.element_size()
        _, _, num_tokens, _, _ = chunk.shape
        kv_stride, layer_stride, token_stride, _, _ = chunk.stride()
        skipped = max(0, plan.skip_prefix_n_tokens - span.start)
        if skipped < num_tokens:
            strides = kv_stride * width, layer_stride * width, token_stride * width
            address = chunk.data_ptr() + skipped * strides[2]
            homes.append(Home(address, *strides, span.start + skipped, num_tokens - skipped))
    return homes


@lru_cache(maxsize=4096)
def packing(
    two: int, num_layers: int, num_tokens: int, row_bytes: int, kv_stride: int, layer_stride: int, token_stride: int
) -> Packing:
    """How `[two, num_layers, num_tokens]` rows of these strides are packed and copied, in as few copies as can be."""
    axes = [(kv_stride, two, 0), (layer_stride, num_layers, 1), (token_stride, num_tokens, 2)]
    strides = [0, 0, 0]
    runs: list[tuple[int, int, int]] = []  # (count, stride at home, packed stride), innermost first
    width = packed = row_bytes
    for stride, count, axis in sorted(axes):
        if count == 1:
            continue
        if not runs and stride == width:
            width *= count
        elif runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * count, *runs[-1][1:])
        else:
            runs.append((count, stride, packed))
        strides[axis] = packed
        packed *= count
    offsets = [(0, 0)]
    for count, stride, packed_stride in runs[1:]:
        offsets = [(h + i * stride, p + i * packed_stride) for i in range(count) for h, p in offsets]
    height, home_pitch, packed_pitch = runs[0] if runs else (1, width, width)
    copies = tuple(Copy(h, p, width, height, home_pitch, packed_pitch) for h, p in offsets)
    return Packing(strides[0], strides[1], strides[2], packed, copies)


def cut(homes: list[Home], two: int, num_layers: int, row_bytes: int, segment_bytes: int) -> list[Segment]:
    """Segments of at most `segment_bytes`. A chunk stays whole where it fits; else it is cut between tokens, evenly."""
    segments: list[Segment] = []
    pieces: list[Piece] = []
    filled = 0
    most_tokens = max(1, segment_bytes // (two * num_layers * row_bytes))
    for home in homes:
        parts = -(-home.num_tokens // most_tokens)
        step = -(-home.num_tokens // parts)
        for row in range(0, home.num_tokens, step):
            tokens = min(step, home.num_tokens - row)
            part = home
            if parts > 1:
                address = home.address + row * home.token_stride
                part = home._replace(address=address, first_token=home.first_token + row, num_tokens=tokens)
            packed = packing(two, num_layers, tokens, row_bytes, home.kv_stride, home.layer_stride, home.token_stride)
            if pieces and filled + packed.num_bytes > segment_bytes:
                segments.append(Segment(pieces, filled))
                pieces, filled = [], 0
            pieces.append(Piece(part, packed, filled))
            filled += -(-packed.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    if pieces:
        segments.append(Segment(pieces, filled))
    return segments


def staged_words(segment: Segment, address: int, tile_tokens: int, words: array[int]) -> int:
    """Append one struct Chunk a piece, where the pieces are packed from `address` on; returns their number of tiles."""
    first_tile = 0
    for home, packed, offset in segment.pieces:
        words.extend((address + offset, packed.kv_stride, packed.layer_stride, packed.token_stride))
        words.extend((home.first_token, home.num_tokens, first_tile))
        first_tile += -(-home.num_tokens // tile_tokens)
    return first_tile


def home_words(segment: Segment, addresses: list[int], tile_tokens: int, words: array[int]) -> None:
    """Append one struct Chunk a piece, where it is at home; `addresses` are what the device calls these places."""
    first_tile = 0
    for (home, _, _), address in zip(segment.pieces, addresses, strict=True):
        words.extend((address, home.kv_stride, home.layer_stride, home.token_stride))
        words.extend((home.first_token, home.num_tokens, first_tile))
        first_tile += -(-home.num_tokens // tile_tokens)
