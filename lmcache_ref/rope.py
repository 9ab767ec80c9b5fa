"""The spec of re-rotation: keys cached at old positions are un-rotated and rotated to new ones.

Here live the record of a rotation (`RotarySpec`), the exact arithmetic that every backend repeats bit for bit
(`rerotate`), and the tables of the usual position scalings (`rotary_table`). Which tokens move where is the
buffer connector's business; several positions per token (mrope) are not covered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from .errors import ArgumentError, DtypeError, StrideError

KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
POSITION_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class RotarySpec:
    """How an engine rotated its keys: a table of cosines and sines, and which dims form a pair.

    cos_sin_cache: `[max_position, rotary_dim]`, any float dtype and device; column j is the cosine of pair j,
        column rotary_dim/2 + j its sine. A scale may be folded in (YaRN). Kept, not copied.
    is_neox: True pairs dim j with dim j + rotary_dim/2 ("neox", half-split); False pairs dims 2j and 2j+1
        ("gptj", interleaved). Dims from rotary_dim on are not rotated.
    Raises ArgumentError, or DtypeError for a table that is not of floats.
    """

    cos_sin_cache: Tensor
    is_neox: bool = True

    def __post_init__(self) -> None:
        table = self.cos_sin_cache
        if not isinstance(table, Tensor):
            raise ArgumentError(f"cos_sin_cache: {type(table).__name__}; a tensor is needed")
        if not isinstance(self.is_neox, bool):
            raise ArgumentError(f"is_neox: {self.is_neox!r}; True (half-split) or False (interleaved) needed")
        if table.dtype not in KEY_DTYPES:
            raise DtypeError(f"cos_sin_cache: dtype {table.dtype}; one of {KEY_DTYPES} is needed")
        shape = list(table.shape)
        if table.ndim != 2 or 0 in shape or shape[1] % 2:
            raise ArgumentError(f"cos_sin_cache: shape {shape}; [max_position, even rotary_dim] is needed")
        # Keys narrower than float64 are rotated in float32: the table must be finite there too.
        if not torch.isfinite(table.to(torch.float32)).all():
            raise ArgumentError("cos_sin_cache: holds values that are not finite in float32")

    @property
    def max_position(self) -> int:
        """Number of positions in the table; positions run from 0 to max_position - 1."""
        return self.cos_sin_cache.shape[0]

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of a head that are rotated."""
        return self.cos_sin_cache.shape[1]

    @classmethod
    def from_module(cls, module: object, *, is_neox: bool | None = None, max_position: int | None = None) -> RotarySpec:
        """The spec of an engine's own rotary module, or an ArgumentError that names the module.

        vLLM style (`cos_sin_cache`, `is_neox_style`, `rotary_dim`): the table is taken as it is, not copied.
        Hugging Face style (`inv_freq`, `attention_scaling`, `rope_type`): the table is computed in float32 as
        the module does, for `max_position` positions (default: its `max_seq_len_cached`). Such a module does
        not know how its model pairs dims, so `is_neox` must be given (True: Llama, Qwen, Mistral, Gemma;
        False: Cohere, GLM, GPT-J). A model that casts cosines and sines to bfloat16 before use has rotated
        with those: `RotarySpec(spec.cos_sin_cache.bfloat16(), spec.is_neox)`.
        Refused: mrope, dynamic, longrope, and whatever else one table indexed by one position cannot say.
        """
        _refuse_unsupported(module)
        if all(hasattr(module, name) for name in _TABLE_MODULE):
            return _spec_from_table_module(module, is_neox, max_position)
        if all(hasattr(module, name) for name in _FREQUENCY_MODULE):
            return _spec_from_frequency_module(module, is_neox, max_position)
        raise _refusal(module, f"has neither all of {_TABLE_MODULE} nor of {_FREQUENCY_MODULE}")


# ------------------------------------------------------------------------------------------- re-rotation


