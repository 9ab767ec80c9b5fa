"""What the scheduler side knows of one request between steps, and what it tells the workers to load and save.

Plain data and counting: no vLLM, no cache, no tensors. Token counts are counts of tokens from the request's first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ArgumentError


@dataclass(frozen=True)
class SavePolicy:
    """Which tokens of a request may be stored.

    chunk_size: tokens a chunk. save_decode_cache: chunks completed by decoding too, else those of the prompt only.
    save_unfull_chunk: the prompt's last, partial chunk too. skip_last_n_tokens: never the last tokens.
    """

    chunk_size: int
    save_decode_cache: bool = False
    save_unfull_chunk: bool = False
    skip_last_n_tokens: int = 0

    def floor(self, num_tokens: int) -> int:
        """Tokens in whole chunks."""
        return num_tokens // self.chunk_size * self.chunk_size


@dataclass(frozen=True)
class LoadSpec:
    """Load tokens `[vllm_cached_tokens, end_token)` out of the first `hit_tokens`, which the cache holds.

    `end_token` is less than `hit_tokens` where vLLM took fewer tokens than it was promised.
    """

    vllm_cached_tokens: int
    hit_tokens: int
    end_token: int


@dataclass(frozen=True)
class SaveSpec:
    """Store tokens `[skip_leading_tokens, end_token)`; the first number is a multiple of the chunk size."""

    skip_leading_tokens: int
    end_token: int


@dataclass
class RequestWork:
    """What a worker does for one request in one step. `token_ids` and `block_ids` cover the load and the save."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    load: LoadSpec | None = None
    save: SaveSpec | None = None


@dataclass
class StepWork:
    """The connector metadata of one step.

    known_failures: blocks that failed to load, which the scheduler has learnt of since the step before.
    """

    requests: list[RequestWork] = field(default_factory=list)
    known_failures: set[int] = field(default_factory=set)


@dataclass
class RequestTracker:
    """One running request.

    token_ids: those known so far, as the cache keys them. block_ids: vLLM's, in order. num_done: tokens whose KV is in
    their slots when the step scheduled last is over. num_saved: tokens stored, or found in the cache.
    """

    request_id: str
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_done: int = 0
    num_saved: int = 0

    def schedule(self, num_computed_tokens: int, num_scheduled_tokens: int) -> None:
        """Note that a step computes `num_scheduled_tokens` behind the first `num_computed_tokens`.

        Drafts of speculative decoding are scheduled too; they are not among `token_ids` and do not count. When vLLM
        goes back (a load failed), what was stored behind that point counts as not stored.
        """
        if num_computed_tokens < self.num_done:
            self.num_saved = min(self.num_saved, num_computed_tokens)
        self.num_done = min(num_computed_tokens + num_scheduled_tokens, len(self.token_ids))

    def restart(self, block_ids: list[int], num_saved: int) -> None:
        """The request comes back from preemption, in other blocks; `num_saved` of its tokens are in the cache."""
        self.block_ids = block_ids
        self.num_done = 0
        self.num_saved = num_saved

    def next_save(self, policy: SavePolicy) -> SaveSpec | None:
        """What the step should store, if anything; it counts as stored from here on."""
        last = len(self.token_ids) if policy.save_decode_cache else min(len(self.token_ids), self.num_prompt_tokens)
        allowed = last - policy.skip_last_n_tokens
        end = policy.floor(max(0, min(self.num_done, allowed)))
        prompt = self.num_prompt_tokens - policy.skip_last_n_tokens
        if policy.save_unfull_chunk and self.num_done >= self.num_prompt_tokens and self.num_saved < prompt:
            end = max(end, prompt)
        if end <= self.num_saved:
            return None
        skip = policy.floor(self.num_saved)
        self.num_saved = end
        return SaveSpec(skip, end)

    def work(self, load: LoadSpec | None, save: SaveSpec | None, block_size: int) -> RequestWork | None:
        """The step's work with the tokens and blocks it needs; None when there is none.

        Raises ArgumentError when the blocks do not hold the tokens that are to be loaded or stored.
        """
        if load is None and save is None:
            return None
        num_tokens = max(load.hit_tokens if load else 0, save.end_token if save else 0)
        num_slots = max(load.end_token if load else 0, save.end_token if save else 0)
        num_blocks = -(-num_slots // block_size)
        if len(self.block_ids) < num_blocks:
            raise ArgumentError(
                f"request {self.request_id}: {len(self.block_ids)} blocks of {block_size} tokens, but tokens up to "
                f"{num_slots} are to be loaded or stored"
            )
        return RequestWork(self.request_id, self.token_ids[:num_tokens], self.block_ids[:num_blocks], load, save)


@dataclass(frozen=True)
class Progress:
    """What a scheduler output says of one request that it has scheduled before."""

    request_id: str
    resumed: bool
    num_computed_tokens: int
    block_ids: list[int]
    new_token_ids: list[int]


def flat_block_ids(block_ids: Any) -> list[int]:
    """Block ids of the one KV cache group: a flat list, a list of lists with one inside, None or nothing at all.

    Raises ArgumentError for several groups.
    """
    if not block_ids:
        return []
    if isinstance(block_ids[0], int):
        return list(block_ids)
    if len(block_ids) != 1:
        raise ArgumentError(f"block_ids: {len(block_ids)} KV cache groups; this connector serves models with one")
    return list(block_ids[0])


def progress_of(cached: Any) -> Iterator[Progress]:
    """The requests of `scheduled_cached_reqs`: a list of objects (vLLM 0.8.5 to 0.9.1) or one object of lists."""
    if isinstance(cached, Iterable):
        for one in cached:
            yield Progress(
                one.req_id,
                bool(one.resumed_from_preemption),
                one.num_computed_tokens,
                flat_block_ids(one.new_block_ids),
                list(one.new_token_ids or ()),
            )
        return
    resumed = resumed_ids(cached)
    for index, request_id in enumerate(cached.req_ids):
        new_token_ids: Sequence[Sequence[int]] = cached.new_token_ids
        yield Progress(
            request_id,
            request_id in resumed,
            cached.num_computed_tokens[index],
            flat_block_ids(cached.new_block_ids[index]),
            list(new_token_ids[index]) if index < len(new_token_ids) else [],
        )


def resumed_ids(cached: Any) -> set[str]:
    """The requests that come back from preemption: a set of ids, in older versions a flag for each request."""
    if hasattr(cached, "resumed_req_ids"):
        return set(cached.resumed_req_ids)
    return {req_id for req_id, flag in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if flag}
