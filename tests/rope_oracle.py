"""Keys, positions and tables to rotate by, and a scalar oracle of re-rotation in plain Python. No test lives here.

The oracle does one float operation at a time, each rounded through `struct`.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lmcache_ref.rope import RotarySpec, rotary_table

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
BITS[torch.float64] = torch.int64
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {"default": None, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3, "yarn": YARN}
MAX_POSITION = 4096

# ------------------------------------------------------------------------------------------- helpers


def assert_same_bits(got: Tensor, expected: Tensor, case: str) -> None:
    """Same dtype, shape and bits: NaN payloads and the sign of zero count."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), case
    got_bits, expected_bits = got.view(BITS[got.dtype]), expected.view(BITS[got.dtype])
    bad = (got_bits != expected_bits).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        digits = got.element_size() * 2
        mask = (1 << 8 * got.element_size()) - 1
        raise AssertionError(
            f"{case}: {len(bad)}/{got.numel()} differ, first at (t, nh, hs) = {at}: expected "
            f"{expected_bits[at].item() & mask:0{digits}x}, got {got_bits[at].item() & mask:0{digits}x}"
        )


def random_keys(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: int = 0) -> Tensor:
    """Normal numbers, scaled by powers of two up to 2 ** +-spread."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spread:
        exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
        values = torch.ldexp(values, exponents)
    return values.to(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, quiet and signalling NaNs with payloads, infinities, -0.0 and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=BITS[dtype])
    infinity = torch.tensor(float("inf"), dtype=dtype).view(BITS[dtype]).item()
    special = [info.min, 0, 1, info.min + 1, infinity, infinity + 1, infinity - (-info.min), info.max, -1]
    bits.view(-1)[: len(special)] = torch.tensor(special, dtype=BITS[dtype])
    return bits.view(dtype)


def random_positions(count: int, seed: int, low: int = 1000, high: int = MAX_POSITION) -> Tensor:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))


def pair_dims(rotary_dim: int, is_neox: bool) -> list[tuple[int, int]]:
    half = rotary_dim // 2
    return [(j, j + half) if is_neox else (2 * j, 2 * j + 1) for j in range(half)]


def as_complex(keys: Tensor, rotary_dim: int, is_neox: bool) -> Tensor:
    """The pairs of `keys` as complex128 numbers `[T, NH, pair]`."""
    first, second = (list(dims) for dims in zip(*pair_dims(rotary_dim, is_neox), strict=True))
    return torch.complex(keys[..., first].double(), keys[..., second].double())


def hugging_face_module(dim: int, parameters: dict, max_position: int = MAX_POSITION, **config):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * dim,
            num_attention_heads=4,
            head_dim=dim,
            max_position_embeddings=max_position,
            rope_parameters=parameters,
            **config,
        )
    )


# ------------------------------------------------------------------------------------------- the scalar oracle


def round_to_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def round_to_float16(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def round_to_bfloat16(value: float) -> float:
    """A float32 value, rounded half to even to its upper 16 bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    upper, lower = bits >> 16, bits & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


ROUND_TO_KEY = {
    torch.bfloat16: round_to_bfloat16,
    torch.float16: round_to_float16,
    torch.float32: lambda value: value,
    torch.float64: lambda value: value,
}


def oracle(keys: Tensor, old: Tensor, new: Tensor, rope: RotarySpec) -> Tensor:
    """A re-rotated copy. Python's floats are float64; rounding each float64 result to float32 once more gives the
    float32 result of + - * / exactly (53 >= 2 * 24 + 2 bits: the double rounding is harmless)."""
    r = (lambda value: value) if keys.dtype == torch.float64 else round_to_float32
    narrow = ROUND_TO_KEY[keys.dtype]
    table = [[r(value) for value in row] for row in rope.cos_sin_cache.tolist()]
    half = rope.rotary_dim // 2
    values = keys.tolist()
    for t, (p, q) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        if p == q:
            continue
        for head in values[t]:
            for j, (first, second) in enumerate(pair_dims(rope.rotary_dim, rope.is_neox)):
                c_old, s_old, c_new, s_new = table[p][j], table[p][half + j], table[q][j], table[q][half + j]
                x, y = head[first], head[second]
                n = r(r(c_old * c_old) + r(s_old * s_old))
                x0 = r(r(r(x * c_old) + r(y * s_old)) / n)
                y0 = r(r(r(y * c_old) - r(x * s_old)) / n)
                head[first] = narrow(r(r(x0 * c_new) - r(y0 * s_new)))
                head[second] = narrow(r(r(y0 * c_new) + r(x0 * s_new)))
    return torch.tensor(values, dtype=torch.float64).to(keys.dtype)


def check_oracle(
    implementation, dtype: torch.dtype, is_neox: bool, scaling: str, rotary_dim: int, table_dtype: torch.dtype
) -> int:
    """Raise unless `implementation` gives the oracle's bits; returns how many values were rotated."""
    table = rotary_table(64, rotary_dim, scaling=SCALINGS[scaling], dtype=table_dtype)
    rope = RotarySpec(table, is_neox)
    shape = (24, 2, 16)
    keys = random_keys(shape, dtype, seed=rotary_dim, spread=4 if dtype == torch.float16 else 12)
    keys[0], keys[1, 0], keys[2] = 0.0, -0.0, torch.finfo(dtype).tiny / 4  # zeros of both signs, subnormals
    old, new = random_positions(24, 1, 0, 64), random_positions(24, 2, 0, 64)
    expected = oracle(keys, old, new, rope)
    implementation(keys, old, new, rope)
    case = f"{dtype}-{'neox' if is_neox else 'gptj'}-{scaling}-rotary{rotary_dim}-table {table_dtype}"
    assert_same_bits(keys, expected, case)
    return int((old != new).sum()) * 2 * rotary_dim
