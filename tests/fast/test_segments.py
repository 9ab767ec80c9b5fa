"""How chunks are cut into segments and copied: each row once, at the place that the segment's table says, in few copies."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.cuda.segments import ALIGN_BYTES, Copy, Segment, cut, packing, segment_bytes
from lmcache_fast.descriptors import CHUNKS_IN_BATCH, WORDS_PER_CHUNK

ROW = 8
MiB = 1 << 20


def rows_of(segment: Segment) -> dict[int, int]:
    """Address in the segment -> address at home of each of its rows, by its table of chunks."""
    found = {}
    tables = [segment.rows[i : i + WORDS_PER_CHUNK] for i in range(0, len(segment.rows), WORDS_PER_CHUNK)]
    for (home, home_strides, first_token, num_tokens), table in zip(segment.parts, tables, strict=True):
        assert table[4:6] == [first_token, num_tokens]
        for number in range(segment.first_plane, segment.first_plane + segment.num_planes):
            for token in range(num_tokens):
                at = (*divmod(number, NUM_LAYERS), token)
                near = table[0] + sum(i * stride for i, stride in zip(at, table[1:4], strict=True))
                assert near not in found
                found[near] = home + sum(i * stride for i, stride in zip(at, home_strides, strict=True))
    return found


NUM_LAYERS = 3


@given(
    order=st.permutations(range(3)),
    gaps=st.tuples(*[st.integers(0, 2)] * 3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    apart=st.integers(0, 3),
    segment_rows=st.integers(6, 150),
    tile_tokens=st.integers(1, 4),
    first_rows=st.integers(0, 160),
    last_rows=st.integers(0, 160),
)
def test_each_row_is_copied_once_to_where_the_table_says(
    order, gaps, lengths, apart, segment_rows, tile_tokens, first_rows, last_rows
):
    """Chunks of any axis order, with and without gaps between rows, planes and chunks; segments of any size."""
    parts, address, token = [], 1000, 0
    for length in lengths:
        strides, size = [0, 0, 0], ROW
        for axis in order:
            count = (2, NUM_LAYERS, length)[axis]
            strides[axis] = size + gaps[axis] * ROW
            size = strides[axis] * count
        parts.append((address, tuple(strides), token, length))
        address += size + apart * ROW
        token += length
    segment_bytes = segment_rows * ROW
    seen = set()
    edges = first_rows * ROW, last_rows * ROW
    for segment in cut(parts, 2, NUM_LAYERS, ROW, segment_bytes, tile_tokens, *edges):
        expected = rows_of(segment)
        copied = {}
        for copy in segment.copies:
            for line, byte in itertools.product(range(copy.height), range(0, copy.width, ROW)):
                near = copy.packed + line * copy.packed_pitch + byte
                assert near not in copied
                copied[near] = copy.home + line * copy.home_pitch + byte
        assert copied == expected
        assert max(copied) + ROW <= segment.num_bytes <= segment_bytes
        assert segment.num_tiles == sum(-(-part[3] // tile_tokens) for part in segment.parts)
        assert not seen & set(copied.values())
        seen |= set(copied.values())
    assert len(seen) == sum(lengths) * 2 * NUM_LAYERS


def test_a_piece_is_as_few_copies_as_can_be():
    """Whole contiguous chunks are one run; a part of one is one copy of rows; token-major parts are one run."""
    row = 64
    whole = packing(2, 4, 16, row, 4 * 16 * row, 16 * row, row)
    assert whole.copies == ((0, 0, 8192, 1, 8192, 8192),) and whole.plane_bytes == 16 * row
    part = packing(2, 4, 5, row, 4 * 16 * row, 16 * row, row)
    assert part.copies == ((0, 0, 5 * row, 8, 16 * row, 5 * row),) and part.plane_bytes == 0
    token_major = packing(2, 1, 5, row, row, 0, 2 * row)
    assert token_major.copies == ((0, 0, 10 * row, 1, 10 * row, 10 * row),) and token_major.plane_bytes == 0
    padded = packing(2, 4, 5, row, 9999, 20 * row, row + 8)
    assert len(padded.copies) == 8 and {height for _, _, _, height, _, _ in padded.copies} == {5}
    assert padded.num_bytes == 2 * 4 * 5 * row


def test_segments_hold_whole_chunks_or_even_parts():
    whole = [(1000 * i, (0, 0, 16), 10 * i, 10) for i in range(5)]
    assert [len(segment.parts) for segment in cut(whole, 1, 1, 16, 512, 4)] == [2, 2, 1]
    assert [[part[3] for part in segment.parts] for segment in cut(whole[:1], 1, 1, 16, 70, 4)] == [[4], [4], [2]]
    layers = [(0, (0, 160, 16), 0, 10)]  # 5 layers, one after the other: cut between them
    planes = [(segment.first_plane, segment.num_planes) for segment in cut(layers, 1, 5, 16, 330, 4)]
    assert planes == [(0, 2), (2, 2), (4, 1)]
    planes = [s.num_planes for s in cut([*layers, (9000, (0, 160, 16), 10, 10)], 1, 5, 16, 800, 4, first_bytes=330)]
    assert planes == [2, 3, 5]
    planes = [s.num_planes for s in cut([(9000, (0, 160, 16), 0, 10), *layers], 1, 5, 16, 800, 4, last_bytes=330)]
    assert planes == [5, 3, 2]
    planes = [s.num_planes for s in cut([(9000, (0, 160, 16), 0, 10), *layers], 1, 5, 16, 330, 4, last_bytes=170)]
    assert planes == [2, 2, 1, 2, 2, 1]
    few = [(1000 * i, (0, 0, 16), i, 1) for i in range(5)]
    assert [len(segment.parts) for segment in cut(few, 1, 1, 16, MiB, 4, last_bytes=33)] == [3, 2]
    assert [len(segment.parts) for segment in cut(few, 1, 1, 16, MiB, 4, first_bytes=512)] == [2, 3]
    assert [len(segment.parts) for segment in cut(few, 1, 1, 16, MiB, 4, last_bytes=80)] == [5]
    assert [len(segment.parts) for segment in cut(few[:1], 1, 1, 16, MiB, 4, last_bytes=15)] == [1]
    small = [(64 * i, (0, 0, 16), i, 1) for i in range(2 * CHUNKS_IN_BATCH + 1)]
    assert [len(segment.parts) for segment in cut(small, 1, 1, 16, MiB, 4)] == [CHUNKS_IN_BATCH, CHUNKS_IN_BATCH, 1]


def test_neighbours_are_one_copy_and_equal_distances_one_copy_of_rows():
    """Chunks side by side at home, of a size that leaves no gap in staging, are one run with seams; apart they are rows."""
    size = ALIGN_BYTES
    together = [(5000 + size * i, (0, 0, 16), 16 * i, 16) for i in range(3)]
    (segment,) = cut(together, 1, 1, 16, MiB, 4)
    assert segment.copies == [Copy(5000, 0, 3 * size, seams=[size, 2 * size])]
    apart = [(5000 + 1000 * i, (0, 0, 16), 16 * i, 16) for i in range(3)]
    (segment,) = cut([*apart, (9000, (0, 0, 16), 48, 16)], 1, 1, 16, MiB, 4)
    assert segment.copies == [Copy(5000, 0, size, 3, 1000, size), Copy(9000, 3 * size, size)]
    pair = [(5000, (0, 0, 16), 0, 16), (5000 + size, (0, 0, 16), 16, 16), (5000 + 4 * size, (0, 0, 16), 32, 32)]
    (segment,) = cut(pair, 1, 1, 16, MiB, 4)  # rows have a seam before each or none: a pair is not the first of them
    assert segment.copies == [Copy(5000, 0, 2 * size, seams=[size]), Copy(5000 + 4 * size, 2 * size, 2 * size)]
    assert not Copy(9000, 0, size).joins(5000, size, size)  # backwards
    assert not Copy(0, 0, size).joins(1 << 31, size, size)  # too far
    assert not Copy(0, 0, size).joins(1000, size, 16)  # of another width


def test_segment_sizes():
    """Half of the call, so that its stages overlap; no less than 4 MiB, no more than a place; a place beside other calls."""
    assert segment_bytes(32 * MiB, 1 << 30, idle=True) == 32 * MiB
    assert segment_bytes(32 * MiB, 40 * MiB, idle=True) == 20 * MiB
    assert segment_bytes(32 * MiB, MiB, idle=True) == 4 * MiB
    assert segment_bytes(512, MiB, idle=True) == 512
    assert segment_bytes(32 * MiB, 40 * MiB, idle=False) == 32 * MiB
