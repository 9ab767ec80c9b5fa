"""V3 over layers that differ: cases 9 and 10 from the field, groups stated and found, errors before any group moves.

V3 over layers that are alike is a row of `test_connector_matrix.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

from deferred import deferred
from helpers import addressed, assert_same, untouched
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2, VLLMPagedMemGPUConnectorV3
from lmcache_ref.errors import ArgumentError, ChunkError, DtypeError, LayoutError, SlotRangeError
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat
from lmcache_ref.metadata import LMCacheMetadata


class Mixed:
    """An engine whose layers differ, under V3: `layers` are tensors of addresses, `rows(layer, slot)` what a slot holds."""

    def __init__(self, layers: list[torch.Tensor], kv_shape, use_mla=False, **options):
        self.layers = layers
        self.metadata = LMCacheMetadata("m", 1, 1, 0, 0, layers[0].dtype, kv_shape, use_mla=use_mla)
        self.connector = VLLMPagedMemGPUConnectorV3(self.metadata, **options)
        self.connector.initialize_kvcaches_ptr(kvcaches=layers)
        self.allocator = HostMemoryAllocator(1 << 16)
        self.allocator.pool.copy_(untouched(1 << 16, torch.uint8))

    def allocate(self, tokens: int):
        fmt = MemoryFormat.UNDEFINED
        return self.allocator.allocate(self.connector.get_shapes(tokens), self.metadata.get_dtypes(), fmt)


@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
def test_case_9_mla_beside_an_indexer(use_gpu):
    """Three layers of 576 bf16 beside three of 132 bytes, T = 5: an object of 3*5*(1152 + 132) bytes, byte-exact."""
    latent = [addressed(4 * 4 * 576, torch.bfloat16, 9216 * i).view(4, 4, 576) for i in range(3)]
    index = [addressed(4 * 4 * 132, torch.uint8, 2112 * i).view(4, 4, 132) for i in range(3)]
    engine = Mixed([*latent, *index], (3, 1, 256, 1, 576), use_mla=True, use_gpu=use_gpu, device="cpu")
    assert engine.connector.get_shapes(5) == [(1, 3, 5, 576), (1, 3, 5, 132)]
    obj, slots = engine.allocate(5), [6, 0, 15, 9, 2]
    assert obj.get_size() == 3 * 5 * (1152 + 132)
    engine.connector.from_gpu(obj, 0, 5, slot_mapping=torch.tensor(slots))
    assert obj.metadata.fmt is MemoryFormat.KV_MLA_FMT
    for group, layers in enumerate((latent, index)):
        wanted = torch.stack([layer.flatten(0, 1)[slots] for layer in layers])
        assert_same(obj.get_tensor(group).flatten(), wanted.flatten(), f"group {group}")

    other = [untouched(layer.numel(), layer.dtype).view(layer.shape) for layer in engine.layers]
    engine.connector.to_gpu(obj, 0, 5, kvcaches=other, slot_mapping=torch.tensor(slots), vllm_cached_tokens=2)
    for number, (to, source) in enumerate(zip(other, engine.layers, strict=True)):
        wanted = untouched(to.numel(), to.dtype).view(to.shape)
        wanted.view(torch.uint8).view(16, -1)[slots[2:]] = source.view(torch.uint8).view(16, -1)[slots[2:]]
        assert_same(to.flatten(), wanted.flatten(), f"layer {number}")


def heads_that_differ(**options) -> Mixed:
    """Layers 0 and 2 `[2, 4, 4, 2, 8]`, layers 1 and 3 `[2, 4, 8, 1, 8]`."""
    shapes = [(2, 4, 4, 2, 8), (2, 4, 8, 1, 8)] * 2
    layers = [addressed(512, torch.float16, 1000 * i).view(shape) for i, shape in enumerate(shapes)]
    return Mixed(layers, (4, 2, 256, 2, 8), **options)


@pytest.mark.parametrize("use_gpu", [False, True], ids=["direct", "staged"])
def test_case_10_heads_and_block_sizes_that_differ_with_slots_of_each_group(use_gpu):
    engine = heads_that_differ(use_gpu=use_gpu, device="cpu")
    assert engine.connector.get_shapes(3) == [(2, 2, 3, 16), (2, 2, 3, 8)]
    slots = [[9, 0, 15], [31, 2, 17]]
    obj = engine.allocate(3)
    engine.connector.from_gpu(obj, 0, 3, slot_mapping=[torch.tensor(of_group) for of_group in slots])
    for group in range(2):
        rows = [engine.layers[layer].flatten(1, 2)[:, slots[group]].flatten(2) for layer in (group, group + 2)]
        assert_same(obj.get_tensor(group).flatten(), torch.stack(rows, 1).flatten(), f"group {group}")
    for layer in engine.layers:
        layer.fill_(-1)
    engine.connector.to_gpu(obj, 0, 3, slot_mapping=[torch.tensor(of_group) for of_group in slots])
    for number, layer in enumerate(engine.layers):
        rows, group = layer.flatten(1, 2), number % 2
        assert_same(rows[:, slots[group]].flatten(), obj.get_tensor(group)[:, number // 2].flatten(), f"layer {number}")
        others = [slot for slot in range(rows.shape[1]) if slot not in slots[group]]
        assert bool((rows[:, others] == -1).all())


def test_case_10_v2_refuses_the_list_and_names_v3():
    connector = VLLMPagedMemGPUConnectorV2(16, 4)
    with pytest.raises(LayoutError, match=r"kv_caches\[1\] has shape .*VLLMPagedMemGPUConnectorV3"):
        connector.initialize_kvcaches_ptr(kvcaches=heads_that_differ().layers)


@pytest.mark.parametrize("direction", ["from_gpu", "to_gpu"])
def test_case_10_no_group_moves_before_the_slots_of_all_are_known_to_be_good(direction):
    engine = heads_that_differ()
    obj = engine.allocate(3)
    obj.metadata.fmt = MemoryFormat.KV_2LTD
    before = [layer.clone() for layer in engine.layers], obj.raw_tensor.clone()
    for slots in ([[9, 0, 15], [31, 2, 32]], [[9, 0, 16], [31, 2, 17]]):
        with pytest.raises(SlotRangeError):
            getattr(engine.connector, direction)(obj, 0, 3, slot_mapping=[torch.tensor(s) for s in slots])
    with pytest.raises(ArgumentError, match="slot_mapping is a list of 1, there are 2 layer groups"):
        getattr(engine.connector, direction)(obj, 0, 3, slot_mapping=[torch.tensor([1, 2, 3])])
    assert all(torch.equal(a, b) for a, b in zip(before[0], engine.layers, strict=True))
    assert torch.equal(before[1], obj.raw_tensor)


def test_groups_are_the_same_before_and_after_and_other_numbers_of_layers_are_refused():
    engine = heads_that_differ()
    shapes = engine.connector.get_shapes(7)
    obj = engine.allocate(3)
    engine.connector.from_gpu(obj, 0, 3, slot_mapping=torch.tensor([1, 2, 3]))
    assert engine.connector.get_shapes(7) == shapes
    with pytest.raises(LayoutError, match=r"2 tensors.*get_shapes"):
        engine.connector.get_shape(7)
    for layers in (engine.layers[:3], [*engine.layers, engine.layers[0].clone()]):
        with pytest.raises(LayoutError, match=f"kvcaches has {len(layers)} layers, expected 4"):
            engine.connector.from_gpu(obj, 0, 3, kvcaches=layers, slot_mapping=torch.tensor([1, 2, 3]))


# Groups stated in advance, and asked for


def manager(*groups):
    """A `kv_layer_groups_manager`: (layers, kv, NH, HS, BS, dtype) of each group."""
    return SimpleNamespace(
        kv_layer_groups=[
            SimpleNamespace(
                layer_indices=layers,
                shape_desc=SimpleNamespace(
                    kv_size=kv, nl=len(layers), nh=heads, hs=size, bs=block, element_size=dtype.itemsize
                ),
                dtype=dtype,
            )
            for layers, kv, heads, size, block, dtype in groups
        ]
    )


def test_groups_that_the_metadata_states_decide_what_a_shape_means():
    """Fused `[5, 4, 2, 16]` is NH = 4, BS = 2 or BS = 4, NH = 2: one layer of each kind, alike to look at."""
    layers = [addressed(640, torch.float16, 1000 * i).view(5, 4, 2, 16) for i in range(2)]
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float16, (2, 2, 4, 3, 8))
    with pytest.raises(LayoutError, match="NH is 4, expected 3"):
        VLLMPagedMemGPUConnectorV3(metadata).initialize_kvcaches_ptr(kvcaches=layers)
    four, two, slots = (4, 8, 2, torch.float16), (2, 8, 4, torch.float16), (5, 0, 7)
    for kinds in ((four, two), (two, four)):
        given = manager(*(([layer], 2, *kind) for layer, kind in enumerate(kinds)))
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float16, (2, 2, 4, 2, 8), kv_layer_groups_manager=given)
        connector = VLLMPagedMemGPUConnectorV3(metadata)
        assert connector.get_shapes(3) == [(2, 1, 3, kind[0] * 8) for kind in kinds]
        obj = HostMemoryAllocator(1 << 14).allocate(connector.get_shapes(3), metadata.get_dtypes())
        connector.from_gpu(obj, 0, 3, kvcaches=layers, slot_mapping=torch.tensor(slots))
        for number, kind in enumerate(kinds):
            layer = layers[number]
            fused = [layer[s // 2, :, s % 2] if kind is four else layer[s // 4, s % 4] for s in slots]
            wanted = rearrange(torch.stack(fused), "t nh (two hs) -> two t (nh hs)", two=2)
            assert_same(obj.get_tensor(number).flatten(), wanted.flatten(), f"group {number}")


def test_shapes_that_were_answered_before_the_groups_were_known_must_hold():
    engine = heads_that_differ()
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float16, (4, 2, 256, 2, 8))
    connector = VLLMPagedMemGPUConnectorV3(metadata)
    assert connector.get_shapes(3) == [(2, 4, 3, 16)]
    with pytest.raises(LayoutError, match="initialize_kvcaches_ptr"):
        connector.initialize_kvcaches_ptr(kvcaches=engine.layers)
    alike = [addressed(256, torch.float16).view(2, 4, 2, 2, 8).clone() for _ in range(4)]
    connector.initialize_kvcaches_ptr(kvcaches=alike)
    assert connector.get_shapes(3) == [(2, 4, 3, 16)] and connector.get_shape(3) == (2, 4, 3, 16)


# Wrong objects and failing backends


def test_wrong_objects_are_refused_before_anything_moves():
    engine = heads_that_differ()
    good, slots = engine.allocate(3), torch.tensor([1, 2, 3])
    shapes = engine.connector.get_shapes(3)
    other = torch.float32
    wrong = {
        "one tensor": (engine.allocator.allocate(shapes[0], torch.float16), ChunkError, r"memory_objs\[1\] has shapes"),
        "swapped": (engine.allocator.allocate(shapes[::-1], [torch.float16] * 2), ChunkError, "has shapes"),
        "longer": (engine.allocate(4), ChunkError, "3 tokens are"),
        "second dtype": (engine.allocator.allocate(shapes, [torch.float16, other]), DtypeError, "float32"),
        "nothing": (None, ChunkError, "no tensor"),
    }
    before = engine.allocator.pool.clone()
    for what, (obj, error, message) in wrong.items():
        with pytest.raises(error, match=message):
            engine.connector.batched_from_gpu([good, obj], [0, 0], [3, 3], slot_mapping=slots)
        assert_same(engine.allocator.pool, before, what)
    with pytest.raises(ChunkError, match="memory_objs must be a list of 2 objects"):
        engine.connector.batched_from_gpu([good], [0, 0], [3, 3], slot_mapping=slots)


@pytest.mark.parametrize("operation", ["batched_from_gpu", "batched_to_gpu"])
@pytest.mark.parametrize("late", [False, True], ids=["refused", "fails late"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_group_that_fails_leaves_none_under_way(operation, late, number):
    engine = heads_that_differ()
    obj = engine.allocate(3)
    obj.metadata.fmt = MemoryFormat.KV_2LTD
    with deferred(engine.allocator.pool) as backend:
        (backend.fail if late else backend.refuse)[number] = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            getattr(engine.connector, operation)([obj], [0], [3], slot_mapping=torch.tensor([1, 2, 3]))
        assert backend.unordered == []
        backend.run_stream()
    engine.connector.reap()
    assert obj.get_ref_count() == 1


def test_the_bytes_of_every_group_are_final_when_a_store_returns():
    engine = heads_that_differ()
    obj, slots = engine.allocate(3), [1, 6, 3]
    with deferred(engine.allocator.pool) as backend:
        engine.connector.from_gpu(obj, 0, 3, slot_mapping=torch.tensor(slots))
        assert backend.count("gather") == 2 and obj.get_ref_count() == 1
        for group in range(2):
            rows = [engine.layers[layer].flatten(1, 2)[:, slots].flatten(2) for layer in (group, group + 2)]
            assert_same(obj.get_tensor(group).flatten(), torch.stack(rows, 1).flatten(), f"group {group}")


def test_a_hint_that_contradicts_the_metadata_is_refused():
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (2, 2, 16, 2, 8))
    connector = VLLMPagedMemGPUConnectorV3(metadata, layout_hints={"num_kv_heads": 4})
    with pytest.raises(LayoutError, match=r"'num_kv_heads'\] is 4, the connector was given 2"):
        connector.initialize_kvcaches_ptr(kvcaches=[torch.zeros(2, 3, 4, 2, 8) for _ in range(2)])
