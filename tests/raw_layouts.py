"""Every row of the layout table once more, by hand: the element at which a head of a token begins, and the shapes.

The numbers are for tight memory. Nothing here uses the library's patterns, planes or views, so the two can be
compared; a row that is missing here fails the test that counts them. Only `Case` calls the library, at its doors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from helpers import addressed, assert_same, untouched, words
from lmcache_ref import c_ops
from lmcache_ref.c_ops import GPUKVFormat, TransferDirection

NL, NB, BS, NH, HS = 3, 5, 4, 6, 7  # all different, none of them 2
D = NH * HS
SLOTS = NB * BS
TOKENS = [13, -1, 0, 6, 19, 3, 8]  # a slot for each token
DTYPE = torch.bfloat16
GUARD = 19  # elements around every tensor: odd, so that no tensor is aligned to more than its dtype

#: (layer, K or V, block, offset, head) -> (tensor, element of the head's first value in it)
Address = Callable[[int, int, int, int, int], tuple[int, int]]
ADDRESS: dict[str, Address] = {
    "NB_NL_TWO_BS_NH_HS": lambda i, k, b, o, h: (0, ((((b * NL + i) * 2 + k) * BS + o) * NH + h) * HS),
    "NL_X_TWO_NB_BS_NH_HS": lambda i, k, b, o, h: (i, (((k * NB + b) * BS + o) * NH + h) * HS),
    "NL_X_NB_TWO_BS_NH_HS": lambda i, k, b, o, h: (i, (((b * 2 + k) * BS + o) * NH + h) * HS),
    "NL_X_NB_BS_HS": lambda i, k, b, o, h: (i, (b * BS + o) * D + h * HS),
    "TWO_X_NL_X_NBBS_NH_HS": lambda i, k, b, o, h: (k * NL + i, (b * BS + o) * D + h * HS),
    "NL_X_NBBS_ONE_HS": lambda i, k, b, o, h: (i, (b * BS + o) * D + h * HS),
    "NL_X_TWO_NB_NH_BS_HS": lambda i, k, b, o, h: (i, (((k * NB + b) * NH + h) * BS + o) * HS),
    "NL_X_NB_TWO_NH_BS_HS": lambda i, k, b, o, h: (i, (((b * 2 + k) * NH + h) * BS + o) * HS),
    "NB_NL_TWO_NH_BS_HS": lambda i, k, b, o, h: (0, ((((b * NL + i) * 2 + k) * NH + h) * BS + o) * HS),
    "TWO_X_NL_X_NB_BS_NH_HS": lambda i, k, b, o, h: (k * NL + i, (b * BS + o) * D + h * HS),
    "NL_X_NB_NH_BS_TWO_HS": lambda i, k, b, o, h: (i, (((b * NH + h) * BS + o) * 2 + k) * HS),
    "NL_X_NB_BS_NH_TWO_HS": lambda i, k, b, o, h: (i, (((b * BS + o) * NH + h) * 2 + k) * HS),
    "NL_X_NH_NB_BS_TWO_HS": lambda i, k, b, o, h: (i, (((h * NB + b) * BS + o) * 2 + k) * HS),
    "NB_NH_NL_TWO_BS_HS": lambda i, k, b, o, h: (0, ((((b * NH + h) * NL + i) * 2 + k) * BS + o) * HS),
    "TWO_NL_X_NBBS_NH_HS": lambda i, k, b, o, h: (k * NL + i, (b * BS + o) * D + h * HS),
    "TWO_NL_X_NB_BS_NH_HS": lambda i, k, b, o, h: (k * NL + i, (b * BS + o) * D + h * HS),
    "NL_X_NB_BS_ONE_HS": lambda i, k, b, o, h: (i, (b * BS + o) * D + h * HS),
    "ONE_X_NL_X_NBBS_ONE_HS": lambda i, k, b, o, h: (i, (b * BS + o) * D + h * HS),
    "ONE_X_NL_X_NB_BS_ONE_HS": lambda i, k, b, o, h: (i, (b * BS + o) * D + h * HS),
    "NB_NL_TWO_NHBSHS": lambda i, k, b, o, h: (0, ((b * NL + i) * 2 + k) * NH * BS * HS + (h * BS + o) * HS),
    "LBHNC": lambda i, k, b, o, h: (0, ((((i * NB + b) * NH + h) * BS + o) * 2 + k) * HS),
    "LBNHC": lambda i, k, b, o, h: (0, ((((i * NB + b) * BS + o) * NH + h) * 2 + k) * HS),
    "LHBNC": lambda i, k, b, o, h: (0, ((((i * NH + h) * NB + b) * BS + o) * 2 + k) * HS),
    "BLHNC": lambda i, k, b, o, h: (0, ((((b * NL + i) * NH + h) * BS + o) * 2 + k) * HS),
    "BLNHC": lambda i, k, b, o, h: (0, ((((b * NL + i) * BS + o) * NH + h) * 2 + k) * HS),
    "BHLNC": lambda i, k, b, o, h: (0, ((((b * NH + h) * NL + i) * BS + o) * 2 + k) * HS),
}

#: lengths of the lists around the tensors, and the shape of each tensor
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "NB_NL_TWO_BS_NH_HS": ((), (NB, NL, 2, BS, NH, HS)),
    "NL_X_TWO_NB_BS_NH_HS": ((NL,), (2, NB, BS, NH, HS)),
    "NL_X_NB_TWO_BS_NH_HS": ((NL,), (NB, 2, BS, NH, HS)),
    "NL_X_NB_BS_HS": ((NL,), (NB, BS, D)),
    "TWO_X_NL_X_NBBS_NH_HS": ((2, NL), (SLOTS, NH, HS)),
    "NL_X_NBBS_ONE_HS": ((NL,), (SLOTS, 1, D)),
    "NL_X_TWO_NB_NH_BS_HS": ((NL,), (2, NB, NH, BS, HS)),
    "NL_X_NB_TWO_NH_BS_HS": ((NL,), (NB, 2, NH, BS, HS)),
    "NB_NL_TWO_NH_BS_HS": ((), (NB, NL, 2, NH, BS, HS)),
    "TWO_X_NL_X_NB_BS_NH_HS": ((2, NL), (NB, BS, NH, HS)),
    "NL_X_NB_NH_BS_TWO_HS": ((NL,), (NB, NH, BS, 2 * HS)),
    "NL_X_NB_BS_NH_TWO_HS": ((NL,), (NB, BS, NH, 2 * HS)),
    "NL_X_NH_NB_BS_TWO_HS": ((NL,), (NH, NB, BS, 2 * HS)),
    "NB_NH_NL_TWO_BS_HS": ((), (NB, NH, NL, 2, BS, HS)),
    "TWO_NL_X_NBBS_NH_HS": ((2 * NL,), (SLOTS, NH, HS)),
    "TWO_NL_X_NB_BS_NH_HS": ((2 * NL,), (NB, BS, NH, HS)),
    "NL_X_NB_BS_ONE_HS": ((NL,), (NB, BS, 1, D)),
    "ONE_X_NL_X_NBBS_ONE_HS": ((1, NL), (SLOTS, 1, D)),
    "ONE_X_NL_X_NB_BS_ONE_HS": ((1, NL), (NB, BS, 1, D)),
    "NB_NL_TWO_NHBSHS": ((), (NB, NL, 2, NH * BS * HS)),
    "LBHNC": ((), (NL, NB, NH, BS, 2 * HS)),
    "LBNHC": ((), (NL, NB, BS, NH, 2 * HS)),
    "LHBNC": ((), (NL, NH, NB, BS, 2 * HS)),
    "BLHNC": ((), (NB, NL, NH, BS, 2 * HS)),
    "BLNHC": ((), (NB, NL, BS, NH, 2 * HS)),
    "BHLNC": ((), (NB, NH, NL, BS, 2 * HS)),
}

#: the shapes that upstream's callers flatten to, where neighbouring axes can be joined
FLATTENED: dict[str, tuple[int, ...]] = {
    "NB_NL_TWO_BS_NH_HS": (NB, NL, 2, BS, D),
    "NL_X_TWO_NB_BS_NH_HS": (2, SLOTS, D),
    "NL_X_NB_TWO_BS_NH_HS": (NB, 2, BS, D),
    "NL_X_NB_BS_HS": (SLOTS, D),
    "TWO_X_NL_X_NBBS_NH_HS": (SLOTS, D),
    "NL_X_NBBS_ONE_HS": (SLOTS, D),
    "TWO_X_NL_X_NB_BS_NH_HS": (SLOTS, D),
    "TWO_NL_X_NBBS_NH_HS": (SLOTS, D),
    "TWO_NL_X_NB_BS_NH_HS": (SLOTS, D),
    "NL_X_NB_BS_ONE_HS": (SLOTS, D),
    "ONE_X_NL_X_NBBS_ONE_HS": (SLOTS, D),
    "ONE_X_NL_X_NB_BS_ONE_HS": (SLOTS, D),
}

#: sizes without which a pointer to such memory cannot be read
NEEDS: dict[str, set[str]] = {
    "NB_NL_TWO_BS_NH_HS": {"block_size"},
    "NL_X_NB_TWO_BS_NH_HS": {"block_size"},
    "NL_X_NB_BS_NH_TWO_HS": {"head_size"},
    "NL_X_NH_NB_BS_TWO_HS": {"head_size"},
    "LBNHC": {"head_size"},
    "LHBNC": {"head_size"},
    "NL_X_TWO_NB_NH_BS_HS": {"block_size", "head_size"},
    "NL_X_NB_TWO_NH_BS_HS": {"block_size", "head_size"},
    "NB_NL_TWO_NH_BS_HS": {"block_size", "head_size"},
    "NL_X_NB_NH_BS_TWO_HS": {"block_size", "head_size"},
    "NB_NH_NL_TWO_BS_HS": {"block_size", "head_size"},
    "NB_NL_TWO_NHBSHS": {"block_size", "head_size"},
    "LBHNC": {"block_size", "head_size"},
    "BLHNC": {"block_size", "head_size"},
    "BLNHC": {"block_size", "head_size"},
    "BHLNC": {"block_size", "head_size"},
}

MLA = {"NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", "NL_X_NB_BS_ONE_HS", "ONE_X_NL_X_NBBS_ONE_HS", "ONE_X_NL_X_NB_BS_ONE_HS"}


def planes_of(name: str) -> int:
    """2 for K and V, 1 for MLA."""
    return 1 if name in MLA else 2


class Guarded:
    """A flat buffer of `num_elements` between two guards."""

    def __init__(self, num_elements: int, dtype: torch.dtype, first: int | None, device: str = "cpu"):
        """Element i holds `first` + i; sentinels where `first` is None."""
        length = num_elements + 2 * GUARD
        whole = untouched(length, dtype) if first is None else addressed(length, dtype, first)
        self.whole = whole.to(device)

    @property
    def inner(self) -> torch.Tensor:
        return self.whole[GUARD:-GUARD]


class Paged:
    """An engine's memory for one row: a guarded buffer for each tensor."""

    def __init__(self, name: str, dtype: torch.dtype, *, written: bool, device: str = "cpu"):
        lists, self.shape = SHAPES[name]
        self.name, self.lists = name, lists
        size = math.prod(self.shape)
        self.parts = [
            Guarded(size, dtype, index * (size + 100) if written else None, device) for index in range(math.prod(lists))
        ]

    @property
    def wholes(self) -> list[torch.Tensor]:
        return [part.whole for part in self.parts]

    def pointers(self, device: str = "cpu") -> torch.Tensor:
        return torch.tensor([part.inner.data_ptr() for part in self.parts], dtype=torch.int64, device=device)

    def tensors(self, shape: Sequence[int] | None = None):
        """Nested lists of views in the engine's shape, or in `shape`."""
        leaves = [part.inner.view(tuple(shape or self.shape)) for part in self.parts]
        for length in reversed(self.lists[1:]):
            leaves = [leaves[i : i + length] for i in range(0, len(leaves), length)]
        return leaves if self.lists else leaves[0]


