"""Which bytes a kernel of csrc touches, row by row, said once more; then its own text is run. No test lives here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

from emulated import library
from spans import Spans

from lmcache_fast.cpu.backend import TYPE_NUMBERS
from lmcache_fast.cuda.device import TYPE_NAMES
from lmcache_fast.descriptors import (
    CHUNKS_IN_BATCH,
    SLOTS_IN_BATCH,
    WORDS_PER_CHUNK,
    WORDS_PER_PLANE,
    Batch,
    Homes,
    Rotation,
)

WORD = 8
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class Memory(Protocol):
    """What a kernel finds where it runs; see `simulated.SimulatedDevice`."""

    def require(self, begin: int, end: int) -> None: ...

    def words(self, address: int, count: int) -> list[int]: ...

    def may_read(self, spans: Spans) -> None: ...


def run_kernel(memory: Memory, kernel: str, batch: Batch, more: Homes | Rotation | None = None) -> tuple[Spans, Spans]:
    """Run it. Returns what it has read and written."""
    move, name = batch.move, kernel.split("_")[0]
    rotation = more if isinstance(more, Rotation) else None
    width = rotation.dim_stride_bytes if rotation else int(kernel.split("_")[1])
    reads = _tables(memory, batch)
    writes: Spans = []
    planes = memory.words(move.planes, move.num_layers * move.kv_size * WORDS_PER_PLANE)
    num_words = move.num_chunks * WORDS_PER_CHUNK
    chunks = memory.words(move.chunks, num_words) if move.chunks else batch.chunks[:num_words]
    homes = more.chunks if isinstance(more, Homes) else chunks
    for word in range(0, num_words, WORDS_PER_CHUNK):
        chunk, home = (table[word : word + WORDS_PER_CHUNK] for table in (chunks, homes))
        first, num_tokens = chunk[4:6]
        slots = _slots(memory, kernel, batch, first, num_tokens, reads)
        if rotation:
            assert move.first_plane + move.num_planes <= move.num_layers, "values would be rotated"
            reads += _rotation(memory, rotation, kernel, first, num_tokens)
        for token, slot in enumerate(slots):
            if slot >= move.num_ids and name != "keep":
                writes.append((move.bad_token, move.bad_token + WORD))
            if (0 <= slot < move.num_ids) == (name == "keep"):
                continue
            for page, row, at_home in _rows(batch, planes, chunk, home, token, slot):
                source, target = {"gather": (page, row), "scatter": (row, page), "keep": (at_home, row)}[name]
                for address in (source, target):
                    assert address % width == 0
                    memory.require(address, address + move.piece_bytes)
                reads.append((source, source + move.piece_bytes))
                writes.append((target, target + move.piece_bytes))
    _run_on_host(kernel, batch, more)
    return reads, writes


def _tables(memory: Memory, batch: Batch) -> Spans:
    """The tables of planes and, where they do not travel with the launch, of chunks; they may be read."""
    move = batch.move
    tables = [(move.planes, move.planes + move.num_layers * move.kv_size * WORDS_PER_PLANE * WORD)]
    if move.chunks:
        tables.append((move.chunks, move.chunks + move.num_chunks * WORDS_PER_CHUNK * WORD))
    else:
        assert move.num_chunks <= CHUNKS_IN_BATCH
    memory.may_read(tables)
    return tables


def _slots(memory: Memory, kernel: str, batch: Batch, first: int, num_tokens: int, reads: Spans) -> list[int]:
    """The slots of some tokens; where they stand in memory, that is added to `reads`."""
    move = batch.move
    if not move.ids:
        assert "keep" not in kernel and "rotated" not in kernel and first + num_tokens <= SLOTS_IN_BATCH
        return list(batch.slots[first : first + num_tokens])
    ids = (move.ids + first * WORD, move.ids + (first + num_tokens) * WORD)
    memory.may_read([ids])
    reads.append(ids)
    return memory.words(ids[0], num_tokens)


def _rows(
    batch: Batch, planes: list[int], chunk: list[int], home: list[int], token: int, slot: int
) -> Iterator[tuple[int, int, int]]:
    """Where the pieces of a token lie: in the pages, in the chunk, in the chunk at home."""
    move = batch.move
    block, offset = divmod(slot, move.block_size)
    for number in range(move.first_plane, move.first_plane + move.num_planes):
        kv, layer = divmod(number, move.num_layers)
        row, at_home = (c[0] + kv * c[1] + layer * c[2] + token * c[3] for c in (chunk, home))
        base = planes[(layer * move.kv_size + kv) * WORDS_PER_PLANE :][:WORDS_PER_PLANE]
        for piece in range(move.pieces_per_token):
            page, behind = base[0] + block * base[1] + offset * base[2] + piece * base[3], piece * move.piece_bytes
            yield page, move.base_address + row + behind, at_home + behind


def _rotation(memory: Memory, rotation: Rotation, kernel: str, first: int, num_tokens: int) -> Spans:
    """The positions of some tokens and their rows of the table."""
    row_bytes = 2 * rotation.num_pairs * TYPES[kernel.split("_")[3]].itemsize
    reads = [
        (positions + first * WORD, positions + (first + num_tokens) * WORD)
        for positions in (rotation.old_positions, rotation.new_positions)
    ]
    memory.may_read(reads)
    for begin, _ in list(reads):
        for position in filter(range(rotation.max_position).__contains__, memory.words(begin, num_tokens)):
            row = rotation.table_address + position * rotation.table_row_stride_bytes
            memory.require(row, row + row_bytes)
            reads.append((row, row + row_bytes))
    return reads


def _run_on_host(kernel: str, batch: Batch, more: Homes | Rotation | None) -> None:
    """gather, scatter or keep, with few threads."""
    counts = (ctypes.c_int64 * 3)()
    name, *words = kernel.split("_")
    launch = 2, 32, ctypes.addressof(counts)
    if name == "keep":
        library().launch_keep(ctypes.byref(batch), ctypes.byref(more), int(words[0]).bit_length() - 1, *launch)
    elif more is not None:
        types = (TYPE_NUMBERS[TYPES[word]] for word in words[1:])
        library().launch_scatter_rotated(ctypes.byref(batch), ctypes.byref(more), *types, *launch)
    else:
        library().launch_move(ctypes.byref(batch), int(name == "scatter"), int(words[0]).bit_length() - 1, *launch)
    assert counts[0] == counts[2] == 0, "vectors that are not aligned, or barriers that not all threads reach"
