"""From a checked plan to what the kernels read: tables of addresses and byte strides, and the widest vector they allow.

The structs mirror csrc/address.h, batch.h and rotate.h field by field. No layout has a name here, and nothing is moved.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_ref.discovery import Planes
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.plan import WORDS_PER_SPAN, TransferPlan

WIDEST_VECTOR_BYTES = 16
WORDS_PER_PLANE = 4
WORDS_PER_CHUNK = 7
CHUNKS_IN_BATCH = 32  # kChunksInBatch of csrc/batch.h
SLOTS_IN_BATCH = 256  # kSlotsInBatch

Part = tuple[int, tuple[int, int, int], int, int]  # of a chunk, as `moved_parts` yields them


def struct_of_words(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of fields of eight bytes each."""
    return type(name, (ctypes.Structure,), {"_fields_": [(field, ctypes.c_int64) for field in fields.split()]})


Move = struct_of_words(
    "Move",
    "planes chunks ids bad_token num_chunks num_tiles num_layers kv_size num_ids tokens_per_id block_size block_shift "
    "pieces_per_token piece_bytes tile_tokens first_plane num_planes planes_alike planes_per_unit base_address",
)


class Batch(ctypes.Structure):
    """A move and, where `move.chunks` is 0, its chunks: up to CHUNKS_IN_BATCH rows of WORDS_PER_CHUNK; where `move.ids` is 0,
    up to SLOTS_IN_BATCH slots. This is the struct BatchAndSlots; kernels that take a Batch take what is before the slots."""

    _fields_ = [
        ("move", Move),
        ("chunks", ctypes.c_int64 * (CHUNKS_IN_BATCH * WORDS_PER_CHUNK)),
        ("slots", ctypes.c_int64 * SLOTS_IN_BATCH),
    ]


class Homes(ctypes.Structure):
    """Where the chunks of a batch are at home: rows of WORDS_PER_CHUNK."""

    _fields_ = [("chunks", ctypes.c_int64 * (CHUNKS_IN_BATCH * WORDS_PER_CHUNK))]


Rotation = struct_of_words(
    "Rotation",
    "keys_address token_stride_bytes head_stride_bytes dim_stride_bytes old_positions new_positions table_address "
    "table_row_stride_bytes max_position num_tokens num_heads num_pairs pair_stride_dims partner_stride_dims bad_token",
)


@dataclass
class PlaneTable:
    """The planes of some layers.

    words: `[NL, TWO, WORDS_PER_PLANE]`, each plane's address, then block, slot and head stride in bytes.
    granule_bytes: the greatest number that divides all of these and the piece.
    alike: whether all have the same strides.
    pieces_per_token: 1 where the heads of a slot are contiguous in every plane, else NH; a piece is `piece_bytes` long.
    moves: what `whole_move` has made of it for so many layers and tokens a tile. resident: what the backend `cuda` keeps of
    it on its device.
    """

    words: array[int]
    granule_bytes: int
    alike: bool
    pieces_per_token: int
    piece_bytes: int
    moves: dict[tuple[int, int], ctypes.Structure] = field(default_factory=dict, compare=False, repr=False)
    resident: Any = field(default=None, compare=False, repr=False)

    @property
    def token_bytes(self) -> int:
        """Of one token in one plane."""
        return self.pieces_per_token * self.piece_bytes


@dataclass(frozen=True)
class ChunkTable:
    """The moved part of every chunk that has one; `words` is `[num_chunks, WORDS_PER_CHUNK]`, as in the struct Chunk."""

    words: array[int]
    granule_bytes: int
    num_tiles: int

    @property
    def num_chunks(self) -> int:
        return len(self.words) // WORDS_PER_CHUNK


