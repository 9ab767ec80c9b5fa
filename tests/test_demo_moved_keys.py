"""What the demo compares moved keys with: the model's own rotation, its table, and one rounding.

That the blend row fails on keys moved wrongly is in `test_demo_broken.py`.
"""

from __future__ import annotations

import pytest
import torch

from lmcache_ref.demo import blend, model


@pytest.fixture(scope="module")
def story():
    return model.run_uninterrupted(0, torch.device("cpu"))


def test_rotated_again_is_what_the_model_computes_at_the_new_positions(story):
    """The key that the model itself makes at another position, out of the same key before rotation.

    Each of the two was rounded three times where the model rotated it: two products and their sum, by at most 2**-8 of each.
    That is at most 2 * 2**-8 of the pair's norm for an element, 2**0.5 times that for the pair, and nothing else is rounded:
    5.7 * 2**-8 for the two, and products of errors.
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
        assert error(keys, unrotated, new, new) <= 6 * 2**-8
        assert error(keys, unrotated, old, old) <= 6 * 2**-8
        assert error(keys, unrotated, new, new + 1) > 6 * 2**-8


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
