"""What all connectors share: reading their arguments, finding the planes, keeping objects alive, staging.

A concrete connector says what it accepts, how it maps tokens to objects and when work must be ordered; the moving is
the backend's.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..backends import Operations, get_backend
from ..discovery import flatten, merged_hints
from ..errors import ArgumentError, SkipPrefixError
from ..kv_cache import PagedKVCache
from ..memory import MemoryFormat, MemoryObj
from ..metadata import EngineType, LMCacheMetadata
from ..plan import ChunkSpan, TransferPlan, check_slots, checked_slots
from ..transfer import Transfer
from .buffers import DeviceBuffers
from .checks import positive_int
from .interface import GPUConnectorInterface
from .object_lists import Held

F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="PagedConnector")


def nvtx(call: F) -> F:
    """Put an NVTX range named `Class.method` around a connector call where CUDA is in use."""

    @functools.wraps(call)
    def ranged(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_initialized():
            return call(self, *args, **kwargs)
        torch.cuda.nvtx.range_push(f"{type(self).__name__}.{call.__name__}")
        try:
            return call(self, *args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()

    return ranged  # type: ignore[return-value]


class ConnectorBase(GPUConnectorInterface):
    """The engine's side and the objects' side of every connector; knows nothing of sizes."""

    engine: EngineType = EngineType.VLLM
    use_gpu: bool = False

    def __init__(self) -> None:
        self.buffers = DeviceBuffers()
        self._known: tuple[Any, list[torch.Tensor], Any] | None = None  # nesting and addresses, tensors, what was read
        self._in_flight: dict[str, deque[tuple[Transfer, Held]]] = {"gather": deque(), "scatter": deque()}
        self._lock = threading.Lock()  # one thread may store while another loads

    # ------------------------------------------------------------------------------------------ the engine's side

    def read_engine(self, kvcaches: Any) -> Any:
        """What this connector makes of the engine's tensors: planes."""
        raise AssertionError("every connector reads its engine")

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Take `kvcaches` if given and find its planes. Raises LayoutError as `discover` does."""
        if kwargs.get("kvcaches") is not None:
            self.kv_cache(kwargs)

    def kv_cache(self, kwargs: Mapping[str, Any]) -> Any:
        """The planes of `kwargs["kvcaches"]`, or of the newest list given before; ArgumentError when there is none."""
        kvcaches, known = kwargs.get("kvcaches"), self._known
        if kvcaches is None:
            if known is None:
                raise ArgumentError("kvcaches is missing, and none was given before")
            return known[2]
        leaves, nesting = flatten(kvcaches)
        where = (nesting, [leaf.data_ptr() for leaf in leaves])  # the same tensor may have been given other memory
        if known is None or where != known[0] or not all(map(operator.is_, leaves, known[1])):
            known = self._known = (where, leaves, self.read_engine(kvcaches))
        return known[2]

    def slot_mapping(self, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """`kwargs["slot_mapping"]` as int64 `[tokens of the request]`."""
        if kwargs.get("slot_mapping") is None:
            raise ArgumentError("slot_mapping is missing")
        return checked_slots(kwargs["slot_mapping"])

    def cached_tokens(self, kwargs: Mapping[str, Any]) -> int:
        """`vllm_cached_tokens`: tokens below it are the engine's own and are not written on load."""
        value = kwargs.get("vllm_cached_tokens")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise SkipPrefixError(f"vllm_cached_tokens must be an int >= 0, got {value!r}")
        return value or 0

    # ------------------------------------------------------------------------------------------ the move

    @nvtx
    def run(
        self,
        operation: str,
        plan: TransferPlan,
        objects: Sequence[MemoryObj] = (),
        *,
        backend: Operations | None = None,
        staged: bool = True,
        staging_tokens: int | None = None,
    ) -> Transfer:
        """Hand a checked plan to the backend; `operation` is "gather" or "scatter". Returns the transfer's handle.

        Goes through a staging buffer of `staging_tokens` (default: the longest chunk) where `use_gpu` asks for one
        and the backend does not bring its own; `staged=False` for what is in a buffer already. `objects` keep a reference
        until their copies are done.
        """
        backend = backend or get_backend(device=plan.cache.device)
        held = Held(objects)
        handle: Transfer | None = None
        try:
            if self.use_gpu and staged and not backend.stages and plan.num_tokens:
                handle = self._run_staged(getattr(backend, operation), operation, plan, staging_tokens)
            else:
                handle = getattr(backend, operation)(plan)
        finally:
            with self._lock:
                self._in_flight[operation].append((handle or Transfer(), held))
            self.reap(thorough=False)
        return handle

    def run_all(
        self, operation: str, plans: Iterable[TransferPlan], objects: Sequence[MemoryObj], how: str, **options: Any
    ) -> None:
        """`run` each plan, then `settle` all of them, also when one of them is refused."""
        transfers: list[Transfer] = []
        try:
            for plan in plans:
                transfers.append(self.run(operation, plan, objects, **options))
        finally:
            self.settle(transfers, how)

    def settle(self, transfers: Iterable[Transfer], how: str) -> None:
        """`wait` for every transfer, or `synchronize` every one and release the objects whose copies are done.

        One that fails does not spare the others; the first error is raised at the end.
        """
        failed = None
        for transfer in transfers:
            try:
                getattr(transfer, how)()
            except Exception as error:
                failed = failed or error
        if how == "synchronize":
            self.reap()
        if failed is not None:
            raise failed

    def reap(self, thorough: bool = True) -> None:
        """Release the objects whose copies are done. thorough: else only those of transfers that have no unfinished one of
        their direction before them; to ask for all takes as long as many are under way."""
        done = []
        with self._lock:
            for transfers in self._in_flight.values():
                for _ in range(len(transfers)):
                    if transfers[0][0].done():
                        done.append(transfers.popleft()[1])
                    elif thorough:
                        transfers.rotate(-1)
                    else:
                        break
        for held in done:
            held.let_go()

    def _run_staged(self, move: Callable[..., Any], operation: str, plan: TransferPlan, tokens: int | None) -> Any:
        """Copy between objects and one device buffer, move between buffer and cache; part by part."""
        check_slots(plan, duplicates=operation == "scatter")
        first = plan.spans[0].chunk
        kv, layers, _, heads, head = first.shape
        longest = max(span.end - span.start for span in plan.spans)
        shape = (kv, layers, min(tokens or longest, longest), heads, head)
        with self.buffers.borrow(shape, first.dtype, plan.cache.device) as buffer:
            for part, home, stage in parts(plan, buffer):
                stage.copy_(home)  # when gathering: rows of skipped tokens come back as they were
                handle = move(part)
                handle.synchronize()  # the next part uses the same buffer
                if operation == "gather":
                    home.copy_(stage)
        return handle


