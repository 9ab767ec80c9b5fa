"""The buffer connector by itself: what `get_kv` gives and when, positions and rotation (cases 28 and 29), what it refuses.

Its moves are rows of `test_connector_matrix.py`, its order of stages is in `test_ordering.py`, a model's own keys are in
`test_blending_walk.py`.
"""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

from drive import Bench, Sizes
from helpers import assert_same
from lmcache_ref.connectors import VLLMBufferLayerwiseGPUConnector
from lmcache_ref.errors import ArgumentError, ChunkError, DuplicateSlotError
from lmcache_ref.memory import MemoryFormat
from lmcache_ref.rope import RotarySpec, rerotate, rotary_table
from steps import Open

SLOTS = torch.tensor([5, 0, 9, 27, 11, 2, 19, 8, 1, 26])
GAPPED = [(1, 3), (4, 6), (9, 10)]


# get_kv


def test_get_kv_is_the_layer_between_two_steps_and_only_then():
    bench = Bench("buffer")
    opened = Open(bench, "load", GAPPED, slots=SLOTS.tolist())
    get_kv, layers = bench.connector.get_kv, range(-1, bench.NL + 1)

    def buffered() -> list[int]:
        found = []
        for layer in layers:
            try:
                get_kv(layer)
                found.append(layer)
            except ValueError as error:
                assert f"layer_id={layer}: " in str(error)
        return found

    seen = [buffered()]
    for _ in range(opened.steps):
        opened.step()
        seen.append(buffered())
    assert seen == [[], [], [0], [1], [2], []]
    for steps in range(bench.NL + 2):
        opened = Open(bench, "load", [(1, 3)]).run(steps)
        opened.generator.close()
        assert buffered() == []


def test_get_kv_holds_keys_and_values_of_the_whole_span_with_zeros_in_gaps():
    """Case 29. What lay in the buffer before does not show."""
    bench = Bench("buffer")
    for first in (3, 30000):
        opened = Open(bench, "load", GAPPED, first=first, slots=SLOTS.tolist()).run(1)
        values = opened.values.clone()
        values[:, :, [0, 3, 6, 7, 8]] = 0
        for layer in range(bench.NL):
            opened.step()
            wanted = rearrange(values[:, layer, 1:10], "two t nh hs -> two t (nh hs)")
            for got, plane in zip(bench.connector.get_kv(layer), wanted, strict=True):
                assert got.shape == (9, 40) and torch.equal(got.view(torch.int16), plane)
        opened.finish()
        opened.release()


def test_case_29_without_chunks_get_kv_says_so_and_the_generator_runs_to_its_end():
    bench = Bench("buffer")
    opened = Open(bench, "load", [])
    for _ in range(opened.steps):
        with pytest.raises(ArgumentError, match="layer_id=0: no layer is buffered"):
            bench.connector.get_kv(0)
        opened.step()
    assert next(opened.generator, "ended") == "ended"


@pytest.mark.parametrize("double", [True, False])
def test_what_a_blender_writes_reaches_the_engine_gaps_included(double):
    bench = Bench("buffer", use_double_buffer=double)
    opened, cache = Open(bench, "load", GAPPED, slots=SLOTS.tolist()).run(1), bench.cache_values()
    bench.put_engine(cache)
    values = opened.values.clone()
    values[:, :, [3, 6, 7, 8]] = 0
    for layer in range(bench.NL):
        opened.step()
        keys, planes = bench.connector.get_kv(layer)
        for token, number in ((3, 1000 + layer), (4, 2000 + layer), (8, 3000 + layer)):  # gap, chunk, gap
            keys[token - 1].view(torch.int16).fill_(number)
            planes[token - 1].view(torch.int16).fill_(-number)
            values[0, layer, token], values[1, layer, token] = number, -number
    opened.finish()
    expected = bench.loaded(cache, values, [(1, 10)], SLOTS.tolist())
    assert_same(bench.engine[0], bench.engine_holding(expected)[0], "the engine")


# One load at a time


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_second_open_load_raises_and_the_first_goes_on(steps):
    bench = Bench("buffer")
    first = Open(bench, "load", [(1, 3)]).run(steps)
    second = Open(bench, "load", [(4, 6)])
    if first.ended:
        second.finish()
    else:
        with pytest.raises(ArgumentError, match="a load of this connector is still open"):
            second.step()
        assert bench.connector.buffers.in_use == (2 if steps < 5 else 0)
        if 2 <= steps < 5:
            bench.connector.get_kv(steps - 2)
        first.finish()
        second = Open(bench, "load", [(4, 6)])
        second.finish()
    expected = second.expected(first.expected(bench.untouched_cache()))
    assert_same(bench.engine[0], bench.engine_holding(expected)[0], "the engine")


