"""What a transfer will move, checked: planes, chunks as views, and the span of the request each chunk holds.

Every backend receives the same `TransferPlan`; all checks that need no slot *value* are made here, before anything
is written. The values are checked by `check_slots`, which the reference always calls and a fast backend may call
only where the slots are on the host or `LMCACHE_VALIDATE=1`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bits import same_bytes
from .discovery import Planes, check_strides
from .environment import variable
from .errors import (
    ArgumentError,
    ChunkError,
    DtypeError,
    DuplicateSlotError,
    SkipPrefixError,
    SlotError,
    SlotRangeError,
)
from .kv_cache import PagedKVCache
from .layouts import CHUNK_AXES, CHUNK_FORMATS, Axes, canonical_view, parse_pattern
from .memory import MemoryFormat, MemoryObj
from .rerotation import Rerotation

MOST_READINGS = 1024  # that a cache keeps in mind
WORDS_PER_SPAN = 6  # of `TransferPlan.span_words`


@dataclass(frozen=True, eq=False)
class ChunkReading:
    """How tensors of one shape, stride and dtype are seen as `[TWO, NL, T, NH, HS]`.

    axes, sizes: names of the tensor's axes and lengths of the names. num_tokens: T. stride_bytes: of TWO, NL and T in
    the view, 0 for an axis of length one.
    """

    axes: Axes
    sizes: Mapping[str, int]
    num_tokens: int
    stride_bytes: tuple[int, int, int]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, seen so; a view that begins where the tensor begins."""
        return canonical_view(tensor, self.axes, self.sizes, CHUNK_AXES)


