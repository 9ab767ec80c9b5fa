"""VLLMPagedMemGPUConnectorV2: construction, the memory of `kvcaches`, and what is refused before anything moves.

Batches, staging and streams are in `test_vllm_v2_moves.py`; layouts and cases in `test_cases_*.py`.
"""

from __future__ import annotations

import threading

import pytest
import torch

from helpers import assert_same, untouched, words
from lmcache_ref.backends import use_backend
from lmcache_ref.connectors import GPUConnectorInterface, VLLMPagedMemGPUConnectorV2
from lmcache_ref.errors import (
    ArgumentError,
    ChunkError,
    DuplicateSlotError,
    LayoutError,
    SkipPrefixError,
    SlotError,
    UseAfterFreeError,
)
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat
from lmcache_ref.metadata import LMCacheMetadata
from v2_bench import ENGINE, K2, SLOTS, connector, expected_object, half, memory

# Construction


def test_it_is_a_connector_and_says_what_it_was_given():
    made = VLLMPagedMemGPUConnectorV2(24, 2, True, chunk_size=8, dtype=torch.float16, device="cpu", use_mla=False)
    assert isinstance(made, GPUConnectorInterface)
    assert (made.hidden_dim_size, made.num_layers, made.use_gpu, made.chunk_size) == (24, 2, True, 8)
    assert (made.dtype, made.device, made.use_mla) == (torch.float16, torch.device("cpu"), False)


@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7, 256])
def test_get_shape(use_mla, tokens):
    made = VLLMPagedMemGPUConnectorV2(24, 2, use_mla=use_mla)
    assert made.get_shape(tokens) == torch.Size([1 if use_mla else 2, 2, tokens, 24])


@pytest.mark.parametrize("missing", ["chunk_size", "dtype", "device"])
def test_staging_needs_to_know_its_buffer(missing):
    options = {"chunk_size": 8, "dtype": torch.float16, "device": "cpu"}
    del options[missing]
    with pytest.raises(ValueError, match=f"use_gpu=True needs {missing}"):
        connector(use_gpu=True, **options)
    assert connector(use_gpu=False, **options).use_gpu is False


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 2), {}, ArgumentError, "hidden_dim_size must be a positive int, got 0"),
        ((24, -1), {}, ArgumentError, "num_layers must be a positive int, got -1"),
        ((24.0, 2), {}, ArgumentError, "hidden_dim_size must be a positive int, got 24.0"),
        ((24, True), {}, ArgumentError, "num_layers must be a positive int, got True"),
        ((24, 2), {"chunk_size": 0}, ArgumentError, "chunk_size must be a positive int, got 0"),
        ((24, 2), {"layout_hints": {"kv": 1}}, ArgumentError, "unknown layout hint 'kv'; known: kv_layout, "),
        ((24, 2), {"layout_hints": {"num_layers": 3}}, LayoutError, r"'num_layers'\] is 3, the connector was given 2"),
        (
            (24, 2),
            {"layout_hints": {"use_mla": True}},
            LayoutError,
            r"'use_mla'\] is True, the connector was given False",
        ),
        (
            (24, 2),
            {"dtype": torch.float16, "layout_hints": {"dtype": torch.bfloat16}},
            LayoutError,
            r"'dtype'\] is torch.bfloat16, the connector was given torch.float16",
        ),
    ],
)
def test_arguments_that_cannot_be(arguments, options, error, message):
    with pytest.raises(error, match=message):
        VLLMPagedMemGPUConnectorV2(*arguments, **options)


def metadata(kv_shape=(2, 2, 8, 3, 8), **changes) -> LMCacheMetadata:
    return LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, kv_shape, **changes)


def test_from_metadata():
    made = VLLMPagedMemGPUConnectorV2.from_metadata(metadata(), True, "cpu")
    assert (made.hidden_dim_size, made.num_layers, made.chunk_size, made.dtype) == (24, 2, 8, torch.float16)
    assert (made.use_gpu, made.device, made.use_mla) == (True, torch.device("cpu"), False)
    mla = VLLMPagedMemGPUConnectorV2.from_metadata(metadata((3, 1, 8, 1, 576), use_mla=True))
    assert mla.get_shape(5) == torch.Size([1, 3, 5, 576]) and not mla.use_gpu
    with pytest.raises(ValueError, match="use_gpu=True needs device"):
        VLLMPagedMemGPUConnectorV2.from_metadata(metadata(), use_gpu=True)
    with pytest.raises(LayoutError, match=r"'head_dim'\] is 4, the connector was given 8"):
        VLLMPagedMemGPUConnectorV2.from_metadata(metadata(), layout_hints={"head_dim": 4})


