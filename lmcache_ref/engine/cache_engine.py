"""The cache engine: stores the KV cache of tokens as chunks, finds them again by their tokens, loads them back.

It joins the names of chunks, the tiers that keep them and the connector that moves them. What an inference engine
calls when is the business of its adapter.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from ..connectors.interface import GPUConnectorInterface
from ..errors import ArgumentError, LayoutError, ObjectError, SkipPrefixError, SlotError
from ..memory import MemoryFormat
from ..metadata import LMCacheMetadata
from .batch import Batch, Pins, first_unmapped
from .chunk import Chunk, ChunkLayout
from .config import LMCacheEngineConfig
from .stats import EngineStats
from .storage import Storage
from .tokens import CacheKey, ChunkNames, Span, Tokens, skipped_tokens, token_ids

logger = logging.getLogger(__name__)

#: what is wrong with a call as a whole: raised, while anything else is the fault of one chunk
CALL_ERRORS = (ArgumentError, LayoutError, SlotError, SkipPrefixError)


class CacheEngine:
    """Stores and loads the KV cache of token sequences, in chunks of `config.chunk_size` tokens.

    gpu_connector: as `CreateGPUConnector` makes it for `config` and `metadata`. Keyword arguments of store and retrieve
    that are not named here go to the connector (`kvcaches`, `slot_mapping`, `vllm_cached_tokens`, `offset`, `sync`).

    tokens: the request's token ids from the first on, a list or a tensor. mask: bool `[tokens]`, False for a prefix of
    whole chunks that is left alone. cache_salt: what else the KV cache depends on, such as an adapter's name.

    Thread-safe: one thread may look up while others store and load. Streams are the connector's: a store is final when it
    returns, a load is seen by later work on the current stream. Every call raises ArgumentError for wrong arguments
    and ObjectError after `close`.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, gpu_connector: GPUConnectorInterface
    ) -> None:
        config.validate()
        self.config, self.metadata, self.connector = config, metadata, gpu_connector
        self.layerwise = config.use_layerwise
        self.num_layers = metadata.kv_shape[0]
        self._fmt: MemoryFormat | None = getattr(gpu_connector, "fmt", None)
        self._has_groups = hasattr(gpu_connector, "get_shapes")  # an object has a tensor for each layer group
        NL, kv, _, NH, HS = metadata.kv_shape
        layout = {"fmt": self._fmt and self._fmt.name, "layerwise": self.layerwise, "kv_shape": [NL, kv, NH, HS]}
        self.names = ChunkNames(config.chunk_size, metadata, layout, save_unfull_chunk=config.save_unfull_chunk)
        self.storage = Storage(config, self.names.scope)
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._pins = Pins(self.storage.unpin)
        self._being_stored: set[CacheKey] = set()
        self._lock = (
            threading.RLock()
        )  # of the three above; reentrant, for a generator may be collected while it is held
        self._storing_call = threading.Lock()  # a connector serves one thread for stores and one for loads
        self._loading_call = threading.Lock()
        self._closed = False

    # -------------------------------------------------------------------------------------------------------- looking up

    def lookup(
        self, tokens: Tokens, request_id: str | None = None, pin: bool | None = None, *, cache_salt: str | None = None
    ) -> int:
        """How many tokens, from the first on, can be loaded: whole chunks, all in host memory and verified.

        Chunks that are only on the disk are brought to host memory first; one that finds no room there is no hit. pin
        (default: when there is a request_id): keep the chunks that were counted until `release(request_id)`. Asking
        again for the same request pins nothing twice.
        """
        self._require_open()
        pin = request_id is not None if pin is None else pin
        if pin and request_id is None:
            raise ArgumentError(
                "pin: True, but request_id is None; allowed: with a request_id, which releases the pins"
            )
        ids = token_ids(tokens)
        with self._found(len(ids), self.names.spans(ids, cache_salt)) as batch:
            if pin and batch.spans:
                self._pins.pin(str(request_id), batch)
            self._count(lookups=1, lookup_tokens=len(ids), hit_tokens=batch.tokens)
            return batch.tokens

    def release(self, request_id: str) -> None:
        """Give back everything that lookups pinned for the request; nothing happens when there is nothing."""
        self._pins.release(request_id)

    lookup_unpin = release

    # ----------------------------------------------------------------------------------------------------------- storing

    def store(
        self, tokens: Tokens, mask: torch.Tensor | None = None, *, cache_salt: str | None = None, **kwargs: Any
    ) -> int:
        """Store the chunks of the tokens that are not there yet; returns how many tokens this call stored.

        A chunk without memory to go to, and those after it, are skipped and counted; so are chunks with a negative slot,
        whose bytes are not all known. What another call is storing at the same time is left to it. With `use_layerwise`
        the generator of `store_layer` is run to its end. Errors of the connector are raised, and nothing is kept.
        """
        if self.layerwise:
            *_, stored = self.store_layer(tokens, mask, cache_salt=cache_salt, **kwargs)
            assert stored is not None
            return stored
        with self._to_store(tokens, mask, cache_salt, kwargs) as batch:
            if batch.spans:
                with self._storing_call:
                    self.connector.batched_from_gpu(batch.objects(), batch.starts, batch.ends, **kwargs)
            return self._publish(batch)

    def store_layer(
        self, tokens: Tokens, mask: torch.Tensor | None = None, *, cache_salt: str | None = None, **kwargs: Any
    ) -> Generator[int | None, None, None]:
        """`store` layer by layer: yields NL+1 times, also when there is nothing to store.

        Call `next` when the engine has written a layer: the i-th `next` starts copying layer i, the (NL+1)-th makes the
        chunks final, publishes them and yields the number of tokens stored (the others yield None). What is stored is
        decided at the first `next`. Closed before its end, or after an error, it keeps nothing and leaves nothing held.
        """
        with self._to_store(tokens, mask, cache_salt, kwargs) as batch:
            if batch.spans:
                layers = [batch.objects(layer) for layer in range(self.num_layers)]
                with contextlib.closing(
                    self.connector.batched_from_gpu(layers, batch.starts, batch.ends, **kwargs)
                ) as copying:
                    for _ in range(self.num_layers):
                        next(copying)
                        yield None
                    next(copying)
            else:
                for _ in range(self.num_layers):
                    yield None
            stored = self._publish(batch)
        yield stored

    @contextlib.contextmanager
    def _to_store(
        self, tokens: Tokens, mask: torch.Tensor | None, cache_salt: str | None, kwargs: dict[str, Any]
    ) -> Iterator[Batch]:
        """New memory for the chunks that have to be stored, until published; those already here stay meanwhile."""
        self._require_open()
        self.connector.initialize_kvcaches_ptr(**kwargs)
        num_tokens, spans, wanted = self._spans(tokens, mask, cache_salt)
        batch, present = Batch(num_tokens), Batch(num_tokens)
        try:
            for span in spans:
                if (chunk := self.storage.host.get(span.key)) is not None:
                    present.add(span, chunk)
            mapped = wanted[: first_unmapped(wanted, kwargs.get("slot_mapping"))]
            self._skip("unmapped_slots", len(wanted) - len(mapped))
            for index, span in enumerate(mapped):
                if not self._reserve(span.key):
                    continue
                chunk = self.storage.host.allocate(self._layout(span.tokens))
                if chunk is None:
                    self._unreserve([span.key])
                    self._skip("no_memory", sum(not self.storage.contains(later.key) for later in mapped[index:]))
                    break
                batch.add(span, chunk)
            yield batch
        finally:
            self.storage.touch([span.key for span in spans])
            for span, chunk in present.pairs():
                self.storage.release(span.key, chunk)
            for chunk in batch.chunks:
                chunk.release()
            self._unreserve(span.key for span in batch.spans)

    def _publish(self, batch: Batch) -> int:
        """Hand the chunks to the tiers; the batch is empty afterwards. Returns its tokens."""
        stored = batch.tokens
        self._count(stores=1, stored_chunks=len(batch.spans), stored_tokens=stored)
        while batch.spans:  # the last first: what is evicted first is the end of a request
            span = batch.spans.pop()
            self.storage.publish(span.key, batch.chunks.pop())
            self._unreserve([span.key])
        return stored

    # ----------------------------------------------------------------------------------------------------------- loading

    def retrieve(
        self, tokens: Tokens, mask: torch.Tensor | None = None, *, cache_salt: str | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Load chunks into the engine's slots; returns which tokens are loaded, bool `[tokens]` on the host.

        True for the chunks after the prefix that `mask` leaves out, up to the first chunk that is missing, damaged or
        refused by the connector (that one is forgotten). Slots of tokens that are False are not to be used. Raises
        what is wrong with the call as a whole: ArgumentError, LayoutError, SlotError, SkipPrefixError. With `use_layerwise`
        the generator of `retrieve_layer` is run to its end.
        """
        if self.layerwise:
            *_, loaded = self.retrieve_layer(tokens, mask, cache_salt=cache_salt, **kwargs)
            assert isinstance(loaded, torch.Tensor)
            return loaded
        with self._to_load(tokens, mask, cache_salt, kwargs) as batch:
            return self._loaded(batch, self._load(batch, kwargs) if batch.spans else 0)

    def retrieve_layer(
        self, tokens: Tokens, mask: torch.Tensor | None = None, *, cache_salt: str | None = None, **kwargs: Any
    ) -> Generator[torch.Tensor | int | None, None, None]:
        """`retrieve` layer by layer: yields NL+2 times, also when nothing is found.

        The first `next` finds and holds all chunks, checks the call and yields how many tokens will be loaded. The
        second starts layer 0, the third layer 1 and so on; once `next` number i+3 has returned, later work on the
        current stream sees layer i. Number NL+2, the last, yields the mask that `retrieve` returns; all others yield None.
        An error of the connector is raised: no token counts as loaded then. Closed early it leaves nothing held.
        """
        with self._to_load(tokens, mask, cache_salt, kwargs) as batch:
            if batch.spans:
                with contextlib.closing(
                    self.connector.batched_to_gpu(starts=batch.starts, ends=batch.ends, **kwargs)
                ) as loading:
                    next(loading)
                    yield batch.tokens
                    for layer in range(self.num_layers):
                        loading.send(batch.objects(layer))
                        yield None
                    next(loading)
            else:
                yield 0
                for _ in range(self.num_layers):
                    yield None
            loaded = self._loaded(batch, len(batch.spans))
        yield loaded

    @contextlib.contextmanager
    def _to_load(
        self, tokens: Tokens, mask: torch.Tensor | None, cache_salt: str | None, kwargs: dict[str, Any]
    ) -> Iterator[Batch]:
        """The chunks after the masked prefix, up to the first that is missing; held."""
        self._require_open()
        self.connector.initialize_kvcaches_ptr(**kwargs)
        num_tokens, _, wanted = self._spans(tokens, mask, cache_salt)
        with self._found(num_tokens, wanted) as batch:
            yield batch

    def _load(self, batch: Batch, kwargs: dict[str, Any]) -> int:
        """How many chunks are in the engine's slots; one that is refused is forgotten."""
        with self._loading_call:
            try:
                self.connector.batched_to_gpu(batch.objects(), batch.starts, batch.ends, **kwargs)
                return len(batch.spans)
            except CALL_ERRORS:
                raise
            except Exception as error:
                logger.warning("a batch of %d chunks was not loaded, trying each alone: %s", len(batch.spans), error)
            for index, (span, chunk) in enumerate(batch.pairs()):
                try:
                    self.connector.batched_to_gpu([chunk.objects[0]], [span.start], [span.end], **kwargs)
                except Exception as error:
                    logger.warning("tokens [%d, %d) were not loaded: %s", span.start, span.end, error)
                    self._count(failed_loads=1)
                    self.storage.drop(span.key)
                    return index
        return len(batch.spans)

    def _loaded(self, batch: Batch, chunks: int) -> torch.Tensor:
        """The mask of the first so many chunks, counted."""
        mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for span in batch.spans[:chunks]:
            mask[span.start : span.end] = True
        self._count(retrieves=1, retrieved_tokens=int(mask.sum()))
        return mask

    # ------------------------------------------------------------------------------------------------------------- chunks

    def _spans(
        self, tokens: Tokens, mask: torch.Tensor | None, cache_salt: str | None
    ) -> tuple[int, list[Span], list[Span]]:
        """How many tokens there are, their chunks, and the chunks after the masked prefix."""
        ids = token_ids(tokens)
        spans = self.names.spans(ids, cache_salt)
        skipped = skipped_tokens(mask, len(ids), self.config.chunk_size)
        return len(ids), spans, [span for span in spans if span.start >= skipped]

    @contextlib.contextmanager
    def _found(self, num_tokens: int, spans: list[Span]) -> Iterator[Batch]:
        """The chunks up to the first that is missing, in host memory, held until the end."""
        batch = Batch(num_tokens)
        try:
            for span in spans:
                chunk = self._hold(span)
                if chunk is None:
                    break
                batch.add(span, chunk)
            self.storage.touch([found.key for found in batch.spans])
            yield batch
        finally:
            for span, chunk in batch.pairs():
                self.storage.release(span.key, chunk)

    def _hold(self, span: Span) -> Chunk | None:
        """The chunk in host memory, held; None when it is missing or not what the connector would load."""
        chunk = self.storage.hold(span.key)
        if chunk is None or self._fits(chunk, span):
            return chunk
        logger.warning("chunk %s is dropped, it is of another model: %s", span.key, chunk.layout)
        self._count(disk_drops=1)
        self.storage.drop(span.key)
        chunk.release()
        return None

    def _fits(self, chunk: Chunk, span: Span) -> bool:
        """Whether the chunk looks as the connector wants it. Before the layer groups are known, nobody can say."""
        if self._has_groups and not self.metadata.layer_groups:
            return True
        found, wanted = chunk.layout, self._layout(span.tokens)
        return found == (wanted if self._fmt else wanted._replace(fmt=found.fmt))

    def _layout(self, num_tokens: int) -> ChunkLayout:
        """How the connector wants a chunk of so many tokens."""
        if self._has_groups:
            shapes, dtypes = self.metadata.get_shapes(num_tokens), self.metadata.get_dtypes()
        else:
            shapes, dtypes = [self.connector.get_shape(num_tokens)], [self.metadata.kv_dtype]
        count = self.num_layers if self.layerwise else 1
        return ChunkLayout(count, tuple(shapes), tuple(dtypes), self._fmt or MemoryFormat.UNDEFINED)

    # -------------------------------------------------------------------------------------------------------- bookkeeping

    def _reserve(self, key: CacheKey) -> bool:
        """Whether this call is to store the chunk: it is not here, and no other call is storing it."""
        with self._lock:
            if key in self._being_stored or self.storage.contains(key):
                return False
            self._being_stored.add(key)
            return True

    def _unreserve(self, keys: Iterable[CacheKey]) -> None:
        with self._lock:
            self._being_stored.difference_update(keys)

    def _skip(self, reason: str, chunks: int) -> None:
        with self._lock:
            self._skipped.update({reason: chunks} if chunks else {})

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def stats(self) -> EngineStats:
        """The numbers as of now."""
        storage, counts = self.storage, dict(self._counts)
        host, disk = storage.host, storage.disk
        with self._lock:
            skipped = self._skipped + storage.skipped
        if disk is not None:
            skipped += disk.skipped
            counts["disk_drops"] = counts.get("disk_drops", 0) + disk.drops
        return EngineStats(
            **counts,
            evictions=host.evictions,
            disk_evictions=disk.evictions if disk else 0,
            skipped=dict(skipped),
            host_chunks=len(host),
            host_used_bytes=host.allocator.used_bytes,
            host_free_bytes=host.allocator.free_bytes,
            disk_chunks=len(disk) if disk else 0,
            disk_used_bytes=disk.used_bytes if disk else 0,
            pinned_requests=len(self._pins),
        )

    def serves(self, metadata: LMCacheMetadata) -> bool:
        """Whether the engine was made for this worker of this model."""
        return ChunkNames(self.config.chunk_size, metadata).scope == self.names.scope

    def flush(self) -> None:
        """Return when all that was stored is on the disk, or was skipped. Nothing to do without a disk."""
        self.storage.flush()

    def close(self) -> None:
        """Write what waits for the disk, release all pins and the host memory. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pins.release_all()
        self.storage.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ObjectError("this CacheEngine is closed")


LMCacheEngine = CacheEngine
