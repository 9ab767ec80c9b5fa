"""Cases from the field, each with its whole kind: what the engine's memory looks like, rows of any width, every code.

They go through `VLLMPagedMemGPUConnectorV2`, with and without staging, on every device there is. Slots, chunks and prefixes
are in `test_cases_tokens.py`, readings alone in `test_readings.py`.
"""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

from engines import Engine, engine_of, first, loaded, new_object, on_devices, round_trip, second, stored, use_gpu
from helpers import DTYPES, addressed, assert_same, untouched
from lmcache_ref.connectors import VLLMPagedMemGPUConnectorV2
from lmcache_ref.errors import DtypeError, LayoutError, StrideError

__all__ = ["use_gpu"]


# Case 1: memory order behind a logical shape


@on_devices
@pytest.mark.parametrize("hint", [{}, {"kv_layout": "HND"}], ids=["no-hint", "HND"])
@pytest.mark.parametrize(("BS", "NH"), [(4, 2), (4, 1), (1, 2), (4, 4), (2, 2)])
@pytest.mark.parametrize("shape", ["first", "second"])
def test_case_1_hnd_memory_behind_an_nhd_shape(shape, BS, NH, hint, use_gpu, device):
    """`out[k, l, t, h*8 + d] == kv[k, slot // BS, slot % BS, h, d]`, also for NH=1 and BS=1."""
    slots = (5, 0, 11, 2) if BS > 1 else (1, 0, 2)
    if shape == "first":
        engine = engine_of(3, (2, 3, NH, BS, 8), (0, 1, 3, 2, 4), hint, first(BS))
    else:
        engine = engine_of(3, (3, 2, NH, BS, 8), (0, 1, 3, 2, 4), hint, second(BS))
    round_trip(engine, slots=slots if BS > 2 else slots[:2], use_gpu=use_gpu, device=device)