def parts(plan: TransferPlan, buffer: torch.Tensor) -> Iterator[tuple[TransferPlan, torch.Tensor, torch.Tensor]]:
    """Cut a plan into parts that run through `buffer` `[TWO, NL, tokens, NH, HS]` on the cache's device.

    Yields `(part, home, stage)`: `part` moves between the cache and `stage`; `home` is the same rows of the caller's
    chunk. The caller copies between the two.
    """
    tokens = buffer.shape[2]
    for span in plan.spans:
        for start in range(span.start, span.end, tokens):
            end = min(start + tokens, span.end)
            stage = buffer[:, :, : end - start].view(span.chunk.dtype)  # fp8 or its uint8 storage; nothing is converted
            home = span.chunk[:, :, start - span.start : end - span.start]
            yield replace(plan, spans=(ChunkSpan(stage, start, end),)), home, stage


class PagedConnector(ConnectorBase):
    """Common construction of the connectors over one `PagedKVCache`, whose layers are all alike.

    hidden_dim_size: D = NH*HS elements. num_layers: NL. use_gpu: go through a device staging buffer.
    chunk_size: tokens that buffer holds. dtype: of the KV cache, checked when given. device: of the buffer; the move
    itself runs where the KV cache is. use_mla: one plane a layer. layout_hints: see `lmcache_ref.discovery.HINTS`.
    """

    fmt: MemoryFormat

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
        super().__init__()
        self.hidden_dim_size = positive_int("hidden_dim_size", hidden_dim_size)
        self.num_layers = positive_int("num_layers", num_layers)
        self.chunk_size = None if chunk_size is None else positive_int("chunk_size", chunk_size)
        self.use_gpu = bool(use_gpu)
        self.use_mla = bool(use_mla)
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.kv_size = 1 if use_mla else 2
        stated = {"num_layers": num_layers, "hidden_dim_size": hidden_dim_size, "dtype": dtype, "use_mla": self.use_mla}
        self.layout_hints = merged_hints(layout_hints, stated)

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

    def require(self, *names: str) -> None:
        """ArgumentError naming the first constructor argument that `use_gpu=True` needs and was not given."""
        for name in names:
            if self.use_gpu and getattr(self, name) is None:
                raise ArgumentError(f"use_gpu=True needs {name}")

    def read_engine(self, kvcaches: Any) -> PagedKVCache:
        """One row of the table for all layers. Raises LayoutError as `discover` does."""
        return PagedKVCache.from_engine(kvcaches, self.engine, self.layout_hints)