def test_from_metadata_tells_heads_from_tokens():
    """The sizes are passed on: NH alone tells fused HND from fused NHD."""
    flat = memory()
    shape = (5, 3, 4, 16)  # fused [NB, NH, BS, K|V]
    obj = half(1)
    made = VLLMPagedMemGPUConnectorV2.from_metadata(metadata())
    made.from_gpu(obj, 0, 1, kvcaches=list(flat.view(2, *shape)), slot_mapping=torch.tensor([6]))
    content = flat.view(2, *shape)[:, 1, :, 2]
    by_hand = torch.stack([content[..., :8].reshape(2, 24), content[..., 8:].reshape(2, 24)])
    assert_same(obj.tensor.reshape(-1), by_hand.reshape(-1), "the object")


# The memory of kvcaches


@pytest.mark.parametrize("name", ["from_gpu", "to_gpu"])
def test_kvcaches_and_slot_mapping_must_be_there(name):
    made, obj = connector(), half(2)
    move = getattr(made, name)
    with pytest.raises(ValueError, match="kvcaches is missing, and none was given before"):
        move(obj, 0, 2, slot_mapping=SLOTS)
    for given in ({}, {"slot_mapping": None}):
        with pytest.raises(ValueError, match="slot_mapping is missing"):
            move(obj, 0, 2, kvcaches=ENGINE.tensors(memory()), **given)
    assert_same(obj.raw_tensor, untouched(obj.get_size(), torch.uint8), "the object")


def store_all(made, **given) -> torch.Tensor:
    """The flat object that holds slots 5, 0 and 19 now."""
    obj = half(3)
    made.from_gpu(obj, 0, 3, slot_mapping=SLOTS, **given)
    return obj.tensor.reshape(-1)


def test_case_23_the_newest_caches_win_and_are_remembered():
    made = connector()
    made.initialize_kvcaches_ptr()  # nothing given: nothing happens
    one, two, three = memory(), memory(1000), memory(2000)
    made.initialize_kvcaches_ptr(kvcaches=ENGINE.tensors(one))
    assert_same(store_all(made), expected_object(one, [5, 0, 19]), "the first list")
    assert_same(
        store_all(made, kvcaches=ENGINE.tensors(two)), expected_object(two, [5, 0, 19]), "a list given to a call"
    )
    assert_same(store_all(made), expected_object(two, [5, 0, 19]), "and remembered")
    made.initialize_kvcaches_ptr(kvcaches=None)
    assert_same(store_all(made, kvcaches=None), expected_object(two, [5, 0, 19]), "None says nothing")
    by_name = dict(enumerate(ENGINE.tensors(three)))
    assert_same(store_all(made, kvcaches=by_name), expected_object(three, [5, 0, 19]), "a mapping")
    two.fill_(7)  # what was replaced is not read any more
    assert_same(store_all(made), expected_object(three, [5, 0, 19]), "the mapping, remembered")


def test_case_23_one_list_whose_tensors_were_replaced():
    """The same list object with another tensor in it, and the same tensor object with other memory."""
    made, one, two = connector(), memory(), memory(1000)
    kv = ENGINE.tensors(one.clone())
    store_all(made, kvcaches=kv)
    kv[:] = ENGINE.tensors(one)
    assert_same(store_all(made, kvcaches=kv), expected_object(one, [5, 0, 19]), "other tensors in the list")
    for tensor, other in zip(kv, ENGINE.tensors(two), strict=True):
        tensor.data = other
    assert_same(store_all(made, kvcaches=kv), expected_object(two, [5, 0, 19]), "other memory under the tensors")


def test_caches_that_are_refused_are_not_remembered():
    made, one = connector(), memory()
    store_all(made, kvcaches=ENGINE.tensors(one))
    for wrong in ([], ENGINE.tensors(one)[:1], [torch.zeros(2, 5, 4, 3, 7)] * 2):
        with pytest.raises(LayoutError):
            store_all(made, kvcaches=wrong)
    assert_same(store_all(made), expected_object(one, [5, 0, 19]), "the caches before")


def test_two_threads_with_their_own_caches_do_not_mix_them():
    """One connector, one thread stores and another loads, each with its own list each time."""
    made, wrong = connector(), []
    gate = threading.Barrier(2)

    def work(start: int):
        flats = [memory(start), memory(start + 500)]
        expected = [expected_object(flat, [5, 0, 19]) for flat in flats]
        gate.wait(10)
        for i in range(60):
            got = store_all(made, kvcaches=ENGINE.tensors(flats[i % 2]))
            if not torch.equal(words(got), words(expected[i % 2])):
                wrong.append((start, i))

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 20000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What is refused, before anything moves


