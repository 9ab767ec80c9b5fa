"""Discovery, one by one: the cases from the field, strides of every kind, and what is refused with which words.

Every shape at every size is in `test_discovery.py`, which offsets a row means in `test_layouts.py`.
"""

from __future__ import annotations

import pytest
import torch

from lmcache_ref.discovery import discover
from lmcache_ref.errors import ArgumentError, LayoutError, StrideError
from lmcache_ref.kv_cache import PagedKVCache

BASE = torch.zeros(1 << 14, dtype=torch.uint8)


def planes_at(tensors, engine="vllm", **hints):
    """(layout, offset in bytes from BASE and strides of each plane)."""
    found = discover(tensors, engine, hints)
    return found.layout.name, [[(p.data_ptr() - BASE.data_ptr(), p.stride()) for p in layer] for layer in found.planes]


def test_case_1_memory_order_behind_a_logical_shape():
    physical = BASE[: 2 * 3 * 2 * 4 * 8].view(2, 3, 2, 4, 8)
    logical = physical.permute(0, 1, 3, 2, 4)
    expected = [[(0, (64, 8, 32, 1)), (192, (64, 8, 32, 1))]]
    assert planes_at([logical]) == ("NL_X_TWO_NB_BS_NH_HS", expected)
    assert planes_at([logical], kv_layout="HND") == ("NL_X_TWO_NB_BS_NH_HS", expected)
    assert planes_at([physical], kv_layout="HND") == ("NL_X_TWO_NB_NH_BS_HS", expected)


def test_case_3_an_axis_of_two_that_could_be_k_and_v():
    both = [BASE[: 2 * 2 * 4 * 3 * 8].view(2, 2, 4, 3, 8)]
    with pytest.raises(LayoutError) as refusal:
        discover(both, "vllm", {"num_kv_heads": 3, "hidden_dim_size": 24, "kv_layout": "NHD"})
    assert str(refusal.value) == (
        "vllm KV cache list[1] of [2, 2, 4, 3, 8] torch.uint8, strides (192, 96, 24, 8, 1); "
        "hints: num_kv_heads=3, hidden_dim_size=24, kv_layout=NHD\n"
        "2 readings are left, and they are different memory:\n"
        "  - NL_X_TWO_NB_BS_NH_HS [two nb bs nh hs] with NL=1, NB=2, BS=4, NH=3, HS=8\n"
        "  - NL_X_NB_TWO_BS_NH_HS [nb two bs nh hs] with NL=1, NB=2, BS=4, NH=3, HS=8\n"
        "give one of the hints layout=NL_X_TWO_NB_BS_NH_HS|NL_X_NB_TWO_BS_NH_HS to decide"
    )
    first = planes_at(both, layout="NL_X_TWO_NB_BS_NH_HS")[1]
    second = planes_at(both, layout="NL_X_NB_TWO_BS_NH_HS")[1]
    assert first == [[(0, (96, 24, 8, 1)), (192, (96, 24, 8, 1))]]
    assert second == [[(0, (192, 24, 8, 1)), (96, (192, 24, 8, 1))]]


@pytest.mark.parametrize("shape", [(5, 4, 2, 16), (5, 2, 4, 16)])
def test_case_5_k_and_v_fused_in_the_last_axis(shape):
    kv = [BASE[: 5 * 4 * 2 * 16].view(shape)]
    row, planes = planes_at(kv, num_kv_heads=2)
    nhd = shape[1] == 4
    strides = (128, 32, 16, 1) if nhd else (128, 16, 64, 1)
    assert (row, planes) == (
        "NL_X_NB_BS_NH_TWO_HS" if nhd else "NL_X_NB_NH_BS_TWO_HS",
        [[(0, strides), (8, strides)]],
    )
    odd = [BASE[: 5 * 4 * 2 * 15].view(*shape[:3], 15)]
    with pytest.raises(LayoutError, match=r"axis \(two hs\) = 15 does not divide by TWO=2"):
        discover(odd, "vllm", {"num_kv_heads": 2})


