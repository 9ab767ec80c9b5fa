"""The rotation of the backend `cuda` on a GPU: the specification's bits, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from rotations import KEY_DTYPES, ROTARY_DIMS, STRIDES, compare, compare_every_value_of_two_bytes, storage, table

from lmcache_ref import rope as spec
from lmcache_ref.backends import get_backend
from lmcache_ref.errors import ArgumentError, BackendError
from lmcache_ref.rope import RotarySpec

on_gpu = pytest.mark.gpu


@pytest.fixture
def cuda():
    return get_backend("cuda")


def on_device(cuda, keys, old, new, rope, positions_on="cpu"):
    """Rotate on the device what the host has, whole storage there and back."""
    flat = torch.empty(0, dtype=keys.dtype).set_(keys.untyped_storage())
    moved = flat.cuda()
    view = moved.as_strided(keys.shape, keys.stride(), keys.storage_offset())
    cuda.rerotate(view, old.to(positions_on), new.to(positions_on), rope)
    flat.copy_(moved.cpu())


@on_gpu
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("table_dtype", KEY_DTYPES, ids=str)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_rotation_bits(key_dtype, table_dtype, is_neox, cuda):
    for strides, rotary_dim, where in itertools.product(STRIDES, ROTARY_DIMS, ("cpu", "cuda")):
        rope = RotarySpec(table(rotary_dim, table_dtype), is_neox)

        def rotate(keys, old, new, rope, where=where):
            on_device(cuda, keys, old, new, rope, where)

        assert compare(rotate, spec.rerotate, strides, key_dtype, rope) > 0


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_finite_value_of_two_bytes(dtype, cuda):
    def rotate(keys, old, new, rope):
        on_device(cuda, keys, old, new, rope)

    assert compare_every_value_of_two_bytes(rotate, spec.rerotate, dtype) > 60000


@on_gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_rotation_refuses_before_anything_is_written(where, cuda):
    keys = torch.randn(3, 2, 4, device="cuda")
    before = keys.clone()
    rows = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    rope = RotarySpec(rows, True)
    good, bad = torch.tensor([0, 0, 0], device=where), torch.tensor([0, 1, 0], device=where)
    with pytest.raises(ArgumentError, match=r"old_positions\[1\] = 1: n = cos"):
        cuda.rerotate(keys, bad, good, rope)
    with pytest.raises(ArgumentError, match=r"new_positions\[1\] = 2 is outside the table"):
        cuda.rerotate(keys, good, bad * 2, rope)
    assert torch.equal(keys, before)
    cuda.rerotate(keys, bad, bad, rope)  # nothing moves
    assert torch.equal(keys, before)


@on_gpu
def test_keys_on_the_host_are_refused(cuda):
    with pytest.raises(BackendError, match="keys is on cpu"):
        cuda.rerotate(torch.zeros(1, 1, 2), torch.zeros(1).long(), torch.zeros(1).long(), RotarySpec(torch.ones(2, 2)))


def test_storage_helper_has_ordinary_numbers():
    """The keys that are rotated are not all zero, or nothing would be seen."""
    assert all(int((storage(dtype, 0) != 0).sum()) > 500 for dtype in KEY_DTYPES)
