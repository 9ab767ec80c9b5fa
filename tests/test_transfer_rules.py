"""The nine rules of the move: each has its own error, and nothing is written when it is raised.

Rules 2 and 5 are what the laws in `test_transfer_laws.py` compare whole buffers for; no input can break them.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import lmcache_ref
from helpers import addressed, assert_same, untouched
from lmcache_ref import errors
from lmcache_ref.kv_cache import PagedKVCache
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat


@pytest.fixture(autouse=True)
def by_the_reference():
    """Rule 4 is always checked by the reference; others may leave it out."""
    with lmcache_ref.use_backend("reference"):
        yield


SHAPE = (2, 3, 4, 2, 8)  # K/V, NB, BS, NH, HS: 12 slots, D = 16


class Bench:
    """One cache of two layers and one chunk of four tokens, full of addresses and sentinels."""

    def __init__(self, dtype=torch.float32, chunk_dtype=None):
        self.cache = [addressed(384, dtype), addressed(384, dtype, 384)]
        self.chunk = addressed(2 * 2 * 4 * 16, chunk_dtype or dtype, 5000)
        self.before = [flat.clone() for flat in (*self.cache, self.chunk)]

    def planes(self) -> PagedKVCache:
        return PagedKVCache.from_vllm([flat.view(SHAPE) for flat in self.cache], kv_layout="NHD")

    def tensor(self) -> torch.Tensor:
        return self.chunk.view(2, 2, 4, 16)

    def unchanged(self) -> None:
        for flat, before in zip((*self.cache, self.chunk), self.before, strict=True):
            assert_same(flat, before, "memory that was refused")


# fmt: off
RULES = {
    # name: (rule, what changes, error, message, directions)
    "dtype": (1, lambda b: {"chunks": [b.tensor().view(torch.int32)]}, errors.DtypeError,
              r"chunks\[0\] is torch.int32, the KV cache is torch.float32; bytes are moved, not converted", 2),
    "slot-past-the-end": (3, lambda b: {"slots": [3, 12, 0, 1]}, errors.SlotRangeError,
                          r"slots\[1\] = 12: the cache has NB\*BS = 3\*4 = 12 slots", 2),
    "slot-far-away": (3, lambda b: {"slots": [3, 0, -1, 2**40 + 1]}, errors.SlotRangeError,
                      r"slots\[3\] = 1099511627777: ", 2),
    "slot-twice": (4, lambda b: {"slots": [3, 7, -1, 3]}, errors.DuplicateSlotError,
                   r"slots\[0\] and slots\[3\] are both 3: ", 1),
    "skip-below-zero": (6, lambda b: {"skip_prefix_n_tokens": -1}, errors.SkipPrefixError, "must be an int >= 0, got -1", 2),
    "skip-no-int": (6, lambda b: {"skip_prefix_n_tokens": 1.0}, errors.SkipPrefixError, "must be an int >= 0, got 1.0", 2),
    "skip-bool": (6, lambda b: {"skip_prefix_n_tokens": True}, errors.SkipPrefixError, "must be an int >= 0, got True", 2),
    "off-the-mapping": (7, lambda b: {"slots": [3, 7, 0]}, errors.ChunkError,
                        r"chunks\[0\] holds tokens \[0, 4\) but slots covers \[0, 3\)", 2),
    "off-the-mapping-by-start": (7, lambda b: {"starts": [1]}, errors.ChunkError, r"chunks\[0\] holds tokens \[1, 5\)", 2),
    "before-the-mapping": (7, lambda b: {"starts": [-1]}, errors.ChunkError, r"chunks\[0\] holds tokens \[-1, 3\)", 2),
    "starts-of-another-length": (7, lambda b: {"starts": [0, 4]}, errors.ChunkError, "1 chunks but 2 starts", 2),
    "expanded-chunk": (8, lambda b: {"chunks": [b.tensor()[:, :, :1].expand(2, 2, 4, 16)]}, errors.StrideError,
                       r"chunks\[0\]: shape \(2, 2, 4, 16\), strides \(128, 64, 0, 1\): an expanded axis \(stride 0\)", 2),
    "strided-chunk": (8, lambda b: {"chunks": [b.chunk.as_strided((2, 2, 4, 16), (128, 1, 2, 8))]}, errors.StrideError,
                      r"chunks\[0\]: .* the innermost axis must have stride 1, has 8", 2),
    "no-cache": (9, lambda b: {"cache": b.cache}, errors.ArgumentError, "cache must be a PagedKVCache, got list", 2),
    "no-layer": (9, lambda b: {"layers": [0, 2]}, errors.ArgumentError, "2 is not a layer; the cache has NL = 2", 2),
    "layer-twice": (9, lambda b: {"layers": [1, 1]}, errors.ArgumentError, r"\[1, 1\] names a layer twice", 2),
    "chunk-of-other-layers": (9, lambda b: {"layers": [1]}, errors.ChunkError,
                              r"chunks\[0\] has shape \(2, 2, 4, 16\); KV_2LTD \[two nl t \(nh hs\)\] of this transfer means "
                              r"two=2, NL=1, D = NH\*HS = 2\*8", 2),
    "chunk-of-other-width": (9, lambda b: {"chunks": [b.tensor()[..., :15]]}, errors.ChunkError, "has shape .* 15", 2),
    "chunk-of-other-rank": (9, lambda b: {"chunks": [b.tensor()[0]]}, errors.ChunkError,
          r"has shape \(2, 4, 16\); KV_2LTD", 2),
    "one-plane-format": (9, lambda b: {"fmt": MemoryFormat.KV_MLA_FMT}, errors.ChunkError, "KV_MLA_FMT .* means two=2", 2),
    "one-layer-format": (9, lambda b: {"fmt": MemoryFormat.KV_T2D, "chunks": [b.tensor()[0].transpose(0, 1)]},
                         errors.ChunkError, r"KV_T2D \[t two \(nh hs\)\] of this transfer means two=2, NL=2", 2),
    "no-format": (9, lambda b: {"fmt": MemoryFormat.BINARY}, errors.ChunkError,
          "is no chunk format; allowed: KV_2LTD, KV_T2D", 2),
    "no-tensor": (9, lambda b: {"chunks": [None]}, errors.ChunkError, r"chunks\[0\] has no tensor \(NoneType\)", 2),
    "slots-no-tensor": (9, lambda b: {"slots": None}, errors.SlotError, "slots must be a tensor, got NoneType", 2),
    "slots-of-floats": (9, lambda b: {"slots": torch.zeros(4)}, errors.SlotError,
          r"int64 \[tokens\], got torch.float32 \(4,\)", 2),
    "slots-of-bools": (9, lambda b: {"slots": torch.ones(4) > 0}, errors.SlotError, r"got torch.bool \(4,\)", 2),
    "slots-2-d": (9, lambda b: {"slots": torch.zeros(1, 4).long()}, errors.SlotError, r"got torch.int64 \(1, 4\)", 2),
}
# fmt: on


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("operation", [lmcache_ref.gather, lmcache_ref.scatter])
def test_a_broken_rule_has_its_own_error_and_writes_nothing(name, operation):
    _, change, error, message, directions = RULES[name]
    bench = Bench()
    given = {"cache": bench.planes(), "slots": [3, 7, -1, 0], "chunks": [bench.tensor()], "fmt": MemoryFormat.KV_2LTD}
    given |= change(bench)
    if isinstance(given["slots"], list):
        given["slots"] = torch.tensor(given["slots"])
    if directions == 1 and operation is lmcache_ref.gather:
        operation(**given)  # reading one slot twice is no fault
        return
    with pytest.raises(error, match=message) as caught:
        operation(**given)
    assert type(caught.value) is error
    bench.unchanged()


def test_each_checked_rule_is_broken_above():
    assert {rule for rule, *_ in RULES.values()} == {1, 3, 4, 6, 7, 8, 9}
    assert len(RULES) == 27


def test_an_error_in_the_last_chunk_writes_no_first_chunk():
    bench = Bench()
    halves = [bench.tensor()[:, :, :2], bench.tensor()[:, :, 2:]]
    for slots, error in (([3, 7, 0, 12], errors.SlotRangeError), ([3, 7, 0, 3], errors.DuplicateSlotError)):
        with pytest.raises(error):
            lmcache_ref.scatter(bench.planes(), torch.tensor(slots), halves, fmt=MemoryFormat.KV_2LTD)
    with pytest.raises(errors.DtypeError, match=r"chunks\[1\]"):
        wrong = [halves[0], halves[1].view(torch.int32)]
        lmcache_ref.scatter(bench.planes(), torch.tensor([3, 7, 0, 1]), wrong, fmt=MemoryFormat.KV_2LTD)
    bench.unchanged()


def test_rule_1_nan_payloads_and_minus_zero_survive():
    """Every bit pattern of two bytes, and quiet, signalling and negative NaNs of four and eight."""
    half = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    single = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, -(1 << 31), 1, 0x7F800000, 0, -1], dtype=torch.int32)
    double = torch.tensor([0x7FF8000000000001, 0x7FF0000000000001, -1, -(1 << 63)], dtype=torch.int64)
    for bits, dtype in (
        (half, torch.float16),
        (half, torch.bfloat16),
        (single, torch.float32),
        (double, torch.float64),
    ):
        source = bits.view(dtype)
        cache = PagedKVCache(((untouched(len(bits) * 2, dtype).view(-1, 2, 1, 4),),))
        chunk, back = source.view(-1, 4), untouched(len(bits), dtype)
        slots = torch.arange(len(chunk)) * 2
        lmcache_ref.scatter(cache, slots, [chunk], fmt=MemoryFormat.KV_MLA_FMT)
        lmcache_ref.gather(cache, slots, [back.view(-1, 4)], fmt=MemoryFormat.KV_MLA_FMT)
        assert_same(back, source, str(dtype))


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("held", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rule_1_uint8_stores_fp8(stored, held):
    cache = PagedKVCache(((untouched(512, stored).view(4, 16, 1, 8),),))
    chunk = torch.arange(256, dtype=torch.uint8).view(held).view(32, 8)
    slots = torch.arange(0, 64, 2)
    if torch.uint8 not in (stored, held) and stored != held:
        with pytest.raises(errors.DtypeError):
            lmcache_ref.scatter(cache, slots, [chunk], fmt=MemoryFormat.KV_MLA_FMT)
        return
    lmcache_ref.scatter(cache, slots, [chunk], fmt=MemoryFormat.KV_MLA_FMT)
    got = cache.planes[0][0].view(torch.uint8).view(32, 2, 8)
    assert got[:, 0].flatten().tolist() == list(range(256)) and bool((got[:, 1] == 0xEE).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_slots_of_any_integer_dtype_are_widened(dtype):
    one, other = Bench(), Bench()
    for bench, slots in ((one, torch.tensor([3, 7, 11, 0])), (other, torch.tensor([3, 7, 11, 0], dtype=dtype))):
        lmcache_ref.scatter(bench.planes(), slots, [bench.tensor()], fmt=MemoryFormat.KV_2LTD)
    for got, expected in zip(other.cache, one.cache, strict=True):
        assert_same(got, expected, str(dtype))


def test_rule_6_slots_of_the_skipped_prefix_are_not_looked_at():
    bench = Bench()
    slots = torch.tensor([2**40, 3, 3, 7])
    lmcache_ref.scatter(bench.planes(), slots, [bench.tensor()], fmt=MemoryFormat.KV_2LTD, skip_prefix_n_tokens=2)
    expected = bench.before[0].clone()
    for kv, (row, slot), d in itertools.product(range(2), ((2, 3), (3, 7)), range(16)):
        expected[kv * 192 + slot * 16 + d] = bench.before[2][kv * 128 + row * 16 + d]
    assert_same(bench.cache[0], expected, "layer 0")


def test_rule_7_no_token_is_no_work():
    bench, empty = Bench(), torch.empty(2, 2, 0, 16)
    for operation in (lmcache_ref.gather, lmcache_ref.scatter):
        for chunks in ([], [empty], [empty, empty], [torch.empty(9).as_strided((2, 2, 0, 16), (0, 0, 0, 1))]):
            operation(bench.planes(), torch.empty(0, dtype=torch.int64), chunks, fmt=MemoryFormat.KV_2LTD)
        operation(bench.planes(), torch.full((4,), -1), [bench.tensor()], fmt=MemoryFormat.KV_2LTD)
        past_the_end = {"fmt": MemoryFormat.KV_2LTD, "skip_prefix_n_tokens": 99}
        operation(bench.planes(), torch.full((4,), 2**40), [bench.tensor()], **past_the_end)
        operation(bench.planes(), torch.arange(4), [torch.empty(2, 0, 4, 16)], fmt=MemoryFormat.KV_2LTD, layers=[])
    bench.unchanged()


def test_a_chunk_may_be_a_memory_object():
    bench = Bench()
    obj = HostMemoryAllocator(1 << 12).allocate([2, 2, 4, 16], torch.float32)
    obj.raw_tensor.fill_(0xEE)
    lmcache_ref.gather(bench.planes(), torch.tensor([3, -1, 0, 11]), [obj], fmt=MemoryFormat.KV_2LTD)
    lmcache_ref.gather(bench.planes(), torch.tensor([3, -1, 0, 11]), [bench.tensor()], fmt=MemoryFormat.KV_2LTD)
    bench.tensor()[:, :, 1] = untouched(1, torch.float32)
    assert_same(obj.tensor.reshape(-1), bench.chunk, "the object")


def test_the_handle_of_the_reference_is_done():
    bench = Bench()
    handle = lmcache_ref.gather(bench.planes(), torch.arange(4), [bench.tensor()], fmt=MemoryFormat.KV_2LTD)
    assert handle.done() is True and handle.wait() is None and handle.synchronize() is None