def plane_table(planes: Planes) -> PlaneTable:
    """The table of `planes[layer][kv]`, all of one shape and dtype."""
    first = planes[0][0]
    element_bytes = first.element_size()
    num_heads, head_bytes = first.shape[2], first.shape[3] * element_bytes
    words = array("q")
    contiguous_heads, kinds = True, set()
    for row in planes:
        for plane in row:
            strides = [
                stride * element_bytes if size > 1 else 0
                for stride, size in zip(plane.stride()[:3], plane.shape[:3], strict=True)
            ]
            contiguous_heads &= num_heads == 1 or strides[2] == head_bytes
            words.extend((plane.data_ptr(), *strides))
            kinds.add(tuple(strides))
    pieces = 1 if contiguous_heads else num_heads
    piece_bytes = num_heads * head_bytes // pieces
    return PlaneTable(words, math.gcd(piece_bytes, *words), len(kinds) <= 1, pieces, piece_bytes)


class PlaneTables:
    """The tables of the caches seen so far, each built once and forgotten with its cache."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[PagedKVCache], dict[int, int], dict[tuple[int, ...], PlaneTable]]] = {}

    def find(self, plan: TransferPlan) -> tuple[PlaneTable, int]:
        """A table and the layer in it that is `plan.planes[0]`; the plan's other layers follow."""
        layer_of_row, tables = self._of_cache(plan.cache)
        if plan.planes is plan.cache.planes and () in tables:
            return tables[()], 0
        layers = tuple(layer_of_row.get(id(row), -1) for row in plan.planes)
        if -1 in layers:  # planes that are not the cache's own rows
            return plane_table(plan.planes), 0
        first = layers[0]
        if layers == tuple(range(first, first + len(layers))):
            layers, offset = (), first  # a run of layers: part of the table of all
        else:
            offset = 0
        if layers not in tables:
            tables[layers] = plane_table(plan.planes if layers else plan.cache.planes)
        return tables[layers], offset

    def _of_cache(self, cache: PagedKVCache) -> tuple[dict[int, int], dict[tuple[int, ...], PlaneTable]]:
        key = id(cache)
        known = self._known.get(key)
        if known is None or known[0]() is not cache:
            layer_of_row = {id(row): layer for layer, row in enumerate(cache.planes)}
            reference = weakref.ref(cache, lambda gone: self._forget(key, gone))
            known = self._known[key] = (reference, layer_of_row, {})
        return known[1], known[2]

    def _forget(self, key: int, gone: weakref.ref[PagedKVCache]) -> None:
        """Drop a dead cache's tables, unless another cache has taken its id since."""
        known = self._known.get(key)
        if known is not None and known[0] is gone:
            self._known.pop(key, None)


def chunk_table(plan: TransferPlan, tile_tokens: int) -> ChunkTable:
    """The plan's chunks, each from its first token after the skipped prefix on; those without such a token are left out."""
    parts = list(moved_parts(plan))
    words, num_tiles = chunk_rows(parts, tile_tokens)
    return ChunkTable(array("q", words), granule_bytes(parts), num_tiles)


