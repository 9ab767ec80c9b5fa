"""Lists of memory objects, taken as a whole: held, let go, and found to be of the same kind as an earlier list.

A layerwise call hands over one list a layer. The first is looked at object by object (`checks.py`, `TransferPlan.build`), the
others by what they have in common with it; a list that differs in anything goes the long way, which says what is wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UseAfterFreeError
from ..kv_cache import PagedKVCache
from ..memory import MemoryAllocator, MemoryFormat, MemoryObj, MemoryObjMetadata
from ..plan import WORDS_PER_SPAN, ChunkSpan, LazySpans, TransferPlan


class Held:
    """One more reference to each of some objects; one that comes twice has two. UseAfterFreeError when the memory of one is
    gone; then none is taken."""

    __slots__ = ("_groups",)

    def __init__(self, objects: Sequence[MemoryObj]):
        allocators = {obj.parent() for obj in objects}
        self._groups: list[_Group] = []
        for allocator in allocators:
            own = objects if len(allocators) == 1 else [obj for obj in objects if obj.parent() is allocator]
            group = _Group(allocator, tuple(own), [obj.metadata for obj in own])
            try:
                group.hold()
            except UseAfterFreeError:
                self.let_go()
                raise
            self._groups.append(group)

    def let_go(self) -> None:
        """Give the references back, once; the last one of an object returns its memory."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.let_go()


class _Group(NamedTuple):
    """Objects of one allocator."""

    allocator: MemoryAllocator
    objects: Sequence[MemoryObj]
    metadata: Sequence[MemoryObjMetadata]

    def hold(self) -> None:
        with self.allocator.lock:
            if self.allocator.pool is None or min([m.ref_count for m in self.metadata]) <= 0:
                for obj in self.objects:  # it may still be pinned
                    obj.require_valid()
            for m in self.metadata:
                m.ref_count += 1

    def let_go(self) -> None:
        with self.allocator.lock:
            for obj, m in zip(self.objects, self.metadata, strict=True):
                if m.ref_count > 1:
                    m.ref_count -= 1
                else:
                    obj.ref_count_down()


class SameKind:
    """What the objects of one layer are, for those of the other layers of the same call."""

    def __init__(self, objects: Sequence[MemoryObj], plan: TransferPlan):
        """plan: of the tensors of `objects`, one after the other, for one layer."""
        self._kinds = [(list(obj.metadata.shapes), list(obj.metadata.dtypes), obj.offsets_bytes[0]) for obj in objects]
        self._plan, self._words = plan, plan.span_words

    def plan(
        self, objects: Sequence[MemoryObj], cache: PagedKVCache, layer: int, fmt: MemoryFormat | None
    ) -> TransferPlan | None:
        """The plan of another layer. None when the objects differ from the first ones in number, shape or dtype, or among
        themselves in their allocator, and when one is not valid, or not in format `fmt` where that is given."""
        if len(objects) != len(self._kinds) or type(objects[0]) is not MemoryObj:
            return None
        allocator = objects[0].parent()
        pool = allocator.pool
        if pool is None:
            return None
        words, base, at = array("q", self._words), pool.data_ptr(), 0
        for obj, (shapes, dtypes, offset) in zip(objects, self._kinds, strict=True):  # one pass, as this is most of it
            if type(obj) is not MemoryObj or obj.parent() is not allocator:
                return None
            m = obj.metadata
            if m.shapes != shapes or m.dtypes != dtypes or m.ref_count <= 0 or (fmt is not None and m.fmt is not fmt):
                return None
            words[at] = base + m.address + offset
            at += WORDS_PER_SPAN
        old = self._plan
        spans = LazySpans(lambda: self._spans(objects), words, pool.is_cpu)
        return TransferPlan(
            cache, (cache.planes[layer],), spans, old.slots, old.skip_prefix_n_tokens, None, old.slots_fixed
        )

    def _spans(self, objects: Sequence[MemoryObj]) -> list[ChunkSpan]:
        return [span.of_tensor(obj.get_tensor(0)) for span, obj in zip(self._plan.spans, objects, strict=True)]
