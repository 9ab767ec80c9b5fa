"""Wrong calls of `rerotate` and wrong specs: what each error says, and that nothing is written before it.

What `rotary_table` refuses is in `test_rope_tables.py`, which modules are refused in `test_rope_modules.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmcache_ref.errors import ArgumentError, DtypeError, StrideError
from lmcache_ref.rope import RotarySpec, rerotate, rotary_table

GOOD = {"keys": torch.ones(4, 2, 16), "old": torch.arange(4), "new": torch.arange(4) + 4}
BAD_CALLS = {
    "2-D": ({"keys": torch.ones(4, 32)}, ArgumentError, r"keys: \[4, 32\].*\[T, NH, HS\]"),
    "no tensor": ({"keys": [[[1.0]]]}, ArgumentError, "keys: list"),
    "integer keys": ({"keys": torch.ones(4, 2, 16).to(torch.uint8)}, DtypeError, r"keys: dtype torch\.uint8.*bfloat16"),
    "fp8 keys": ({"keys": torch.ones(4, 2, 16).to(torch.float8_e4m3fn)}, DtypeError, "float8_e4m3fn"),
    "complex keys": ({"keys": torch.ones(4, 2, 16, dtype=torch.complex64)}, DtypeError, "complex64"),
    "short heads": ({"keys": torch.ones(4, 2, 8)}, ArgumentError, "HS = 8 is less than .* rotary_dim = 12"),
    "expanded": ({"keys": torch.ones(4, 1, 16).expand(4, 2, 16)}, StrideError, r"\[4, 2, 16\].*\[16, 0, 1\]"),
    "overlapping": ({"keys": torch.ones(99).as_strided((4, 2, 16), (16, 8, 1))}, StrideError, "overlaps"),
    "negative": ({"old": torch.tensor([0, 1, -1, 3])}, ArgumentError, r"old_positions\[2\] = -1 .*0\.\.31"),
    "too large": ({"new": torch.tensor([9, 31, 32, 99])}, ArgumentError, r"new_positions\[2\] = 32 .*0\.\.31"),
    "equal, too large": (
        {"old": torch.tensor([0, 1, 2, 32]), "new": torch.tensor([0, 1, 2, 32])},
        ArgumentError,
        r"old_positions\[3\] = 32 .*0\.\.31",
    ),
    "2-D positions": ({"old": torch.arange(4)[None]}, ArgumentError, r"old_positions: shape \[1, 4\].*\[4\]"),
    "too few": ({"new": torch.arange(3)}, ArgumentError, r"new_positions: shape \[3\].*\[4\]"),
    "float positions": ({"old": torch.arange(4.0)}, ArgumentError, r"old_positions: torch\.float32.*integers"),
    "bool positions": ({"new": torch.ones(4, dtype=torch.bool)}, ArgumentError, r"new_positions: torch\.bool"),
    "list positions": ({"new": [1, 2, 3, 4]}, ArgumentError, "new_positions: list"),
    "n = 0": ({"old": torch.tensor([0, 1, 30, 3])}, ArgumentError, r"old_positions\[2\] = 30: n .*pair 4 .* is 0\.0"),
    "n underflows": ({"old": torch.tensor([0, 29, 2, 3])}, ArgumentError, r"old_positions\[1\] = 29: n .* 0\.0"),
    "n overflows": ({"old": torch.tensor([0, 1, 2, 28])}, ArgumentError, r"old_positions\[3\] = 28: n .* inf"),
    "no spec": ({"rope": torch.ones(32, 12)}, ArgumentError, "rope: Tensor; a RotarySpec"),
}


def table_with_bad_rows() -> Tensor:
    table = rotary_table(32, 12)
    table[30, [4, 10]] = 0.0
    table[29, [4, 10]] = 1e-30
    table[28, [4, 10]] = 1e30
    return table


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_input_is_refused_before_anything_is_written(name):
    changes, error, message = BAD_CALLS[name]
    call = {**GOOD, "rope": RotarySpec(table_with_bad_rows()), **changes}
    keys = call["keys"].clone() if changes.keys().isdisjoint({"keys"}) else call["keys"]
    before = keys.clone() if isinstance(keys, Tensor) else None
    with pytest.raises(error, match=message):
        rerotate(keys, call["old"], call["new"], call["rope"])
    if before is not None:
        assert torch.equal(keys.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def test_the_good_call_is_good():
    keys = GOOD["keys"].clone()
    rerotate(keys, GOOD["old"], GOOD["new"], RotarySpec(table_with_bad_rows()))
    assert not torch.equal(keys, GOOD["keys"])
    assert len(BAD_CALLS) == 20


BAD_SPECS = {
    "no tensor": ([[1.0, 0.0]], True, ArgumentError, "cos_sin_cache: list"),
    "1-D": (torch.ones(4), True, ArgumentError, r"shape \[4\]"),
    "3-D": (torch.ones(4, 2, 2), True, ArgumentError, r"shape \[4, 2, 2\]"),
    "odd width": (torch.ones(4, 5), True, ArgumentError, r"shape \[4, 5\].*even"),
    "no columns": (torch.ones(4, 0), True, ArgumentError, r"shape \[4, 0\]"),
    "no rows": (torch.ones(0, 4), True, ArgumentError, r"shape \[0, 4\]"),
    "integers": (torch.ones(4, 4, dtype=torch.int32), True, DtypeError, "int32"),
    "complex": (torch.ones(4, 4, dtype=torch.complex64), True, DtypeError, "complex64"),
    "NaN": (torch.full((4, 4), float("nan")), True, ArgumentError, "not finite"),
    "infinite": (torch.full((4, 4), float("-inf"), dtype=torch.bfloat16), True, ArgumentError, "not finite"),
    "too large for float32": (torch.full((4, 4), 1e300, dtype=torch.float64), True, ArgumentError, "not finite"),
    "pairing by name": (torch.ones(4, 4), "neox", ArgumentError, "is_neox: 'neox'"),
    "pairing by number": (torch.ones(4, 4), 1, ArgumentError, "is_neox: 1"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_wrong_spec_cannot_be_made(name):
    table, is_neox, error, message = BAD_SPECS[name]
    with pytest.raises(error, match=message):
        RotarySpec(table, is_neox)


def test_a_spec_is_a_frozen_record():
    table = rotary_table(8, 4)
    spec = RotarySpec(table)
    assert (spec.max_position, spec.rotary_dim, spec.is_neox) == (8, 4, True)
    assert spec.cos_sin_cache is table
    with pytest.raises(AttributeError):
        spec.is_neox = False