def test_case_6_one_cross_layer_tensor_and_its_layers():
    whole = BASE[: 3 * 2 * 2 * 4 * 2 * 8].view(3, 2, 2, 4, 2, 8)
    strides = (256, 16, 8, 1)
    expected = [[(0, strides), (64, strides)], [(128, strides), (192, strides)]]
    assert planes_at(whole) == ("NB_NL_TWO_BS_NH_HS", expected)
    assert planes_at([whole], num_layers=2) == ("NB_NL_TWO_BS_NH_HS", expected)
    assert planes_at([whole[:, layer] for layer in range(2)]) == ("NL_X_NB_TWO_BS_NH_HS", expected)
    with pytest.raises(LayoutError, match=r"NL is 2, expected 1 \(num_layers\)"):
        discover([whole], "vllm", {"num_layers": 1})


@pytest.mark.parametrize(("given", "expected"), [(3, 2), (2, 3)])
def test_case_8_more_or_fewer_tensors_than_layers(given, expected):
    kv = [BASE[:320].view(2, 5, 4, 2, 4)] * given
    with pytest.raises(LayoutError, match=rf"list\[{given}\](.|\n)*NL is {given}, expected {expected} \(num_layers\)"):
        discover(kv, "vllm", {"num_layers": expected})


def test_case_38_sizes_tell_heads_from_tokens():
    logical = torch.empty(2, 7, 1, 16, 128, dtype=torch.uint8).transpose(2, 3)
    cache = PagedKVCache.from_vllm([logical], kv_layout="HND", hidden_dim_size=128)
    assert (cache.block_size, cache.num_heads, cache.head_size, cache.layout.name) == (
        16,
        1,
        128,
        "NL_X_TWO_NB_BS_NH_HS",
    )
    fused = torch.empty(7, 2, 16, 128, dtype=torch.uint8)
    cache = PagedKVCache.from_vllm([fused], hidden_dim_size=128)
    assert (cache.num_heads, cache.block_size, cache.head_size, cache.layout.name) == (
        2,
        16,
        64,
        "NL_X_NB_NH_BS_TWO_HS",
    )


def test_strides_that_contradict_the_stated_order_are_refused():
    """NHD memory under the hint HND, K and V interleaved so that the strides do not fall: NH could pass for BS."""
    kv = [BASE.as_strided((2, 3, 4, 4, 8), (128, 256, 32, 8, 1), 0)]
    assert planes_at(kv, kv_layout="NHD")[1] == [[(0, (256, 32, 8, 1)), (128, (256, 32, 8, 1))]]
    with pytest.raises(LayoutError, match=r"NL_X_TWO_NB_BS_NH_HS .*: memory order contradicts kv_layout HND"):
        discover(kv, "vllm", {"kv_layout": "HND", "hidden_dim_size": 32})


def test_a_named_row_that_the_strides_belie_is_refused():
    """A vLLM tensor in logical order is not what the HND row names, although its shape would fit."""
    kv = [BASE[: 2 * 3 * 4 * 4 * 8].view(2, 3, 4, 4, 8).transpose(2, 3)]
    with pytest.raises(LayoutError, match=r"NL_X_TWO_NB_NH_BS_HS .*: memory order contradicts the strides"):
        discover(kv, "vllm", {"layout": "NL_X_TWO_NB_NH_BS_HS"})
    interleaved = [BASE.as_strided((2, 3, 4, 4, 8), (128, 256, 32, 8, 1), 0)]
    expected = [[(0, (256, 8, 32, 1)), (128, (256, 8, 32, 1))]]
    assert planes_at(interleaved, layout="NL_X_TWO_NB_NH_BS_HS")[1] == expected


# Any strides a view can have


