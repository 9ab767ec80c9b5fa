"""vLLM's objects as its scheduler hands them to a connector, in the shapes observed in 0.8.5, 0.9 and 0.32; no vLLM.

`FakeEngine` is a scheduler small enough to be read: it admits, schedules, preempts and finishes requests and calls the
connector's scheduler side as vLLM does. What the caches hold is a set of token prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

DIALECTS = ("0.8.5", "0.9", "0.32")


class FakeRequest:
    """vLLM's `Request`, as far as a connector looks."""

    def __init__(self, request_id: str, prompt: list[int], **more: Any) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.all_token_ids = list(prompt)
        self.num_computed_tokens = 0
        self.lora_request = None
        self.__dict__.update(more)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def decode(self, token: int) -> None:
        self.all_token_ids.append(token)


@dataclass
class FakeLookup:
    """Caches that hold the first tokens of some sequences. Pins are counted, and so are the questions."""

    held: list[list[int]] = field(default_factory=list)
    chunk_size: int = 1
    pins: dict[str, int] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    closed: bool = False

    def lookup(self, token_ids: list[int], request_id: str) -> int:
        self.asked.append(list(token_ids))
        best = 0
        for sequence in self.held:
            same = 0
            while same < min(len(sequence), len(token_ids)) and sequence[same] == token_ids[same]:
                same += 1
            best = max(best, same // self.chunk_size * self.chunk_size)
        if best:
            self.pins[request_id] = self.pins.get(request_id, 0) + 1
        return best

    def release(self, request_id: str) -> None:
        self.pins.pop(request_id, None)

    def close(self) -> None:
        self.closed = True


def new_request(request: FakeRequest, block_ids: list[int], dialect: str) -> SimpleNamespace:
    """An entry of `scheduled_new_reqs`."""
    return SimpleNamespace(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        block_ids=list(block_ids) if dialect == "0.8.5" else (list(block_ids),),
        num_computed_tokens=request.num_computed_tokens,
        lora_request=None,
        **({"mm_hashes": [], "mm_positions": []} if dialect != "0.32" else {"mm_features": []}),
    )


@dataclass
class Scheduled:
    """One request that runs on, or comes back."""

    request: FakeRequest
    new_tokens: int
    new_block_ids: list[int]
    resumed: bool = False


def cached_requests(scheduled: list[Scheduled], dialect: str) -> Any:
    """`scheduled_cached_reqs`: a list of objects in 0.8.5, one object of lists from 0.9.2 on."""
    if dialect == "0.8.5":
        return [
            SimpleNamespace(
                req_id=one.request.request_id,
                resumed_from_preemption=one.resumed,
                new_token_ids=new_tokens(one),
                new_block_ids=list(one.new_block_ids),
                num_computed_tokens=one.request.num_computed_tokens,
            )
            for one in scheduled
        ]
    parts = SimpleNamespace(
        req_ids=[one.request.request_id for one in scheduled],
        new_block_ids=[(list(one.new_block_ids),) if one.new_block_ids else None for one in scheduled],
        num_computed_tokens=[one.request.num_computed_tokens for one in scheduled],
    )
    if dialect == "0.9":
        parts.new_token_ids = [new_tokens(one) for one in scheduled]
        parts.resumed_from_preemption = [one.resumed for one in scheduled]
        parts.new_block_ids = [(list(one.new_block_ids),) for one in scheduled]
    else:
        parts.new_token_ids = []
        parts.resumed_req_ids = {one.request.request_id for one in scheduled if one.resumed}
    return parts


def new_tokens(one: Scheduled) -> list[int]:
    start = one.request.num_computed_tokens
    return one.request.all_token_ids[start : start + one.new_tokens]


def scheduler_output(
    dialect: str,
    new: list[tuple[FakeRequest, int, list[int]]] = (),  # type: ignore[assignment]
    cached: list[Scheduled] = (),  # type: ignore[assignment]
    finished: set[str] = frozenset(),  # type: ignore[assignment]
) -> SimpleNamespace:
    """A `SchedulerOutput`. `new`: (request, scheduled tokens, block ids)."""
    counts = {request.request_id: tokens for request, tokens, _ in new}
    counts |= {one.request.request_id: one.new_tokens for one in cached}
    return SimpleNamespace(
        scheduled_new_reqs=[new_request(request, blocks, dialect) for request, _, blocks in new],
        scheduled_cached_reqs=cached_requests(list(cached), dialect),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        finished_req_ids=set(finished),
    )
