"""The backend of `deferred.py`: that it is as late as it says, and that it sees a race."""

from __future__ import annotations

import pytest
import torch

import lmcache_ref
from deferred import deferred
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.rope import RotarySpec, rotary_table

SLOTS = torch.tensor([3, 0, 5, 1])


@pytest.fixture
def memory():
    cache = lmcache_ref.PagedKVCache.from_vllm([torch.zeros(2, 3, 2, 1, 4)], num_layers=1, num_kv_heads=1, head_dim=4)
    return cache, torch.ones(2, 4, 4)


def scatter(cache, chunk, slots=SLOTS):
    return lmcache_ref.scatter(cache, slots, [chunk], fmt=MemoryFormat.KV_2TD)


def gather(cache, chunk, slots=SLOTS):
    return lmcache_ref.gather(cache, slots, [chunk], fmt=MemoryFormat.KV_2TD)


def test_what_nobody_waits_for_never_happens(memory):
    cache, chunk = memory
    with deferred(chunk):
        late = scatter(cache, chunk)
        assert cache.planes[0][0].sum() == 0 and not late.done()


def test_after_wait_it_happens_when_the_stream_next_touches_the_memory(memory):
    cache, chunk = memory
    with deferred(chunk):
        late = scatter(cache, chunk)
        late.wait()
        assert chunk.sum() == 32 and torch.ones(3).sum() == 3
        assert not late.done()
        assert cache.planes[0][0].sum() == 16 and late.done()


def test_host_bytes_are_final_after_synchronize_and_not_after_wait(memory):
    cache, chunk = memory
    with deferred(chunk):
        late = gather(cache, chunk)
        late.wait()
        assert chunk.sum() == 32
        late.synchronize()
        assert chunk.sum() == 0 and late.done()


def test_transfers_happen_in_the_order_in_which_they_were_waited_for(memory):
    cache, chunk = memory
    with deferred(chunk) as backend:
        first, second = scatter(cache, chunk), gather(cache, torch.zeros(2, 1, 4), torch.tensor([2]))
        second.wait()
        first.synchronize()
        assert [late for what, late in backend.log if what == "happens"] == [second, first]


@pytest.mark.parametrize(
    ("first", "second"), [(scatter, scatter), (scatter, gather), (gather, scatter)], ids=["WW", "WR", "RW"]
)
def test_two_transfers_over_the_same_memory_without_a_wait_are_seen(memory, first, second):
    cache, chunk = memory
    other = torch.zeros(2, 1, 4)
    with deferred(chunk):
        late = first(cache, chunk)
        with pytest.raises(AssertionError, match="touch 8 same elements"):
            second(cache, other, torch.tensor([5]))
        second(cache, other, torch.tensor([4]))
        late.wait()
        second(cache, torch.zeros(2, 1, 4), torch.tensor([5]))


def test_rotating_keys_that_a_transfer_is_writing_is_seen(memory):
    cache, chunk = memory
    keys, old, new = cache.planes[0][0][:, 0], torch.arange(3), torch.arange(3) + 1
    with deferred(chunk) as backend:
        late = scatter(cache, chunk)
        rope = RotarySpec(rotary_table(8, 4))
        with pytest.raises(AssertionError, match="under way"):
            backend.rerotate(keys, old, new, rope)
        late.wait()
        backend.rerotate(keys, old, new, rope)
        assert [what for what, _ in backend.log] == ["scatter", "wait", "rerotate", "happens"]


def test_an_error_of_the_device_comes_once_and_late(memory):
    cache, chunk = memory
    with deferred(chunk) as backend:
        backend.fail[0] = ValueError("slot")
        late = scatter(cache, chunk)
        with pytest.raises(ValueError, match="slot"):
            late.wait()
        late.synchronize()
        assert late.done()
