"""A chunk of tokens as the cache keeps it: the memory objects that hold it, taken and released together.

One object for all layers, or one for each; either way a chunk is there as a whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..memory import MemoryFormat, MemoryObj


class ChunkLayout(NamedTuple):
    """How a chunk's objects look: `num_objects` of them, each with tensors of these shapes and dtypes."""

    num_objects: int
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    fmt: MemoryFormat

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors of all objects; padding between them does not count."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return self.num_objects * sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


class Chunk:
    """The objects of one chunk. Born with the reference that its objects were allocated with."""

    def __init__(self, objects: Sequence[MemoryObj]) -> None:
        self.objects = tuple(objects)

    @property
    def layout(self) -> ChunkLayout:
        """As the objects are now: a store sets their format."""
        first = self.objects[0].metadata
        return ChunkLayout(len(self.objects), tuple(first.shapes), tuple(first.dtypes), first.fmt)

    @property
    def size_bytes(self) -> int:
        """Bytes taken from the pool."""
        return sum(obj.get_physical_size() for obj in self.objects)

    @property
    def can_evict(self) -> bool:
        """Whether the tier that asks is the only holder."""
        return all(obj.can_evict for obj in self.objects)

    def hold(self) -> Chunk:
        """Take a reference; returns the chunk."""
        for obj in self.objects:
            obj.ref_count_up()
        return self

    def release(self) -> None:
        """Give a reference back; the last one frees the memory."""
        for obj in self.objects:
            obj.ref_count_down()

    def pin(self) -> None:
        for obj in self.objects:
            obj.pin()

    def unpin(self) -> None:
        for obj in self.objects:
            obj.unpin()
