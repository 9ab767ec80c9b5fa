"""The demo of every connector: each is right over exactly the layouts it takes, and a broken one is seen to be broken.

The demo's own workings over one connector are in `test_demo.py`.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from lmcache_ref import LAYOUTS, cli
from lmcache_ref.connectors import (
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache_ref.demo import CONNECTORS, blend, connectors, model, run_demo, trip
from lmcache_ref.demo.raw import mixed_raw
from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.rope import RotarySpec

PER_LAYER, MLA, FLAT, FLAT_MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_HS", "TWO_X_NL_X_NBBS_NH_HS", "NL_X_NBBS_ONE_HS"
VLLM_KV = (
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
    "NB_NL_TWO_NH_BS_HS",
    "NL_X_NB_NH_BS_TWO_HS",
    "NL_X_NB_BS_NH_TWO_HS",
    "NL_X_NH_NB_BS_TWO_HS",
    "LBHNC",
    "LBNHC",
    "LHBNC",
    "BLHNC",
    "BLNHC",
    "BHLNC",
)
SGLANG = (
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "TWO_NL_X_NBBS_NH_HS",
    "TWO_NL_X_NB_BS_NH_HS",
    "NL_X_NB_BS_ONE_HS",
    "ONE_X_NL_X_NBBS_ONE_HS",
    "ONE_X_NL_X_NB_BS_ONE_HS",
)
TAKES = {
    "VLLMPagedMemGPUConnectorV3": {*VLLM_KV, MLA, "mixed"},
    "VLLMPagedMemLayerwiseGPUConnector": {*VLLM_KV, MLA},
    "VLLMBufferLayerwiseGPUConnector": {*VLLM_KV, "blend"},
    "SGLangGPUConnector": {*SGLANG},
    "SGLangLayerwiseGPUConnector": {*SGLANG},
}
CASES = [(name, row) for name, rows in TAKES.items() for row in sorted(rows)]


@pytest.fixture(scope="module")
def shown():
    return {name: run_demo(connector=name) for name in TAKES}


def demo_one(row, connector, **options):
    (result,) = run_demo([row], connector, **options)
    return result


# Every connector over its layouts


def test_every_connector_shows_what_it_takes_and_nothing_else(shown):
    assert list(CONNECTORS) == ["VLLMPagedMemGPUConnectorV2", *TAKES]
    assert len(CASES) == 17 + 16 + 16 + 8 + 8
    for name, results in shown.items():
        assert len(results) == len(TAKES[name])
        assert {result.layout for result in results} == TAKES[name]
        in_table = [result.layout for result in results if result.layout in LAYOUTS]
        assert in_table == [row for row in LAYOUTS if row in TAKES[name]], "in the order of the table"


@pytest.mark.parametrize(("name", "row"), CASES)
def test_row_is_right(shown, name, row):
    (result,) = [result for result in shown[name] if result.layout == row]
    assert result.ok, result
    equal = None if row == "blend" else True
    assert (result.tokens_equal, result.logits_equal, result.control_differs) == (equal, equal, True)
    assert (result.connector, result.error, result.skipped) == (name, "", False)
    assert result.bytes == (131072 if row == "blend" else 204800)  # 64 of the 100 tokens
    assert min(result.store_seconds, result.load_seconds) > 0
    assert bool(result.note) == (row in ("blend", "mixed") or LAYOUTS[row].is_mla)


def test_all_runs_each_connector_that_takes_the_layouts():
    results = run_demo([PER_LAYER, FLAT_MLA, "mixed", "blend"], "all")
    V2, V3, one_layer, buffer, sglang, sglang_one_layer = CONNECTORS
    assert [(result.connector, result.layout) for result in results] == [
        (V2, PER_LAYER),
        (V2, FLAT_MLA),
        (V3, PER_LAYER),
        (V3, "mixed"),
        (one_layer, PER_LAYER),
        (buffer, PER_LAYER),
        (buffer, "blend"),
        (sglang, FLAT_MLA),
        (sglang_one_layer, FLAT_MLA),
    ]
    assert [result for result in results if not result.ok] == []


def test_another_seed_is_right_too():
    assert [result for result in run_demo([PER_LAYER, FLAT, "mixed", "blend"], "all", seed=1) if not result.ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_every_connector_on_a_gpu(seed):
    results = run_demo(connector="all", device="cuda", seed=seed)
    assert len(results) == len(LAYOUTS) + len(CASES)
    assert [result for result in results if not result.ok] == []


def test_the_command_line_shows_one_table_a_connector():
    shown = CliRunner().invoke(cli.application(), ["demo", "--connector", "all", "-l", FLAT_MLA])
    assert shown.exit_code == 0
    for name in ("VLLMPagedMemGPUConnectorV2", "SGLangGPUConnector", "SGLangLayerwiseGPUConnector"):
        assert shown.stdout.count(f"demo: {name}, by ") == 1
    assert shown.stdout.count(FLAT_MLA) == 3 == shown.stdout.count("demo: ")
    document = json.loads(
        CliRunner().invoke(cli.application(), ["demo", "--connector", "all", "-l", FLAT_MLA, "--json"]).stdout
    )
    assert [result["ok"] for result in document["results"]] == [True] * 3


# What is refused


@pytest.mark.parametrize(
    ("connector", "rows", "refused", "offered"),
    [
        ("VLLMBufferLayerwiseGPUConnector", [MLA, PER_LAYER], MLA, "BHLNC, blend"),
        ("VLLMPagedMemLayerwiseGPUConnector", [FLAT, "blend"], f"{FLAT}, blend", MLA),
        ("VLLMPagedMemGPUConnectorV3", [FLAT_MLA], FLAT_MLA, "BHLNC, mixed"),
        ("SGLangGPUConnector", [PER_LAYER], PER_LAYER, "TWO_X_NL_X_NBBS_NH_HS, NL_X_NBBS_ONE_HS"),
        ("SGLangLayerwiseGPUConnector", ["mixed", FLAT], "mixed", "ONE_X_NL_X_NB_BS_ONE_HS"),
        ("VLLMPagedMemGPUConnectorV2", ["mixed"], "mixed", "NB_NL_TWO_NHBSHS"),
    ],
)
def test_a_row_that_the_connector_does_not_take_is_refused(monkeypatch, connector, rows, refused, offered):
    monkeypatch.setattr(model, "build_model", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ArgumentError) as error:
        run_demo(rows, connector)
    message = str(error.value)
    assert message.startswith(f"layouts: {refused} not taken by {connector}; it takes: ")
    taken = message.partition("it takes: ")[2].split(", ")
    assert set(taken) == TAKES.get(connector, {*LAYOUTS})
    assert offered in message


def test_unknown_names_are_refused(monkeypatch):
    monkeypatch.setattr(model, "build_model", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ArgumentError, match=r"'V9'.*VLLMPagedMemGPUConnectorV2, .*SGLangLayerwiseGPUConnector, all$"):
        run_demo(connector="V9")
    with pytest.raises(LayoutError, match="'NOPE'"):
        run_demo(["NOPE"], "all")


# Broken connectors


class V3SwapsOnStore(VLLMPagedMemGPUConnectorV3):
    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
        for obj in memory_objs:
            obj.tensor.copy_(obj.tensor.flip(0))


class V3ForgetsTheLastGroup(VLLMPagedMemGPUConnectorV3):
    """Right where there is one group."""

    def plans(self, *args, loading, **kwargs):
        plans = super().plans(*args, loading=loading, **kwargs)
        return plans[:-1] if loading and len(plans) > 1 else plans


class V3ExchangesGroups(VLLMPagedMemGPUConnectorV3):
    """Stores and loads, both wrong alike: the pages cannot show it."""

    def read_engine(self, kvcaches):
        return super().read_engine(kvcaches)[::-1]


def stores_zeros_in_the_last_layer(base):
    class StoresZerosInTheLastLayer(base):
        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
            yield from super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
            memory_objs[-1][-1].tensor.zero_()

    return StoresZerosInTheLastLayer


def loads_the_first_layer_everywhere(base):
    class LoadsTheFirstLayerEverywhere(base):
        def batched_to_gpu(self, starts, ends, **kwargs):
            steps = super().batched_to_gpu(starts, ends, **kwargs)
            next(steps)
            first = yield
            steps.send(first)
            for _ in range(self.num_layers - 1):
                yield
                steps.send(first)
            yield
            next(steps)
            yield

    return LoadsTheFirstLayerEverywhere


def yields_once_too_few(base):
    class YieldsOnceTooFew(base):
        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
            steps = super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
            yield from itertools.islice(steps, self.num_layers)
            next(steps)

    return YieldsOnceTooFew


def yields_once_too_often(base):
    class YieldsOnceTooOften(base):
        def batched_to_gpu(self, starts, ends, **kwargs):
            yield from super().batched_to_gpu(starts, ends, **kwargs)
            yield

    return YieldsOnceTooOften


class SGLangNextSlot(SGLangGPUConnector):
    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, *, slot_mapping, **kwargs):
        super().batched_to_gpu(memory_objs, starts, ends, slot_mapping=slot_mapping.roll(1), **kwargs)


class SGLangWithoutOffset(SGLangGPUConnector):
    def first_mapped_token(self, kwargs):
        return 0


class SGLangLayerwiseWithoutOffset(SGLangLayerwiseGPUConnector):
    def first_mapped_token(self, kwargs):
        return 0


class BlendsWithoutRotating(VLLMBufferLayerwiseGPUConnector):
    def _rotate(self, call, buffer, old, new):
        super()._rotate(call, buffer, new, new)


class BlendsOnePositionOff(VLLMBufferLayerwiseGPUConnector):
    def _rotate(self, call, buffer, old, new):
        super()._rotate(call, buffer, old, torch.where(old == new, new, new + 1))


class BlendsWithTheOtherPairing(VLLMBufferLayerwiseGPUConnector):
    def __init__(self, *args, rope, **options):
        super().__init__(*args, rope=RotarySpec(rope.cos_sin_cache, not rope.is_neox), **options)


class BlendsWithTheUnroundedTable(VLLMBufferLayerwiseGPUConnector):
    """Closer to the mathematics than the model is; a rounding or two away from its keys."""

    def __init__(self, *args, rope, **options):
        angles = torch.atan2(*rope.cos_sin_cache.float().chunk(2, dim=1)[::-1])
        super().__init__(*args, rope=RotarySpec(torch.cat((angles.cos(), angles.sin()), dim=1)), **options)


class BlendsWithAFullGap(VLLMBufferLayerwiseGPUConnector):
    def _rotate(self, call, buffer, old, new):
        super()._rotate(call, buffer, old, new)
        buffer[1, call.ends[0] - call.starts[0]] = 1


class BlendsTheValuesToo(VLLMBufferLayerwiseGPUConnector):
    def _rotate(self, call, buffer, old, new):
        super()._rotate(call, buffer, old, new)
        values = buffer[1].view(-1, call.cache.num_heads, call.cache.head_size)
        call.backend.rerotate(values, old, new, self.rope)


STORED, PAGES = "stored rows hold other bytes", "bytes of paged memory are not what the load should leave"
KEYS = "elements of moved keys are more than one rounding away"
LAST_ROWS = f"8 {STORED}, the first is layer 3, K, token 96"
OUTSIDE = "ChunkError: chunk 1: [64, 96) is outside slot_mapping, which covers tokens [0, 68)"
FEW, OFTEN = "yielded 4 times, expected 5", "yielded 7 times, expected 6"
L, B, S = VLLMPagedMemLayerwiseGPUConnector, VLLMBufferLayerwiseGPUConnector, SGLangLayerwiseGPUConnector


def sglang(connector_class):
    return connectors.replace(connectors.whole_model(connector_class), load=connectors.load_whole_in_two)


def sglang_layerwise(connector_class):
    return connectors.replace(connectors.layerwise(connector_class), load=connectors.load_layerwise_in_two)


BROKEN = [
    (connectors.grouped, V3SwapsOnStore, PER_LAYER, STORED),
    (connectors.grouped, V3ForgetsTheLastGroup, "mixed", PAGES),
    (connectors.grouped, V3ExchangesGroups, "mixed", STORED),
    (connectors.layerwise, stores_zeros_in_the_last_layer(L), PER_LAYER, LAST_ROWS),
    (connectors.layerwise, loads_the_first_layer_everywhere(L), MLA, PAGES),
    (connectors.layerwise, yields_once_too_few(L), PER_LAYER, FEW),
    (connectors.layerwise, yields_once_too_often(L), PER_LAYER, OFTEN),
    (connectors.blending, stores_zeros_in_the_last_layer(B), PER_LAYER, STORED),
    (connectors.blending, loads_the_first_layer_everywhere(B), PER_LAYER, PAGES),
    (connectors.blending, yields_once_too_few(B), PER_LAYER, FEW),
    (connectors.blending, yields_once_too_often(B), PER_LAYER, OFTEN),
    (connectors.blending, BlendsWithoutRotating, "blend", KEYS),
    (connectors.blending, BlendsOnePositionOff, "blend", KEYS),
    (connectors.blending, BlendsWithTheOtherPairing, "blend", KEYS),
    (connectors.blending, BlendsWithTheUnroundedTable, "blend", KEYS),
    (connectors.blending, BlendsWithAFullGap, "blend", PAGES),
    (connectors.blending, BlendsTheValuesToo, "blend", PAGES),
    (sglang, SGLangNextSlot, FLAT, PAGES),
    (sglang, SGLangWithoutOffset, FLAT, OUTSIDE),
    (sglang_layerwise, stores_zeros_in_the_last_layer(S), FLAT_MLA, STORED),
    (sglang_layerwise, loads_the_first_layer_everywhere(S), FLAT, PAGES),
    (sglang_layerwise, SGLangLayerwiseWithoutOffset, FLAT, OUTSIDE),
    (sglang_layerwise, yields_once_too_few(S), FLAT, FEW),
]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "broken", "row", "error"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_connector_is_shown_as_broken(monkeypatch, record, broken, row, error):
    monkeypatch.setitem(CONNECTORS, "Broken", record(broken))
    result = demo_one(row, "Broken")
    assert not result.ok
    assert error in result.error


@pytest.mark.parametrize("broken", [V3ForgetsTheLastGroup, V3ExchangesGroups])
def test_only_the_mixed_row_shows_groups_gone_wrong(monkeypatch, broken):
    monkeypatch.setitem(CONNECTORS, "Broken", connectors.grouped(broken))
    assert demo_one(PER_LAYER, "Broken").ok


@pytest.mark.parametrize("broken", [BlendsWithoutRotating, BlendsOnePositionOff, BlendsTheValuesToo])
def test_only_the_blend_row_shows_rotation_gone_wrong(monkeypatch, broken):
    monkeypatch.setitem(CONNECTORS, "Broken", connectors.blending(broken))
    assert demo_one(PER_LAYER, "Broken").ok


@pytest.mark.parametrize(
    ("connector", "row", "error"),
    [
        ("SGLangLayerwiseGPUConnector", FLAT, "a flipped bit of a stored key changed no logit"),
        ("VLLMBufferLayerwiseGPUConnector", "blend", "a flipped bit of a stored key left all keys within one rounding"),
    ],
)
def test_a_control_that_changes_nothing_fails(monkeypatch, connector, row, error):
    monkeypatch.setattr(trip, "flip_sign_of_greatest", lambda row: None)
    result = demo_one(row, connector)
    assert (result.ok, result.control_differs, result.error) == (False, False, error)


# How connectors are driven


@pytest.mark.parametrize(("sent", "yields"), [(5, 4), (5, 6), (1, 0), (1, 3)])
def test_steps_are_counted(sent, yields):
    def steps():
        for _ in range(yields):
            yield

    with pytest.raises(RuntimeError, match=f"yielded {yields} times, expected {sent}"):
        connectors.run_steps(steps(), [None] * sent)


def test_steps_send_in_order_and_run_to_the_end():
    seen = []

    def steps():
        for _ in range(3):
            seen.append((yield))
        seen.append("end")

    connectors.run_steps(steps(), [None, "layer 0", "layer 1"])
    assert seen == ["layer 0", "layer 1", None, "end"]


@pytest.mark.parametrize(("record", "base"), [(sglang, SGLangGPUConnector), (sglang_layerwise, S)])
def test_sglang_loads_the_later_chunks_by_a_partial_mapping(monkeypatch, record, base):
    calls = []

    class Listens(base):
        def batched_to_gpu(self, *args, **kwargs):
            calls.append((*args[-2:], kwargs["offset"], len(kwargs["slot_mapping"]), kwargs.get("sync")))
            return super().batched_to_gpu(*args, **kwargs)

    monkeypatch.setitem(CONNECTORS, "Listens", record(Listens))
    assert demo_one(FLAT, "Listens").ok
    sync = True if record is sglang_layerwise else None
    first, others = ([0], [32], 0, 100, sync), ([32, 64, 96], [64, 96, 100], 32, 68, sync)
    assert calls == [first, others] * (1 + 1 + trip.MORE_TIMES)  # the control, for good, for the clock


def test_the_mixed_model_has_two_groups_and_the_others_one(monkeypatch):
    seen = []

    class Listens(VLLMPagedMemGPUConnectorV3):
        def read_engine(self, kvcaches):
            groups = super().read_engine(kvcaches)
            seen.append([(group.layers.layer_indices, group.layers.BS) for group in groups])
            return groups

    monkeypatch.setitem(CONNECTORS, "Listens", connectors.grouped(Listens))
    assert [result.ok for result in run_demo(["mixed", PER_LAYER], "Listens")] == [True, True]
    assert seen == [[((0, 2), 16), ((1, 3), 8)], [((0, 1, 2, 3), 16)]]


def test_the_mixed_raw_lines_against_numbers_written_by_hand():
    raw = mixed_raw(NL=2, NB=3, BS=4, NH=2, HS=2)
    kv = raw.allocate(0, torch.int64, "cpu")
    assert [tuple(layer.shape) for layer in kv] == [(2, 3, 4, 2, 2), (6, 2, 2, 2, 2)]
    for layer in kv:
        layer.copy_(torch.arange(layer.numel()).view(layer.shape))
    assert raw.row(kv, 0, 1, 6).tolist() == [[72, 73], [74, 75]]  # 1*48 + 1*16 + 2*4
    assert raw.row(kv, 1, 1, 7).tolist() == [[60, 61], [62, 63]]  # 3*16 + 1*8 + 1*4
    places = list(itertools.product(range(2), range(2), range(12)))
    for place in places:
        raw.row(kv, *place)[:] = -1
    assert all(bool((layer == -1).all()) for layer in kv)


# What moved keys are compared with


@pytest.fixture(scope="module")
def story():
    return model.run_uninterrupted(0, torch.device("cpu"))


def test_rotated_again_is_what_the_model_computes_at_the_new_positions(story):
    """The key that the model itself makes at another position, out of the same key before rotation.

    Each of the two was rounded three times where the model rotated it (two products, a sum), for a pair of norm 1 by at
    most 2 units of 2**-9 an element; nothing else is rounded. That is two times 2 * 2**0.5 for a pair, in all 6.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    before = []
    projections = [layer.self_attn.k_proj for layer in story.model.model.layers]
    hooks = [linear.register_forward_hook(lambda *args: before.append(args[2])) for linear in projections]
    prompt = torch.randint(model.VOCABULARY, (1, model.PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    model.forward(story.model, prompt, model.cache_of([]))
    for hook in hooks:
        hook.remove()
    assert len(before) == model.NL
    old, new = torch.arange(model.PROMPT_TOKENS), torch.arange(model.PROMPT_TOKENS).flip(0) + 77

    def error(keys, unrotated, new, asked):
        states = unrotated[0].unflatten(1, (model.NH, model.HS)).transpose(0, 1)[None]
        own = apply_rotary_pos_emb(states, states, *story.model.model.rotary_emb(states, new[None]))[1]
        own = own[0].transpose(0, 1).double()
        off = model.rotated_again(story.model, keys, old, asked) - own
        return float((torch.hypot(*off.chunk(2, -1)) / torch.hypot(*own.chunk(2, -1))).max())

    for (keys, _), unrotated in zip(story.rows, before, strict=True):
        assert error(keys, unrotated, new, new) <= 6 * 2**-9
        assert error(keys, unrotated, old, old) <= 6 * 2**-9
        assert error(keys, unrotated, new, new + 1) > 6 * 2**-9


def test_rotated_again_at_the_same_positions_is_the_key_itself(story):
    at = torch.arange(model.PROMPT_TOKENS)
    keys = story.rows[0][0]
    assert torch.allclose(model.rotated_again(story.model, keys, at, at), keys.double(), rtol=0, atol=1e-13)


def test_one_rounding_is_half_a_unit_in_the_last_place():
    # between 1 and 2 a unit is 2**-7; the second element of each pair is too small for the pair's share to count
    exact = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-8 - 2**-12, 1 + 2**-8 + 2**-12, 1.5, 0, 0, 0], dtype=torch.float64)
    exact = torch.cat([exact, torch.zeros(8, dtype=torch.float64)]).view(1, 1, 16)
    found = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.5 + 2**-7] + [0.0] * 11).bfloat16().view(1, 1, 16)
    right = [True, True, True, False, False] + [True] * 11
    assert blend.within_one_rounding(found, exact).flatten().tolist() == right
    found[0, 0, 6] = 2**-20  # exactly zero has no last place
    right[6] = False
    assert blend.within_one_rounding(found, exact).flatten().tolist() == right
    nan = torch.full((1, 1, 16), float("nan")).bfloat16()
    assert not blend.within_one_rounding(nan, exact).any()


def test_the_rope_is_the_models_own_table(story):
    rope = model.rope_of(story.model)
    cos, sin = story.model.model.rotary_emb(story.rows[0][0], torch.arange(2 * model.PROMPT_TOKENS)[None])
    own = torch.cat((cos[0, :, : model.HS // 2], sin[0, :, : model.HS // 2]), dim=1)
    assert rope.is_neox and model.same_bits(rope.cos_sin_cache, own)


@pytest.mark.parametrize("connector", ["VLLMPagedMemGPUConnectorV2", "VLLMPagedMemLayerwiseGPUConnector"])
def test_connectors_have_the_threads_that_the_caller_has(monkeypatch, connector):
    seen = []
    record = CONNECTORS[connector]

    def load(*args, **kwargs):
        seen.append(torch.get_num_threads())
        record.load(*args, **kwargs)

    monkeypatch.setitem(CONNECTORS, "Listens", connectors.replace(record, load=load))
    with model.threads(3):
        assert demo_one(PER_LAYER, "Listens").ok
        assert torch.get_num_threads() == 3
    assert set(seen) == {3} and len(seen) == 2 + trip.MORE_TIMES
