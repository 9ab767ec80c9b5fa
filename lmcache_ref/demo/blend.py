"""The row "blend": two stored chunks are loaded the other way round at new positions, with a gap between them.

Keys carry their positions, so that the connector has to rotate them on. What they should be is computed with the
model's own rotation in float64; decoding is not compared, since no model without blending has such a cache.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from . import model as llama
from .connectors import Spans
from .trip import SENTINEL_BYTE, RoundTrip

#: where the stored chunks come to lie, in the order in which they are loaded: the second before the first
MOVED: Spans = ((7, 39), (47, 79))
NOTE = "chunks from 64 and 0 moved to 7 and 47: keys within one rounding, zeros between"


class BlendTrip(RoundTrip):
    """As `RoundTrip`, but another request loads two of the chunks at other positions than they were stored at."""

    spans: ClassVar[Spans] = ((0, 32), (64, 96))
    unnoticed: ClassVar[str] = "a flipped bit of a stored key left all keys within one rounding"

    def load(self, slots: dict[str, torch.Tensor]) -> None:
        """Objects to pages: of each layer the second chunk, then the first."""
        objects = [layer[::-1] for layer in self.objects]
        self.how.load(self.connector, objects, MOVED, kvcaches=self.pages, slot_mapping=slots["new"])

    def compare(self) -> tuple[bool | None, bool | None]:
        """There is no model whose cache never moved."""
        return None, None

    def differs(self) -> bool:
        """Whether the damaged key is more than a rounding away."""
        return bool(self.faults_of_pages())

    def faults_of_pages(self) -> list[str]:
        """Whether keys are rotated, values are bit for bit, the gap is zero and the sentinel is everywhere else."""
        expected = self.raw.allocate(SENTINEL_BYTE, llama.DTYPE, self.device)
        slots, wrong = self.new_slots.tolist(), 0
        gap = slots[MOVED[0][1] : MOVED[1][0]]
        for layer, (keys, values) in enumerate(self.rows):
            for slot in gap:
                for k in range(2):
                    self.raw.row(expected, layer, k, slot)[:] = 0
            for (start, end), (first, last) in zip(self.spans[::-1], MOVED, strict=True):
                at = slots[first:last]
                found = self.read(layer, 0, at)
                exact = llama.rotated_again(
                    self.story.model, keys[start:end], torch.arange(start, end), torch.arange(first, last)
                )
                wrong += int((~within_one_rounding(found, exact)).sum())
                for token, slot in enumerate(at):
                    self.raw.row(expected, layer, 0, slot)[:] = found[token]  # judged above
                    self.raw.row(expected, layer, 1, slot)[:] = values[start + token]
        faults = [f"{wrong} elements of moved keys are more than one rounding away"] if wrong else []
        return faults + self.faults_beside(expected)


def within_one_rounding(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Which elements of bfloat16 `found` are `exact` (float64) rounded once; both `[T, NH, HS]`, half-split pairs.

    Half a unit in the last place, and 16 roundings of the float32 arithmetic, which count where an element is small
    beside its pair.
    """
    half_unit = torch.exp2((torch.frexp(exact).exponent - 9).double())  # bfloat16 has 8 significant bits
    half_unit[exact == 0] = 0
    pair_norm = torch.hypot(*exact.chunk(2, dim=-1)).repeat(1, 1, 2)
    return (found.double() - exact).abs() <= half_unit + 16 * 2**-24 * pair_norm
