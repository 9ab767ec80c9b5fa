"""The raw table: for every layout, what an engine allocates and where in it one token's row lies, in plain indexing.

The demo fills and reads paged memory through these lines only. They share nothing with the layout table, discovery
or the planes, so that a mistake there cannot be made twice and cancel. Keep it so: no helper, no pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Raw(NamedTuple):
    """One layout as its engine holds it.

    lists: lengths of the list levels, outermost first; `()` is one bare tensor. shape: of each tensor.
    row: `row(kv_caches, layer, k, slot)` is the row of one token, a view into the engine's memory: `[NH, HS]` of K
    (k = 0) or V (k = 1), or with MLA (k = 0) the latent `[C]`. Assigning to `row(...)[:]` writes the token.
    """

    lists: tuple[int, ...]
    shape: tuple[int, ...]
    row: Callable[[Any, int, int, int], torch.Tensor]

    def allocate(self, sentinel_byte: int, dtype: torch.dtype, device: torch.device | str) -> Any:
        """The engine's tensors, nested as `lists` says, every byte `sentinel_byte`."""

        def build(lengths: tuple[int, ...]) -> Any:
            if lengths:
                return [build(lengths[1:]) for _ in range(lengths[0])]
            return filled(self.shape, sentinel_byte, dtype, device)

        return build(self.lists)


