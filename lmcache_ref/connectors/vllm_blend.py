"""vLLM, layer by layer through ping-pong device buffers, so that cached text can be blended at new positions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import ArgumentError, ChunkError
from ..kv_cache import PagedKVCache
from ..memory import MemoryFormat, MemoryObj
from ..plan import TransferPlan
from ..rerotation import Rerotation
from ..rope import RotarySpec
from .checks import check_ascending
from .layerwise import LayerwiseCall, LayerwiseConnector, LoadGenerator


class VLLMBufferLayerwiseGPUConnector(LayerwiseConnector):
    """Object for each layer and chunk: `[2, T, D]` `KV_2TD`. Loading re-rotates keys and lets a blender edit the layer.

    use_gpu must be true; needs `dtype` and `device`. rope: how the engine rotated its keys; it may be set before the
    first use, and without it every object must be loaded at the positions it was stored at. use_double_buffer: two
    layers are in flight when loading, else one. buffer_tokens: the longest span `[starts[0], ends[-1])` of a call.

    Load, for layer i: (1) bring it to a buffer, (2) move its keys from `metadata.cached_positions` to their places
    in the span and zero the gaps between chunks, (3) write the whole span, gaps included, to the engine's slots. A
    backend that `rotates` moves the keys on their way in stage 1; of another one `rerotate` is called. Stages 1 and 2
    are done when `send` of layer i returns; until the next `send` (or `next`), which runs stage 3, `get_kv(i)`
    is the layer and may be edited in place.

    Chunks must ascend without overlap (ChunkError). `sync` is optional (true). A second open load raises. MLA: there
    are no keys to rotate, refused by name.
    """

    per_layer_format = MemoryFormat.KV_2TD

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = True,
        use_double_buffer: bool = True,
        *,
        rope: RotarySpec | None = None,
        **options: Any,
    ) -> None:
        if not use_gpu:
            raise ArgumentError("use_gpu must be True: this connector works in device buffers")
        if options.get("use_mla"):
            raise ArgumentError(
                "use_mla=True: a latent row has no keys to re-rotate; use the plain layerwise connector"
            )
        super().__init__(hidden_dim_size, num_layers, use_gpu, **options)
        if rope is not None and not isinstance(rope, RotarySpec):
            raise ArgumentError(f"rope must be a RotarySpec, got {type(rope).__name__}")
        self.rope = rope
        self.use_double_buffer = bool(use_double_buffer)
        self._open: LayerwiseCall | None = None  # the load whose layer get_kv gives
        self._layer: tuple[int, torch.Tensor] | None = None  # that layer and its buffer [2, T_span, D]

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[2, T, D]`."""
        return torch.Size([2, num_tokens, self.hidden_dim_size])

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the buffered layer, `[T_span, D]` each: the buffer itself. ArgumentError when it is not buffered."""
        if self._layer is None or self._layer[0] != layer_id:
            have = "no layer is buffered" if self._layer is None else f"the buffer holds layer {self._layer[0]}"
            raise ArgumentError(f"layer_id={layer_id}: {have}; call between send() of the layer and the next step")
        return self._layer[1][0], self._layer[1][1]

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> LoadGenerator:  # type: ignore[override]
        """Load; `next`, then `send(objects of the layer)` NL times, then `next`. Yields NL+2 times."""
        self.reads_sync(kwargs)
        call = LayerwiseCall(self, starts, ends, kwargs, loading=True)
        if self._open is not None:
            raise ArgumentError("a load of this connector is still open; close it or run it to its end")
        self._open = call
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            buffers = [stack.enter_context(self._buffer(call)) for _ in range(2 if self.use_double_buffer else 1)]
            stack.callback(call.abandon)  # runs first: no transfer is left over a returned buffer
            for layer in range(self.num_layers):
                objects = call.sent((yield))
                call.plan(
                    objects, layer, loading=True
                )  # for its checks; the objects go to the buffer, not to the slots
                rotation = self._rotation(*self._positions(objects, call, layer))
                buffer = buffers[layer % len(buffers)]
                if not self.use_double_buffer:
                    self._write_back(call)
                    call.settle("wait")  # before the one buffer takes the next layer
                self._bring(call, objects, buffer, rotation if call.backend.rotates else None)
                self._write_back(call)
                call.settle("wait")
                self._rotate(call, buffer, None if call.backend.rotates else rotation)
                self._layer = (layer, buffer) if call.starts else None
            yield
            self._write_back(call)
            call.settle("wait")
        yield

    # ------------------------------------------------------------------------------------------ the three stages

    def _rotation(self, old: torch.Tensor, new: torch.Tensor) -> Rerotation | None:
        """From `old` to `new` positions of the span; None where no key moves."""
        if self.rope is None or torch.equal(old, new):
            return None
        return Rerotation(old, new, self.rope)

    def _bring(
        self, call: LayerwiseCall, objects: Sequence[MemoryObj], buffer: torch.Tensor, rotation: Rerotation | None
    ) -> None:
        """Stage 1: the objects side by side in the buffer, a cache of one token a block; keys are rotated if asked."""
        if not call.starts:
            return
        first, span = call.starts[0], buffer.shape[1]
        heads = (span, 1, call.cache.num_heads, call.cache.head_size)
        pages = PagedKVCache(((buffer[0].view(heads), buffer[1].view(heads)),))
        plan = TransferPlan.build(
            pages,
            torch.arange(span),
            objects,
            fmt=self.fmt,
            starts=[start - first for start in call.starts],
            rotation=rotation,
        )
        call.pending.append(self.run("scatter", plan, objects, backend=call.backend, staged=False))

    def _rotate(self, call: LayerwiseCall, buffer: torch.Tensor, rotation: Rerotation | None) -> None:
        """Stage 2: gaps become zero, keys that stage 1 did not rotate are rotated; in place."""
        for end, start in zip(call.ends, call.starts[1:], strict=False):
            buffer[:, end - call.starts[0] : start - call.starts[0]].zero_()
        if rotation is not None:
            keys = buffer[0].view(-1, call.cache.num_heads, call.cache.head_size)
            call.backend.rerotate(keys, rotation.old_positions, rotation.new_positions, rotation.rope)

    def _write_back(self, call: LayerwiseCall) -> None:
        """Stage 3: the buffered layer, gaps included, goes to the engine's slots and leaves the buffer."""
        if self._layer is None:
            return
        (layer, buffer), self._layer = self._layer, None
        first, last = call.starts[0], call.ends[-1]
        plan = TransferPlan.build(
            call.cache,
            call.slots[first:last],
            [buffer],
            fmt=self.fmt,
            layers=layer,
            skip_prefix_n_tokens=max(0, call.skip - first),
        )
        call.pending.append(self.run("scatter", plan, backend=call.backend, staged=False))

    # ------------------------------------------------------------------------------------------ the arguments

    def _positions(
        self, objects: Sequence[MemoryObj], call: LayerwiseCall, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Old and new position of every token of the span, int64 `[T_span]`; in a gap the two are equal."""
        if not call.starts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        first = call.starts[0]
        new = torch.arange(first, call.ends[-1])
        old = new.clone()
        for index, (obj, start, end) in enumerate(zip(objects, call.starts, call.ends, strict=True)):
            name, positions = f"layer {layer}: memory_objs[{index}]", obj.metadata.cached_positions
            if positions is None or tuple(positions.shape) != (end - start,):
                shape = None if positions is None else tuple(positions.shape)
                raise ChunkError(f"{name}: cached_positions must be [{end - start}], got {shape}")
            if self.rope is None and not torch.equal(positions.cpu(), new[start - first : end - first]):
                raise ArgumentError(
                    f"{name} was stored at positions {positions.tolist()[:3]}..., is loaded at [{start}, {end}), and the "
                    f"connector has no rope to move its keys by; set connector.rope"
                )
            old[start - first : end - first] = positions.cpu()
        if self.rope is not None and len(new):
            least, most = int(min(old.min(), new.min())), int(max(old.max(), new.max()))
            if least < 0 or most >= self.rope.max_position:
                raise ArgumentError(
                    f"layer {layer}: positions {least}..{most} exceed the rotary table of {self.rope.max_position}"
                )
        return old, new

    def _buffer(self, call: LayerwiseCall) -> AbstractContextManager[torch.Tensor]:
        span = call.ends[-1] - call.starts[0] if call.starts else 0
        return self.buffers.borrow((2, span, self.hidden_dim_size), call.cache.dtype, call.cache.device)

    def _close(self) -> None:
        self._open = self._layer = None

    def reads_sync(self, kwargs: dict[str, Any]) -> bool:
        """`sync`, true when not given."""
        return super().reads_sync({"sync": True, **kwargs})

    def moved_spans(self, call: LayerwiseCall, *, loading: bool) -> list[tuple[int, int]]:
        """On load the gaps too."""
        spans = super().moved_spans(call, loading=loading)
        return [(spans[0][0], spans[-1][1])] if loading and spans else spans

    def check_call(self, call: LayerwiseCall) -> None:
        """Chunks ascend, their span fits the buffer; else ChunkError before the first yield."""
        check_ascending(call.starts, call.ends)
        span = call.ends[-1] - call.starts[0] if call.starts else 0
        limit = self.buffer_tokens or call.cache.num_slots
        if span > limit:
            raise ChunkError(f"the call spans {span} tokens, the buffer holds {limit} (buffer_tokens)")

    def describe(self, obj: MemoryObj, start: int, end: int) -> None:
        """The object's format, and the positions its keys were rotated at."""
        super().describe(obj, start, end)
        obj.metadata.cached_positions = torch.arange(start, end)
