"""Tables of `rotary_table`: the bits of transformers, the formulas of the papers, and every error.

Tables that are taken from an engine's module are in `test_rope_modules.py`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lmcache_ref.errors import ArgumentError, DtypeError
from lmcache_ref.rope import RotarySpec, rotary_table
from rope_oracle import LLAMA3, MAX_POSITION, SCALINGS, YARN, assert_same_bits, hugging_face_module

HUGGING_FACE_TABLES = {
    "default": (128, {"rope_type": "default", "rope_theta": 10000.0}),
    "default, other base": (64, {"rope_type": "default", "rope_theta": 500000.0}),
    "default, odd size": (80, {"rope_type": "default", "rope_theta": 1000000.0}),
    "linear": (128, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "linear, uneven": (64, {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.7}),
    "Llama 3.1": (
        128,
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    ),
    "Llama 3.2": (64, {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3, short context": (64, {**LLAMA3, "rope_theta": 10000.0}),
    "llama3, uneven": (256, {**LLAMA3, "rope_theta": 10000.0, "factor": 11.3, "low_freq_factor": 1.3}),
    "YaRN, long context": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 131072}),
    "YaRN, tiny context": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 128}),
    "YaRN, no ramp": (64, {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 6}),
    "YaRN, shrunk": (64, {**YARN, "rope_theta": 10000.0, "factor": 0.5}),
    "YaRN": (128, {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768}),
    "YaRN, short context": (64, {**YARN, "rope_theta": 10000.0}),
    "YaRN, attention factor": (64, {**YARN, "rope_theta": 10000.0, "attention_factor": 0.7}),
    "YaRN, mscale": (64, {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "YaRN, other betas": (64, {**YARN, "rope_theta": 10000.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    "YaRN, not truncated": (64, {**YARN, "rope_theta": 150000.0, "truncate": False}),
}


@pytest.mark.parametrize("name", HUGGING_FACE_TABLES)
def test_tables_have_the_bits_of_transformers(name):
    dim, parameters = HUGGING_FACE_TABLES[name]
    module = hugging_face_module(dim, dict(parameters))
    cos, sin = module(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    assert torch.equal(cos[0, :, : dim // 2], cos[0, :, dim // 2 :])  # theirs is one half, twice
    theirs = torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), dim=-1)
    assert_same_bits(rotary_table(MAX_POSITION, dim, scaling=parameters), theirs, name)
    assert_same_bits(RotarySpec.from_module(module, is_neox=True).cos_sin_cache, theirs, f"{name}, from_module")


def scalar_radians_per_position(kind: str, j: int, dim: int, base: float) -> float:
    """One pair at a time, from the papers; for the constants of LLAMA3 and YARN above."""
    theta = base ** (-2 * j / dim)
    turns = 1024 * theta / (2 * math.pi)
    if kind == "linear":
        return theta / 4
    if kind == "llama3":
        share = min(max((turns - 1) / (4 - 1), 0), 1)
        return (1 - share) * theta / 8 + share * theta
    if kind == "yarn":
        low = math.floor(dim / 2 * math.log(1024 / (32 * 2 * math.pi), base))
        high = math.ceil(dim / 2 * math.log(1024 / (1 * 2 * math.pi), base))
        interpolated = min(max((j - low) / (high - low), 0), 1)
        return interpolated * theta / 4 + (1 - interpolated) * theta
    return theta


@pytest.mark.parametrize("kind", SCALINGS)
def test_float64_tables_follow_the_papers(kind):
    dim, base = 64, 10000.0
    table = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind], torch.float64)
    scale = 0.1 * math.log(4) + 1 if kind == "yarn" else 1.0
    for position, j in itertools.product((0, 1, 1000, 4095), range(dim // 2)):
        angle = position * scalar_radians_per_position(kind, j, dim, base)
        assert table[position, j].item() == pytest.approx(scale * math.cos(angle), abs=1e-11)
        assert table[position, dim // 2 + j].item() == pytest.approx(scale * math.sin(angle), abs=1e-11)
    in_float32 = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind])
    assert (in_float32 - table).abs().max() < MAX_POSITION * 2**-22  # an angle of 4095 radians, rounded
    rounded = rotary_table(MAX_POSITION, dim, base, SCALINGS[kind], torch.bfloat16)
    assert_same_bits(rounded, in_float32.bfloat16(), "bfloat16 is float32, rounded once")


def test_the_scalar_formulas_reach_every_branch():
    """The scalings of these tests leave fast pairs alone, slow slow pairs down fully, and blend some between."""
    for kind, factor in (("llama3", 8), ("yarn", 4)):
        slowed = [
            scalar_radians_per_position("default", j, 64, 1e4) / scalar_radians_per_position(kind, j, 64, 1e4)
            for j in range(32)
        ]
        assert slowed[0] == 1 and slowed[-1] == pytest.approx(factor)
        assert sum(1.01 < value < factor - 0.01 for value in slowed) >= 3


BAD_SCALINGS = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; supported are default, linear, llama3, yarn"),
    "longrope": ({"type": "longrope"}, "'longrope'"),
    "a list": ({"rope_type": ["yarn"]}, r"\['yarn'\]"),
    "mrope": ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "unknown .'mrope_section'"),
    "factor without a kind": ({"factor": 2.0}, r"'default': missing \[\], unknown \['factor'\]"),
    "linear without factor": ({"rope_type": "linear"}, r"missing \['factor'\]"),
    "no factor given": ({"rope_type": "linear", "factor": None}, r"missing \['factor'\]"),
    "llama3 half": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "missing .'high_freq_factor'"),
    "another's key": ({**YARN, "attn_factor": 1.0}, r"unknown \['attn_factor'\]; its keys are \['factor'"),
    "factor of 0": ({"rope_type": "linear", "factor": 0.0}, "factor = 0.0"),
    "negative factor": ({**YARN, "factor": -4.0}, "factor = -4.0"),
    "factor as text": ({"rope_type": "linear", "factor": "2"}, "factor = '2'"),
    "factor as bool": ({"rope_type": "linear", "factor": True}, "factor = True"),
    "infinite factor": ({"rope_type": "linear", "factor": math.inf}, "factor = inf"),
    "truncate as number": ({**YARN, "truncate": 1}, "truncate = 1"),
    "base of 1": ({"rope_theta": 1.0}, "base = 1.0"),
    "base as text": ({"rope_theta": "1e4"}, "base = '1e4'"),
    "llama3 upside down": ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0 must be greater"),
}


@pytest.mark.parametrize("name", BAD_SCALINGS)
def test_wrong_scalings_are_refused(name):
    scaling, message = BAD_SCALINGS[name]
    with pytest.raises(ArgumentError, match=message):
        rotary_table(16, 8, scaling=scaling)


def test_wrong_sizes_are_refused():
    for rotary_dim in (0, -2, 7, 8.0, None):
        with pytest.raises(ArgumentError, match=f"rotary_dim: {rotary_dim}"):
            rotary_table(16, rotary_dim)
    for max_position in (0, -1, 16.0, None):
        with pytest.raises(ArgumentError, match=f"max_position: {max_position}"):
            rotary_table(max_position, 8)
    with pytest.raises(DtypeError, match="int64"):
        rotary_table(16, 8, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"base: 10000.0 contradicts .* 500000.0"):
        rotary_table(16, 8, base=10000.0, scaling={"rope_theta": 500000.0})


def test_ways_to_say_the_same_table():
    plain = rotary_table(16, 8)
    for scaling in ({}, {"rope_type": "default"}, {"rope_theta": 10000}, {"partial_rotary_factor": 0.5}):
        assert_same_bits(rotary_table(16, 8, scaling=scaling), plain, str(scaling))
    assert_same_bits(rotary_table(16, 8, base=1e4, scaling={"rope_theta": 1e4}), plain, "base twice")
    yarn = rotary_table(16, 8, scaling=YARN)
    old_spelling = {**{key: value for key, value in YARN.items() if key != "rope_type"}, "type": "yarn"}
    assert_same_bits(rotary_table(16, 8, scaling=old_spelling), yarn, "type")
    assert_same_bits(rotary_table(16, 8, scaling={**YARN, "attention_factor": None}), yarn, "None is absent")
    assert not torch.equal(yarn, plain)