class MixedRaw(NamedTuple):
    """A list of one tensor a layer whose layers differ: `shapes` of each, `row` as in `Raw`."""

    shapes: tuple[tuple[int, ...], ...]
    row: Callable[[Any, int, int, int], torch.Tensor]

    def allocate(self, sentinel_byte: int, dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
        """The engine's tensors, every byte `sentinel_byte`."""
        return [filled(shape, sentinel_byte, dtype, device) for shape in self.shapes]


def filled(shape: tuple[int, ...], sentinel_byte: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor whose bytes are all the same."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(sentinel_byte)
    return tensor


def mixed_raw(NL: int, NB: int, BS: int, NH: int, HS: int) -> MixedRaw:
    """Even layers: K first, blocks of BS tokens. Odd layers: twice as many blocks of BS/2, each its K, then its V."""
    short = BS // 2

    def row(kv: Any, i: int, k: int, s: int) -> torch.Tensor:
        return kv[i][s // short, k, s % short] if i % 2 else kv[i][k, s // BS, s % BS]

    even, odd = (2, NB, BS, NH, HS), (2 * NB, 2, short, NH, HS)
    return MixedRaw(tuple(odd if i % 2 else even for i in range(NL)), row)


def raw_table(NL: int, NB: int, BS: int, NH: int, HS: int, C: int) -> dict[str, Raw]:
    """Layout name -> `Raw` for these sizes; C is the latent width of the MLA rows, which have no NH and HS.

    In the lines `i` is the layer, `k` is K or V, `s` the slot.
    """
    half = (slice(0, HS), slice(HS, 2 * HS))  # K and V in one row of a head
    # fmt: off
    return {
        # one tensor of K and V a layer
        "NL_X_TWO_NB_BS_NH_HS":    Raw((NL,), (2, NB, BS, NH, HS), lambda kv, i, k, s: kv[i][k, s // BS, s % BS]),
        "NL_X_NB_TWO_BS_NH_HS":    Raw((NL,), (NB, 2, BS, NH, HS), lambda kv, i, k, s: kv[i][s // BS, k, s % BS]),
        "NL_X_TWO_NB_NH_BS_HS":    Raw((NL,), (2, NB, NH, BS, HS), lambda kv, i, k, s: kv[i][k, s // BS, :, s % BS]),
        "NL_X_NB_TWO_NH_BS_HS":    Raw((NL,), (NB, 2, NH, BS, HS), lambda kv, i, k, s: kv[i][s // BS, k, :, s % BS]),
        # the same, each head's K and V side by side
        "NL_X_NB_NH_BS_TWO_HS":    Raw((NL,), (NB, NH, BS, 2 * HS), lambda kv, i, k, s: kv[i][s // BS, :, s % BS, half[k]]),
        "NL_X_NB_BS_NH_TWO_HS":    Raw((NL,), (NB, BS, NH, 2 * HS), lambda kv, i, k, s: kv[i][s // BS, s % BS, :, half[k]]),
        "NL_X_NH_NB_BS_TWO_HS":    Raw((NL,), (NH, NB, BS, 2 * HS), lambda kv, i, k, s: kv[i][:, s // BS, s % BS, half[k]]),
        # one tensor for all layers
        "NB_NL_TWO_BS_NH_HS":      Raw((), (NB, NL, 2, BS, NH, HS), lambda kv, i, k, s: kv[s // BS, i, k, s % BS]),
        "NB_NL_TWO_NH_BS_HS":      Raw((), (NB, NL, 2, NH, BS, HS), lambda kv, i, k, s: kv[s // BS, i, k, :, s % BS]),
        "NB_NH_NL_TWO_BS_HS":      Raw((), (NB, NH, NL, 2, BS, HS), lambda kv, i, k, s: kv[s // BS, :, i, k, s % BS]),
        "NB_NL_TWO_NHBSHS":        Raw((), (NB, NL, 2, NH * BS * HS),
                                       lambda kv, i, k, s: kv[s // BS, i, k].view(NH, BS, HS)[:, s % BS]),
        "LBHNC":                   Raw((), (NL, NB, NH, BS, 2 * HS), lambda kv, i, k, s: kv[i, s // BS, :, s % BS, half[k]]),
        "LBNHC":                   Raw((), (NL, NB, BS, NH, 2 * HS), lambda kv, i, k, s: kv[i, s // BS, s % BS, :, half[k]]),
        "LHBNC":                   Raw((), (NL, NH, NB, BS, 2 * HS), lambda kv, i, k, s: kv[i, :, s // BS, s % BS, half[k]]),
        "BLHNC":                   Raw((), (NB, NL, NH, BS, 2 * HS), lambda kv, i, k, s: kv[s // BS, i, :, s % BS, half[k]]),
        "BLNHC":                   Raw((), (NB, NL, BS, NH, 2 * HS), lambda kv, i, k, s: kv[s // BS, i, s % BS, :, half[k]]),
        "BHLNC":                   Raw((), (NB, NH, NL, BS, 2 * HS), lambda kv, i, k, s: kv[s // BS, :, i, s % BS, half[k]]),
        # K layers, then V layers, in one list or two
        "TWO_X_NL_X_NBBS_NH_HS":   Raw((2, NL), (NB * BS, NH, HS), lambda kv, i, k, s: kv[k][i][s]),
        "TWO_X_NL_X_NB_BS_NH_HS":  Raw((2, NL), (NB, BS, NH, HS), lambda kv, i, k, s: kv[k][i][s // BS, s % BS]),
        "TWO_NL_X_NBBS_NH_HS":     Raw((2 * NL,), (NB * BS, NH, HS), lambda kv, i, k, s: kv[k * NL + i][s]),
        "TWO_NL_X_NB_BS_NH_HS":    Raw((2 * NL,), (NB, BS, NH, HS), lambda kv, i, k, s: kv[k * NL + i][s // BS, s % BS]),
        # MLA: one plane a layer
        "NL_X_NB_BS_HS":           Raw((NL,), (NB, BS, C), lambda kv, i, k, s: kv[i][s // BS, s % BS]),
        "NL_X_NBBS_ONE_HS":        Raw((NL,), (NB * BS, 1, C), lambda kv, i, k, s: kv[i][s, 0]),
        "NL_X_NB_BS_ONE_HS":       Raw((NL,), (NB, BS, 1, C), lambda kv, i, k, s: kv[i][s // BS, s % BS, 0]),
        "ONE_X_NL_X_NBBS_ONE_HS":  Raw((1, NL), (NB * BS, 1, C), lambda kv, i, k, s: kv[0][i][s, 0]),
        "ONE_X_NL_X_NB_BS_ONE_HS": Raw((1, NL), (NB, BS, 1, C), lambda kv, i, k, s: kv[0][i][s // BS, s % BS, 0]),
    }
    # fmt: on
