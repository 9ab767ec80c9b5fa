"""The scheduler's half of the connector: how much of a request is in the cache, and what each step loads and stores.

It asks the workers' caches through a `Lookup` and never sees a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ArgumentError
from .request_tracker import (
    LoadSpec,
    Progress,
    RequestTracker,
    RequestWork,
    SavePolicy,
    StepWork,
    flat_block_ids,
    progress_of,
)
from .token_keys import keyed_prompt

logger = logging.getLogger("vllm.lmcache_ref")


class Lookup(Protocol):
    """The workers' caches, as the scheduler sees them."""

    def lookup(self, token_ids: list[int], request_id: str) -> int:
        """Leading tokens that every worker holds in host memory, verified, and now pinned for the request."""

    def release(self, request_id: str) -> None:
        """Give the request's pins back, in every worker; nothing to give back is no error."""

    def close(self) -> None:
        """Let go of what it holds open. May be called twice."""


@dataclass(frozen=True)
class Promise:
    """What vLLM was told of a request that is not allocated yet."""

    vllm_cached_tokens: int
    hit_tokens: int
    promised_tokens: int


class SchedulerSide:
    """State of all requests between the calls of vLLM's scheduler. Not thread-safe: the scheduler is one thread.

    block_size: tokens a block. loads, saves: what the connector's role allows. metadata_type: made for each step, with
    a list `requests`.
    """

    def __init__(
        self,
        policy: SavePolicy,
        lookup: Lookup,
        *,
        block_size: int,
        loads: bool = True,
        saves: bool = True,
        metadata_type: Callable[[], StepWork] = StepWork,
    ) -> None:
        self.policy = policy
        self.lookup = lookup
        self.block_size = block_size
        self.loads = loads
        self.saves = saves
        self.metadata_type = metadata_type
        self._hits: dict[str, int] = {}  # requests that were asked for and are not allocated yet
        self._promises: dict[str, Promise] = {}
        self._loads: dict[str, LoadSpec] = {}  # allocated, not in a step yet
        self._found: dict[str, int] = {}  # likewise: tokens the cache had
        self._requests: dict[str, Any] = {}  # vLLM's own objects, allocated until finished
        self._trackers: dict[str, RequestTracker] = {}
        self._failed_blocks: set[int] = set()  # learnt of, not passed on yet
        self._pinned: set[str] = set()  # requests that had a hit; released when they finish at the latest

    # ------------------------------------------------------------------------------------------ a waiting request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens to load behind the first `num_computed_tokens`, which vLLM has; at least one is left to compute.

        Asking again before `update_state_after_alloc` asks no cache: the hit is pinned and stays what it was.
        """
        if not self.loads:
            return 0
        hit = self._hits.get(request.request_id)
        if hit is None:
            hit = self._hits[request.request_id] = self._look_up(request)
        tokens = max(0, min(hit, request.num_tokens - 1) - num_computed_tokens)
        self._promises[request.request_id] = Promise(num_computed_tokens, hit, tokens)
        return tokens

    def _look_up(self, request: Any) -> int:
        prompt = keyed_prompt(request)
        if prompt is None:
            return 0
        token_ids = prompt + list(request.all_token_ids[len(prompt) :])
        token_ids = token_ids[: max(0, len(token_ids) - self.policy.skip_last_n_tokens)]
        hit = self.lookup.lookup(token_ids, request.request_id) if token_ids else 0
        if hit:
            self._pinned.add(request.request_id)
        logger.info("request %s: %d of %d tokens are in the cache", request.request_id, hit, request.num_tokens)
        return min(hit, len(token_ids))

    def update_state_after_alloc(self, request: Any, num_external_tokens: int) -> None:
        """vLLM has made room for the request and counts on `num_external_tokens` of the promised ones.

        Raises ArgumentError when it counts on more than was promised.
        """
        request_id = request.request_id
        self._requests[request_id] = request
        promise = self._promises.pop(request_id, Promise(0, 0, 0))
        self._hits.pop(request_id, None)
        self._found[request_id] = promise.hit_tokens
        self._loads.pop(request_id, None)
        if num_external_tokens == 0:
            self._release(request_id)
            return
        if not 0 < num_external_tokens <= promise.promised_tokens:
            raise ArgumentError(
                f"num_external_tokens: {num_external_tokens} for request {request_id}; {promise.promised_tokens} tokens "
                f"were promised"
            )
        start, end = promise.vllm_cached_tokens, promise.hit_tokens
        if num_external_tokens < promise.promised_tokens:
            end = start + num_external_tokens
        # A full hit is loaded as a whole: vLLM computes its last token again and writes the slot over.
        self._loads[request_id] = LoadSpec(start, promise.hit_tokens, end)

    # ------------------------------------------------------------------------------------------ a step

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """What the workers load and store in the step that `scheduler_output` describes, which is not changed."""
        new = scheduler_output.scheduled_new_reqs
        # A new request may have the id of one that just finished: what is known of that id is the new one's.
        for request_id in set(scheduler_output.finished_req_ids) - {one.req_id for one in new}:
            self.forget(request_id)
        step = self.metadata_type()
        step.known_failures, self._failed_blocks = self._failed_blocks, set()
        scheduled = scheduler_output.num_scheduled_tokens
        works = [self._start(one, scheduled[one.req_id]) for one in new]
        works += [
            self._continue(progress, scheduled[progress.request_id])
            for progress in progress_of(scheduler_output.scheduled_cached_reqs)
            if progress.request_id in scheduled
        ]
        step.requests.extend(work for work in works if work is not None)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM has taken the failed blocks of a step back: the workers may trust those blocks from the next step on."""
        self._failed_blocks |= set(getattr(connector_output, "invalid_block_ids", None) or ())

    def _start(self, new: Any, num_scheduled_tokens: int) -> RequestWork | None:
        """A request in its first step. One without tokens (a prompt of embeddings) gets no tracker."""
        self._trackers.pop(new.req_id, None)
        request = self._requests.get(new.req_id, new)
        token_ids = keyed_prompt(request)
        if token_ids is None:
            return None
        tracker = RequestTracker(new.req_id, len(token_ids), token_ids, flat_block_ids(new.block_ids))
        tracker.num_saved = self._found.pop(new.req_id, 0)
        self._trackers[new.req_id] = tracker
        self._read_tokens(tracker, [])
        return self._step(tracker, new.num_computed_tokens, num_scheduled_tokens)

    def _continue(self, progress: Progress, num_scheduled_tokens: int) -> RequestWork | None:
        """A request that was in a step before, perhaps preempted since."""
        tracker = self._trackers.get(progress.request_id)
        if tracker is None:
            return None
        if progress.resumed:
            tracker.restart(progress.block_ids, self._found.pop(progress.request_id, 0))
        else:
            tracker.block_ids.extend(progress.block_ids)
        self._read_tokens(tracker, progress.new_token_ids, progress.num_computed_tokens)
        return self._step(tracker, progress.num_computed_tokens, num_scheduled_tokens)

    def _read_tokens(self, tracker: RequestTracker, new_token_ids: list[int], num_computed_tokens: int = 0) -> None:
        """Append the tokens that became known: vLLM's request object knows all, else those of the scheduler output,
        which begin at `num_computed_tokens`."""
        known = len(tracker.token_ids)
        request = self._requests.get(tracker.request_id)
        if request is not None:
            tracker.token_ids.extend(request.all_token_ids[known:])
        else:
            tracker.token_ids.extend(new_token_ids[max(0, known - num_computed_tokens) :])

    def _step(self, tracker: RequestTracker, num_computed_tokens: int, num_scheduled_tokens: int) -> RequestWork | None:
        tracker.schedule(num_computed_tokens, num_scheduled_tokens)
        load = self._loads.pop(tracker.request_id, None)
        save = tracker.next_save(self.policy) if self.saves else None
        return tracker.work(load, save, self.block_size)

    # ------------------------------------------------------------------------------------------ the end

    def forget(self, request_id: str) -> None:
        """The request is over, or was never started: its pins go back. May be called more than once."""
        for known in (self._hits, self._promises, self._loads, self._found, self._requests, self._trackers):
            known.pop(request_id, None)
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        if request_id in self._pinned:
            self._pinned.discard(request_id)
            self.lookup.release(request_id)

    def close(self) -> None:
        """Close the lookup. Pins are left to the workers, who end too and may be gone already. May be called twice."""
        self.lookup.close()
