"""`assert_same_bits`: the one comparison of the suite, and the message that tells a kernel author where to look.

Equal means equal dtype, shape and bits. What the elements mean (tokens, slots, guard bands) is known to `explain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import ContractViolation
from .engine import WORDS

#: the rules of `transfer.py` in the words of a failure
RULES = {
    1: "bytes are moved, not changed",
    2: "a token of negative slot stays; slot 0 is an ordinary slot",
    3: "a slot >= NB*BS is never followed",
    4: "one scatter writes a slot at most once",
    5: "what is not named stays as it is",
    6: "tokens of the skipped prefix are not moved, nor are their slots looked at",
    7: "no token is no work; ragged, several, gapped chunks are ordinary",
    8: "any strides a view can have",
    9: "wrong input raises before anything is written",
}


def assert_same_bits(
    got: torch.Tensor,
    expected: torch.Tensor,
    *,
    axes: Sequence[str] | None = None,
    case: object = None,
    backend: str | None = None,
    device: str = "cpu",
    explain: Callable[[tuple[int, ...]], tuple[int, list[str]]] | None = None,
) -> None:
    """Nothing when both have the same dtype, shape and bits; else ContractViolation.

    The message: case, rule, first bad coordinate under the names `axes`, expected and found bits in hex, bad / total, and
    the command that runs this case again. explain: from the first bad coordinate to the broken rule (default 1) and
    lines to add. Tensors may be on different devices; nothing is written.
    """
    if got.dtype != expected.dtype:
        raise violation(1, [f"dtype: expected {expected.dtype}, got {got.dtype}"], case, backend, device)
    if got.shape != expected.shape:
        shapes = f"shape: expected {tuple(expected.shape)}, got {tuple(got.shape)}"
        raise violation(1, [shapes], case, backend, device)
    found, wanted = words_of(got), words_of(expected)
    wrong = found != wanted
    if not bool(wrong.any()):
        return
    first = tuple(wrong.nonzero()[0].tolist())
    names = axes or [f"axis{number}" for number in range(got.dim())]
    rule, notes = explain(first) if explain else (1, [])
    lines = [
        "at " + ", ".join(f"{name}={place}" for name, place in zip(names, first, strict=True)),
        *notes,
        f"expected bits {as_hex(wanted[first])}, got {as_hex(found[first])}",
        f"{int(wrong.sum())} bad of {wrong.numel()} elements",
    ]
    raise violation(rule, lines, case, backend, device)


def violation(
    rule: int, lines: Sequence[str], case: object = None, backend: str | None = None, device: str = "cpu"
) -> ContractViolation:
    """The exception for a broken rule: what was run, the rule, `lines`, and how to run it again."""
    head = [f"{case or 'bits differ'}{f' by backend {backend!r}' if backend else ''}{_on(device)}"]
    again = [f"again: lmcache-ref verify --case {case} --backend {backend}"] if case and backend else []
    if again and device != "cpu":
        again[0] += f" --device {device}"
    return ContractViolation("\n  ".join([*head, f"rule {rule} is broken: {RULES[rule]}", *lines, *again]))


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same width, on the host."""
    return tensor.detach().view(WORDS[tensor.element_size()]).cpu()


def as_hex(word: torch.Tensor) -> str:
    """An integer element as the hex digits of its bits."""
    width_bytes = word.element_size()
    return f"0x{int(word) & ((1 << 8 * width_bytes) - 1):0{2 * width_bytes}x}"


def _on(device: str) -> str:
    return "" if device == "cpu" else f" on {device}"