def chunk_rows(parts: Iterable[Part], tile_tokens: int) -> tuple[list[int], int]:
    """One struct Chunk a part, as words; and the number of their tiles."""
    words: list[int] = []
    first_tile = 0
    for address, strides, first_token, num_tokens in parts:
        words += (address, *strides, first_token, num_tokens, first_tile)
        first_tile += -(-num_tokens // tile_tokens)
    return words, first_tile


def granule_bytes(parts: Iterable[Part]) -> int:
    """The greatest number that divides every address and stride of the parts; 0 when there is none."""
    return math.gcd(*(number for address, strides, _, _ in parts for number in (address, *strides)))


def moved_parts(plan: TransferPlan) -> Iterator[Part]:
    """Of each chunk with a token after the skipped prefix: address of that token's row, strides in bytes (kv, layer,
    token), the token, and how many there are from it on."""
    words, skip = plan.span_words, plan.skip_prefix_n_tokens
    for i in range(0, len(words), WORDS_PER_SPAN):
        address, kv, layer, token, start, end = words[i : i + WORDS_PER_SPAN]
        first_token = start if start > skip else skip
        if first_token < end:
            yield address + (first_token - start) * token, (kv, layer, token), first_token, end - first_token


def vector_bytes(planes: PlaneTable, chunks: ChunkTable) -> int:
    """The widest vector that every address, stride and piece of a batch allows: 16, 8, 4, 2 or 1 bytes."""
    return math.gcd(WIDEST_VECTOR_BYTES, planes.granule_bytes, chunks.granule_bytes)


def describe_move(
    plan: TransferPlan, ids: torch.Tensor, planes: PlaneTable, first_layer: int, chunks: ChunkTable, tile_tokens: int
) -> ctypes.Structure:
    """The struct Move of a batch whose tables lie on the host, slots as ids. It holds addresses: keep the tables and
    `ids` (int64, contiguous) alive as long as it is used."""
    skipped_bytes = first_layer * plan.cache.kv_size * WORDS_PER_PLANE * planes.words.itemsize
    move = whole_move(plan, planes, tile_tokens)
    move.planes = planes.words.buffer_info()[0] + skipped_bytes
    move.chunks, move.num_chunks, move.num_tiles = chunks.words.buffer_info()[0], chunks.num_chunks, chunks.num_tiles
    move.ids = ids.data_ptr()
    return move


def whole_move(plan: TransferPlan, planes: PlaneTable, tile_tokens: int) -> ctypes.Structure:
    """The struct Move of a batch in all planes of a plan, slots as ids; addresses and the numbers of chunks are left 0."""
    known = planes.moves.get((len(plan.planes), tile_tokens))
    if known is None:
        known = planes.moves[len(plan.planes), tile_tokens] = _whole_move(plan, planes, tile_tokens)
    return Move.from_buffer_copy(known)


def _whole_move(plan: TransferPlan, planes: PlaneTable, tile_tokens: int) -> ctypes.Structure:
    cache, num_layers = plan.cache, len(plan.planes)
    block_size, kv_size = cache.block_size, cache.kv_size
    return Move(
        num_layers=num_layers,
        kv_size=kv_size,
        num_ids=cache.num_slots,
        tokens_per_id=1,
        block_size=block_size,
        block_shift=block_size.bit_length() - 1 if block_size.bit_count() == 1 else -1,
        pieces_per_token=planes.pieces_per_token,
        piece_bytes=planes.piece_bytes,
        tile_tokens=tile_tokens,
        num_planes=num_layers * kv_size,
        planes_alike=planes.alike,
        planes_per_unit=1,
    )


def describe_rotation_on_the_way(
    cache: PagedKVCache, old_address: int, new_address: int, table: torch.Tensor, is_neox: bool
) -> ctypes.Structure:
    """The struct Rotation of a scatter to `cache`: addresses of positions int64 `[tokens of the request]`, and a table
    `[max_position, rotary_dim]` with contiguous rows. Keep all of them alive as long as it is used."""
    element_bytes = cache.dtype.itemsize
    return Rotation(
        head_stride_bytes=cache.head_size * element_bytes,
        dim_stride_bytes=element_bytes,
        old_positions=old_address,
        new_positions=new_address,
        num_heads=cache.num_heads,
        **_table_and_pairing(table, is_neox),
    )


def describe_rotation(
    keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, table: torch.Tensor, is_neox: bool
) -> ctypes.Structure:
    """The struct Rotation of keys `[T, NH, HS]`, positions int64 `[T]` (contiguous) and a table
    `[max_position, rotary_dim]` with contiguous rows. It holds addresses: keep the tensors alive as long as it is used."""
    token_stride, head_stride, dim_stride = (stride * keys.element_size() for stride in keys.stride())
    return Rotation(
        keys_address=keys.data_ptr(),
        token_stride_bytes=token_stride,
        head_stride_bytes=head_stride,
        dim_stride_bytes=dim_stride,
        old_positions=old.data_ptr(),
        new_positions=new.data_ptr(),
        num_tokens=keys.shape[0],
        num_heads=keys.shape[1],
        **_table_and_pairing(table, is_neox),
    )


def _table_and_pairing(table: torch.Tensor, is_neox: bool) -> dict[str, int]:
    """The fields of the struct Rotation that say how keys are rotated."""
    max_position, rotary_dim = table.shape
    return {
        "table_address": table.data_ptr(),
        "table_row_stride_bytes": table.stride(0) * table.element_size(),
        "max_position": max_position,
        "num_pairs": rotary_dim // 2,
        "pair_stride_dims": 1 if is_neox else 2,
        "partner_stride_dims": rotary_dim // 2 if is_neox else 1,
    }