def rows(slots: Sequence[int], skip: int = 0) -> list[tuple[int, int, int]]:
    """(token, block, offset) of every token that moves."""
    return [(t, slot // BS, slot % BS) for t, slot in enumerate(slots) if t >= skip and slot >= 0]


def whole_model(num_tokens: int) -> Callable[[int, int, int, int], int]:
    """Where (K or V, layer, token, head) begins in a chunk `[planes, NL, T, D]`."""
    return lambda k, layer, token, head: ((k * NL + layer) * num_tokens + token) * D + head * HS


def moved(
    name: str,
    paged: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    slots: Sequence[int],
    skip: int,
    direction: str,
    *,
    place: Callable[[int, int, int, int], int] | None = None,
    layers: Sequence[int] = range(NL),
    address: Address | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the whole buffers hold afterwards, as integers. place: as `whole_model` returns, for other chunks."""
    paged = [words(part).clone() for part in paged]
    chunk = words(chunk).clone()
    place, address = place or whole_model(len(slots)), address or ADDRESS[name]
    for t, block, offset in rows(slots, skip):
        for k in range(planes_of(name)):
            for layer in layers:
                for head in range(NH):
                    tensor, element = address(layer, k, block, offset, head)
                    there = slice(GUARD + element, GUARD + element + HS)
                    start = GUARD + place(k, layer, t, head)
                    here = slice(start, start + HS)
                    if direction == "D2H":
                        chunk[here] = paged[tensor][there]
                    else:
                        paged[tensor][there] = chunk[here]
    return paged, chunk


class Case:
    """Paged memory of one row and one guarded chunk, as a transfer in one direction finds them."""

    def __init__(self, name: str, direction: str, dtype: torch.dtype = DTYPE, device: str = "cpu", tokens=TOKENS):
        self.name, self.direction, self.tokens = name, TransferDirection[direction], tokens
        self.paged = Paged(name, dtype, written=direction == "D2H", device=device)
        shape = (planes_of(name), NL, len(tokens), D)
        self.chunk = Guarded(torch.Size(shape).numel(), dtype, 7777 if direction == "H2D" else None)
        self.key_value = self.chunk.inner.view(shape)
        self.slots = torch.tensor(tokens)
        self.device = device

    def source(self, form: str):
        """What the door gets as key_value_ptrs."""
        if form == "pointers":
            return self.paged.pointers(self.device)
        tensors = self.paged.tensors(FLATTENED[self.name] if form == "flattened" else None)
        return tensors if isinstance(tensors, list) else [tensors]

    def call(self, source, function=c_ops.multi_layer_kv_transfer, **sizes):
        arguments = (self.key_value, source, self.slots, torch.device(self.device), SLOTS, self.direction)
        function(*arguments, GPUKVFormat[self.name], **sizes)

    def snapshot(self) -> list[torch.Tensor]:
        return [whole.clone() for whole in (*self.paged.wholes, self.chunk.whole)]

    def check(self, before: list[torch.Tensor], skip: int = 0):
        """Every buffer holds what it must; `before`: the snapshot taken before the call."""
        *paged, chunk = before
        expected_paged, expected_chunk = moved(self.name, paged, chunk, self.tokens, skip, self.direction.name)
        assert_same(self.chunk.whole, expected_chunk.view(self.chunk.whole.dtype), "chunk")
        for index, (got, expected) in enumerate(zip(self.paged.wholes, expected_paged, strict=True)):
            assert_same(got.cpu(), expected.view(got.dtype), f"paged memory {index}")

    def check_untouched(self, before: list[torch.Tensor]):
        for got, expected in zip(self.snapshot(), before, strict=True):
            assert torch.equal(words(got), words(expected))