def test_a_load_that_was_not_started_keeps_nobody_waiting():
    bench = Bench("buffer")
    waiting = Open(bench, "load", [(1, 3)])
    Open(bench, "load", [(4, 6)]).finish()
    waiting.finish()
    Open(bench, "store", [(4, 6)]).finish()


# Positions


def test_a_store_records_positions_and_format():
    bench = Bench("buffer")
    opened = Open(bench, "store", GAPPED, slots=SLOTS.tolist())
    opened.finish()
    for row in opened.objects:
        for obj, (start, end) in zip(row, GAPPED, strict=True):
            assert obj.metadata.fmt is MemoryFormat.KV_2TD
            assert obj.metadata.cached_positions.dtype == torch.int64
            assert obj.metadata.cached_positions.tolist() == list(range(start, end))


@pytest.mark.parametrize("layer", range(3))
def test_positions_that_cannot_be_are_refused_before_the_layer_moves(layer):
    table = rotary_table(16, 8)
    refused = {
        "none": (None, table, r"memory_objs\[1\]: cached_positions must be \[2\], got None"),
        "too many": (torch.arange(3), table, r"cached_positions must be \[2\], got \(3,\)"),
        "beyond the table": (torch.tensor([15, 16]), table, r"positions 1..16 exceed the rotary table of 16"),
        "negative": (torch.tensor([-1, 0]), table, r"positions -1..9 exceed"),
        "moved without rope": (torch.tensor([4, 6]), None, "no rope to move its keys by; set connector.rope"),
    }
    for what, (positions, table, message) in refused.items():
        bench = Bench("buffer", rope=None if table is None else RotarySpec(table))
        opened = Open(bench, "load", GAPPED, slots=SLOTS.tolist()).run(layer + 1)
        before = bench.engine[0].clone()
        opened.objects[layer][1].metadata.cached_positions = positions
        with pytest.raises(ValueError, match=f"layer {layer}: .*{message}|{message}"):
            opened.step()
        assert_same(bench.engine[0], before, what)
        assert bench.connector.buffers.in_use == 0


def test_rope_may_be_set_before_first_use():
    bench = Bench("buffer")
    opened = Open(bench, "load", [(1, 3)])
    for row in opened.objects:
        row[0].metadata.cached_positions = torch.tensor([8, 9])
    bench.connector.rope = RotarySpec(rotary_table(16, 8))
    opened.finish()


# Case 28: keys at p, re-rotated to q, against keys rotated at q directly