def test_padding_offset_descending_layers_and_interleaved_k_and_v():
    padded = [BASE.as_strided((2, 5, 4, 3, 8), (700, 130, 24, 8, 1), 40 + 1400 * (2 - layer)) for layer in range(3)]
    expected = [[(offset, (130, 24, 8, 1)), (offset + 700, (130, 24, 8, 1))] for offset in (2840, 1440, 40)]
    assert planes_at(padded) == ("NL_X_TWO_NB_BS_NH_HS", expected)
    interleaved = [BASE.as_strided((2, 5, 4, 3, 8), (100, 200, 24, 8, 1), 7 + layer * 1000) for layer in range(3)]
    expected = [[(offset, (200, 24, 8, 1)), (offset + 100, (200, 24, 8, 1))] for offset in (7, 1007, 2007)]
    assert planes_at(interleaved) == ("NL_X_TWO_NB_BS_NH_HS", expected)


def test_case_7_a_storage_offset_works():
    big = BASE[: 9 * 2 * 4 * 3 * 8].view(9, 2, 4, 3, 8)
    offset, strides = 3 * 192, (192, 24, 8, 1)
    assert planes_at([big[3:]])[1] == [[(offset, strides), (offset + 96, strides)]]


def expanded(axis: int) -> torch.Tensor:
    shape = [2, 5, 4, 3, 8]
    shape[axis] = 1
    return torch.empty(shape).expand(2, 5, 4, 3, 8)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, 5, 4, 3, 16)[..., ::2], "strides (960, 192, 48, 16, 2): the innermost axis must have stride 1"),
        (
            torch.empty(2, 5, 4, 8, 3).transpose(3, 4),
            "strides (480, 96, 24, 1, 3): the innermost axis must have stride 1",
        ),
        (expanded(4), "strides (60, 12, 3, 1, 0): the innermost axis must have stride 1, has 0"),
        *((expanded(axis), "an expanded axis (stride 0); elements share memory") for axis in range(4)),
        (torch.empty(999).as_strided((2, 5, 4, 3, 8), (470, 96, 24, 8, 1)), "stride 470 overlaps its neighbours"),
        (torch.empty(999).as_strided((2, 5, 4, 3, 8), (480, 96, 24, 7, 1)), "stride 7 overlaps its neighbours"),
    ],
    ids=[
        "every-other",
        "transposed",
        "expanded-hs",
        *(f"expanded-{a}" for a in ("two", "nb", "bs", "nh")),
        "kv",
        "heads",
    ],
)
def test_case_7_memory_that_no_backend_may_address(tensor, message):
    with pytest.raises(StrideError) as refusal:
        discover([torch.empty(2, 5, 4, 3, 8), tensor], "vllm")
    assert message in str(refusal.value)
    assert f"kv_caches[1]: shape (2, 5, 4, 3, 8), strides {tensor.stride()}" in str(refusal.value)


def test_a_layer_may_be_another_layer_but_v_not_k():
    one = BASE[: 2 * 5 * 4 * 3 * 8].view(2, 5, 4, 3, 8)
    assert len(discover([one, one], "vllm").planes) == 2
    flat = BASE[: 20 * 3 * 8].view(20, 3, 8)
    with pytest.raises(LayoutError, match="layer 0: K and V are the same memory"):
        PagedKVCache.from_sglang([[flat], [flat]])


# What is no KV cache, and hints that say nothing

GOOD = torch.empty(2, 5, 4, 3, 8)


