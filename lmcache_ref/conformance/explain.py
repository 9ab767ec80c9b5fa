"""From a wrong element of a buffer to words: whose element it is, which rule is broken, and whose bytes it holds instead.

Runs only after a comparison failed; no verdict depends on it.
"""

from __future__ import annotations

import math
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
        shape = self.memory.shape
        owner = self.memory.filled(torch.arange(math.prod(shape)).view(shape), -1)
        element = int(owner[first])
        if element < 0:
            return self.refused or 5, [f"outside of every tensor: {self._outside(owner, first[0])}"]
        place = dict(zip(self.memory.axes, unravel(element, shape), strict=True))
        where = f"which is {self._text(place)} of the {self._side}"
        if not self.written:
            return 5, [where, "the source of the move was written"]
        if self.refused:
            return self.refused, [where, "the call was wrong input, this was written all the same"]
        inside = owner >= 0
        logical = torch.full(shape, self._nobody, dtype=self.found.dtype)
        logical.view(-1)[owner[inside]] = self.found[inside]
        rule, why = (self._chunk_rule if "t" in place else self._cache_rule)(place, logical)
        return rule, [
            where,
            why,
            *self._holds(logical.view(-1, shape[-1])[element // shape[-1]], int(self.found[first])),
        ]

    @property
    def _nobody(self) -> int:
        return sentinel(self.found.element_size())

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
        return f"in a guard band or padding of the {self._side}, {position - last} elements beyond {self._text(place)}"

    def _chunk_rule(self, place: dict[str, int], logical: torch.Tensor) -> tuple[int, str]:
        token = place["t"]
        status, slot = self.scene.status(token), self.scene.slots[token]
        if status == "moved":
            return self._moved(token, place, logical, {t: logical[:, :, t] for t, _ in self.scene.moves()})
        if status == "prefix":
            return 6, f"token {token} is below skip_prefix_n_tokens = {self.scene.skip}, its row was written"
        return 2, f"token {token} has slot {slot}, its row was written"

    def _cache_rule(self, place: dict[str, int], logical: torch.Tensor) -> tuple[int, str]:
        slot = place["nb"] * self.block_size + place["bs"]
        num_slots = self.memory.shape[2] * self.block_size
        if place["nl"] not in self.scene.layers:
            return 5, f"layer {place['nl']} is not one of the layers {self.scene.layers} of this call"
        rows = logical[list(self.scene.layers)].flatten(2, 3)
        for token, moved_slot in self.scene.moves():
            if moved_slot == slot:
                return self._moved(token, place, logical, {t: rows[:, :, s] for t, s in self.scene.moves()})
        for token, other in enumerate(self.scene.slots):
            if other < 0 and other % num_slots == slot and self.scene.status(token) == "negative":
                return 2, f"token {token} has slot {other}, which wraps to slot {slot}"
            if other == slot and self.scene.status(token) == "prefix":
                return 6, f"token {token} of slot {slot} is below skip_prefix_n_tokens = {self.scene.skip}"
        return 5, f"no token that is moved has slot {slot}"

    def _moved(
        self, token: int, place: dict[str, int], logical: torch.Tensor, of_tokens: dict[int, torch.Tensor]
    ) -> tuple[int, str]:
        """What is wrong with a token that had to be moved. of_tokens: what was found for each of those."""
        slot = self.scene.slots[token]
        row = logical[tuple(place[axis] for axis in self.memory.axes[:-1])]
        if not bool((row == self._nobody).all()):
            return 1, f"token {token} of slot {slot} was moved wrongly"
        missing = [self.scene.slots[other] for other, found in of_tokens.items() if bool((found == self._nobody).all())]
        return (2 if missing == [0] else 7), f"token {token} of slot {slot} was not moved: its row was never written"

    def _holds(self, row: torch.Tensor, element: int) -> list[str]:
        """Whose row or element of the source this is, where that is one only."""
        axes, shape = self.source_axes, self.source.shape
        rows = self.source.reshape(-1, shape[-1])
        same = (rows == row).all(1).nonzero().flatten().tolist()
        if len(same) == 1:
            place = dict(zip(axes[:-1], unravel(same[0], shape[:-1]), strict=True))
            return [f"the row holds the bytes of {self._text(place)}"]
        same = (self.source.flatten() == element).nonzero().flatten().tolist()
        if len(same) == 1 and row.element_size() >= 4:  # narrow words are alike by chance
            return [f"the element is that of {self._text(dict(zip(axes, unravel(same[0], shape), strict=True)))}"]
        return []


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a flat index in a dense array of `shape`."""
    place = []
    for length in reversed(shape):
        place.append(flat % length)
        flat //= length
    return tuple(reversed(place))
