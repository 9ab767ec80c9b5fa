"""The whole-model doors of `c_ops`: every row of the table, both directions, pointers and lists of tensors.

What the buffers must hold afterwards comes from `raw_layouts.py`, element by element; whole buffers are compared, guard
bands included. Wrong input is in `test_c_ops_errors.py`; the other doors are in
`test_c_ops_layers.py`, `_blocks`, `_copies` and `_host_memory`.
"""

from __future__ import annotations

import enum
import gc
from types import SimpleNamespace

import pytest
import torch

import lmcache_fast.c_ops
from lmcache_ref import LAYOUTS, c_ops, register_backend, register_layout, use_backend
from lmcache_ref.backends import unregister_backend
from lmcache_ref.c_ops import D2H, H2D, GPUKVFormat, TransferDirection, pointers
from lmcache_ref.c_ops.pointers import values_of
from lmcache_ref.errors import (
    ArgumentError,
    LayoutError,
)
from lmcache_ref.layouts import unregister_layout
from raw_layouts import (
    ADDRESS,
    BS,
    FLATTENED,
    HS,
    MLA,
    NEEDS,
    NL,
    SHAPES,
    SLOTS,
    Case,
    D,
    planes_of,
)

NAMES = [member.name for member in GPUKVFormat]
FORMS = [(name, form) for name in NAMES for form in ("pointers", "tensors")] + [(n, "flattened") for n in FLATTENED]


def test_every_row_of_the_table_is_in_the_enum_and_in_the_tests():
    assert NAMES == list(LAYOUTS) == list(ADDRESS) == list(SHAPES)
    assert len(NAMES) == 26 and len(FORMS) == 64
    assert {name for name in NAMES if planes_of(name) == 1} == MLA
    upstream = {row.name: row.upstream_id for row in LAYOUTS.values() if row.upstream_id is not None}
    assert {member.name: member.value for member in GPUKVFormat if member.value < 11} == upstream
    assert sorted(member.value for member in GPUKVFormat) == list(range(26))
    assert GPUKVFormat.NL_X_NB_BS_NH_TWO_HS == 11


@pytest.mark.parametrize("skip", [0, 2, 5])
@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_whole_model(name, form, direction, skip):
    case = Case(name, direction)
    before = case.snapshot()
    case.call(case.source(form), block_size=BS, head_size=D if name in MLA else HS, skip_prefix_n_tokens=skip)
    case.check(before, skip)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_a_row_does_not_need_may_be_missing_and_others_are_named(name):
    given = {"block_size": BS, "head_size": HS}
    needed = NEEDS.get(name, set())
    case = Case(name, "D2H")
    before = case.snapshot()
    for argument in needed:
        with pytest.raises(ArgumentError, match=f"^{argument} is missing; {name}"):
            case.call(case.source("pointers"), **{a: v for a, v in given.items() if a in needed - {argument}})
        case.check_untouched(before)
    case.call(case.source("pointers"), **{argument: given[argument] for argument in needed})
    case.check(before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("name", ["NL_X_NB_TWO_NH_BS_HS", "NL_X_NB_BS_HS", "LBNHC"])
def test_raw_memory_has_the_dtype_of_the_chunk(name, direction, dtype):
    case = Case(name, direction, dtype)
    before = case.snapshot()
    case.call(case.source("pointers"), block_size=BS, head_size=D if name in MLA else HS)
    case.check(before)


def test_fp8_tensors_and_a_chunk_of_bytes_are_the_same_bytes():
    case = Case("NL_X_TWO_NB_BS_NH_HS", "D2H", torch.uint8)
    before = case.snapshot()
    case.call([tensor.view(torch.float8_e5m2) for tensor in case.paged.tensors()])
    case.check(before)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize(
    ("name", "axes"), [("NL_X_TWO_NB_NH_BS_HS", (0, 1, 3, 2, 4)), ("NL_X_NB_TWO_NH_BS_HS", (0, 1, 3, 2, 4))]
)
def test_tensors_that_show_another_order_than_memory(name, axes, direction):
    """vLLM's HND caches: heads before tokens in memory, tokens before heads in the shape."""
    case = Case(name, direction)
    before = case.snapshot()
    shown = [tensor.permute(axes) for tensor in case.paged.tensors()]
    assert not any(tensor.is_contiguous() for tensor in shown)
    case.call(shown)
    case.check(before)
    # and the same tensors called by the format whose names their shape shows
    again = Case(name, direction)
    before = again.snapshot()
    source = [tensor.permute(axes) for tensor in again.paged.tensors()]
    arguments = (again.key_value, source, again.slots, "cpu", SLOTS, again.direction)
    c_ops.multi_layer_kv_transfer(*arguments, GPUKVFormat[name.replace("NH_BS", "BS_NH")], BS, HS)
    again.check(before)


def test_block_padding_comes_from_the_strides_of_tensors():
    padded = torch.full((NL, 5, 3 * D * BS), -1, dtype=torch.int16)
    layers = [padded[layer, :, : BS * D].view(5, BS, D) for layer in range(NL)]
    chunk = torch.arange(NL * 3 * D, dtype=torch.int16).view(1, NL, 3, D)
    arguments = (chunk, layers, torch.tensor([17, 2, 9]), "cpu", SLOTS, H2D)
    c_ops.multi_layer_kv_transfer(*arguments, GPUKVFormat.NL_X_NB_BS_HS)
    expected = torch.full_like(padded, -1)
    for token, slot in enumerate([17, 2, 9]):
        start = slot % BS * D
        expected[:, slot // BS, start : start + D] = chunk[0, :, token]
    assert torch.equal(padded, expected)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_narrow_slots_are_widened(kind):
    case = Case("NL_X_TWO_NB_BS_NH_HS", "D2H", tokens=[13, 0, 6, 19, 3])
    before = case.snapshot()
    case.slots = case.slots.to(kind)
    case.call(case.source("pointers"))
    case.check(before)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("tokens", [[], [-1, -1, -5]])
def test_nothing_to_move_moves_nothing(tokens, direction):
    case = Case("NL_X_NB_TWO_BS_NH_HS", direction, tokens=tokens)
    case.slots = case.slots.long()
    before = case.snapshot()
    case.call(case.source("pointers"), block_size=BS)
    case.check_untouched(before)


# Separate K and V


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("form", ["pointers", "tensors", "flattened", "flat list"])
@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("TWO_") or n in MLA])
def test_unilateral(name, form, direction):
    case = Case(name, direction)
    before = case.snapshot()
    source = [part.inner.view(SHAPES[name][1]) for part in case.paged.parts] if form == "flat list" else None
    case.call(source or case.source(form), c_ops.multi_layer_kv_transfer_unilateral)
    case.check(before)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("TWO_") and n not in MLA])