@pytest.mark.parametrize(
    ("kv_caches", "error", "message"),
    [
        ([], LayoutError, "kv_caches is an empty list"),
        ([[GOOD], []], LayoutError, "kv_caches is an empty list"),
        ([GOOD, [GOOD]], LayoutError, r"ragged nesting: list lengths \[\(\), \(1,\)\]"),
        ([[GOOD, GOOD], [GOOD]], LayoutError, r"ragged nesting: list lengths \[\(2,\), \(1,\)\]"),
        (None, ArgumentError, "kv_caches must be a tensor, a list or a mapping of tensors, got NoneType"),
        ([GOOD, None], ArgumentError, "must be a tensor, a list or a mapping of tensors, got NoneType"),
        ("layers", ArgumentError, "must be a tensor, a list or a mapping of tensors, got str"),
        ({GOOD}, ArgumentError, "must be a tensor, a list or a mapping of tensors, got set"),
        ([torch.empty(())], LayoutError, r"kv_caches\[0\] is a scalar; a KV cache has axes"),
        ([GOOD, GOOD[:, :4]], LayoutError, r"kv_caches\[1\] has shape \(2, 4, 4, 3, 8\), kv_caches\[0\] has \(2, 5, "),
        ([GOOD, GOOD.half()], LayoutError, r"kv_caches\[1\] has dtype torch.float16, kv_caches\[0\] has torch.float32"),
        ([GOOD, GOOD.to("meta")], LayoutError, r"kv_caches\[1\] has device meta, kv_caches\[0\] has cpu"),
        ([GOOD[0]], LayoutError, r"no reading is left:\n  - NL_X_NB_NH_BS_TWO_HS(.|\n)*NL_X_NH_NB_BS_TWO_HS"),
        ([torch.empty(5, 8)], LayoutError, "no row of this engine has this rank and nesting"),
        ([[[GOOD]]], LayoutError, "no row of this engine has this rank and nesting"),
        ([torch.empty(3, 5, 4, 3, 8)], LayoutError, "axis 'two' must be 2, is 5"),
    ],
)
def test_what_is_no_kv_cache(kv_caches, error, message):
    with pytest.raises(error, match=message):
        discover(kv_caches, "vllm", {"num_kv_heads": 7} if message.startswith("no reading") else {})


def test_layers_that_differ_are_pointed_to_the_connector_for_them():
    with pytest.raises(LayoutError, match="layers that differ need VLLMPagedMemGPUConnectorV3"):
        discover([GOOD, GOOD[..., :4].contiguous()], "vllm")


def test_a_mapping_from_layer_names_is_its_values_in_order():
    layers = [BASE[960 * i : 960 * (i + 1)].view(2, 5, 4, 3, 8) for i in (2, 0, 1)]
    by_name = {f"model.layers.{i}.attn": layer for i, layer in enumerate(layers)}
    assert planes_at(by_name) == planes_at(layers)
    assert planes_at(tuple(layers)) == planes_at(layers)


@pytest.mark.parametrize(
    ("hints", "error", "message"),
    [
        ({"kv_layuot": "NHD"}, ArgumentError, "unknown layout hint 'kv_layuot'; known: kv_layout, layout, num_layers"),
        (
            {"kv_layout": "HDN"},
            ArgumentError,
            "kv_layout='HDN'; known: NHD, HND, LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC",
        ),
        ({"layout": "NL_X_TWO"}, LayoutError, "unknown layout 'NL_X_TWO'; known: NB_NL_TWO_BS_NH_HS, "),
        ({"num_kv_heads": 0}, ArgumentError, "hint num_kv_heads must be a positive int, got 0"),
        ({"head_dim": 8.0}, ArgumentError, "hint head_dim must be a positive int, got 8.0"),
        ({"num_layers": True}, ArgumentError, "hint num_layers must be a positive int, got True"),
        ({"dtype": "float16"}, ArgumentError, "hint dtype must be a torch.dtype, got 'float16'"),
        ({"use_mla": "False"}, ArgumentError, "hint use_mla must be True or False, got 'False'"),
        ({"dtype": torch.float16}, LayoutError, "the KV cache is torch.float32, expected torch.float16"),
        ({"num_kv_heads": 4}, LayoutError, r"NL_X_TWO_NB_BS_NH_HS .*: NH is 3, expected 4 \(num_kv_heads\)"),
        ({"tokens_per_block": 3}, LayoutError, r"BS is 4, expected 3 \(tokens_per_block\)"),
        ({"head_dim": 4}, LayoutError, r"HS is 8, expected 4 \(head_dim\)"),
        ({"hidden_dim_size": 32}, LayoutError, r"D = NH\*HS is 3\*8, expected 32 \(hidden_dim_size\)"),
        ({"num_kv_heads": 3, "hidden_dim_size": 48}, LayoutError, r"D = NH\*HS is 3\*8, expected 48"),
        ({"use_mla": True}, LayoutError, "K and V a layer, but use_mla=True"),
        ({"kv_layout": "LHBNC"}, LayoutError, "memory order contradicts kv_layout LHBNC"),
        ({"layout": "NL_X_NB_BS_HS"}, LayoutError, "no row of this engine has this rank and nesting"),
        ({"layout": "NL_X_NB_TWO_BS_NH_HS"}, LayoutError, "axis 'two' must be 2, is 5"),
    ],
    ids=str,
)
def test_hints_that_cannot_be(hints, error, message):
    with pytest.raises(error, match=message):
        discover([GOOD], "vllm", hints)


