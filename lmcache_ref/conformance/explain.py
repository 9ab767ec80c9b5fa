"""From a wrong element of a buffer to words: whose element it is, which rule is broken, and whose bytes it holds instead.

Runs only after a comparison failed; no verdict depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .engine import ChunkMemory, EngineMemory, sentinel
from .scenes import Scene

Memory = EngineMemory | ChunkMemory


@dataclass(frozen=True)
class Explainer:
    """Speaks about the buffer of `memory`, one of the two sides of a move.

    scene, block_size: the request, BS. written: whether this side is the destination. found: the flat buffer as it was
    read back. source: the logical array of the side the bytes come from; source_axes: the names of its axes. refused: the
    rule that is broken when the call was wrong input and yet wrote, None for a legal call.
    """

    scene: Scene
    block_size: int
    memory: Memory
    written: bool
    found: torch.Tensor
    source: torch.Tensor
    source_axes: Sequence[str]
    refused: int | None = None

    def __call__(self, first: tuple[int, ...]) -> tuple[int, list[str]]:
        """The broken rule and the lines to add, for the first bad element of the buffer."""
        count = torch.Size(self.memory.shape).numel()
        owner = self.memory.filled(torch.arange(count).view(self.memory.shape), -1)
        element = int(owner[first])
        if element < 0:
            return self.refused or 5, [f"outside of every tensor: {self._outside(owner, first[0])}"]
        place = dict(zip(self.memory.axes, unravel(element, self.memory.shape), strict=True))
        where = f"which is {self._text(place)} of the {self._side}"
        if not self.written:
            return 5, [where, "the source of the move was written"]
        if self.refused:
            return self.refused, [where, "the call was wrong input, this was written all the same"]
        row = self._row(owner, element)
        rule, why = self._chunk_rule(place, row) if "t" in place else self._cache_rule(place, row)
        return rule, [where, why, *self._holds(row, int(self.found[first]))]

    @property
    def _side(self) -> str:
        return "engine's cache" if isinstance(self.memory, EngineMemory) else "chunks"

    def _text(self, place: dict[str, int]) -> str:
        """`nl=0, two=1 (V), nb=3, ...`, with the slot where there is one."""
        words = [f"{axis}={at}" for axis, at in place.items()]
        if "nb" in place:
            words.append(f"slot {place['nb'] * self.block_size + place['bs']}")
        return ", ".join(words)

    def _outside(self, owner: torch.Tensor, position: int) -> str:
        """How far a guard or padding element is from the last element before it that belongs to a tensor."""
        before = (owner[:position] >= 0).nonzero()
        if not len(before):
            return "in the guard band before the first one"
        last = int(before[-1])
        place = dict(zip(self.memory.axes, unravel(int(owner[last]), self.memory.shape), strict=True))
        return f"in a guard band or padding of the {self._side}, {position - last} elements after {self._text(place)}"

    def _row(self, owner: torch.Tensor, element: int) -> torch.Tensor:
        """What was found in the row (all of HS) that `element` belongs to."""
        head_size = self.memory.shape[-1]
        places = {int(owner[p]): p for p in (owner // head_size == element // head_size).nonzero().flatten().tolist()}
        return self.found[[places[key] for key in sorted(places)]]

    def _chunk_rule(self, place: dict[str, int], row: torch.Tensor) -> tuple[int, str]:
        token = place["t"]
        status, slot = self.scene.status(token), self.scene.slots[token]
        if status == "moved":
            return self._moved(token, row)
        if status == "prefix":
            return 6, f"token {token} is below skip_prefix_n_tokens = {self.scene.skip}, its row was written"
        return 2, f"token {token} has slot {slot}, its row was written"

    def _cache_rule(self, place: dict[str, int], row: torch.Tensor) -> tuple[int, str]:
        slot = place["nb"] * self.block_size + place["bs"]
        num_slots = self.memory.shape[2] * self.block_size
        if place["nl"] not in self.scene.layers:
            return 5, f"layer {place['nl']} is not one of the layers {self.scene.layers} of this call"
        for token, moved_slot in self.scene.moves():
            if moved_slot == slot:
                return self._moved(token, row)
        for token, other in enumerate(self.scene.slots):
            if other < 0 and other % num_slots == slot and self.scene.status(token) == "negative":
                return 2, f"token {token} has slot {other}, which wraps to slot {slot}"
            if other == slot and self.scene.status(token) == "prefix":
                return 6, f"token {token} of slot {slot} is below skip_prefix_n_tokens = {self.scene.skip}"
        return 5, f"no token that is moved has slot {slot}"

    def _moved(self, token: int, row: torch.Tensor) -> tuple[int, str]:
        slot = self.scene.slots[token]
        if bool((row == sentinel(row.element_size())).all()):
            return (2 if slot == 0 else 7), f"token {token} of slot {slot} was not moved: its row was never written"
        return 1, f"token {token} of slot {slot} was moved wrongly"

    def _holds(self, row: torch.Tensor, element: int) -> list[str]:
        """Whose row or element of the source this is, where that is one only."""
        axes, shape = self.source_axes, self.source.shape
        rows = self.source.reshape(-1, shape[-1])
        same = (rows == row).all(1).nonzero().flatten().tolist()
        if len(same) == 1:
            place = dict(zip(axes[:-1], unravel(same[0], shape[:-1]), strict=True))
            return [f"the row holds the bytes of {self._text(place)}"]
        same = (self.source.flatten() == element).nonzero().flatten().tolist()
        if len(same) == 1:
            return [f"the element is that of {self._text(dict(zip(axes, unravel(same[0], shape), strict=True)))}"]
        return []


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a flat index in a dense array of `shape`."""
    place = []
    for length in reversed(shape):
        place.append(flat % length)
        flat //= length
    return tuple(reversed(place))