@torch.no_grad()
def rerotate(keys: Tensor, old_positions: Tensor, new_positions: Tensor, rope: RotarySpec) -> None:
    """Move keys that were rotated to `old_positions` to `new_positions`, in place.

    keys: `[T, NH, HS]`, bfloat16, float16, float32 or float64, any strides that do not overlap; mutated.
    old_positions, new_positions: integers `[T]`, on any device, each in [0, rope.max_position).

    A pair (x, y) is rotated by x' = x*c - y*s, y' = y*c + x*s. Un-rotation divides by n = c*c + s*s and is
    so the exact inverse also where the table carries a scale (YaRN) or was rounded to bfloat16. Computed in
    float32 (float64 for float64 keys; the table is cast to it), every operation rounded by itself in the
    order written, no fused multiply-add, IEEE division; one rounding to the key dtype at the end. Rows with
    equal positions, and dims from rotary_dim on, keep their bits. A NaN in a moved pair gives NaNs, of any
    payload. The order of roundings holds in eager mode only: a compiler may fuse.

    Runs on the current stream and makes the host wait for it (positions are checked on the host).
    Raises ArgumentError (shape, position outside the table, n = 0 where a key moves), DtypeError or
    StrideError before anything is written.
    """
    check_keys(keys, rope)
    old = checked_positions("old_positions", old_positions, len(keys), rope).to(keys.device)
    new = checked_positions("new_positions", new_positions, len(keys), rope).to(keys.device)
    moved = (old != new).nonzero().squeeze(1)  # the rows to rewrite
    compute_dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32

    # 1. Name the axes: x and y are views [T, NH, pair] of the engine's memory; c and s are [moved, 1, pair].
    x_view, y_view = _pair_views(keys, rope)
    c_old, s_old = _cos_sin(rope, old[moved], compute_dtype)
    c_new, s_new = _cos_sin(rope, new[moved], compute_dtype)
    x, y = x_view[moved].to(compute_dtype), y_view[moved].to(compute_dtype)

    # 2. Un-rotate. One torch call per operation: each result is rounded before the next reads it.
    n = c_old * c_old + s_old * s_old
    _check_invertible(n, old, moved)
    x0 = (x * c_old + y * s_old) / n
    y0 = (y * c_old - x * s_old) / n

    # 3. Rotate, round once, write.
    x_view[moved] = (x0 * c_new - y0 * s_new).to(keys.dtype)
    y_view[moved] = (y0 * c_new + x0 * s_new).to(keys.dtype)


def _pair_views(keys: Tensor, rope: RotarySpec) -> tuple[Tensor, Tensor]:
    """The two members of every pair as views `[T, NH, rotary_dim/2]` of `keys`; unflatten never copies."""
    rotary = keys[..., : rope.rotary_dim]
    if rope.is_neox:
        x, y = rotary.unflatten(-1, (2, -1)).unbind(-2)  # t nh (two pair)
    else:
        x, y = rotary.unflatten(-1, (-1, 2)).unbind(-1)  # t nh (pair two)
    return x, y


def _cos_sin(rope: RotarySpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, `[T, 1, rotary_dim/2]`, on the device of the positions."""
    rows = rope.cos_sin_cache[positions.to(rope.cos_sin_cache.device)].to(positions.device, dtype)
    cos, sin = rearrange(rows, "t (two pair) -> two t 1 pair", two=2)
    return cos, sin


def check_keys(keys: Tensor, rope: RotarySpec) -> None:
    """`keys` `[T, NH, HS]` can be rotated by `rope`; ArgumentError, DtypeError or StrideError otherwise."""
    if not isinstance(rope, RotarySpec):
        raise ArgumentError(f"rope: {type(rope).__name__}; a RotarySpec is needed")
    if not isinstance(keys, Tensor) or keys.ndim != 3:
        what = list(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ArgumentError(f"keys: {what}; a tensor [T, NH, HS] is needed")
    if keys.dtype not in KEY_DTYPES:
        raise DtypeError(f"keys: dtype {keys.dtype}; one of {KEY_DTYPES} is needed")
    shape, strides = list(keys.shape), list(keys.stride())
    if shape[-1] < rope.rotary_dim:
        raise ArgumentError(f"keys: HS = {shape[-1]} is less than the table's rotary_dim = {rope.rotary_dim}")
    reach = 0  # of the axes with smaller strides, in elements
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach and keys.numel():
            raise StrideError(f"keys: shape {shape} with element strides {strides} overlaps itself")
        reach += stride * (size - 1)


def checked_positions(name: str, positions: Tensor, num_tokens: int, rope: RotarySpec) -> Tensor:
    """`positions` as int64 `[T]`, where they are; ArgumentError for one outside the table. The host waits for a device."""
    if not isinstance(positions, Tensor) or positions.dtype not in POSITION_DTYPES:
        what = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ArgumentError(f"{name}: {what}; a tensor of integers is needed")
    if list(positions.shape) != [num_tokens]:
        raise ArgumentError(f"{name}: shape {list(positions.shape)}; [T] of keys is [{num_tokens}]")
    positions = positions.to(torch.int64)
    outside = ((positions < 0) | (positions >= rope.max_position)).nonzero()
    if len(outside):
        token, last = int(outside[0]), rope.max_position - 1
        raise ArgumentError(f"{name}[{token}] = {int(positions[token])} is outside the table, 0..{last}")
    return positions


def _check_invertible(n: Tensor, old: Tensor, moved: Tensor) -> None:
    bad = ((n == 0) | ~torch.isfinite(n)).nonzero()
    if len(bad):
        row, _, pair = bad[0].tolist()
        token = int(moved[row])
        raise ArgumentError(
            f"old_positions[{token}] = {int(old[token])}: n = cos*cos + sin*sin of pair {pair} of the table "
            f"is {n[row, 0, pair].item()}; > 0 and finite needed, or the rotation cannot be undone"
        )


# ------------------------------------------------------------------------------------------- tables


def rotary_table(
    max_position: int,
    rotary_dim: int,
    base: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The table `[max_position, rotary_dim]` of a rotation, cosines then sines, on the CPU.

    base: the rotation's theta; default: `scaling["rope_theta"]`, else 10000.
    scaling: a model's `rope_parameters` (or older `rope_scaling`) as Hugging Face writes it; `rope_type` is
        default, linear, llama3 or yarn. Any other, and keys without a meaning here, are an ArgumentError.
        YaRN's attention factor is folded in. `partial_rotary_factor` is not read: rotary_dim says it.
    dtype: float64 computes in float64. Any other computes in float32, in the engines' order, and rounds once
        at the end: keys an engine rotated by angles rounded to float32 are best undone with the same angles.
    Source: Su et al., RoFormer (arXiv 2104.09864); the scalings cite theirs.
    """
    if not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2:
        raise ArgumentError(f"rotary_dim: {rotary_dim!r}; a positive even integer is needed")
    if dtype not in KEY_DTYPES:
        raise DtypeError(f"dtype: {dtype}; one of {KEY_DTYPES} is needed")
    kind, theta, options = _read_scaling(scaling or {}, base)
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # One pair per element; its unit is positions per radian.
    periods = theta ** (torch.arange(0, rotary_dim, 2, dtype=compute_dtype) / rotary_dim)
    inverse_frequency, attention_factor = _FREQUENCIES[kind](periods, theta, **options)
    return _table(inverse_frequency, attention_factor, max_position).to(dtype)


def _table(inverse_frequency: Tensor, attention_factor: float, max_position: Any) -> Tensor:
    if not isinstance(max_position, int) or max_position < 1:
        raise ArgumentError(f"max_position: {max_position!r}; a positive integer is needed")
    positions = torch.arange(max_position, dtype=inverse_frequency.dtype, device=inverse_frequency.device)
    angles = positions[:, None] * inverse_frequency
    return torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=-1)