def test_a_hint_that_says_nothing_says_nothing():
    assert discover([GOOD], "vllm", {"kv_layout": None, "num_kv_heads": None}).layout.name == "NL_X_TWO_NB_BS_NH_HS"


def test_an_order_may_be_stated_by_an_enum_of_the_engine():
    class Order:
        name = "HND"

    assert discover([GOOD], "vllm", {"kv_layout": Order()}).layout.name == "NL_X_TWO_NB_NH_BS_HS"


@pytest.mark.parametrize(
    ("stored", "stated"),
    [
        (torch.uint8, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.uint8),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_uint8_may_be_the_storage_of_an_fp8(stored, stated):
    assert discover([torch.empty(2, 5, 4, 3, 8, dtype=stored)], "vllm", {"dtype": stated})


@pytest.mark.parametrize(
    ("stored", "stated"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.uint8, torch.int8),
        (torch.uint8, torch.bfloat16),
    ],
)
def test_other_dtypes_of_equal_width_are_not_the_same_bytes(stored, stated):
    with pytest.raises(LayoutError, match=f"the KV cache is {stored}, expected {stated}"):
        discover([torch.empty(2, 5, 4, 3, 8, dtype=stored)], "vllm", {"dtype": stated})


def test_tensorrt_llm_needs_two_of_three_sizes():
    pool = BASE[: 5 * 3 * 2 * 64].view(5, 3, 2, 64)
    strides = (384, 8, 32, 1)
    expected = [[(128 * layer, strides), (128 * layer + 64, strides)] for layer in range(3)]
    for hints in (
        {"num_kv_heads": 2, "tokens_per_block": 4},
        {"num_kv_heads": 2, "head_dim": 8},
        {"tokens_per_block": 4, "head_dim": 8},
        {"num_kv_heads": 2, "hidden_dim_size": 16},
        {"head_dim": 8, "hidden_dim_size": 16},
    ):
        assert planes_at(pool, "trtllm", **hints) == ("NB_NL_TWO_NHBSHS", expected)
    for hints in ({}, {"num_kv_heads": 2}, {"hidden_dim_size": 16}, {"tokens_per_block": 4, "hidden_dim_size": 16}):
        with pytest.raises(LayoutError, match=r"axis \(nh bs hs\) = 64 needs the hints .*head_dim"):
            discover(pool, "trtllm", hints)
    with pytest.raises(LayoutError, match=r"axis \(nh bs hs\) = 64 does not divide by NH=3, BS=4"):
        discover(pool, "trtllm", {"num_kv_heads": 3, "tokens_per_block": 4})


def test_an_engine_without_rows_and_an_unknown_engine():
    with pytest.raises(LayoutError, match=r"mock KV cache (.|\n)*no row of this engine has this rank and nesting"):
        discover([GOOD], "mock")
    with pytest.raises(ArgumentError, match="engine: 'tgi' is unknown; known: vllm, sglang, trtllm, mock"):
        discover([GOOD], "tgi")


def test_nothing_is_copied_and_nothing_is_read():
    kv = [BASE[:960].view(2, 5, 4, 3, 8)]
    for layer in PagedKVCache.from_vllm(kv).planes:
        for plane in layer:
            assert plane.untyped_storage().data_ptr() == BASE.untyped_storage().data_ptr()
    assert discover([torch.empty(2, 5, 4, 3, 8, device="meta")], "vllm").layout.name == "NL_X_TWO_NB_BS_NH_HS"
