"""The tables the kernels read: field by field the structs of the headers, the widest vector, found once for each cache."""

from __future__ import annotations

import ctypes
import gc
import re

import pytest
import torch
from strided import FORMATS, GEOMETRIES, Case, Request, Sizes, World

from lmcache_fast import descriptors
from lmcache_fast.descriptors import Move, PlaneTables, Rotation, chunk_table, plane_table, vector_bytes
from lmcache_fast.environment import source_folder
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan

SIZES = Sizes(3, 2, 7, 4, 2, 8)


def fields_of(header: str, struct: str) -> list[str]:
    """The fields of a struct in csrc, every one of eight bytes."""
    text = re.sub(r"//.*", "", (source_folder() / header).read_text())
    body = re.search(rf"struct {struct} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    declarations = [line.strip() for line in body[1].split(";") if line.strip()]
    fields = [re.fullmatch(r"(?:const )?(?:i64|u64|Plane|Chunk)\*? (\w+)", line) for line in declarations]
    assert all(fields), declarations
    return [field[1] for field in fields if field]


@pytest.mark.parametrize(("header", "struct"), [("address.h", Move), ("rotate.h", Rotation)])
def test_structs_are_those_of_the_headers(header, struct):
    assert fields_of(header, struct.__name__) == [name for name, _ in struct._fields_]


def test_table_rows_are_those_of_the_header():
    assert len(fields_of("address.h", "Plane")) == descriptors.WORDS_PER_PLANE
    assert fields_of("address.h", "Chunk") == [
        "address",
        "kv_stride_bytes",
        "layer_stride_bytes",
        "token_stride_bytes",
        "first_token",
        "num_tokens",
        "first_tile",
    ]


def test_the_batch_is_that_of_the_header():
    text = (source_folder() / "batch.h").read_text()
    assert f"kChunksInBatch = {descriptors.CHUNKS_IN_BATCH}, kSlotsInBatch = {descriptors.SLOTS_IN_BATCH} " in text
    words = len(Move._fields_) + descriptors.CHUNKS_IN_BATCH * descriptors.WORDS_PER_CHUNK
    assert ctypes.sizeof(descriptors.Batch) == 8 * (words + descriptors.SLOTS_IN_BATCH) <= 4096
    assert 8 * (words + descriptors.CHUNKS_IN_BATCH * descriptors.WORDS_PER_CHUNK) <= 4096  # of keep, with its homes


def test_chunk_rows():
    """Three chunks of a request, a prefix that ends inside the second, one token to a tile of two left over."""
    request = Request(tuple(range(12)), ((0, 2), (3, 8), (8, 12)), skip=5)
    world = World(Case(SIZES, torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], request), gathers=True)
    found = chunk_table(world.plan(), tile_tokens=2)
    row_bytes = SIZES.D * 2
    assert found.words.tolist() == [
        *(world.chunks[1].data_ptr() + 2 * row_bytes, 15 * row_bytes, 5 * row_bytes, row_bytes, 5, 3, 0),
        *(world.chunks[2].data_ptr(), 12 * row_bytes, 4 * row_bytes, row_bytes, 8, 4, 2),
    ]
    assert (found.num_chunks, found.num_tiles) == (2, 4)


