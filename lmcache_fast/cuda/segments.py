"""Cuts chunks in host memory into segments of staging memory, and says which copies bring a segment there or back.

Whole numbers only: addresses, strides, bytes. No stream, no device and no layout is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..descriptors import CHUNKS_IN_BATCH, Part

ALIGN_BYTES = 256  # of a piece in its segment
LEAST_SEGMENT_BYTES = 4 << 20
SEGMENTS_PER_CALL = 2  # at least, beside a small one, where that leaves LEAST_SEGMENT_BYTES each: two stages overlap
LONGEST_PITCH_BYTES = (1 << 31) - 1  # of a copy in rows


@dataclass(slots=True)
class Copy:
    """`height` runs of `width` bytes, each side with its own distance from one to the next. seams: where in a single run one
    chunk ends and the next one begins."""

    home: int
    packed: int
    width: int
    height: int = 1
    home_pitch: int = 0
    packed_pitch: int = 0
    seams: list[int] = field(default_factory=list)

    def joins(self, home: int, packed: int, width: int) -> bool:
        """Whether this copy can move one more run of bytes; then it does."""
        if self.height > 1:
            follows = self.home + self.height * self.home_pitch, self.packed + self.height * self.packed_pitch
            if width != self.width or (home, packed) != follows:
                return False
            self.height += 1
            return True
        home_pitch, packed_pitch = home - self.home, packed - self.packed
        if home_pitch == self.width == packed_pitch:
            self.seams.append(self.width)
            self.width += width
            return True
        if self.seams or width != self.width or not width <= home_pitch <= LONGEST_PITCH_BYTES:
            return False
        self.height, self.home_pitch, self.packed_pitch = 2, home_pitch, packed_pitch
        return True


class Packing(NamedTuple):
    """Strides of a piece without gaps, its axes in the order they have at home; the copies in between, from the starts of
    both, as fields of `Copy`. aligned_bytes: to where the next piece may begin. is_run: one copy of one run of bytes.
    plane_bytes: of one plane where planes lie at home one after the other, in the order kv, layer, no gaps; else 0."""

    strides: tuple[int, int, int]
    num_bytes: int
    aligned_bytes: int
    plane_bytes: int
    is_run: bool
    copies: tuple[tuple[int, int, int, int, int, int], ...]


class Segment:
    """Parts of chunks that share one launch and one place in the ring, in some of the planes (numbered kv * NL + layer).

    parts: where they are at home. end: where the next one begins. rows: one struct Chunk a part, packed, addresses from the
    segment's start; num_tiles: of all. copies: between home (addresses) and the segment (from its start).
    """

    __slots__ = ("copies", "end", "first_plane", "num_bytes", "num_planes", "num_tiles", "parts", "rows")

    def __init__(self, first_plane: int, num_planes: int):
        self.first_plane, self.num_planes = first_plane, num_planes
        self.parts: list[Part] = []
        self.rows: list[int] = []
        self.copies: list[Copy] = []
        self.num_bytes = self.num_tiles = self.end = 0

    def add(self, part: Part, packed: Packing, tile_tokens: int) -> None:
        """Put a part behind the others. Parts that lie side by side on both sides are one copy, those of equal distance one
        copy in rows."""
        address, _, first_token, num_tokens = part
        offset = self.end
        self.parts.append(part)
        self.rows += (offset, *packed.strides, first_token, num_tokens, self.num_tiles)
        self.num_tiles += -(-num_tokens // tile_tokens)
        self.num_bytes = offset + packed.num_bytes
        self.end = offset + packed.aligned_bytes
        if packed.is_run:
            if not self.copies or not self.copies[-1].joins(address, offset, packed.num_bytes):
                self.copies.append(Copy(address, offset, packed.num_bytes))
            return
        for home, near, width, height, home_pitch, packed_pitch in packed.copies:
            home, near = home + address, near + offset
            if height > 1 or not self.copies or not self.copies[-1].joins(home, near, width):
                self.copies.append(Copy(home, near, width, height, home_pitch, packed_pitch))


@lru_cache(maxsize=4096)
def packing(
    two: int, num_layers: int, num_tokens: int, row_bytes: int, kv_stride: int, layer_stride: int, token_stride: int
) -> Packing:
    """How `[two, num_layers, num_tokens]` rows of these strides are packed and copied, in as few copies as can be."""
    axes = [(kv_stride, two, 0), (layer_stride, num_layers, 1), (token_stride, num_tokens, 2)]
    strides = [0, 0, 0]
    runs: list[tuple[int, int, int]] = []  # (count, stride at home, packed stride), innermost first
    width = packed = row_bytes
    order = []
    for stride, count, axis in sorted(axes):
        if count == 1:
            continue
        order.append(axis)
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
    copies = tuple((h, p, width, height, home_pitch, packed_pitch) for h, p in offsets)
    gapless = not runs and order == sorted(order, reverse=True)
    plane_bytes = num_tokens * row_bytes if gapless else 0
    aligned = -(-packed // ALIGN_BYTES) * ALIGN_BYTES
    return Packing((strides[0], strides[1], strides[2]), packed, aligned, plane_bytes, not runs, copies)


def segment_bytes(place_bytes: int, call_bytes: int, idle: bool) -> int:
    """How much to move at a stretch: small enough that stages overlap within a call, large enough to keep the link full.
    idle: no other call is under way, whose stages they could overlap with."""
    return min(place_bytes, max(LEAST_SEGMENT_BYTES, -(-call_bytes // SEGMENTS_PER_CALL))) if idle else place_bytes


def cut(
    parts: Sequence[Part],
    two: int,
    num_layers: int,
    row_bytes: int,
    segment_bytes: int,
    tile_tokens: int,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> Iterator[Segment]:
    """Segments of at most `segment_bytes`, as they are asked for. A chunk stays whole where it fits; else it is cut evenly,
    between planes where these are runs of memory, or between tokens; one token in all planes always fits.

    first_bytes, last_bytes: where chunks are small enough, or can be cut between planes, the first or the last segment is no
    larger; 0: it may be as large as the others.
    """
    num_planes = two * num_layers
    token_bytes = num_planes * row_bytes
    left = token_bytes * sum([part[3] for part in parts])  # from this part on
    most = min(first_bytes or segment_bytes, segment_bytes)
    segment = Segment(0, num_planes)
    known_strides, known_tokens = None, 0
    for part in parts:
        _, strides, _, num_tokens = part
        if num_tokens != known_tokens or strides != known_strides:  # most chunks of a call are alike
            known_strides, known_tokens = strides, num_tokens
            packed = packing(two, num_layers, num_tokens, row_bytes, *strides)
        ends = left <= last_bytes  # the last segment begins here
        last_bytes = 0 if ends else last_bytes
        at_end = last_bytes > 0 and left == num_tokens * token_bytes  # or within this part, where that can be
        left -= num_tokens * token_bytes
        edge_bytes = min(last_bytes, segment_bytes) if at_end else most
        cuts_planes = packed.num_bytes > edge_bytes and 0 < packed.plane_bytes <= edge_bytes
        full = segment.end + packed.num_bytes > most or len(segment.parts) == CHUNKS_IN_BATCH
        if segment.parts and (full or ends or cuts_planes):
            yield segment
            segment, most = Segment(0, num_planes), segment_bytes
        if cuts_planes:
            counts = _even_counts(
                num_planes, edge_bytes // packed.plane_bytes, segment_bytes // packed.plane_bytes, at_end
            )
            yield from _between_planes(part, packed, counts, tile_tokens)
            most = segment_bytes
        elif packed.num_bytes <= segment_bytes:
            segment.add(part, packed, tile_tokens)
        else:
            for piece in _between_tokens(part, segment_bytes // token_bytes):
                segment.add(piece, packing(two, num_layers, piece[3], row_bytes, *piece[1]), tile_tokens)
                yield segment
                segment, most = Segment(0, num_planes), segment_bytes
    if segment.parts:
        yield segment


def _between_planes(part: Part, packed: Packing, counts: Iterable[int], tile_tokens: int) -> Iterator[Segment]:
    """A segment for each count of planes."""
    address, _, first_token, num_tokens = part
    first = 0
    for count in counts:
        segment = Segment(first, count)
        before, segment.num_bytes = first * packed.plane_bytes, count * packed.plane_bytes
        segment.parts = [part]
        segment.rows = [-before, *packed.strides, first_token, num_tokens, 0]  # where plane 0 would be
        segment.num_tiles = -(-num_tokens // tile_tokens)
        segment.copies = [Copy(address + before, 0, segment.num_bytes)]
        yield segment
        first += count


def _between_tokens(part: Part, most_tokens: int) -> Iterator[Part]:
    address, strides, first_token, num_tokens = part
    step = _even(num_tokens, most_tokens)
    for row in range(0, num_tokens, step):
        yield address + row * strides[2], strides, first_token + row, min(step, num_tokens - row)


def _even_counts(total: int, edge: int, most: int, at_end: bool) -> list[int]:
    """The sizes of parts of at most `most`, even but for the first or the last one where `edge` is smaller."""
    small = [edge] if edge < most else []
    rest = total - sum(small)
    step = _even(rest, most)
    evens = [min(step, rest - done) for done in range(0, rest, step)]
    return evens + small if at_end else small + evens


def _even(total: int, most: int) -> int:
    """The size of parts, none larger than `most` (or 1), that are as few and as even as can be."""
    parts = -(-total // max(1, most))
    return -(-total // parts)
