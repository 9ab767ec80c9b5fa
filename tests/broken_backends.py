"""A backend that keeps the contract, and one class per way of breaking it, for `test_conformance.py`.

`Honest` moves one token at a time in steps; each fault overrides one step.
"""

from __future__ import annotations

import torch

from lmcache_ref.errors import SlotRangeError
from lmcache_ref.plan import check_slots
from lmcache_ref.transfer import Transfer


class Honest:
    """A backend that keeps the contract, one row at a time; each fault below overrides one step of it."""

    direction = ""

    def rerotate(self, *arguments):
        raise AssertionError("not part of the suite")

    def gather(self, plan):
        self.direction = "gather"
        return self.move(plan)

    def scatter(self, plan):
        self.direction = "scatter"
        return self.move(plan)

    def move(self, plan):
        self.check(plan)
        for span in plan.spans:
            for row in range(self.rows(span)):
                token = self.token(plan, span, row)
                slot = int(plan.slots[token])
                if self.moves(plan, token, slot):
                    self.move_token(plan, span, row, slot)
                else:
                    self.skipped(plan, span, row, slot)
        self.after(plan)
        return self.handle()

    def move_token(self, plan, span, row, slot):
        block, offset = self.place(plan, slot)
        for place, planes in enumerate(self.planes(plan)):
            for kv, plane in enumerate(self.kv(planes)):
                ends = plane[block, offset], span.chunk[kv, place, row]
                source, target = ends if self.direction == "gather" else ends[::-1]
                self.copy(target, source)

    def check(self, plan):
        check_slots(plan, duplicates=False)

    def rows(self, span):
        return span.end - span.start

    def token(self, plan, span, row):
        return span.start + row

    def moves(self, plan, token, slot):
        return slot >= 0 and token >= plan.skip_prefix_n_tokens

    def place(self, plan, slot):
        return divmod(slot, plan.cache.block_size)

    def planes(self, plan):
        return plan.planes

    def kv(self, planes):
        return planes

    def copy(self, target, source):
        target.view(torch.uint8).copy_(source.view(torch.uint8))

    def skipped(self, plan, span, row, slot):
        pass

    def after(self, plan):
        pass

    def handle(self):
        return Transfer()


class NegativeSlotsWrap(Honest):
    def moves(self, plan, token, slot):
        return token >= plan.skip_prefix_n_tokens

    def place(self, plan, slot):
        return divmod(slot % plan.cache.num_slots, plan.cache.block_size)


class SlotZeroIsSkipped(Honest):
    def moves(self, plan, token, slot):
        return slot > 0 and super().moves(plan, token, slot)


class KAndVSwapped(Honest):
    def kv(self, planes):
        return planes[::-1]


class OffByOneSlot(Honest):
    def place(self, plan, slot):
        return super().place(plan, (slot + 1) % plan.cache.num_slots)