def test_heads_together_are_one_piece_and_apart_many():
    for geometry, pieces in (("nhd", 1), ("kv_in_block", 1), ("padded_slots", 1), ("hnd", 2), ("unlike_layers", 2)):
        world = World(Case(SIZES, torch.bfloat16, GEOMETRIES[geometry], FORMATS["KV_2LTD"], Request((), ())), True)
        table = plane_table(world.cache.planes)
        assert (table.pieces_per_token, table.piece_bytes) == (pieces, SIZES.D * 2 // pieces), geometry


@pytest.mark.parametrize(
    ("HS", "dtype", "geometry", "chunk_pad", "width_bytes"),
    [
        (8, torch.bfloat16, "nhd", 0, 16),
        (64, torch.uint8, "nhd", 0, 16),
        (12, torch.bfloat16, "nhd", 0, 8),
        (8, torch.bfloat16, "nhd", 4, 8),
        (6, torch.float32, "hnd", 0, 8),
        (8, torch.bfloat16, "padded_heads", 0, 8),
        (46, torch.bfloat16, "nhd", 0, 4),
        (3, torch.float64, "off_by_one", 0, 8),
        (8, torch.bfloat16, "off_by_one", 0, 2),
        (8, torch.bfloat16, "nhd", 3, 2),
        (33, torch.uint8, "nhd", 0, 1),
        (64, torch.uint8, "off_by_one", 0, 1),
    ],
)
def test_the_widest_vector_of_a_batch(HS, dtype, geometry, chunk_pad, width_bytes):
    sizes = Sizes(3, 2, 7, 4, 1, HS)
    request = Request(tuple(range(8)), ((0, 4), (4, 8)))
    world = World(Case(sizes, dtype, GEOMETRIES[geometry], FORMATS["KV_2LTD"], request, chunk_pad), gathers=True)
    plan = world.plan()
    for memory in (world.cache_memory, world.chunk_memory):
        assert memory.data_ptr() % 16 == 0
    assert vector_bytes(plane_table(plan.planes), chunk_table(plan, 16)) == width_bytes


def test_strides_of_axes_of_length_one_do_not_count():
    memory = torch.zeros(64, dtype=torch.bfloat16)
    plane = memory.as_strided((1, 1, 1, 8), (1, 3, 5, 1))
    chunk = memory.as_strided((1, 1, 1, 8), (7, 9, 11, 1), 16)
    plan = TransferPlan.build(PagedKVCache(((plane,),)), torch.tensor([0]), [chunk], fmt=MemoryFormat.KV_MLA_FMT)
    assert vector_bytes(plane_table(plan.planes), chunk_table(plan, 16)) == 16


# ------------------------------------------------------------------------------------------------ tables of a cache


def cache_and_plan(layers: list[int] | None) -> tuple[PagedKVCache, TransferPlan]:
    world = World(Case(SIZES, torch.bfloat16, GEOMETRIES["nhd"], FORMATS["KV_2LTD"], Request((), ())), True)
    chunks = [torch.empty(2, len(layers) if layers else SIZES.NL, 0, SIZES.D, dtype=torch.bfloat16)]
    plan = TransferPlan.build(
        world.cache, torch.empty(0, dtype=torch.int64), chunks, fmt=MemoryFormat.KV_2LTD, layers=layers
    )
    return world.cache, plan


@pytest.mark.parametrize("layers", [None, [0], [2], [1, 2], [2, 0], [2, 1, 0]])
def test_a_table_holds_the_layers_of_the_plan_from_the_offset_on(layers):
    tables = PlaneTables()
    _cache, plan = cache_and_plan(layers)
    table, first = tables.find(plan)
    found = table.words[first * 2 * 4 :][: len(plan.planes) * 2 * 4]
    assert found == plane_table(plan.planes).words
    assert tables.find(plan)[0] is table


def test_runs_of_layers_share_one_table(monkeypatch):
    tables = PlaneTables()
    cache, _ = cache_and_plan(None)
    built = []
    monkeypatch.setattr(descriptors, "plane_table", lambda planes: built.append(planes) or plane_table(planes))
    for layers in ([0], [1], [2], [1, 2], [0, 1, 2]):
        chunk = torch.empty(2, len(layers), 0, SIZES.D, dtype=torch.bfloat16)
        plan = TransferPlan.build(
            cache, torch.empty(0, dtype=torch.int64), [chunk], fmt=MemoryFormat.KV_2LTD, layers=layers
        )
        assert tables.find(plan)[1] == layers[0]
    assert built == [cache.planes]


def test_planes_that_are_not_the_caches_own_are_read_each_time():
    tables = PlaneTables()
    cache, plan = cache_and_plan(None)
    other = TransferPlan(cache, tuple(tuple(plane[:2] for plane in row) for row in plan.planes), (), plan.slots)
    assert tables.find(other)[0].words == plane_table(other.planes).words
    assert tables.find(other)[0] is not tables.find(other)[0]


def test_a_cache_that_is_gone_is_forgotten_and_its_id_proves_nothing():
    tables = PlaneTables()
    cache, plan = cache_and_plan(None)
    key = id(cache)
    table, _ = tables.find(plan)
    assert set(tables._known) == {key}
    _other, other_plan = cache_and_plan(None)
    tables._known[id(other_plan.cache)] = tables._known[key]  # as if the id had been used again
    assert tables.find(other_plan)[0].words == plane_table(other_plan.planes).words
    assert tables.find(other_plan)[0] is not table
    del cache, plan, _other, other_plan
    gc.collect()
    assert not tables._known
