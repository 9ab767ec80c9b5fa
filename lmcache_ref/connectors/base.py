"""What all connectors share: reading their arguments, finding the planes, checking a batch, staging.

A concrete connector says what it accepts, how it maps tokens to objects and when work must be ordered; the moving is
the backend's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..backends import get_backend
from ..discovery import check_hints, flatten
from ..errors import ArgumentError, ChunkError, LayoutError, SkipPrefixError
from ..kv_cache import PagedKVCache
from ..memory import MemoryFormat, MemoryObj
from ..metadata import EngineType, LMCacheMetadata
from ..plan import ChunkSpan, TransferPlan, check_slots, checked_slots
from .interface import GPUConnectorInterface

F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="PagedConnector")


def nvtx(call: F) -> F:
    """Put an NVTX range named `Class.method` around a connector call where CUDA is."""

    @functools.wraps(call)
    def ranged(self: Any, *args: Any, **kwargs: Any) -> Any:
        cuda = torch.cuda.is_available()
        with torch.cuda.nvtx.range(f"{type(self).__name__}.{call.__name__}") if cuda else nullcontext():
            return call(self, *args, **kwargs)

    return ranged  # type: ignore[return-value]


class PagedConnector(GPUConnectorInterface):
    """Common construction and argument handling of the connectors over one `PagedKVCache`.

    hidden_dim_size: D = NH*HS elements. num_layers: NL. use_gpu: go through a device staging buffer.
    chunk_size: tokens that buffer holds. dtype: of the KV cache, checked when given. device: of the buffer.
    use_mla: one plane a layer. layout_hints: see `lmcache_ref.discovery.HINTS`.
    """

    engine: EngineType = EngineType.VLLM

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = False,
        *,
        chunk_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        use_mla: bool = False,
        layout_hints: Mapping[str, Any] | None = None,
    ) -> None:
        self.hidden_dim_size = positive_int("hidden_dim_size", hidden_dim_size)
        self.num_layers = positive_int("num_layers", num_layers)
        self.chunk_size = None if chunk_size is None else positive_int("chunk_size", chunk_size)
        self.use_gpu = bool(use_gpu)
        self.use_mla = bool(use_mla)
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.kv_size = 1 if use_mla else 2
        stated = {
            "num_layers": num_layers,
            "hidden_dim_size": hidden_dim_size,
            "dtype": dtype,
            "use_mla": self.use_mla,
        }
        self.layout_hints = merged_hints(layout_hints, stated)
        self._leaves: tuple[torch.Tensor, ...] = ()
        self._kvcaches: Any = None
        self._cache: PagedKVCache | None = None

    @classmethod
    def from_metadata(
        cls: type[Self],
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        layout_hints: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """The connector for `metadata.kv_shape = (NL, 2 or 1, chunk_size, NH, HS)` and `metadata.kv_dtype`."""
        num_layers, _, chunk_size, num_heads, head_size = metadata.kv_shape
        sizes = {} if metadata.use_mla else {"num_kv_heads": num_heads, "head_dim": head_size}
        return cls(
            num_heads * head_size,
            num_layers,
            use_gpu,
            chunk_size=chunk_size,
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=merged_hints(layout_hints, sizes),
            **options,
        )

    def require(self, **options: Any) -> None:
        """ArgumentError naming the first constructor argument that `use_gpu=True` needs and is None."""
        for name, value in options.items():
            if value is None:
                raise ArgumentError(f"use_gpu=True needs {name}")

    # ------------------------------------------------------------------------------------------ the engine's side

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Take `kvcaches` if given and find its planes. Raises LayoutError as `discover` does."""
        kvcaches = kwargs.get("kvcaches")
        if kvcaches is not None:
            self._take(kvcaches)

    def _take(self, kvcaches: Any) -> PagedKVCache:
        leaves = tuple(flatten(kvcaches)[0])
        known = len(leaves) == len(self._leaves) and all(a is b for a, b in zip(leaves, self._leaves, strict=True))
        if self._cache is None or not known or kvcaches is not self._kvcaches:
            self._cache = PagedKVCache.from_engine(kvcaches, self.engine, self.layout_hints)
            self._leaves, self._kvcaches = leaves, kvcaches
        return self._cache

    def kv_cache(self, kwargs: Mapping[str, Any]) -> PagedKVCache:
        """The planes of `kwargs["kvcaches"]`, or of the newest list given before; ArgumentError when there is none."""
        kvcaches = kwargs.get("kvcaches")
        if kvcaches is not None:
            return self._take(kvcaches)
        if self._cache is None:
            raise ArgumentError("kvcaches is missing, and none was given before")
        return self._cache

    @staticmethod
    def slot_mapping(kwargs: Mapping[str, Any]) -> torch.Tensor:
        """`kwargs["slot_mapping"]` as int64 `[tokens of the request]`."""
        if kwargs.get("slot_mapping") is None:
            raise ArgumentError("slot_mapping is missing")
        return checked_slots(kwargs["slot_mapping"])

    # ------------------------------------------------------------------------------------------ the objects' side

    @staticmethod
    def cached_tokens(kwargs: Mapping[str, Any]) -> int:
        """`vllm_cached_tokens`: tokens below it are the engine's own and are not written on load."""
        value = kwargs.get("vllm_cached_tokens")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise SkipPrefixError(f"vllm_cached_tokens must be an int >= 0, got {value!r}")
        return value or 0

    # ------------------------------------------------------------------------------------------ the move

    def run(self, operation: str, plan: TransferPlan) -> Any:
        """Hand a checked plan to the backend, through the staging buffer where one is asked for and the backend
        does not bring its own. `operation` is "gather" or "scatter". Returns the transfer's handle."""
        backend = get_backend(device=plan.cache.device)
        move = getattr(backend, operation)
        if not self.use_gpu or backend.stages or not plan.num_tokens:
            return move(plan)
        check_slots(plan, duplicates=operation == "scatter")
        handle = None
        for part, home, stage in staged(plan, self.chunk_size or max(s.end - s.start for s in plan.spans)):
            if operation == "scatter":
                stage.copy_(home)
                handle = move(part)
                handle.synchronize()  # the buffer is used again by the next part
            else:
                stage.copy_(home)  # rows of skipped tokens come back as they were
                handle = move(part)
                handle.synchronize()
                home.copy_(stage)
        return handle


