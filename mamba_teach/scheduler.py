"""The scheduler: who computes how many tokens in the next step.

Each step has a budget of tokens. Decoding requests come first, one token each, so that nobody who is
talking has to stop for somebody's long prompt. What is left goes to prompts in order of arrival, in
chunks. When the pool runs dry, the request that arrived last gives its blocks back and starts again
later (*preemption by recompute*): the oldest always moves on, so all of them end.

No torch in here: the scheduler knows numbers of tokens and block ids, and could schedule anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mamba_teach import events
from mamba_teach.cache.manager import CacheManager
from mamba_teach.config import EngineConfig
from mamba_teach.request import Request, Status


@dataclass(frozen=True)
class ScheduledRow:
    """One request's part of a step: tokens ``num_computed .. num_computed + num_tokens - 1``.

    Attributes:
        is_decode: whether the row computes its last sampled token, and nothing else.
        samples: whether all known tokens are computed after it, so that a new one is sampled.
    """

    request: Request
    num_computed: int
    num_tokens: int
    is_decode: bool
    samples: bool


@dataclass(frozen=True)
class Schedule:
    """A step: its rows, decode rows first, and what changed in the block tables since the last one.

    Attributes:
        freed: ids of requests that lost all their blocks (finished, aborted, preempted). To be
            applied before ``new_blocks``.
        new_blocks: request id -> block ids to append, one list per group.
    """

    rows: tuple[ScheduledRow, ...]
    freed: tuple[str, ...]
    new_blocks: dict[str, list[list[int]]]


class Scheduler:
    """Queues of waiting and running requests over a cache manager.

    Attributes:
        waiting: in order of arrival; preempted requests at the front.
        running: in order of arrival.
    """

    def __init__(
        self, config: EngineConfig, cache: CacheManager, emit: Callable[[events.Event], None]
    ) -> None:
        self.config = config
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._emit = emit
        self._freed: list[str] = []
        self._new_blocks: dict[str, list[list[int]]] = {}

    def add(self, request: Request) -> None:
        """Queue a request that passed the checks at the door."""
        self.waiting.append(request)
        self._emit(events.RequestAdded(request.request_id, request.num_prompt_tokens))

    def schedule(self) -> Schedule:
        """Plan the next step and allocate its blocks.

        With work left, at least one row comes back: the oldest running request can always preempt
        its way to the blocks it needs, for a request that needs more than the pool was refused.
        """
        rows: list[ScheduledRow] = []
        by_urgency = sorted(self.running, key=lambda r: not r.is_decode)  # stable: then by arrival
        for request in by_urgency:
            if request.status is not Status.RUNNING:
                continue  # preempted a moment ago, to make room
            if (num_tokens := self._tokens_for(request, rows)) == 0:
                break
            if self._make_room(request, request.num_computed_tokens + num_tokens, rows):
                rows.append(self._row(request, num_tokens))
        # Whoever was just preempted would come straight back and be preempted again.
        made_room = any(request.status is not Status.RUNNING for request in by_urgency)
        while self.waiting and not made_room and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            num_tokens = self._tokens_for(request, rows)
            # Blocks for all known tokens, not for this chunk alone: a request that is let in bit by
            # bit is thrown out half-way.
            if num_tokens == 0 or not self._allocate(request, request.num_tokens):
                break
            self._admit(request)
            rows.append(self._row(request, num_tokens))
        rows.sort(key=lambda row: not row.is_decode)
        for row in rows:
            self._emit(
                events.RowScheduled(
                    row.request.request_id,
                    "decode" if row.is_decode else "prefill",
                    row.num_computed,
                    row.num_tokens,
                )
            )
        schedule = Schedule(tuple(rows), tuple(self._freed), self._new_blocks)
        self._freed, self._new_blocks = [], {}
        return schedule

    def commit(self, row: ScheduledRow, sampled: int | None, finish_reason: str | None) -> None:
        """Record that a row was computed, the token it sampled if any, and whether it is done."""
        request = row.request
        request.num_computed_tokens += row.num_tokens
        if sampled is not None:
            request.output_token_ids.append(sampled)
            self._emit(events.TokenSampled(request.request_id, sampled))
        if finish_reason is not None:
            self.finish(request, finish_reason)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and give its blocks back. Ending it twice is harmless."""
        if request.status is Status.FINISHED:
            return
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self._free(request)
        self._emit(events.RequestFinished(request.request_id, reason))

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away and put it first in the queue; it starts again."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._free(request)
        self._emit(events.RequestPreempted(request.request_id))

    def discard(self, schedule: Schedule) -> None:
        """Take back a step that failed half-way: its rows may have half-written states, so they
        give up their blocks and are computed again."""
        for row in reversed(schedule.rows):
            if row.request.status is Status.RUNNING:
                self.preempt(row.request)

    def _tokens_for(self, request: Request, rows: list[ScheduledRow]) -> int:
        """What the request would compute next, as far as the step's budget goes."""
        budget = self.config.max_num_batched_tokens - sum(row.num_tokens for row in rows)
        return min(budget, request.num_tokens - request.num_computed_tokens)

    def _admit(self, request: Request) -> None:
        self.waiting.popleft()
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)  # a resumed request keeps its old rank
        request.status = Status.RUNNING
        request.num_prefills += 1

    def _make_room(self, request: Request, num_tokens: int, rows: list[ScheduledRow]) -> bool:
        """Grow a running request to ``num_tokens`` tokens, preempting later arrivals.

        Returns False if it had to go itself. Rows of preempted requests leave ``rows``.
        """
        while not self._allocate(request, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            rows[:] = [row for row in rows if row.request is not victim]
            if victim is request:
                return False
        return True

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        new = self.cache.allocate(request.request_id, num_tokens)
        if new is None:
            return False
        if any(new):
            self._new_blocks[request.request_id] = new
        for group, block_ids in enumerate(new):
            if block_ids:
                self._emit(events.BlocksAllocated(request.request_id, group, tuple(block_ids)))
        return True

    def _free(self, request: Request) -> None:
        self._new_blocks.pop(request.request_id, None)
        if blocks := self.cache.free(request.request_id):
            self._freed.append(request.request_id)
            self._emit(events.BlocksFreed(request.request_id, tuple(blocks)))

    @staticmethod
    def _row(request: Request, num_tokens: int) -> ScheduledRow:
        return ScheduledRow(
            request=request,
            num_computed=request.num_computed_tokens,
            num_tokens=num_tokens,
            is_decode=request.is_decode,
            samples=request.num_computed_tokens + num_tokens == request.num_tokens,
        )
