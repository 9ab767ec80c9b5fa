"""A scatter that re-rotates keys on the way: the specification's law, who is asked for it, and what is refused.

The arithmetic itself is `test_rope*.py`; that fast backends do the same, and that a blend uses it, is
`tests/fast/test_rotated_scatter.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lmcache_ref
from helpers import assert_same
from lmcache_ref.backends import get_backend, register_backend
from lmcache_ref.errors import ArgumentError, BackendError, DtypeError
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rerotation import Rerotation
from lmcache_ref.rope import KEY_DTYPES, RotarySpec, rerotate, rotary_table
from lmcache_ref.transfer import reference_gather, reference_scatter
from registry import operations, own_registry
from rope_oracle import random_keys

__all__ = ["own_registry"]

NL, NB, BS, NH, HS, MAX_POSITION = 2, 6, 4, 3, 10, 32
SLOTS = torch.tensor([5, 0, -1, 22, 11, 2, 19, 8, 1, 13, 14, 3])
SPANS = ((0, 5), (6, 12))
#: axes of a plane's memory, outermost first
ORDERS = {"nhd": "NB BS NH HS", "hnd": "NB NH BS HS", "heads outermost": "NH NB BS HS"}


class World:
    """Caches and chunks of random keys and values, and a rotation for the request; every third key stays."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, order: str = "nhd", rotary_dim: int = 6, neox: bool = True):
        lengths, axes = {"NB": NB, "BS": BS, "NH": NH, "HS": HS}, ORDERS[order].split()
        self.memory = random_keys((NL * 2, *(lengths[axis] for axis in axes)), dtype, seed=1)
        places = [axes.index(axis) for axis in lengths]
        planes = [plane.permute(places) for plane in self.memory]
        self.cache = PagedKVCache(tuple((planes[2 * layer], planes[2 * layer + 1]) for layer in range(NL)))
        self.chunks = [random_keys((2, NL, end - start, NH * HS), dtype, seed=start) for start, end in SPANS]
        old, new = (torch.randint(0, MAX_POSITION, SLOTS.shape, generator=_generator(seed)) for seed in (1, 2))
        new[::3] = old[::3]
        table = rotary_table(MAX_POSITION, rotary_dim)
        table[MAX_POSITION - 1, [0, rotary_dim // 2]] = 0.0  # nothing is there, so that it can be made wrong
        old, new = (positions.clamp(max=MAX_POSITION - 2) for positions in (old, new))
        self.rotation = Rerotation(old, new, RotarySpec(table, neox))

    def plan(self, **changed) -> TransferPlan:
        arguments = {"starts": [start for start, _ in SPANS], "rotation": self.rotation, **changed}
        return TransferPlan.build(self.cache, SLOTS, self.chunks, fmt=MemoryFormat.KV_2LTD, **arguments)

    def rotate_in_place(self, skip: int) -> None:
        """The keys of the slots that were written, in the pages."""
        moved = [t for start, end in SPANS for t in range(max(start, skip), end) if SLOTS[t] >= 0]
        old, new = torch.zeros(2, NB * BS, dtype=torch.int64)
        old[SLOTS[moved]], new[SLOTS[moved]] = self.rotation.old_positions[moved], self.rotation.new_positions[moved]
        for keys, _ in self.cache.planes:
            for block in range(NB):
                slots = slice(block * BS, block * BS + BS)
                rerotate(keys[block], old[slots], new[slots], self.rotation.rope)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", KEY_DTYPES, ids=str)
def test_the_bits_are_those_of_a_scatter_and_a_rotation_of_the_keys_in_place(dtype, order, neox):
    for rotary_dim, skip in ((2, 0), (6, 3), (HS, 0), (HS, 7)):
        one, other = (World(dtype, order, rotary_dim, neox) for _ in range(2))
        reference_scatter(one.plan(skip_prefix_n_tokens=skip))
        reference_scatter(other.plan(skip_prefix_n_tokens=skip, rotation=None))
        assert not torch.equal(one.memory, other.memory)
        other.rotate_in_place(skip)
        assert_same(one.memory.flatten(), other.memory.flatten(), f"rotary_dim {rotary_dim}, skip {skip}")
        for chunk, before in zip(one.chunks, World(dtype).chunks, strict=True):
            assert_same(chunk.flatten(), before.flatten(), "the chunks")


def test_positions_of_any_integer_type_and_tokens_that_do_not_move():
    """Narrow positions, some of them of tokens that are in no chunk or have no slot."""
    one, other = World(), World()
    rotation = one.rotation
    narrow = Rerotation(rotation.old_positions.to(torch.uint8), rotation.new_positions.to(torch.int32), rotation.rope)
    lmcache_ref.scatter(
        one.cache, SLOTS, one.chunks, fmt=MemoryFormat.KV_2LTD, starts=[0, 6], rotation=narrow
    ).synchronize()  # fmt: skip
    reference_scatter(other.plan(rotation=None))
    other.rotate_in_place(0)
    assert_same(one.memory.flatten(), other.memory.flatten(), "the pages")


# What is refused


def _wrong(**changed) -> Rerotation:
    return replace(World().rotation, **changed)


def _old(token: int, position: int) -> torch.Tensor:
    old = World().rotation.old_positions.clone()
    old[token] = position
    return old


#: the same words as `rope.rerotate` has for the keys of the request
REFUSED = {
    "beyond the table": (_wrong(old_positions=_old(7, 32)), r"^old_positions\[7\] = 32 is outside the table, 0\.\.31$"),
    "negative": (_wrong(new_positions=_old(2, -1)), r"^new_positions\[2\] = -1 is outside the table"),
    "too few": (_wrong(new_positions=torch.arange(4)), r"^new_positions: shape \[4\]; \[T\] of keys is \[12\]$"),
    "floats": (_wrong(old_positions=torch.zeros(12)), r"^old_positions: torch\.float32; a tensor of integers"),
    "not undone": (_wrong(old_positions=_old(4, 31)), r"^old_positions\[4\] = 31: n = .* of pair 0 of the table is 0"),
    "wide table": (_wrong(rope=RotarySpec(rotary_table(32, 12))), r"^keys: HS = 10 is less than .* rotary_dim = 12$"),
    "no spec": (_wrong(rope=rotary_table(32, 6)), "^rope: Tensor; a RotarySpec is needed$"),
    "no record": ((1, 2), "^rotation must be a Rerotation, got tuple$"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_rotations_are_refused_before_anything_is_written(name):
    rotation, message = REFUSED[name]
    world = World()
    with pytest.raises(ArgumentError, match=message):
        lmcache_ref.scatter(
            world.cache, SLOTS, world.chunks, fmt=MemoryFormat.KV_2LTD, starts=[0, 6], rotation=rotation
        )
    assert_same(world.memory.flatten(), World().memory.flatten(), "the pages")


def test_keys_of_bytes_and_caches_without_keys_are_refused():
    rotation, slots = World().rotation, torch.full_like(SLOTS, -1)
    plane, chunk = torch.zeros(NB, BS, NH, HS, dtype=torch.uint8), torch.zeros(2, 1, 12, NH * HS, dtype=torch.uint8)
    with pytest.raises(DtypeError, match=r"^keys: dtype torch\.uint8; one of"):
        TransferPlan.build(
            PagedKVCache(((plane, plane.clone()),)), slots, [chunk], fmt=MemoryFormat.KV_2LTD, rotation=rotation
        )  # fmt: skip
    latent, chunk = torch.zeros(NB, BS, 1, HS), torch.zeros(1, 1, 12, HS)
    with pytest.raises(ArgumentError, match=r"^rotation: the cache has 1 plane a layer \(MLA\), and so no keys"):
        TransferPlan.build(
            PagedKVCache(((latent,),)), slots, [chunk], fmt=MemoryFormat.KV_MLA_FMT, rotation=rotation
        )  # fmt: skip


def test_a_position_that_cannot_be_undone_does_not_matter_to_a_key_that_stays():
    world = World()
    old = _old(3, MAX_POSITION - 1)
    new = world.rotation.new_positions.clone()
    new[3] = MAX_POSITION - 1
    world.plan(rotation=Rerotation(old, new, world.rotation.rope))


def test_a_gather_refuses_a_rotation():
    world = World()
    with pytest.raises(ArgumentError, match=r"^rotation: a gather moves bytes as they are"):
        reference_gather(world.plan())
    assert_same(world.chunks[0].flatten(), World().chunks[0].flatten(), "the chunk")


# Who is asked


def test_a_backend_that_does_not_rotate_is_never_given_a_rotation():
    plans, world = [], World()
    register_backend("mine", operations(scatter=lambda plan: plans.append(plan) or lmcache_ref.Transfer()))
    arguments = {"fmt": MemoryFormat.KV_2LTD, "starts": [0, 6]}
    assert not get_backend("mine").rotates and get_backend("reference").rotates
    with lmcache_ref.use_backend("mine"):
        with pytest.raises(BackendError, match=r"^backend 'mine' does not re-rotate .* call its rerotate on the keys$"):
            lmcache_ref.scatter(world.cache, SLOTS, world.chunks, **arguments, rotation=world.rotation)
        lmcache_ref.scatter(world.cache, SLOTS, world.chunks, **arguments)
    assert [plan.rotation for plan in plans] == [None]
    register_backend("yours", operations(scatter=lambda plan: plans.append(plan)), rotates=True)
    with lmcache_ref.use_backend("yours"):
        lmcache_ref.scatter(world.cache, SLOTS, world.chunks, **arguments, rotation=world.rotation)
    assert plans[-1].rotation.rope is world.rotation.rope