class ChunkSpan:
    """One chunk: `chunk[kv, layer]` is `[T, NH, HS]`, a view of the caller's `tensor`; its rows are the request's tokens
    `[start, end)`.

    stride_bytes: of TWO, NL and T in the view, 0 for an axis of length one. The view is made when it is asked for: who moves
    by addresses needs only these and the tensor.
    """

    __slots__ = ("_reading", "end", "start", "stride_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor, start: int, end: int, reading: ChunkReading | None = None):
        """reading: None for a tensor that is `[TWO, NL, T, NH, HS]` already."""
        self.tensor, self.start, self.end, self._reading = tensor, start, end, reading
        self.stride_bytes = stride_bytes_of(tensor) if reading is None else reading.stride_bytes

    def of_tensor(self, tensor: torch.Tensor) -> ChunkSpan:
        """The same span for another tensor of the same shape, stride and dtype."""
        return ChunkSpan(tensor, self.start, self.end, self._reading)

    @property
    def chunk(self) -> torch.Tensor:
        """The view `[TWO, NL, T, NH, HS]`."""
        return self.tensor if self._reading is None else self._reading.view(self.tensor)

    def __repr__(self) -> str:
        return f"ChunkSpan([{self.start}, {self.end}), {tuple(self.chunk.shape)} {self.tensor.dtype})"


class LazySpans(Sequence[ChunkSpan]):
    """Spans that are made when somebody looks at one. words: as `TransferPlan.span_words`. on_host: where all tensors are."""

    def __init__(self, make: Callable[[], Sequence[ChunkSpan]], words: array[int], on_host: bool):
        self._make, self.words, self.on_host = make, words, on_host
        self._made: Sequence[ChunkSpan] | None = None

    def __len__(self) -> int:
        return len(self.words) // WORDS_PER_SPAN

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made[index]


@dataclass(frozen=True)
class TransferPlan:
    """A checked batch: which planes, which chunks, which slots.

    planes: `planes[i][kv]` for the i-th requested layer; `chunk[kv, i]` belongs to it.
    slots: int64 `[tokens of the request]`, on whatever device the caller had it.
    Tokens below `skip_prefix_n_tokens` (counted from the start of the request) and tokens of negative slot stay.
    rotation: for a scatter: keys (kv 0) that move are re-rotated on the way, by `rope.rerotate`'s arithmetic; chunks
    keep theirs. Given only to a backend that `rotates`.
    slots_fixed: nobody writes to `slots` any more: who has seen this tensor in another plan need not look at it again.
    """

    cache: PagedKVCache
    planes: Planes
    spans: Sequence[ChunkSpan]
    slots: torch.Tensor
    skip_prefix_n_tokens: int = 0
    rotation: Rerotation | None = None
    slots_fixed: bool = False

    @classmethod
    def build(
        cls,
        cache: PagedKVCache,
        slots: torch.Tensor,
        chunks: Sequence[torch.Tensor | MemoryObj],
        *,
        fmt: MemoryFormat,
        layers: Sequence[int] | int | None = None,
        starts: Sequence[int] | None = None,
        skip_prefix_n_tokens: int = 0,
        rotation: Rerotation | None = None,
    ) -> TransferPlan:
        """Check everything and name every axis. Arguments as in `lmcache_ref.scatter`."""
        if not isinstance(cache, PagedKVCache):
            raise ArgumentError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
        slots = checked_slots(slots)
        if (
            isinstance(skip_prefix_n_tokens, bool)
            or not isinstance(skip_prefix_n_tokens, int)
            or skip_prefix_n_tokens < 0
        ):
            raise SkipPrefixError(f"skip_prefix_n_tokens must be an int >= 0, got {skip_prefix_n_tokens!r}")
        if starts is not None and len(starts) != len(chunks):
            raise ChunkError(f"{len(chunks)} chunks but {len(starts)} starts")
        planes = cache.planes if layers is None else cache.select_layers(_checked_layers(layers, cache))
        spans: list[ChunkSpan] = []
        readings = cache.chunk_readings
        if len(readings) > MOST_READINGS:
            readings.clear()
        next_start, num_slots, num_layers = 0, len(slots), len(planes)
        for index, chunk in enumerate(chunks):
            tensor = chunk.tensor if isinstance(chunk, MemoryObj) else chunk
            if not isinstance(tensor, torch.Tensor):
                raise ChunkError(f"chunks[{index}] has no tensor ({type(chunk).__name__})")
            kind = tensor.shape, tensor.stride(), tensor.dtype, fmt, num_layers
            reading = readings.get(kind)
            if reading is None:  # most chunks are alike, and are looked at once
                reading = readings[kind] = read_chunk(tensor, f"chunks[{index}]", fmt, cache, num_layers)
            start = next_start if starts is None else starts[index]
            next_start = end = start + reading.num_tokens
            if start < 0 or end > num_slots:
                raise ChunkError(f"chunks[{index}] holds tokens [{start}, {end}) but slots covers [0, {num_slots})")
            spans.append(ChunkSpan(tensor, start, end, reading))
        if rotation is not None:
            if not isinstance(rotation, Rerotation):
                raise ArgumentError(f"rotation must be a Rerotation, got {type(rotation).__name__}")
            rotation = rotation.checked(cache, num_slots)
        return cls(cache, planes, tuple(spans), slots, skip_prefix_n_tokens, rotation)

    @property
    def span_words(self) -> array[int]:
        """For who moves by addresses, WORDS_PER_SPAN words a span: its tensor's address; strides of TWO, NL and T in bytes,
        0 for an axis of length one; start and end. Do not change it."""
        if isinstance(self.spans, LazySpans):
            return self.spans.words
        words: list[int] = []
        for span in self.spans:
            words += (span.tensor.data_ptr(), *span.stride_bytes, span.start, span.end)
        return array("q", words)

    @property
    def on_host(self) -> bool:
        """Whether all chunks are in host memory."""
        if isinstance(self.spans, LazySpans):
            return self.spans.on_host
        return all([span.tensor.is_cpu for span in self.spans])  # a list: a generator takes twice the time

    @property
    def num_tokens(self) -> int:
        """Tokens in all chunks, skipped ones included."""
        return sum([span.end - span.start for span in self.spans])

    @property
    def num_moved_tokens(self) -> int:
        """Tokens in all chunks from the skipped prefix on; those of negative slot included."""
        skip = self.skip_prefix_n_tokens
        return sum([max(0, span.end - max(span.start, skip)) for span in self.spans]) if skip else self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks, skipped tokens included."""
        return sum(span.tensor.numel() * span.tensor.element_size() for span in self.spans)


def refuse_rotation(plan: TransferPlan) -> None:
    """What every gather begins with: ArgumentError for a plan with a rotation."""
    if plan.rotation is not None:
        raise ArgumentError("rotation: a gather moves bytes as they are; keys are re-rotated by a scatter only")


def stride_bytes_of(chunk: torch.Tensor) -> tuple[int, int, int]:
    """Strides of TWO, NL and T of a view `[TWO, NL, T, NH, HS]`, 0 for an axis of length one."""
    width, strides, sizes = chunk.element_size(), chunk.stride(), chunk.shape
    kv, layer, token = (strides[axis] * width if sizes[axis] > 1 else 0 for axis in range(3))
    return kv, layer, token


def read_chunk(
    tensor: torch.Tensor, name: str, fmt: MemoryFormat, cache: PagedKVCache, num_layers: int
) -> ChunkReading:
    """How a chunk is seen as `[TWO, NL, T, NH, HS]`; DtypeError, StrideError or ChunkError when it does not fit `cache`."""
    if fmt not in CHUNK_FORMATS:
        raise ChunkError(f"fmt={fmt!r} is no chunk format; allowed: {', '.join(f.name for f in CHUNK_FORMATS)}")
    if not same_bytes(tensor.dtype, cache.dtype):
        raise DtypeError(f"{name} is {tensor.dtype}, the KV cache is {cache.dtype}; bytes are moved, not converted")
    sizes = {"two": cache.kv_size, "nl": num_layers, "nh": cache.num_heads, "hs": cache.head_size, "1": 1}
    for pattern in CHUNK_FORMATS[fmt]:
        axes = parse_pattern(pattern)
        names = [name for group in axes for name in group]
        wanted = [_length(group, sizes) for group in axes]
        fits = len(axes) == tensor.dim() and all(n in (None, m) for n, m in zip(wanted, tensor.shape, strict=True))
        if fits and (("two" in names) == (cache.kv_size == 2)) and ("nl" in names or num_layers == 1):
            check_strides(tensor, name)
            view = canonical_view(tensor, axes, sizes, CHUNK_AXES)
            return ChunkReading(axes, sizes, view.shape[2], stride_bytes_of(view))
    raise ChunkError(
        f"{name} has shape {tuple(tensor.shape)}; {fmt.name} [{' | '.join(CHUNK_FORMATS[fmt])}] of this transfer means "
        f"two={cache.kv_size}, NL={num_layers}, D = NH*HS = {cache.num_heads}*{cache.head_size}"
    )


def checked_slots(slots: torch.Tensor) -> torch.Tensor:
    """`slots` as int64 (widened, never narrowed); SlotError unless it is a 1-D integer tensor."""
    if not isinstance(slots, torch.Tensor):
        raise SlotError(f"slots must be a tensor, got {type(slots).__name__}")
    if slots.dim() != 1 or slots.dtype.is_floating_point or slots.dtype.is_complex or slots.dtype == torch.bool:
        raise SlotError(f"slots must be int64 [tokens], got {slots.dtype} {tuple(slots.shape)}")
    return slots.to(torch.int64)


def check_slots(plan: TransferPlan, *, duplicates: bool) -> None:
    """`check_slot_values` for the spans of a plan."""
    spans = [(span.start, span.end) for span in plan.spans]
    check_slot_values(plan.cache, plan.slots, spans, plan.skip_prefix_n_tokens, duplicates=duplicates)


def check_slot_values(
    cache: PagedKVCache, slots: torch.Tensor, spans: Sequence[tuple[int, int]], skip: int, *, duplicates: bool
) -> None:
    """Every slot that will be used exists (rule 3) and, with `duplicates`, is used once (rule 4).

    Used are the tokens of `spans`, `[start, end)` each, from token `skip` on. Makes the host wait for slots on a device.
    """
    limit, runs = cache.num_slots, used_runs(spans, skip)
    if not runs:
        return
    values = slots.cpu()
    slot = torch.cat([values[start:end] for start, end in runs]) if len(runs) > 1 else values[slice(*runs[0])]
    least, most = map(int, torch.aminmax(slot))
    if most >= limit:
        bad = int(_tokens(runs)[(slot >= limit).nonzero()[0]])
        counted = f"NB*BS = {cache.num_blocks}*{cache.block_size} = {limit}"
        raise SlotRangeError(f"slots[{bad}] = {int(slots[bad])}: the cache has {counted} slots")
    if duplicates and most >= 0:
        kept = slot if least >= 0 else slot[slot >= 0]
        order = torch.arange(len(kept), dtype=torch.int32)
        last = torch.empty(limit, dtype=torch.int32)
        last.scatter_(0, kept, order)  # of tokens with one slot, one is left; the others do not find themselves
        if not torch.equal(last.index_select(0, kept), order):
            _refuse_duplicates(slot, _tokens(runs))


def used_runs(spans: Iterable[tuple[int, int]], skip: int = 0) -> list[list[int]]:
    """The tokens of `spans` from token `skip` on as `[start, end]`, those that follow each other as one."""
    runs: list[list[int]] = []
    for start, end in spans:
        start = max(start, skip)
        if runs and runs[-1][1] == start < end:
            runs[-1][1] = end
        elif start < end:
            runs.append([start, end])
    return runs


def _tokens(runs: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.cat([torch.arange(*run) for run in runs])


def _refuse_duplicates(slot: torch.Tensor, token: torch.Tensor) -> None:
    """DuplicateSlotError naming the lowest slot that two tokens have."""
    token, slot = token[slot >= 0], slot[slot >= 0]
    ordered, order = slot.sort(stable=True)
    at = int((ordered[1:] == ordered[:-1]).nonzero()[0])
    first, second = (int(token[order[i]]) for i in (at, at + 1))
    raise DuplicateSlotError(f"slots[{first}] and slots[{second}] are both {int(ordered[at])}: a write is lost")


def validating() -> bool:
    """Whether `LMCACHE_VALIDATE=1` asks for every optional check."""
    return variable("LMCACHE_VALIDATE") not in ("", "0")


def _length(group: tuple[str, ...], sizes: dict[str, int]) -> int | None:
    """Elements on one tensor axis, None where any number goes (`t`)."""
    length = 1
    for name in group:
        if name not in sizes:
            return None
        length *= sizes[name]
    return length


def _checked_layers(layers: Any, cache: PagedKVCache) -> list[int]:
    """The requested layers as a list; ArgumentError for one that does not exist or comes twice."""
    chosen = [layers] if isinstance(layers, int) else list(layers)
    for layer in chosen:
        if not isinstance(layer, int) or not 0 <= layer < cache.num_layers:
            raise ArgumentError(f"layers: {layer!r} is not a layer; the cache has NL = {cache.num_layers}")
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"layers: {chosen} names a layer twice")
    return chosen