@pytest.mark.parametrize("NH", [1, 2])
def test_case_1_other_tensors_with_a_logical_shape(NH):
    """The same of a cross-layer tensor and of fused K|V, where the logical order is [NB, NH, BS, C]."""
    whole = torch.Size((3, 2, 2, NH, 4, 8))
    round_trip(
        Engine(
            whole.numel(),
            lambda flat: flat.view(whole).permute(0, 1, 2, 4, 3, 5),
            lambda kv, layer, k, slot: kv[slot // 4, layer, k, slot % 4],
            NL=2,
            D=8 * NH,
        )
    )
    logical_fused = lambda kv, layer, k, slot: kv[layer][slot // 4, :, slot % 4, 8 * k : 8 * k + 8]  # noqa: E731
    for hints in ({"num_kv_heads": NH}, {"num_kv_heads": NH, "kv_layout": "NHD"}):
        round_trip(engine_of(2, (5, 4, NH, 16), (0, 2, 1, 3), hints, logical_fused), slots=(5, 0, 19, 2))


# Case 3: what could be K/V or blocks


@pytest.mark.parametrize(("layout", "token"), [("NL_X_TWO_NB_BS_NH_HS", first(4)), ("NL_X_NB_TWO_BS_NH_HS", second(4))])
def test_case_3_two_blocks_need_the_row(layout, token):
    engine = engine_of(2, (2, 2, 4, 3, 8), None, {}, token)
    round_trip(engine, slots=(5, 0, 7), layout=layout)
    connector, flat = engine.connector(torch.float16), addressed(engine.num_elements, torch.float16)
    obj, before = new_object(connector, 3, torch.float16), flat.clone()
    for move in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(LayoutError, match=r"2 readings are left(.|\n)*give one of the hints layout="):
            move(obj, 0, 3, kvcaches=engine.tensors(flat), slot_mapping=torch.tensor([5, 0, 7]))
    assert_same(flat, before, "the engine's memory")
    assert_same(obj.raw_tensor, untouched(obj.get_size(), torch.uint8), "the object")


# Case 4: bytes, not numbers


@on_devices
@pytest.mark.parametrize("hints", [{"kv_layout": "NHD"}, {"kv_layout": "HND"}], ids=["NHD", "HND"])
def test_case_4_the_same_bytes_as_any_dtype(hints, device):
    """[2, 3, 4, 2, 32 bytes] as fp16, fp32, uint8, ...: identical bytes out."""
    nhd = hints["kv_layout"] == "NHD"
    token = first(4) if nhd else lambda kv, layer, k, slot: kv[layer][k, slot // 4, :, slot % 4]
    memory = addressed(2 * 2 * 3 * 4 * 2 * 32, torch.uint8).to(device)
    objects = []
    for dtype in DTYPES:
        HS = 32 // dtype.itemsize
        engine = engine_of(2, (2, 3, 4, 2, HS) if nhd else (2, 3, 2, 4, HS), None, hints, token)
        connector = engine.connector(dtype, device=device)
        objects.append(stored(engine, connector, memory.view(dtype), [5, 0, 11, 2], dtype).raw_tensor)
    assert len(objects) == 6
    for obj, dtype in zip(objects, DTYPES, strict=True):
        assert_same(obj, objects[0], str(dtype))


# Case 5: K|V fused in the last axis

FUSED = {
    "NHD": ((5, 4, 3, 16), lambda kv, layer, k, slot: kv[layer][slot // 4, slot % 4, :, 8 * k : 8 * k + 8]),
    "HND": ((5, 3, 4, 16), lambda kv, layer, k, slot: kv[layer][slot // 4, :, slot % 4, 8 * k : 8 * k + 8]),
    "LHBNC": ((3, 5, 4, 16), lambda kv, layer, k, slot: kv[layer][:, slot // 4, slot % 4, 8 * k : 8 * k + 8]),
}


@on_devices
@pytest.mark.parametrize("order", FUSED)
@pytest.mark.parametrize("hinted", [False, True])
def test_case_5_fused_k_and_v(order, hinted, use_gpu, device):
    shape, token = FUSED[order]
    engine = engine_of(2, shape, None, {"kv_layout": order} if hinted else {}, token)
    round_trip(engine, slots=(5, 0, 19, 2), use_gpu=use_gpu, device=device)


@pytest.mark.parametrize("order", FUSED)
def test_case_5_an_odd_width_is_an_error(order):
    connector = VLLMPagedMemGPUConnectorV2(24, 1, layout_hints={"kv_layout": order})
    obj = new_object(connector, 2, torch.float16)
    with pytest.raises(LayoutError, match=r"axis \(two hs\) = 15 does not divide by TWO=2"):
        kv = [torch.empty(*FUSED[order][0][:3], 15, dtype=torch.float16)]
        connector.from_gpu(obj, 0, 2, kvcaches=kv, slot_mapping=torch.tensor([0, 1]))


# Case 6: one tensor for all layers


@on_devices
@pytest.mark.parametrize("form", ["tensor", "list-of-one", "views", "mapping-of-views"])
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_case_6_cross_layer_and_its_views_make_the_same_object(form, hnd, device):
    shape = torch.Size((3, 2, 2, 2, 4, 8) if hnd else (3, 2, 2, 4, 2, 8))

    def tensors(flat):
        whole = flat.view(shape)
        views = {f"layers.{layer}": whole[:, layer] for layer in range(2)}
        return {"tensor": whole, "list-of-one": [whole], "views": list(views.values()), "mapping-of-views": views}[form]

    def token(kv, layer, k, slot):
        one = (
            kv[slot // 4, layer, k]
            if form == "tensor"
            else kv[0][slot // 4, layer, k]
            if form == "list-of-one"
            else None
        )
        if one is None:
            one = (list(kv.values()) if isinstance(kv, dict) else kv)[layer][slot // 4, k]
        return one[:, slot % 4] if hnd else one[slot % 4]

    engine = Engine(shape.numel(), tensors, token, 2, 16, hints={"kv_layout": "HND" if hnd else "NHD"})
    obj = round_trip(engine, device=device)
    content = addressed(engine.num_elements, torch.float16).view(shape)
    by_hand = torch.stack([
        content[s // 4, :, :, :, s % 4] if hnd else content[s // 4, :, :, s % 4] for s in (5, 0, 11, 2)
    ])  # fmt: skip
    assert_same(obj.tensor.reshape(-1), by_hand.reshape(4, 2, 2, 16).permute(2, 1, 0, 3).reshape(-1), "the object")


# Case 7: strides


@pytest.mark.parametrize(
    ("kv", "strides"),
    [
        (torch.zeros(2, 5, 4, 3, 16)[..., ::2], r"\(960, 192, 48, 16, 2\)"),
        (torch.zeros(2, 5, 4, 1, 8).expand(2, 5, 4, 3, 8), r"\(160, 32, 8, 0, 1\)"),
        (torch.zeros(2, 1, 4, 3, 8).expand(2, 5, 4, 3, 8), r"\(96, 0, 24, 8, 1\)"),
    ],
    ids=["every-other-element", "expanded-heads", "expanded-blocks"],
)
def test_case_7_memory_that_cannot_be_addressed(kv, strides):
    connector = VLLMPagedMemGPUConnectorV2(24, 1)
    obj = new_object(connector, 2, torch.float32)
    for move in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(StrideError, match=rf"kv_caches\[0\]: shape \(2, 5, 4, 3, 8\), strides {strides}"):
            move(obj, 0, 2, kvcaches=[kv], slot_mapping=torch.tensor([0, 1]))
    assert not kv.any()


@on_devices
def test_case_7_offsets_padding_interleaved_k_and_v_and_descending_layers(use_gpu, device):
    """`big[3:]`, padded blocks, K and V side by side in a block, layers at descending addresses."""
    big = Engine(
        2 * 8 * 2 * 4 * 3 * 8,
        lambda flat: [half.view(8, 2, 4, 3, 8)[3:] for half in flat.chunk(2)],
        second(4),
        NL=2,
        D=24,
    )

    def strided(strides, offsets):
        return lambda flat: [flat.as_strided((2, 5, 4, 3, 8), strides, offset) for offset in offsets]

    padded = Engine(3500, strided((701, 137, 33, 9, 1), (1800, 5)), first(4), 2, 24)
    interleaved = Engine(3500, strided((100, 211, 24, 8, 1), (1800, 5)), first(4), 2, 24)
    for engine in (big, padded, interleaved):
        round_trip(engine, slots=(5, 0, 19, 2), use_gpu=use_gpu, device=device)


# Cases 8 and 10: tensors that do not fit the connector


@pytest.mark.parametrize(("given", "NL"), [(2, 3), (4, 3), (1, 3), (3, 1)])
def test_case_8_more_or_fewer_tensors_than_layers(given, NL):
    connector = VLLMPagedMemGPUConnectorV2(24, NL)
    obj = new_object(connector, 2, torch.float32)
    kv = [torch.zeros(2, 5, 4, 3, 8) for _ in range(given)]
    for move in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(
            LayoutError, match=rf"list\[{given}\] of (.|\n)*NL is {given}, expected {NL} \(num_layers\)"
        ):
            move(obj, 0, 2, kvcaches=kv, slot_mapping=torch.tensor([0, 1]))


def test_case_10_layers_that_differ_are_not_for_v2():
    connector = VLLMPagedMemGPUConnectorV2(16, 4)
    layers = [torch.zeros(2, 4, 4, 1, 8), torch.zeros(2, 4, 8, 1, 8)] * 2
    obj = new_object(connector, 2, torch.float32)
    with pytest.raises(
        LayoutError, match=r"kv_caches\[1\] has shape .*; layers that differ need VLLMPagedMemGPUConnectorV3"
    ):
        connector.from_gpu(obj, 0, 2, kvcaches=layers, slot_mapping=torch.tensor([0, 1]))


# Case 11: offsets past 2^31

BLOCKS, BLOCK_TOKENS, WIDTH = 64000, 64, 576
CACHE_BYTES = BLOCKS * BLOCK_TOKENS * WIDTH  # 2.36e9
MARGIN_BYTES = 1 << 31  # an address that loses its 33rd bit lands in the margin before or after the cache


def unmapped_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros that take no memory until they are written; the mapping goes with the tensor."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


@on_devices
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_11_offsets_past_2_to_31(dtype, device):
    """The last slots of a 2.4 GB cache in the middle of a larger buffer: exactly their bytes are written."""
    assert CACHE_BYTES > 1 << 31
    num_bytes = CACHE_BYTES + 2 * MARGIN_BYTES
    buffer = unmapped_zeros(num_bytes) if device == "cpu" else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    kv = [buffer[MARGIN_BYTES : MARGIN_BYTES + CACHE_BYTES].view(BLOCKS, BLOCK_TOKENS, WIDTH)]
    last = BLOCKS * BLOCK_TOKENS - 1
    slots = [last, 0, (1 << 31) // WIDTH, (1 << 31) // WIDTH + 1, last - 1]
    connector = VLLMPagedMemGPUConnectorV2(WIDTH, 1, dtype=torch.uint8, use_mla=True)
    source, back = (new_object(connector, len(slots), torch.uint8) for _ in range(2))
    source.raw_tensor.copy_(addressed(source.get_size(), torch.uint8))
    given = {"kvcaches": kv, "slot_mapping": torch.tensor(slots, dtype=dtype)}
    connector.to_gpu(source, 0, len(slots), **given)
    connector.from_gpu(back, 0, len(slots), **given)
    assert_same(back.raw_tensor, source.raw_tensor, "what comes back")
    for row, slot in enumerate(slots):
        start = MARGIN_BYTES + slot * WIDTH
        assert_same(buffer[start : start + WIDTH].cpu(), source.tensor[0, 0, row], f"slot {slot}")
        buffer[start : start + WIDTH] = 0
    rest = buffer.view(torch.int64)  # all of it: the margins and every other slot
    assert sum(int(piece.count_nonzero()) for piece in rest.split(1 << 24)) == 0


# Cases 12 and 13: rows of any width, every code


@on_devices
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (46, torch.bfloat16),
        (33, torch.uint8),
        (3, torch.float16),
        (132, torch.uint8),
        (656, torch.uint8),
        (1, torch.uint8),
        (1, torch.float64),
        (5, torch.float32),
        (576, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_case_12_odd_rows_at_odd_offsets(width, dtype, offset, use_gpu, device):
    """MLA rows, and K and V of one head, in memory that starts `offset` elements into its storage."""

    def shifted(shape):
        return lambda flat: [
            part.view(shape) for part in flat[offset : offset + 2 * torch.Size(shape).numel()].chunk(2)
        ]

    mla = Engine(
        2 * 12 * width + 4,
        shifted((3, 4, width)),
        lambda kv, layer, k, slot: kv[layer][slot // 4, slot % 4],
        2,
        width,
        True,
    )
    pair = Engine(4 * 12 * width + 4, shifted((2, 3, 4, 1, width)), first(4), 2, width)
    for engine in (mla, pair):
        round_trip(engine, dtype, use_gpu=use_gpu, device=device)


FP8 = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@on_devices
@pytest.mark.parametrize("held", FP8)
@pytest.mark.parametrize("cached", FP8)
def test_case_13_every_fp8_code(cached, held, use_gpu, device):
    """All 256 codes, byte for byte; an fp8 may lie in uint8 storage, but not in another fp8."""
    engine = engine_of(1, (2, 4, 4, 1, 8), None, {}, first(4))
    connector = engine.connector(cached, use_gpu, device, chunk_size=3)
    flat = torch.arange(256, dtype=torch.uint8).view(cached).to(device)
    slots = list(range(16))
    if held != cached and torch.uint8 not in (held, cached):
        with pytest.raises(DtypeError, match=f"is {held}, the KV cache is {cached}"):
            stored(engine, connector, flat, slots, held)
        return
    obj = stored(engine, connector, flat, slots, held)
    assert sorted(obj.raw_tensor.tolist()) == list(range(256))
    back = loaded(engine, connector, obj, slots, device)
    assert_same(back, flat, "the cache that was loaded")


def test_case_13_objects_of_both_dtypes_in_one_batch(use_gpu):
    """One batch with an object of the fp8 and one of its uint8 storage: no conversion between the two."""
    engine = engine_of(1, (2, 4, 4, 1, 8), None, {}, first(4))
    for dtypes in itertools.permutations((torch.uint8, torch.float8_e4m3fn)):
        connector = engine.connector(torch.float8_e4m3fn, use_gpu, chunk_size=3)
        flat = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        objects = [new_object(connector, 8, dtype) for dtype in dtypes]
        given = {"kvcaches": engine.tensors(flat), "slot_mapping": torch.arange(16)}
        connector.batched_from_gpu(objects, [0, 8], [8, 16], **given)
        expected = flat.view(torch.uint8).view(2, 2, 64).transpose(0, 1)
        for obj, part in zip(objects, expected, strict=True):
            assert_same(obj.raw_tensor, part.reshape(-1), str(dtypes))
        back = untouched(256, torch.float8_e4m3fn)
        connector.batched_to_gpu(objects, [0, 8], [8, 16], kvcaches=engine.tensors(back), slot_mapping=torch.arange(16))
        assert_same(back, flat, f"the cache loaded from {dtypes}")


@pytest.mark.parametrize("held", [torch.bfloat16, torch.int8, torch.float16])
def test_case_13_other_bytes_are_refused(held):
    engine = engine_of(1, (2, 4, 4, 1, 8), None, {}, first(4))
    connector = engine.connector(torch.uint8)
    flat = addressed(256, torch.uint8)
    before, obj = flat.clone(), new_object(connector, 2, held)
    for move in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(DtypeError, match=rf"is {held}, the KV cache is torch.uint8"):
            move(obj, 0, 2, kvcaches=engine.tensors(flat), slot_mapping=torch.tensor([0, 1]))
    assert_same(flat, before, "the engine's memory")
    assert_same(obj.raw_tensor, untouched(obj.get_size(), torch.uint8), "the object")