def staged(plan: TransferPlan, tokens: int) -> Iterator[tuple[TransferPlan, torch.Tensor, torch.Tensor]]:
    """Cut a plan into parts of at most `tokens` tokens that run through one device buffer.

    Yields `(part, home, stage)`: `part` moves between the cache and `stage` `[TWO, NL, t, NH, HS]` on the cache's
    device; `home` is the same rows of the caller's chunk. The caller copies between the two.
    """
    first = plan.spans[0].chunk
    kv, layers, _, heads, head = first.shape
    buffer = torch.empty((kv, layers, tokens, heads, head), dtype=first.dtype, device=plan.cache.device)
    for span in plan.spans:
        for start in range(span.start, span.end, tokens):
            end = min(start + tokens, span.end)
            stage = buffer[:, :, : end - start]
            home = span.chunk[:, :, start - span.start : end - span.start]
            yield replace(plan, spans=(ChunkSpan(stage, start, end),)), home, stage


def check_batch(objects: Sequence[Any], starts: Sequence[int], ends: Sequence[int], num_slots: int) -> None:
    """Lengths agree, every `[start, end)` is a range inside the slot mapping; else ChunkError naming the chunk."""
    for name, value in (("memory_objs", objects), ("starts", starts), ("ends", ends)):
        if value is None or isinstance(value, (str, MemoryObj)) or not isinstance(value, Sequence):
            raise ArgumentError(f"{name} must be a list, got {type(value).__name__}")
    if not len(objects) == len(starts) == len(ends):
        raise ChunkError(f"{len(objects)} memory objects, {len(starts)} starts, {len(ends)} ends: lengths differ")
    check_spans(starts, ends, num_slots)


def check_spans(starts: Sequence[int], ends: Sequence[int], num_slots: int) -> None:
    """Every `[starts[i], ends[i])` is a range inside the slot mapping; else ChunkError naming the chunk."""
    if len(starts) != len(ends):
        raise ChunkError(f"{len(starts)} starts, {len(ends)} ends: lengths differ")
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end < start or start < 0:
            raise ChunkError(f"chunk {index}: [{start}, {end}) is no token range")
        if end > num_slots:
            raise ChunkError(f"chunk {index}: [{start}, {end}) is outside slot_mapping of {num_slots} tokens")


def check_object(obj: Any, index: int, tokens: int, fmt: MemoryFormat, shape: torch.Size, *, loading: bool) -> None:
    """The object holds a tensor of `shape`; when loading also in format `fmt`. Else ChunkError naming the object."""
    name = f"memory_objs[{index}]"
    if not isinstance(obj, MemoryObj) or obj.tensor is None:
        raise ChunkError(f"{name} has no tensor ({type(obj).__name__})")
    if loading and obj.metadata.fmt != fmt:
        raise ChunkError(f"{name} is {obj.metadata.fmt.name}, this connector loads {fmt.name}")
    if obj.tensor.shape != shape:
        raise ChunkError(
            f"{name} has shape {tuple(obj.tensor.shape)}; {tokens} tokens of {fmt.name} are {tuple(shape)}"
        )


def merged_hints(hints: Mapping[str, Any] | None, stated: Mapping[str, Any]) -> dict[str, Any]:
    """`hints` with what the connector itself knows; LayoutError when the two contradict."""
    merged = check_hints(hints or {})
    for key, value in stated.items():
        if value is None:
            continue
        if key in merged and merged[key] != value:
            raise LayoutError(f"layout_hints[{key!r}] is {merged[key]}, the connector was given {value}")
        merged[key] = value
    return merged


def positive_int(name: str, value: Any) -> int:
    """`value`, or ArgumentError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} must be a positive int, got {value!r}")
    return value