def freed():
    obj = half(2)
    obj.ref_count_down()
    return obj


def of_format(fmt, shape, dtype=torch.float16):
    def make():
        obj = HostMemoryAllocator(1 << 12).allocate(list(shape), dtype, fmt)
        obj.raw_tensor.fill_(0xEE)
        return obj

    return make


OBJECTS = {
    # name: (object, error, message, also when storing)
    "none": (lambda: None, ChunkError, r"memory_objs\[0\] has no tensor \(NoneType\)", True),
    "a-tensor": (lambda: torch.zeros(2, 2, 2, 24), ChunkError, r"memory_objs\[0\] has no tensor \(Tensor\)", True),
    "no-tensors": (
        lambda: HostMemoryAllocator(64).allocate([], [], K2),
        ChunkError,
        r"memory_objs\[0\] has no tensor \(MemoryObj\)",
        True,
    ),
    "freed": (freed, UseAfterFreeError, "the object was freed", True),
    "fewer-tokens": (
        of_format(K2, (2, 2, 1, 24)),
        ChunkError,
        r"has shape \(2, 2, 1, 24\); 2 tokens of KV_2LTD are",
        True,
    ),
    "more-tokens": (
        of_format(K2, (2, 2, 3, 24)),
        ChunkError,
        r"2 tokens of KV_2LTD are \(2, 2, 2, 24\)",
        True,
    ),
    "other-layers": (of_format(K2, (2, 1, 2, 24)), ChunkError, r"has shape \(2, 1, 2, 24\)", True),
    "other-width": (of_format(K2, (2, 2, 2, 12)), ChunkError, r"has shape \(2, 2, 2, 12\)", True),
    "transposed": (of_format(K2, (2, 2, 24, 2)), ChunkError, r"has shape \(2, 2, 24, 2\)", True),
    "other-itemsize": (
        of_format(K2, (2, 2, 2, 24), torch.float32),
        ValueError,
        "is torch.float32, the KV cache is",
        True,
    ),
    "other-dtype": (
        of_format(K2, (2, 2, 2, 24), torch.bfloat16),
        ValueError,
        "is torch.bfloat16, the KV cache is",
        True,
    ),
    **{
        fmt.name: (
            of_format(fmt, (2, 2, 2, 24)),
            ChunkError,
            rf"memory_objs\[0\] is {fmt.name}, this connector loads KV_2LTD",
            False,
        )
        for fmt in MemoryFormat
        if fmt is not K2
    },
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("staged", [False, True])
def test_objects_that_do_not_fit(name, staged):
    """The object in question comes last of two: nothing of the first moves either."""
    make, error, message, also_stored = OBJECTS[name]
    made = connector(use_gpu=staged, chunk_size=4, dtype=torch.float16, device="cpu")
    flat, good, bad = memory(), half(2), make()
    before = flat.clone()
    given = {"kvcaches": ENGINE.tensors(flat), "slot_mapping": SLOTS}
    with pytest.raises(error, match=message):
        made.to_gpu(bad, 0, 2, **given)
    with pytest.raises(error, match=message.replace(r"\[0\]", r"\[1\]")):
        made.batched_to_gpu([good, bad], [0, 2], [2, 4], **given)
    if also_stored:
        with pytest.raises(error, match=message.replace(r"\[0\]", r"\[1\]")):
            made.batched_from_gpu([good, bad], [0, 2], [2, 4], **given)
        assert_same(good.raw_tensor, untouched(good.get_size(), torch.uint8), "the object that would have fit")
    else:
        made.batched_from_gpu([good, bad], [0, 2], [2, 4], **given)  # storing sets the format
        assert bad.metadata.fmt is K2
    assert good.get_ref_count() == 1
    assert_same(flat, before, "the engine's memory")


def test_an_mla_connector_loads_mla_objects_only():
    made = VLLMPagedMemGPUConnectorV2(24, 2, use_mla=True)
    kv = [torch.zeros(5, 4, 24, dtype=torch.float16) for _ in range(2)]
    with pytest.raises(ValueError, match=r"memory_objs\[0\] is KV_2LTD, this connector loads KV_MLA_FMT"):
        made.to_gpu(of_format(K2, (1, 2, 2, 24))(), 0, 2, kvcaches=kv, slot_mapping=SLOTS)
    with pytest.raises(LayoutError, match="one plane a layer, but use_mla=False"):
        connector().from_gpu(half(2), 0, 2, kvcaches=kv, slot_mapping=SLOTS)
    with pytest.raises(LayoutError, match="K and V a layer, but use_mla=True"):
        made.from_gpu(half(2, made), 0, 2, kvcaches=ENGINE.tensors(memory()), slot_mapping=SLOTS)


@pytest.mark.parametrize(
    ("objects", "starts", "ends", "message"),
    [
        (1, [0, 2], [2, 4], "1 memory objects, 2 starts"),
        (2, [0], [2], "2 memory objects, 1 starts"),
        (2, [0, 2], [2], "2 starts, 1 ends: lengths differ"),
        (2, [0, 4], [2, 2], r"chunk 1: \[4, 2\) is no token range"),
        (2, [0, -2], [2, 0], r"chunk 1: \[-2, 0\) is no token range"),
        (2, [0, 9], [2, 11], r"chunk 1: \[9, 11\) is outside slot_mapping, which covers tokens \[0, 10\)"),
        (2, [0, 10], [2, 12], r"chunk 1: \[10, 12\) is outside slot_mapping"),
        (2, [0, 2**40], [2, 2**40 + 2], r"chunk 1: \[1099511627776, 1099511627778\) is outside slot_mapping"),
        (2, 0, 2, "starts must be a list, got int"),
        (2, [0, 2], None, "ends must be a list, got NoneType"),
        (None, [0, 2], [2, 4], "memory_objs must be a list, got NoneType"),
    ],
)
def test_batches_that_do_not_fit(objects, starts, ends, message):
    made, flat = connector(), memory()
    before = flat.clone()
    batch = None if objects is None else [half(2) for _ in range(objects)]
    for move in (made.batched_from_gpu, made.batched_to_gpu):
        with pytest.raises(ValueError, match=message):
            move(batch, starts, ends, kvcaches=ENGINE.tensors(flat), slot_mapping=SLOTS)
    assert_same(flat, before, "the engine's memory")
    for obj in batch or []:
        assert_same(obj.raw_tensor, untouched(obj.get_size(), torch.uint8), "an object")


def test_a_batch_may_be_called_by_keyword_as_by_place():
    made, flat, obj = connector(), memory(), half(2)
    given = {"kvcaches": ENGINE.tensors(flat), "slot_mapping": SLOTS}
    made.batched_from_gpu(memory_objs=[obj], starts=[3], ends=[5], **given)
    assert_same(obj.tensor.reshape(-1), expected_object(flat, [2, 8]), "the object")
    with pytest.raises(ArgumentError, match="must be a list, got NoneType"):
        made.batched_to_gpu(**given)
    made.batched_to_gpu(memory_objs=[obj], starts=[3], ends=[5], **given)
    assert_same(flat, memory(), "what was loaded where it came from")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1], "slots must be a tensor, got list"),
        (torch.tensor([0.0, 1.0]), r"slots must be int64 \[tokens\], got torch.float32 \(2,\)"),
        (torch.tensor([True, False]), r"got torch.bool \(2,\)"),
        (torch.tensor([[0, 1]]), r"got torch.int64 \(1, 2\)"),
        (torch.tensor(3), r"got torch.int64 \(\)"),
    ],
)
def test_slots_of_the_wrong_kind(slots, message):
    for move in (connector().from_gpu, connector().to_gpu):
        with pytest.raises(SlotError, match=message):
            move(half(2), 0, 2, kvcaches=ENGINE.tensors(memory()), slot_mapping=slots)


@pytest.mark.parametrize("cached", [-1, 1.0, True, "8"])
def test_cached_tokens_of_the_wrong_kind(cached):
    given = {"kvcaches": ENGINE.tensors(memory()), "slot_mapping": SLOTS, "vllm_cached_tokens": cached}
    with pytest.raises(SkipPrefixError, match=f"vllm_cached_tokens must be an int >= 0, got {cached!r}"):
        connector().to_gpu(half(2), 0, 2, **given)
    connector().from_gpu(half(2), 0, 2, **given)  # it is about loading


@pytest.mark.parametrize("staged", [False, True])
def test_one_slot_for_two_tokens_is_refused_when_loading(staged):
    made = connector(use_gpu=staged, chunk_size=1, dtype=torch.float16, device="cpu")
    flat, objects = memory(), [half(1), half(1)]
    before = flat.clone()
    with use_backend("reference"), pytest.raises(DuplicateSlotError, match=r"slots\[0\] and slots\[2\] are both 5"):
        given = {"kvcaches": ENGINE.tensors(flat), "slot_mapping": torch.tensor([5, 0, 5])}
        made.batched_to_gpu(objects, [0, 2], [1, 3], **given)
    assert_same(flat, before, "the engine's memory")
