"""Re-rotation by the backend `cpu` against the specification: the same bits, the same errors, nothing else written."""

from __future__ import annotations

import itertools

import pytest
import torch
from rotations import (
    KEY_DTYPES,
    MAX_POSITION,
    ROTARY_DIMS,
    STRIDES,
    compare,
    compare_every_value_of_two_bytes,
    positions,
    storage,
    table,
)

from helpers import assert_same
from lmcache_fast.cpu import backend as cpu_module
from lmcache_ref import rope as spec
from lmcache_ref.backends import get_backend
from lmcache_ref.errors import ArgumentError, BackendError, DtypeError, StrideError
from lmcache_ref.rope import RotarySpec


@pytest.fixture(scope="module")
def cpu():
    return get_backend("cpu")


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("table_dtype", KEY_DTYPES, ids=str)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_bits(key_dtype, table_dtype, is_neox, cpu):
    for strides, rotary_dim in itertools.product(STRIDES, ROTARY_DIMS):
        rope = RotarySpec(table(rotary_dim, table_dtype), is_neox)
        assert compare(cpu.rerotate, spec.rerotate, strides, key_dtype, rope) > 0


@pytest.mark.parametrize("scale", [2.0**-12, 1.37, 300.0])
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_bits_with_a_scale_in_the_table(key_dtype, scale, cpu):
    rope = RotarySpec(table(20, torch.float32, scale), True)
    for seed in range(5):
        compare(cpu.rerotate, spec.rerotate, "tokens outermost", key_dtype, rope, seed)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("threads", [1, 3])
def test_real_sizes(threads, is_neox, cpu, monkeypatch):
    """More pairs than are in hand at once (64), more tokens than one thread takes at a stretch."""
    monkeypatch.setattr(cpu_module, "ONE_THREAD_BYTES", 0)
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(300, 2, 256, generator=generator).to(torch.bfloat16)
    old, new = (torch.randint(0, 4096, (300,), generator=generator) for _ in range(2))
    rope = RotarySpec(spec.rotary_table(4096, 180), is_neox)
    expected = keys.clone()
    spec.rerotate(expected, old, new, rope)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu.rerotate(keys, old, new, rope)
    finally:
        torch.set_num_threads(before)
    assert_same(keys.flatten(), expected.flatten(), "keys")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_finite_value_of_two_bytes_is_widened_and_rounded_alike(dtype, cpu):
    assert compare_every_value_of_two_bytes(cpu.rerotate, spec.rerotate, dtype) > 60000


def test_a_nan_gives_nans_and_a_token_that_stays_keeps_its_payload(cpu):
    keys = torch.full((2, 1, 4), float("nan"))
    keys.view(torch.int32)[1] = 0x7FC0BEEF
    stays = keys[1].clone()
    cpu.rerotate(keys, torch.tensor([1, 5]), torch.tensor([2, 5]), RotarySpec(table(4, torch.float32)))
    assert keys[0].isnan().all()
    assert torch.equal(keys[1].view(torch.int32), stays.view(torch.int32))


# ------------------------------------------------------------------------------------------------ errors


def _zeroed() -> RotarySpec:
    cos_sin = table(6, torch.float32)
    cos_sin[7, [2, 5]] = 0.0
    return RotarySpec(cos_sin)


def _position(token: int, value: int) -> torch.Tensor:
    old = positions(0)[0].clone()
    old[old == 7] = 8
    old[token] = value
    return old


ERRORS = {
    "position too large": (ArgumentError, {"old_positions": _position(9, MAX_POSITION)}),
    "position too large that stays": (
        ArgumentError,
        {"old_positions": _position(9, MAX_POSITION), "new_positions": _position(9, MAX_POSITION)},
    ),
    "negative position": (ArgumentError, {"new_positions": _position(9, -1)}),
    "positions of another length": (ArgumentError, {"old_positions": torch.arange(5)}),
    "positions of floats": (ArgumentError, {"old_positions": positions(0)[0].float()}),
    "a rotation that cannot be undone": (ArgumentError, {"old_positions": _position(9, 7), "rope": _zeroed()}),
    "a table wider than a head": (ArgumentError, {"rope": RotarySpec(table(22, torch.float32))}),
    "keys of integers": (DtypeError, {"keys": torch.zeros(13, 3, 20, dtype=torch.int32)}),
    "keys that overlap": (StrideError, {"keys": torch.zeros(13, 1, 20).expand(13, 3, 20)}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_specifications_and_nothing_is_written(name, cpu):
    error, change = ERRORS[name]
    messages = []
    for rotate in (cpu.rerotate, spec.rerotate):
        flat = storage(torch.bfloat16, 0)
        arguments = {
            "keys": STRIDES["tokens outermost"](flat),
            "old_positions": positions(0)[0],
            "new_positions": positions(1)[1],
            "rope": RotarySpec(table(6, torch.float32)),
            **change,
        }
        with pytest.raises(error) as raised:
            rotate(**arguments)
        messages.append(str(raised.value))
        assert_same(flat, storage(torch.bfloat16, 0), "after the error")
    assert messages[0] == messages[1]


def test_keys_of_another_device_are_refused_by_name(cpu):
    keys = torch.empty(2, 1, 4, device="meta")
    with pytest.raises(BackendError, match="keys is on meta"):
        cpu.rerotate(
            keys,
            torch.zeros(2, dtype=torch.int64),
            torch.ones(2, dtype=torch.int64),
            RotarySpec(table(4, torch.float32)),
        )


def test_no_token_is_no_work(cpu):
    none = torch.empty(0, dtype=torch.int64)
    cpu.rerotate(torch.empty(0, 3, 20), none, none, RotarySpec(table(6, torch.float32)))