def test_unilateral_refuses_rows_that_keep_k_and_v_in_one_tensor(name):
    case = Case(name, "D2H")
    before = case.snapshot()
    with pytest.raises(LayoutError, match=f"gpu_kv_format: {name}.*use multi_layer_kv_transfer"):
        case.call(case.source("pointers"), c_ops.multi_layer_kv_transfer_unilateral)
    case.check_untouched(before)


# Doors, not rooms


@pytest.fixture
def backend():
    """What a backend was asked to do that moves nothing; it is selected during the test."""
    seen = []

    def record(name):
        def operation(plan):
            seen.append((name, plan))
            return SimpleNamespace(wait=lambda: seen.append("waited"))

        return operation

    operations = {name: record(name) for name in ("gather", "scatter", "rerotate")}
    register_backend("recorder", SimpleNamespace(**operations))
    with use_backend("recorder"):
        yield seen
    unregister_backend("recorder")


@pytest.mark.parametrize(("direction", "operation"), [("H2D", "scatter"), ("D2H", "gather")])
def test_the_selected_backend_gets_one_batch_and_is_waited_for(backend, direction, operation):
    case = Case("NL_X_TWO_NB_BS_NH_HS", direction)
    case.call(case.source("pointers"), block_size=BS, head_size=HS, skip_prefix_n_tokens=3)
    (name, plan), waited = backend
    assert (name, waited) == (operation, "waited")
    assert len(plan.planes) == NL and len(plan.spans) == 1 and plan.skip_prefix_n_tokens == 3


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
def test_the_comparison_sees_a_backend_that_moves_nothing(backend, direction):
    case = Case("NL_X_TWO_NB_BS_NH_HS", direction)
    before = case.snapshot()
    case.call(case.source("pointers"))
    with pytest.raises(AssertionError, match="elements differ"):
        case.check(before)


def test_the_comparison_sees_swapped_axes():
    """The mutant of every row that has both: heads and tokens of a block swapped."""
    for name in ("NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_BS_NH_HS", "NB_NL_TWO_BS_NH_HS"):
        case = Case(name, "D2H")
        before = case.snapshot()
        swapped = GPUKVFormat[name.replace("BS_NH", "NH_BS")]
        arguments = (case.key_value, case.source("pointers"), case.slots, "cpu", SLOTS, D2H, swapped)
        c_ops.multi_layer_kv_transfer(*arguments, block_size=BS, head_size=HS)
        with pytest.raises(AssertionError, match="chunk: "):
            case.check(before)


