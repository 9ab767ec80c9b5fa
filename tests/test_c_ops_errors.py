"""Wrong input at the doors of `c_ops`: the error names what was wrong, and nothing has moved."""

from __future__ import annotations

import pytest
import torch

from lmcache_ref import c_ops
from lmcache_ref.c_ops import D2H, H2D, GPUKVFormat
from lmcache_ref.errors import (
    ArgumentError,
    ChunkError,
    DtypeError,
    DuplicateSlotError,
    LayoutError,
    SkipPrefixError,
    SlotError,
    SlotRangeError,
)
from raw_layouts import NH, SLOTS, Case


def source_with(change):
    return lambda case: change(case.source("pointers"))


WRONG = {
    "no tensor": (dict(key_value=None), ArgumentError, "key_value must be a tensor, got NoneType"),
    "chunk rank": (lambda c: dict(key_value=c.key_value[0]), ChunkError, "key_value has shape .* 4 axes"),
    "chunk planes": (lambda c: dict(key_value=c.key_value[:1]), ChunkError, r"shape \(1, 3, 7, 42\)"),
    "slots missing": (lambda c: dict(slot_mapping=c.slots[:-1]), ChunkError, "6 slots, the chunk 7 tokens"),
    "slots float": (lambda c: dict(slot_mapping=c.slots.float()), SlotError, "slots must be int64"),
    "slot too large": (
        lambda c: dict(slot_mapping=torch.tensor([0, 1, 2, 3, SLOTS, 4, 5])),
        SlotRangeError,
        r"slots\[4\] = 20",
    ),
    "slot twice": (lambda c: dict(slot_mapping=torch.tensor([0, 1, 2, 3, 1, 4, 5])), DuplicateSlotError, "are both 1"),
    "direction": (dict(direction=True), ArgumentError, "direction: True; allowed: H2D, D2H"),
    "format": (dict(gpu_kv_format=99), ArgumentError, "gpu_kv_format: 99; known: .*NL_X_NB_BS_HS=3"),
    "format name": (dict(gpu_kv_format="NHD"), LayoutError, "unknown layout 'NHD'"),
    "no page buffer": (dict(page_buffer_size=0), ArgumentError, "page_buffer_size: 0"),
    "page buffer": (dict(page_buffer_size=-20), ArgumentError, "page_buffer_size must be an int >= 0, got -20"),
    "block size": (dict(block_size=3), ArgumentError, "block_size: 3 does not divide page_buffer_size 20"),
    "head size": (dict(head_size=5), ArgumentError, "head_size: 5 does not divide D = 42"),
    "skip": (dict(skip_prefix_n_tokens=-1), SkipPrefixError, "skip_prefix_n_tokens must be an int >= 0, got -1"),
    "device": (dict(paged_memory_device="xpu:0"), ArgumentError, "cpu and cuda, not on xpu"),
    "no device": (dict(paged_memory_device=None), ArgumentError, "need the device"),
    "too few": (source_with(lambda p: p[:2]), LayoutError, "key_value_ptrs: 2 pointers.* NL = 3 has 3 tensors"),
    "too many": (source_with(lambda p: p.repeat(2)), LayoutError, "key_value_ptrs: 6 pointers"),
    "null": (source_with(lambda p: p * 0), ArgumentError, r"key_value_ptrs\[0\]: 0 is no address"),
    "odd address": (
        source_with(lambda p: p + 1),
        ArgumentError,
        r"key_value_ptrs\[0\]: .* not aligned to torch.bfloat",
    ),
    "pointer type": (source_with(lambda p: p.to(torch.int32)), ArgumentError, "must be int64 pointers.*torch.int32"),
    "a number": (source_with(lambda p: int(p[0])), ArgumentError, "int64 pointers or a list of tensors, got int"),
    "no layers": (source_with(lambda p: []), ArgumentError, "int64 pointers or a list of tensors, got list"),
    "numbers": (source_with(lambda p: p.tolist()), ArgumentError, "int64 pointers or a list of tensors, got int"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input(what, monkeypatch):
    monkeypatch.setenv("LMCACHE_VALIDATE", "1")
    change, error, message = WRONG[what]
    case = Case("NL_X_TWO_NB_BS_NH_HS", "H2D", tokens=[13, 7, 0, 6, 19, 3, 8])
    before = case.snapshot()
    arguments = dict(
        key_value=case.key_value,
        key_value_ptrs=case.source("pointers"),
        slot_mapping=case.slots,
        paged_memory_device="cpu",
        page_buffer_size=SLOTS,
        direction=H2D,
        gpu_kv_format=GPUKVFormat[case.name],
    )
    changed = change(case) if callable(change) else change
    arguments.update(changed if isinstance(changed, dict) else {"key_value_ptrs": changed})
    with pytest.raises(error, match=message):
        c_ops.multi_layer_kv_transfer(**arguments)
    case.check_untouched(before)


WRONG_TENSORS = {
    "too few": (lambda t: t[:2], {}, LayoutError, "key_value_ptrs: 2 tensors"),
    "rank": (lambda t: [x[0, 0, 0] for x in t], {}, LayoutError, r"shape \(6, 7\) is neither .* nor \[two nbbs hs\]"),
    "sizes swapped": (lambda t: t, dict(block_size=NH, page=30), LayoutError, "BS is 4, expected 6"),
    "head size": (lambda t: t, dict(head_size=6), LayoutError, "HS is 7, expected 6"),
    "hidden size": (lambda t: [x[:, :, :, :5] for x in t], {}, LayoutError, r"is 5\*7, expected 42"),
    "page buffer": (lambda t: t, dict(page=24), ArgumentError, "page_buffer_size: 24, but .* 20 slots"),
    "dtype": (lambda t: [x.view(torch.float16) for x in t], {}, DtypeError, "moved, not converted"),
    "device": (lambda t: t, dict(device="meta"), ArgumentError, "paged_memory_device: meta, but .* on cpu"),
    "strides": (lambda t: [x[..., ::2] for x in t], {}, LayoutError, "innermost axis must have stride 1"),
    "layers differ": (lambda t: [*t[:2], t[2][:, :3]], {}, LayoutError, r"kv_caches\[2\]"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_wrong_tensors(what):
    change, sizes, error, message = WRONG_TENSORS[what]
    case = Case("NL_X_TWO_NB_BS_NH_HS", "D2H")
    before = case.snapshot()
    sizes = dict(sizes)
    page, device = sizes.pop("page", SLOTS), sizes.pop("device", "cpu")
    arguments = (case.key_value, change(case.source("tensors")), case.slots, device, page, D2H, GPUKVFormat[case.name])
    with pytest.raises(error, match=message):
        c_ops.multi_layer_kv_transfer(*arguments, **sizes)
    case.check_untouched(before)