def memory_of(plane):
    """All of the storage under a view, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(plane.untyped_storage())


def byte_beyond(tensor, step):
    """Flip one byte of the storage, `step` bytes from the start of the tensor."""
    memory_of(tensor)[tensor.storage_offset() * tensor.element_size() + step] ^= 0xFF


class WritesAByteBefore(Honest):
    """Before the tensor that lies first: the guard band in front, or between two tensors."""

    def after(self, plan):
        target = plan.spans[-1].chunk if self.direction == "gather" else plan.planes[-1][-1]
        if target.numel():
            byte_beyond(target, -1)


class WritesAByteOfPadding(Honest):
    """Between two rows of the destination, where the odd geometry has padding and the dense one the next row."""

    def after(self, plan):
        target = plan.spans[-1].chunk[0, 0] if self.direction == "gather" else plan.planes[0][0][0, 0]
        if target.numel() and target.stride(0) > target[0].numel():
            byte_beyond(target, target[0].numel() * target.element_size())


class ForgetsTheLastToken(Honest):
    def rows(self, span):
        return max(0, super().rows(span) - 1)


class IgnoresTheSkippedPrefix(Honest):
    def moves(self, plan, token, slot):
        return 0 <= slot < plan.cache.num_slots


class LooksAtSlotsOfThePrefix(Honest):
    def check(self, plan):
        if plan.slots.numel() and plan.slots.max() >= plan.cache.num_slots:
            raise SlotRangeError("somewhere in slots")


class RoundTripsThroughFloat(Honest):
    def copy(self, target, source):
        target.copy_(source.float() + 0.0)


class ZeroesSkippedRows(Honest):
    def skipped(self, plan, span, row, slot):
        if slot < 0:
            span.chunk[:, :, row].zero_()


class ZeroesThePrefix(Honest):
    def skipped(self, plan, span, row, slot):
        if slot >= 0:
            span.chunk[:, :, row].zero_()


class IgnoresStarts(Honest):
    def move(self, plan):
        start = 0
        spans = []
        for span in plan.spans:
            length = span.end - span.start
            spans.append(type(span)(span.chunk, start, start + length))
            start += length
        return super().move(type(plan)(plan.cache, plan.planes, tuple(spans), plan.slots, plan.skip_prefix_n_tokens))


class LayersReversed(Honest):
    def planes(self, plan):
        return plan.planes[::-1]


class IgnoresTheChoiceOfLayers(Honest):
    def planes(self, plan):
        return plan.cache.planes[: len(plan.planes)]


class BlockAndOffsetSwapped(Honest):
    def place(self, plan, slot):
        return slot % plan.cache.num_blocks, slot // plan.cache.num_blocks


class DropsTheLastLayer(Honest):
    def planes(self, plan):
        return plan.planes[:-1] if len(plan.planes) > 1 else ()


class ClearsOtherLayers(Honest):
    def move_token(self, plan, span, row, slot):
        super().move_token(plan, span, row, slot)
        for planes in plan.cache.planes:
            if not any(planes is chosen for chosen in plan.planes):
                planes[0][self.place(plan, slot)] = 0


class CopiesHalfOfTheHeads(Honest):
    def copy(self, target, source):
        super().copy(target[: len(target) // 2], source[: len(source) // 2])


class CopiesHalfOfEveryHead(Honest):
    def copy(self, target, source):
        half = target.shape[-1] // 2
        super().copy(target[:, :half], source[:, :half])


class WritesTheSource(Honest):
    def copy(self, target, source):
        super().copy(target, source)
        source.view(torch.uint8)[..., -1] ^= 0xFF


class TakesSlotsForDense(Honest):
    def move(self, plan):
        slots = plan.slots.as_strided((len(plan.slots),), (1,))
        return super().move(type(plan)(plan.cache, plan.planes, plan.spans, slots, plan.skip_prefix_n_tokens))


class TakesBlocksForDense(Honest):
    """Addresses a slot as if there were no padding between blocks."""

    def move_token(self, plan, span, row, slot):
        dense = tuple(
            tuple(
                plane.as_strided(plane.shape, (plane.stride(1) * plane.shape[1], *plane.stride()[1:])) for plane in kv
            )
            for kv in plan.planes
        )
        whole = type(plan)(plan.cache, dense, plan.spans, plan.slots, plan.skip_prefix_n_tokens)
        super().move_token(whole, span, row, slot)


class DoesNotRefuseSlots(Honest):
    def check(self, plan):
        pass

    def moves(self, plan, token, slot):
        return slot < plan.cache.num_slots and super().moves(plan, token, slot)


class SlotsOf32Bits(Honest):
    def move(self, plan):
        slots = plan.slots.to(torch.int32).to(torch.int64)
        return super().move(type(plan)(plan.cache, plan.planes, plan.spans, slots, plan.skip_prefix_n_tokens))


class FollowsThenRefuses(Honest):
    """Moves whatever it can and only then finds the slot that is out of range."""

    def check(self, plan):
        pass

    def moves(self, plan, token, slot):
        return slot < plan.cache.num_slots and super().moves(plan, token, slot)

    def after(self, plan):
        check_slots(plan, duplicates=False)


class Crashes(Honest):
    def check(self, plan):
        super().check(plan)
        raise ZeroDivisionError("in the guest")


class NeverDone(Honest):
    def handle(self):
        return type("Pending", (Transfer,), {"done": lambda self: False})()