def _default(periods: Tensor, theta: float) -> tuple[Tensor, float]:
    """Pair j turns by theta ** (-2j / rotary_dim) radians per position (RoFormer)."""
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, theta: float, *, factor: float) -> tuple[Tensor, float]:
    """Every pair turns `factor` times slower: position interpolation (Chen et al., arXiv 2306.15595)."""
    return (1.0 / periods) / factor, 1.0


def _llama3(
    periods: Tensor,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> tuple[Tensor, float]:
    """Short wavelengths stay, long ones turn `factor` times slower, a blend in between (Meta, Llama 3.1)."""
    if high_freq_factor <= low_freq_factor:
        raise ArgumentError(f"scaling: {high_freq_factor=} must be greater than {low_freq_factor=}")
    fast = 1.0 / periods
    slow = fast / factor
    wavelength = 2 * math.pi / fast
    turns = original_max_position_embeddings / wavelength  # full turns within the context of pretraining
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    middle = (1 - blend) * fast / factor + blend * fast
    is_long = wavelength > original_max_position_embeddings / low_freq_factor
    is_short = wavelength < original_max_position_embeddings / high_freq_factor
    return torch.where(is_long, slow, torch.where(is_short, fast, middle)), 1.0


def _yarn(
    periods: Tensor,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: float,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 0.0,
    mscale_all_dim: float = 0.0,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """NTK-by-parts with a temperature (Peng et al., YaRN, arXiv 2309.00071).

    Pairs that make more than `beta_fast` turns within the context of pretraining stay, those that make fewer
    than `beta_slow` turn `factor` times slower, a ramp over the pair index in between (its ends rounded
    outwards to whole pairs if `truncate`). The paper's 0.1 ln(factor) + 1 multiplies cosines and sines.
    """
    pairs = len(periods)

    def pair_that_turns(turns: float) -> float:
        period = original_max_position_embeddings / (turns * 2 * math.pi)
        return (2 * pairs * math.log(period)) / (2 * math.log(theta))

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    keep = 1 - ((torch.arange(pairs, dtype=periods.dtype) - first) / width).clamp(0, 1)
    inverse_frequency = (1.0 / (factor * periods)) * (1 - keep) + (1.0 / periods) * keep

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if attention_factor is None:
        both = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if both else temperature(1.0)
    return inverse_frequency, attention_factor


# rope_type -> f(periods, theta, **keys of scaling) -> (radians per position [pair], factor on cos and sin).
# The keyword-only parameters are the keys that a kind needs (no default) or knows.
_FREQUENCIES: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _read_scaling(scaling: Mapping[str, Any], base: float | None) -> tuple[str, float, dict[str, Any]]:
    """(kind, theta, the keyword arguments of the kind's row in `_FREQUENCIES`)."""
    given = {key: value for key, value in scaling.items() if value is not None}
    old_spelling = given.pop("type", "default")
    kind = given.pop("rope_type", old_spelling)
    if not isinstance(kind, str) or kind not in _FREQUENCIES:
        raise ArgumentError(f"scaling: rope_type {kind!r}; supported are {', '.join(_FREQUENCIES)}")
    given.pop("partial_rotary_factor", None)
    theta = given.pop("rope_theta", base if base is not None else 10000.0)
    if base is not None and theta != base:
        raise ArgumentError(f"base: {base} contradicts scaling's rope_theta = {theta}")
    parameters = inspect.signature(_FREQUENCIES[kind]).parameters.values()
    needed = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    missing = [name for name in needed if needed[name] and name not in given]
    unknown = sorted(set(given) - set(needed))
    if missing or unknown:
        keys = f"its keys are {list(needed)}"
        raise ArgumentError(f"scaling of rope_type {kind!r}: missing {missing}, unknown {unknown}; {keys}")
    for name, value in {"base": theta, **given}.items():
        if isinstance(value, bool) if name == "truncate" else _is_allowed_number(name, value):
            continue
        raise ArgumentError(f"scaling of rope_type {kind!r}: {name} = {value!r} is not allowed")
    return kind, float(theta), given


def _is_allowed_number(name: str, value: Any) -> bool:
    """Positive and finite; 0 switches the two mscale off; a base of 1 would turn every pair at one speed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 if name.startswith("mscale") else value > (1 if name == "base" else 0)


# ------------------------------------------------------------------------------------------- engines' modules

_TABLE_MODULE = ("cos_sin_cache", "is_neox_style", "rotary_dim")  # vLLM
_FREQUENCY_MODULE = ("inv_freq", "attention_scaling", "rope_type")  # Hugging Face

# Words in the class name (or a base's) of modules that one table indexed by one position does not describe:
# several positions per token, tables that depend on the length, keys rotated within a chunk, learnt tables.
_REFUSED_NAMES = ("mrotary", "xdrotary", "vision", "dynamic", "longrope", "dualchunk", "fourier")


def _refusal(module: object, why: str) -> ArgumentError:
    return ArgumentError(
        f"rotary module {type(module).__name__}: {why}. Supported is one table indexed by one position "
        f"({', '.join(_FREQUENCIES)}); if this is one, give RotarySpec(cos_sin_cache, is_neox) itself"
    )


def _refuse_unsupported(module: Any) -> None:
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if getattr(module, "mrope_section", None) is not None or "mrope_section" in parameters:
        raise _refusal(module, "mrope, several positions per token")
    for parent in type(module).__mro__:
        if any(word in parent.__name__.lower() for word in _REFUSED_NAMES):
            raise _refusal(module, f"is a {parent.__name__}")
    factors = getattr(module, "scaling_factors", None)
    if isinstance(factors, (list, tuple)) and len(factors) > 1:
        raise _refusal(module, f"holds one table per scaling factor, {factors}")


def _spec_from_table_module(module: Any, is_neox: bool | None, max_position: int | None) -> RotarySpec:
    name = type(module).__name__
    if max_position is not None:
        raise ArgumentError(f"max_position: {max_position}; the table of {name} is taken as it is")
    if is_neox is not None and is_neox != module.is_neox_style:
        raise ArgumentError(f"is_neox: {is_neox}; {name}.is_neox_style is {module.is_neox_style}")
    shape = list(module.cos_sin_cache.shape)
    if shape[1:] != [module.rotary_dim]:
        raise _refusal(module, f"cos_sin_cache is {shape}, its width not rotary_dim = {module.rotary_dim}")
    return RotarySpec(module.cos_sin_cache.detach(), bool(module.is_neox_style))


def _spec_from_frequency_module(module: Any, is_neox: bool | None, max_position: int | None) -> RotarySpec:
    name = type(module).__name__
    if not isinstance(module.rope_type, str) or module.rope_type not in _FREQUENCIES:
        raise _refusal(module, f"rope_type is {module.rope_type!r}")
    if is_neox is None:
        raise ArgumentError(f"is_neox: missing; {name} does not know its model's pairing (True: as Llama)")
    rows = getattr(module, "max_seq_len_cached", None) if max_position is None else max_position
    inverse_frequency = module.inv_freq.detach().to(torch.float32)
    return RotarySpec(_table(inverse_frequency, float(module.attention_scaling), rows), is_neox)