TABLES = {
    "default": {},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
#: stored at [1000, 1006) and [1006, 1010); loaded in the other order, far before and far behind
STORED = [(1000, 1006), (1006, 1010)]
LOADED = [(900, 904), (1300, 1306)]


def rotated(raw: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, neox: bool) -> torch.Tensor:
    """Keys `[T, NH, HS]` turned as complex numbers, in float64, by the table's rows."""
    cos, sin = table.double()[positions].chunk(2, -1)
    turn = torch.complex(cos, sin)[:, None]
    width = table.shape[1]
    pairs = "t nh (two pair) -> t nh pair two" if neox else "t nh (pair two) -> t nh pair two"
    both = rearrange(raw[..., :width].double(), pairs, two=2).contiguous()
    back = " -> ".join(reversed(pairs.split(" -> ")))
    turned = rearrange(torch.view_as_real(torch.view_as_complex(both) * turn), back)
    return torch.cat([turned, raw[..., width:].double()], -1)


@pytest.mark.parametrize("scaling", TABLES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [16, 8], ids=["whole head", "half head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_case_28_keys_come_out_as_if_rotated_where_they_are_loaded(scaling, neox, rotary_dim, dtype):
    table = rotary_table(1400, rotary_dim, scaling=TABLES[scaling], dtype=torch.float64)
    table = table if dtype is torch.float64 else table.float()
    sizes = Sizes(NL=2, NH=3, HS=16)
    bench = Bench("buffer", sizes=sizes, dtype=dtype, rope=RotarySpec(table, neox), buffer_tokens=500)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(2, 2, 10, 3, 16, generator=generator, dtype=torch.float64)  # NL TWO T NH HS
    at_p = raw.clone()
    at_p[:, 0] = torch.stack([rotated(raw[layer, 0], torch.arange(1000, 1010), table, neox) for layer in range(2)])
    at_p = at_p.to(dtype)

    slots, cache = torch.full((1400,), -1), bench.untouched_cache()
    slots[1000:1010] = SLOTS
    word = cache.dtype
    cache[:, :, SLOTS] = at_p.view(word)
    bench.put_engine(cache)
    objects = bench.allocate(STORED)
    bench.store(objects, STORED, slots)
    bench.put_engine(bench.untouched_cache())
    slots[:] = -1
    slots[900:904], slots[1300:1306] = SLOTS[:4], SLOTS[4:]
    bench.load([row[::-1] for row in objects], LOADED, slots)

    order = [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
    expected, stored = bench.untouched_cache(), at_p[:, :, order]
    rows = rearrange(bench.kvcaches, "nb nl two bs nh hs -> nl two (nb bs) nh hs")[:, :, SLOTS]
    new = torch.cat([torch.arange(900, 904), torch.arange(1300, 1306)])
    old = torch.arange(1000, 1010)[order]
    for layer in range(2):
        assert torch.equal(rows[layer, 1].view(word), stored[layer, 1].view(word)), "values moved"
        keys, bits = rows[layer, 0], stored[layer, 0].clone()
        assert torch.equal(keys[..., rotary_dim:].view(word), bits[..., rotary_dim:].view(word)), "unrotated dims moved"
        direct = rotated(raw[layer, 0, order], new, table, neox)
        check_tolerance(keys, direct, bits, old, new, table, neox)
        rerotate(bits, old, new, bench.connector.rope)
        assert torch.equal(keys.view(word), bits.view(word)), "not the specified arithmetic"
    expected[:, :, SLOTS] = rows.contiguous().view(word)
    assert_same(bench.engine[0], bench.engine_holding(expected)[0], "outside the loaded slots")


def check_tolerance(keys, direct, bits, old, new, table, neox) -> None:
    """fp64: 1e-12; fp32: 1e-5 of the pair's norm; bf16: one rounding of the fp64 re-rotation of the stored bits."""
    if keys.dtype is torch.bfloat16:
        n = table.double().chunk(2, -1)
        inverse = torch.cat([n[0] / (n[0] ** 2 + n[1] ** 2), -n[1] / (n[0] ** 2 + n[1] ** 2)], -1)
        exact = rotated(rotated(bits.double(), old, inverse, neox), new, table, neox)
        below, above = exact.bfloat16().view(torch.int16).int(), keys.view(torch.int16).int()
        assert int((below - above).abs().max()) <= 1
        return
    width = table.shape[1]
    pairs = "t nh (two pair) -> t nh pair two" if neox else "t nh (pair two) -> t nh pair two"
    error, exact = (rearrange(x[..., :width], pairs, two=2) for x in (keys.double() - direct, direct))
    limit = 1e-12 if keys.dtype is torch.float64 else 1e-5
    assert bool((error.norm(dim=-1) <= limit * exact.norm(dim=-1)).all())


def test_equal_positions_leave_the_bits_alone():
    """NaNs of any payload and -0.0, in the dims that a rotation would touch."""
    bench = Bench("buffer", rope=RotarySpec(rotary_table(32, 8)))
    opened = Open(bench, "load", GAPPED, slots=SLOTS.tolist())
    opened.finish()
    wanted = bench.engine_holding(opened.expected(bench.untouched_cache()))[0]
    assert_same(bench.engine[0], wanted, "the engine")


# What it refuses


def test_what_cannot_work_is_refused_at_construction():
    sizes = {"dtype": torch.float16, "device": "cpu"}
    refused = [
        ({"use_gpu": False, **sizes}, "use_gpu must be True"),
        ({"use_mla": True, **sizes}, "use_mla=True: .* plain layerwise"),
        ({"device": "cpu"}, "use_gpu=True needs dtype"),
        ({"dtype": torch.float16}, "use_gpu=True needs device"),
        ({"rope": "yarn", **sizes}, "rope must be a RotarySpec, got str"),
        ({"buffer_tokens": 0, **sizes}, "buffer_tokens must be a positive int, got 0"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            VLLMBufferLayerwiseGPUConnector(40, 3, **options)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_chunks_must_ascend_without_overlap(kind):
    bench = Bench("buffer")
    for spans in ([(4, 6), (1, 3)], [(1, 4), (3, 6)], [(1, 3), (1, 3)]):
        with pytest.raises(ChunkError, match=r"chunks 0 and 1: .* must ascend without overlap"):
            Open(bench, kind, spans).step()
    assert bench.connector.buffers.in_use == 0


def test_slots_of_gaps_are_checked_too_on_load_only():
    """Tokens 3 and 5 share a slot, 3 is in a gap: a load would write it twice; token 8 has none and is skipped."""
    bench = Bench("buffer")
    twice = [5, 0, 9, 2, 11, 2, 19, 8, -1, 26]
    with pytest.raises(DuplicateSlotError, match=r"slots\[3\] and slots\[5\] are both 2"):
        Open(bench, "load", GAPPED, slots=twice).step()
    Open(bench, "store", GAPPED, slots=twice).finish()
    Open(bench, "load", [(4, 6), (9, 10)], slots=twice).finish()
