"""Specs made from engines' rotary modules: whose table is taken as it is, and which are refused by name.

Keys that a transformers model rotated itself are moved and compared with the model's own at the new positions.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lmcache_ref.errors import ArgumentError
from lmcache_ref.rope import RotarySpec, rerotate, rotary_table
from rope_oracle import (
    BITS,
    MAX_POSITION,
    YARN,
    as_complex,
    assert_same_bits,
    hugging_face_module,
    random_keys,
    random_positions,
)


class RotaryEmbedding(torch.nn.Module):
    """Has the attributes of vLLM's rotary modules that have one table."""

    def __init__(self, table: Tensor, is_neox_style: bool = True, rotary_dim: int | None = None, **extra):
        super().__init__()
        self.register_buffer("cos_sin_cache", table, persistent=False)
        self.is_neox_style = is_neox_style
        self.rotary_dim = table.shape[-1] if rotary_dim is None else rotary_dim
        for name, value in extra.items():
            setattr(self, name, value)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    pass


class MRotaryEmbedding(RotaryEmbedding):
    pass


class Ernie4_5_VLRotaryEmbedding(MRotaryEmbedding):
    pass


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    pass


class Phi3LongRoPEScaledRotaryEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("long_short_cos_sin_cache", torch.ones(8, 4), persistent=False)
        self.rotary_dim = 4


@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_table_of_a_vllm_module_is_taken_as_it_is(dtype, is_neox):
    table = rotary_table(32, 8, scaling=YARN, dtype=dtype)
    for kind in (RotaryEmbedding, YaRNScalingRotaryEmbedding):
        spec = RotarySpec.from_module(kind(table, is_neox, scaling_factors=[4.0]))
        assert_same_bits(spec.cos_sin_cache, table, kind.__name__)
        assert spec.cos_sin_cache.data_ptr() == table.data_ptr()
        assert spec.is_neox is is_neox


BAD_MODULES = {
    "mrope": (lambda: MRotaryEmbedding(torch.ones(8, 4)), "MRotaryEmbedding: is a MRotaryEmbedding"),
    "mrope's child": (
        lambda: Ernie4_5_VLRotaryEmbedding(torch.ones(8, 4)),
        "Ernie4_5_VLRotaryEmbedding: is a MRotaryEmbedding",
    ),
    "mrope by attribute": (
        lambda: RotaryEmbedding(torch.ones(8, 4), mrope_section=[1, 1]),
        "RotaryEmbedding: mrope",
    ),
    "dynamic": (lambda: DynamicNTKScalingRotaryEmbedding(torch.ones(8, 4)), "is a DynamicNTKScaling"),
    "longrope": (Phi3LongRoPEScaledRotaryEmbedding, "Phi3LongRoPEScaledRotaryEmbedding"),
    "several tables": (
        lambda: RotaryEmbedding(torch.ones(8, 4), scaling_factors=[1.0, 4.0]),
        r"one table per scaling factor, \[1.0, 4.0\]",
    ),
    "other width": (
        lambda: RotaryEmbedding(torch.ones(8, 8), rotary_dim=4),
        r"cos_sin_cache is \[8, 8\], its width not rotary_dim = 4",
    ),
    "one table per head": (lambda: RotaryEmbedding(torch.ones(8, 2, 4)), r"cos_sin_cache is \[8, 2, 4\]"),
    "no rotary module": (lambda: torch.nn.Linear(2, 2), "Linear: has neither all of"),
    "no module": (lambda: None, "NoneType: has neither all of"),
    "Hugging Face dynamic": (
        lambda: hugging_face_module(64, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "LlamaRotaryEmbedding: rope_type is 'dynamic'",
    ),
    "Hugging Face longrope": (
        lambda: hugging_face_module(
            4,
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0, 1.0],
                "long_factor": [2.0, 2.0],
                "original_max_position_embeddings": 1024,
            },
        ),
        "LlamaRotaryEmbedding: rope_type is 'longrope'",
    ),
    "Hugging Face mrope": (lambda: qwen_2_vl_module(), "Qwen2VL.*RotaryEmbedding: mrope"),
    "one rotation per kind of layer": (
        lambda: SimpleNamespace(inv_freq=torch.ones(2), attention_scaling=1.0, rope_type={"full": "default"}),
        "rope_type is {'full': 'default'}",
    ),
}


def qwen_2_vl_module():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = Qwen2VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    return Qwen2VLRotaryEmbedding(config)


@pytest.mark.parametrize("name", BAD_MODULES)
def test_modules_that_one_table_cannot_say_are_refused_by_name(name):
    make, message = BAD_MODULES[name]
    with pytest.raises(ArgumentError, match=message):
        RotarySpec.from_module(make(), is_neox=True)


def test_what_a_module_cannot_tell_must_be_told_and_what_it_tells_stands():
    module = hugging_face_module(64, {"rope_type": "default", "rope_theta": 1e4}, max_position=512)
    with pytest.raises(ArgumentError, match="is_neox: missing; LlamaRotaryEmbedding"):
        RotarySpec.from_module(module)
    with pytest.raises(ArgumentError, match="max_position: 0"):
        RotarySpec.from_module(module, is_neox=True, max_position=0)
    assert RotarySpec.from_module(module, is_neox=False).max_position == 512
    longer = RotarySpec.from_module(module, is_neox=False, max_position=600)
    assert (longer.max_position, longer.rotary_dim, longer.is_neox) == (600, 64, False)
    with pytest.raises(ArgumentError, match=r"is_neox: False; RotaryEmbedding\.is_neox_style is True"):
        RotarySpec.from_module(RotaryEmbedding(torch.ones(8, 4)), is_neox=False)
    with pytest.raises(ArgumentError, match="max_position: 9; the table of RotaryEmbedding"):
        RotarySpec.from_module(RotaryEmbedding(torch.ones(8, 4)), max_position=9)


@pytest.mark.parametrize("is_neox", (True, False), ids=("llama", "cohere"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_keys_that_a_transformers_model_rotated(dtype, is_neox):
    """K rotated by the model's own code at p, moved to q, against the model's own code at q."""
    from transformers import CohereConfig
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    if is_neox:
        module, code = hugging_face_module(64, {**YARN, "rope_theta": 1e4}), modeling_llama
    else:
        config = CohereConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=MAX_POSITION)
        module, code = modeling_cohere.CohereRotaryEmbedding(config), modeling_cohere
    raw = random_keys((1, 2, 32, 64), dtype, seed=18)  # [batch, NH, T, HS]

    def rotated_by_the_model(positions: Tensor) -> Tensor:
        cos, sin = module(raw, positions[None])
        return code.apply_rotary_pos_emb(raw, raw, cos, sin)[1][0].transpose(0, 1)  # [T, NH, HS]

    p, q = random_positions(32, 19), random_positions(32, 20)
    keys, expected = rotated_by_the_model(p).clone(), rotated_by_the_model(q)
    spec = RotarySpec.from_module(module, is_neox=is_neox)
    rerotate(keys, p, q, RotarySpec(spec.cos_sin_cache.to(dtype), spec.is_neox))
    got, want = as_complex(keys, 64, is_neox), as_complex(expected, 64, is_neox)
    error = ((got - want).abs() / want.abs()).max()
    # bfloat16: the model rounds each product and sum at p and at q, we once.
    assert error < {torch.float32: 1e-5, torch.bfloat16: 8 * 2**-8}[dtype]
