"""The scheduler: who computes how many tokens in the next step.

Each step has a budget of tokens. Decoding requests come first, one token and its drafts each, so that
nobody who is talking has to stop for somebody's long prompt. What is left goes to prompts in order of
arrival, in chunks. When the pool runs dry, the request that arrived last gives its blocks back and
starts again later (*preemption by recompute*): the oldest always moves on, so all of them end.

No torch in here: the scheduler knows numbers of tokens and block ids, and could schedule anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mamba_teach import events
from mamba_teach.cache.coordinator import CacheCoordinator, TableUpdates
from mamba_teach.config import EngineConfig
from mamba_teach.request import Request, Status


@dataclass(frozen=True)
class ScheduledRow:
    """One request's part of a step: tokens ``num_computed .. num_computed + num_tokens - 1``.

    Attributes:
        is_decode: whether the row computes its last sampled token and drafts, and nothing else.
        samples: whether all known tokens are computed after it, so that new ones are sampled.
        draft_token_ids: guesses among ``num_tokens``, behind the last sampled token.
    """

    request: Request
    num_computed: int
    num_tokens: int
    is_decode: bool
    samples: bool
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.draft_token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens up to the end of the step, whether or not they will count."""
        return self.num_computed + self.num_tokens

    def computed_after(self, num_sampled: int) -> int:
        """Tokens computed after the step: of a row with drafts only those that turned out right."""
        return self.num_computed + num_sampled if self.num_drafts else self.seq_len

    @property
    def token_ids(self) -> list[int]:
        """The row's input."""
        known = self.request.tokens(self.num_computed, self.seq_len - self.num_drafts)
        return [*known, *self.draft_token_ids]

    @property
    def kind(self) -> str:
        return "decode" if self.is_decode else "prefill"


@dataclass(frozen=True)
class Schedule:
    """A step: its rows, decode rows first, and what changed in the block tables since the last one.

    Attributes:
        updates: to be applied to copies of the tables before the rows are computed.
    """

    rows: tuple[ScheduledRow, ...]
    updates: TableUpdates


class Scheduler:
    """Queues of waiting and running requests over the cache.

    Args:
        config: budgets.
        cache: blocks and hits.
        align_chunks: end prefill chunks on block boundaries where the budget allows; in mode
            "align" a state is kept at the end of a chunk, and only a whole block can be hit.
        emit: the event log.

    Attributes:
        waiting: in order of arrival; preempted requests at the front.
        running: in order of arrival.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheCoordinator,
        align_chunks: bool,
        emit: Callable[[events.Event], None],
    ) -> None:
        self.config = config
        self.cache = cache
        self.align_chunks = align_chunks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._emit = emit

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
        budget = self.config.max_num_batched_tokens
        by_urgency = sorted(self.running, key=lambda r: not r.is_decode)  # stable: then by arrival
        for request in by_urgency:
            if request.status is not Status.RUNNING:
                continue  # preempted a moment ago, to make room
            n = request.num_computed_tokens
            if (num_tokens := self._tokens_for(request, n, budget)) == 0:
                break
            if self._make_room(request, n + num_tokens, rows):
                rows.append(self._row(request, num_tokens))
                budget -= num_tokens
        # Whoever was just preempted stands first in the queue, and needs more than it gave back.
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hit = self.cache.find_hit(request)
            num_tokens = self._tokens_for(request, hit, budget)
            chunk = self.config.max_num_batched_tokens
            if num_tokens == 0 or not self.cache.admit(request, hit, num_tokens, chunk):
                break
            self._admit(request, hit)
            rows.append(self._row(request, num_tokens))
            budget -= num_tokens
        rows.sort(key=lambda row: not row.is_decode)
        for row in rows:
            rid, n, kind = row.request.request_id, row.num_computed, row.kind
            self._emit(events.RowScheduled(rid, kind, n, row.num_tokens))
        return Schedule(tuple(rows), self.cache.drain_updates())

    def commit(
        self,
        row: ScheduledRow,
        sampled: Sequence[int],
        drafts: Sequence[int] = (),
        finish_reason: str | None = None,
    ) -> None:
        """Record that a row was computed.

        Args:
            sampled: its new tokens: drafts that were right and the one behind them; none if it has
                more known tokens to compute.
            drafts: guesses to check in its next step.
            finish_reason: if it is done.
        """
        request, n = row.request, row.num_computed
        request.num_computed_tokens = n_after = row.computed_after(len(sampled))
        request.draft_token_ids = list(drafts)
        if row.num_drafts:
            request.num_drafted_tokens += row.num_drafts
            request.num_accepted_drafts += len(sampled) - 1
            verified = events.DraftsVerified(request.request_id, row.num_drafts, len(sampled) - 1)
            self._emit(verified)
        for token in sampled:
            request.output_token_ids.append(token)
            self._emit(events.TokenSampled(request.request_id, token))
        self.cache.commit(request, n, n_after, row.seq_len, row.num_drafts, row.is_decode)
        if finish_reason is not None:
            self.finish(request, finish_reason)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and give its blocks back. Ending it twice is harmless."""
        if request.status is Status.FINISHED:
            return
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self.cache.release(request.request_id)
        self._emit(events.RequestFinished(request.request_id, reason))

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away and put it first in the queue; it starts again."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.cache.release(request.request_id)
        self._emit(events.RequestPreempted(request.request_id))

    def discard(self, schedule: Schedule) -> None:
        """Take back a step that failed half-way: its rows may have half-written states, so they
        give up their blocks and are computed again."""
        for row in reversed(schedule.rows):
            if row.request.status is Status.RUNNING:
                self.preempt(row.request)

    def _tokens_for(self, request: Request, n: int, budget: int) -> int:
        """How many tokens the request would compute next, from position ``n`` on."""
        end = min(n + budget, request.num_tokens + len(request.draft_token_ids))
        if not self.align_chunks:
            return end - n
        # The longest prefix anybody can hit ends before the last token; no chunk runs over that
        # boundary. Before it, chunks end on the grid, unless the budget does not reach the next
        # line: then some tokens are better than none.
        block_size = self.cache.block_size
        last_boundary = (request.num_tokens - 1) // block_size * block_size
        if n < last_boundary:
            end = min(end, last_boundary)
            aligned = end // block_size * block_size
            end = aligned if aligned > n else end
        return end - n

    def _admit(self, request: Request, hit: int) -> None:
        self.waiting.popleft()
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)  # a resumed request keeps its old rank
        request.status = Status.RUNNING
        request.num_computed_tokens = request.num_hit_tokens = hit
        if request.num_prefills == 0:
            request.num_cached_tokens = hit
        request.num_prefills += 1

    def _make_room(self, request: Request, seq_len: int, rows: list[ScheduledRow]) -> bool:
        """Grow a running request to ``seq_len`` tokens, preempting later arrivals.

        Returns False if it had to go itself. Rows of preempted requests leave ``rows``.
        """
        n, num_drafts = request.num_computed_tokens, len(request.draft_token_ids)
        while not self.cache.allocate(request, n, seq_len, num_drafts):
            victim = self.running[-1]
            self.preempt(victim)
            rows[:] = [row for row in rows if row.request is not victim]
            if victim is request:
                return False
        return True

    @staticmethod
    def _row(request: Request, num_tokens: int) -> ScheduledRow:
        drafts = tuple(request.draft_token_ids)
        computed = request.num_computed_tokens
        return ScheduledRow(
            request=request,
            num_computed=computed,
            num_tokens=num_tokens,
            is_decode=request.is_decode,
            samples=computed + num_tokens == request.num_tokens + len(drafts),
            draft_token_ids=drafts,
        )