def test_a_row_registered_later_is_called_by_its_name():
    register_layout("NL_X_BS_NB_HS", "bs nb hs", nesting=("nl",))
    try:
        pool = torch.arange(BS * 5 * D, dtype=torch.int16)
        chunk = torch.zeros(1, 1, 2, D, dtype=torch.int16)
        pointers = torch.tensor([pool.data_ptr()])
        c_ops.multi_layer_kv_transfer(
            chunk, pointers, torch.tensor([9, 3]), "cpu", SLOTS, D2H, "NL_X_BS_NB_HS", block_size=BS
        )
        expected = [pool.view(BS, 5, D)[slot % BS, slot // BS] for slot in (9, 3)]
        assert torch.equal(chunk[0, 0], torch.stack(expected))
    finally:
        unregister_layout("NL_X_BS_NB_HS")


def test_upstreams_own_enums_are_understood():
    upstream_direction = enum.Enum("TransferDirection", {"H2D": 0, "D2H": 1})
    upstream_format = enum.IntEnum("GPUKVFormat", {"NL_X_TWO_NB_BS_NH_HS": 1})
    case = Case("NL_X_TWO_NB_BS_NH_HS", "D2H")
    before = case.snapshot()
    arguments = (case.key_value, case.source("pointers"), case.slots, "cpu", SLOTS, upstream_direction.D2H)
    c_ops.multi_layer_kv_transfer(*arguments, upstream_format.NL_X_TWO_NB_BS_NH_HS)
    case.check(before)


SURFACE = """
    TransferDirection H2D D2H GPUKVFormat EngineKVFormat multi_layer_kv_transfer multi_layer_kv_transfer_unilateral
    single_layer_kv_transfer single_layer_kv_transfer_sgl multi_layer_block_kv_transfer PageBufferShapeDesc
    load_and_reshape_flash reshape_and_cache_back_flash lmcache_memcpy_async rotary_embedding_k_fused batched_memcpy
    alloc_pinned_ptr free_pinned_ptr alloc_pinned_numa_ptr free_pinned_numa_ptr alloc_shm_pinned_ptr
    free_shm_pinned_ptr alloc_numa_ptr free_numa_ptr get_gpu_pci_bus_id
"""


def test_the_surface_is_complete_and_the_fast_package_has_the_same():
    assert sorted(SURFACE.split()) == sorted(c_ops.__all__) == sorted(lmcache_fast.c_ops.__all__)
    for name in c_ops.__all__:
        assert getattr(lmcache_fast.c_ops, name) is getattr(c_ops, name)
    for coder in ("calculate_cdf", "encode_fast_new", "decode_fast_new", "decode_fast_prefsum"):
        assert not hasattr(c_ops, coder)
    assert c_ops.EngineKVFormat is GPUKVFormat and tuple(TransferDirection) == (c_ops.H2D, c_ops.D2H)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("name", NAMES)
def test_pointers_on_the_device(name, direction, pinned):
    case = Case(name, direction, device="cuda:0")
    before = case.snapshot()
    if pinned:
        case.chunk.whole = case.chunk.whole.pin_memory()
        case.key_value = case.chunk.inner.view(case.key_value.shape)
    case.slots = case.slots.cuda()
    case.call(case.source("pointers"), block_size=BS, head_size=D if name in MLA else HS, skip_prefix_n_tokens=2)
    torch.cuda.synchronize()
    case.check([whole.cpu() for whole in before], 2)


@pytest.mark.gpu
def test_pointers_that_are_no_memory_of_the_device():
    case = Case("NL_X_TWO_NB_BS_NH_HS", "D2H")
    before = case.snapshot()
    arguments = (case.key_value, case.source("pointers"), case.slots, "cuda:0", SLOTS, D2H, GPUKVFormat[case.name])
    with pytest.raises(ArgumentError, match=r"key_value_ptrs\[0\]: 0x.* is no memory of cuda:0"):
        c_ops.multi_layer_kv_transfer(*arguments)
    case.check_untouched(before)


def test_pointers_on_a_device_are_read_once_until_torch_writes_to_them():
    """Reading makes the host wait. A tensor that is gone is forgotten; one of inference mode is read each time."""

    class OnDevice(torch.Tensor):
        is_cpu = False
        reads = 0

        def tolist(self):
            OnDevice.reads += 1
            return torch.Tensor.tolist(self.as_subclass(torch.Tensor))

    tensor = torch.tensor([4096, 8192]).as_subclass(OnDevice)
    assert [values_of(tensor) for _ in range(3)] == [(4096, 8192)] * 3
    assert OnDevice.reads == 1
    tensor[1] = 12288
    assert [values_of(tensor) for _ in range(2)] == [(4096, 12288)] * 2
    assert OnDevice.reads == 2
    key = id(tensor)
    assert key in pointers._values_seen
    del tensor
    gc.collect()
    assert key not in pointers._values_seen
    with torch.inference_mode():
        tensor = torch.tensor([4096]).as_subclass(OnDevice)
    assert [values_of(tensor) for _ in range(2)] == [(4096,)] * 2
    assert OnDevice.reads == 4


@pytest.mark.gpu
def test_pointers_on_a_gpu_do_not_make_the_host_wait_again():
    tensor = torch.tensor([4096, 8192], device="cuda")
    assert values_of(tensor) == (4096, 8192)
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    assert values_of(tensor) == (4096, 8192)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("form", ["pointers", "tensors"])
def test_a_call_in_inference_mode_and_the_same_outside_it(form, direction):
    """What is kept of the first call serves the second one."""
    case = Case("NL_X_TWO_NB_BS_NH_HS", direction)
    source, before = case.source(form), case.snapshot()
    with use_backend("reference"):
        with torch.inference_mode():
            case.call(source)
        case.call(source)
    case.check(before)
