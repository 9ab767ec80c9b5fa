"""A request: its slots, its chunks, and what must come of it. Expected values are a correspondence, token by token.

A token's row is found by its flat slot in `[NB*BS]`; nothing here divides by a block size or knows a layout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scene:
    """One request. slots: per token. spans: tokens `[start, end)` of each chunk, in the order they are passed.

    skip: tokens below it are not moved. layers: which layers, in the order they are passed; of a whole-model chunk
    they are its layers. starts: pass the starts, otherwise the chunks follow one another. narrow: the slots may
    be passed as int32. rule: what is broken when a backend raises at this request.
    """

    name: str
    slots: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    skip: int = 0
    starts: bool = True
    narrow: bool = False
    rule: int = 7

    def moves(self) -> Iterator[tuple[int, int]]:
        """`(token, slot)` of every token that must be moved."""
        return ((token, self.slots[token]) for token in range(len(self.slots)) if self.status(token) == "moved")

    def status(self, token: int) -> str:
        """What becomes of a token: moved, or why not: gap, prefix, negative."""
        if not any(start <= token < end for start, end in self.spans):
            return "gap"
        if token < self.skip:
            return "prefix"
        return "negative" if self.slots[token] < 0 else "moved"

    def gathered(self, cache: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """The logical chunks `[TWO, layers, T, NH, HS]` after a gather from the logical cache."""
        rows, chunks = cache.flatten(2, 3), chunks.clone()
        for token, slot in self.moves():
            for place, layer in enumerate(self.layers):
                chunks[:, place, token] = rows[layer, :, slot]
        return chunks

    def scattered(self, cache: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """The logical cache `[NL, TWO, NB, BS, NH, HS]` after a scatter of the logical chunks."""
        rows = cache.flatten(2, 3).clone()
        for token, slot in self.moves():
            for place, layer in enumerate(self.layers):
                rows[layer, :, slot] = chunks[:, place, token]
        return rows.view(cache.shape)


#: fewest slots a cache needs for the scenes
MIN_SLOTS = 20


def tokens_of(num_slots: int) -> int:
    """T of every scene: two thirds of the slots, so that some stay untouched."""
    return 2 * num_slots // 3


def plain(draw: random.Random, num_layers: int, num_slots: int) -> Scene:
    """Three chunks one after the other, the last one ragged; random slots, the first and the last among them."""
    T = tokens_of(num_slots)
    slots = [0, num_slots - 1, *draw.sample(range(1, num_slots - 1), T - 2)]
    draw.shuffle(slots)
    length = 2 * T // 5
    spans = tuple((start, min(T, start + length)) for start in range(0, T, length))
    return Scene("plain", tuple(slots), spans, tuple(range(num_layers)), starts=False, narrow=True)


def mixed(draw: random.Random, num_layers: int, num_slots: int) -> Scene:
    """Chunks in descending order with a gap and an empty one, negative slots, a prefix that ends inside a chunk, and
    some layers only, not in order. The slots that a wrapped negative one would hit are used by nobody."""
    T = tokens_of(num_slots)
    quarter, half = T // 4, T // 2
    negatives = (-1, -(num_slots // 2), -1)
    free = [slot for slot in range(num_slots) if slot - num_slots not in negatives]
    slots = draw.sample(free, T)
    spans = ((half + 1, T), (half, half), (quarter, half), (0, quarter))
    skip = quarter + 2
    movable = [token for token in range(skip, T) if token != half]
    for token, negative in zip(draw.sample(movable, len(negatives)), negatives, strict=True):
        slots[token] = negative
    layers = (num_layers - 1, 0) if num_layers > 1 else (0,)
    return Scene("mixed", tuple(slots), spans, layers, skip)


def prefix(draw: random.Random, num_layers: int, num_slots: int) -> Scene:
    """A skipped prefix whose slots are out of range or taken twice: nobody may look at them."""
    T = tokens_of(num_slots)
    slots = draw.sample(range(num_slots), T)
    slots[:4] = [num_slots, 1 << 40, slots[T - 1], -1]
    return Scene("prefix", tuple(slots), ((0, T),), tuple(range(num_layers)), skip=5, rule=6)


def empty(draw: random.Random, num_layers: int, num_slots: int) -> list[Scene]:
    """Requests in which there is nothing to move."""
    T = tokens_of(num_slots)
    slots = tuple(draw.sample(range(num_slots), T))
    layers = tuple(range(num_layers))
    return [
        Scene("empty", (), (), layers, starts=False),
        Scene("empty", slots, ((3, 3),), layers),
        Scene("empty", (-1, -num_slots) * (T // 2), ((0, T // 2 * 2),), layers, rule=2),
        Scene("empty", slots, ((0, T),), layers, skip=T + 100, rule=6),
    ]


#: pattern of a case -> the request it makes
REQUESTS: dict[str, Callable[[random.Random, int, int], Scene]] = {"plain": plain, "mixed": mixed, "prefix": prefix}
