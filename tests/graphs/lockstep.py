"""An engine with recorded graphs beside one without: the same requests, step by step.

The two must agree in every token and every page. Besides, the one with graphs is watched: a step may
change the pages that its log names, and no bit of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from engine.test_batching import assert_consistent
from support.models import NEAR_TIE, greedy_gap

from mamba_teach import Engine, RequestOutput, SamplingParams
from mamba_teach.events import StateAccess, StateCopied, StepDispatched
from mamba_teach.model.hybrid import HybridModel
from mamba_teach.runner import model_runner
from mamba_teach.runner.decode_graphs import DecodeGraphs
from mamba_teach.runner.graph_pool import GraphPool
from mamba_teach.runner.graph_recorder import RecordedGraph, tensors_in
from mamba_teach.scheduler import Schedule
from mamba_teach.spec_decode.scripted_proposer import Script


def raw_buffers(caches: Sequence[Any]) -> list[torch.Tensor]:
    """All memory of all layers, flat uint8, one tensor per position."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(caches)}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]


@contextmanager
def patterned_pages() -> Iterator[None]:
    """Pages of engines made inside begin as random bytes, the null page's as well."""
    allocate = model_runner.allocate_pages

    def patterned(*args: Any) -> list[Any]:
        caches = allocate(*args)
        generator = torch.Generator().manual_seed(0)
        for raw in raw_buffers(caches):
            raw.copy_(torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8))
        return caches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "allocate_pages", patterned)
        yield


def graphs_of(engine: Engine) -> DecodeGraphs:
    assert engine.runner.graphs is not None
    return engine.runner.graphs


def recorded_graphs(engine: Engine) -> list[RecordedGraph]:
    graphs = [step.graph for step in graphs_of(engine).steps.values()]
    assert all(isinstance(graph, RecordedGraph) for graph in graphs)
    return graphs  # type: ignore[return-value]


def pages_of_step(engine: Engine, schedule: Schedule, start: int) -> set[int]:
    """Pages that a step may change: states it says it writes, and where its new keys go.

    Args:
        start: events before the runner's.
    """
    pages = set(schedule.updates.unowned) if engine.config.poison else set()
    for event in engine.events[start:]:
        if isinstance(event, StateAccess):
            pages |= {block for block, _ in event.writes}
        elif isinstance(event, StateCopied):
            pages.add(event.dst)
    # A drafter with keys of its own adds those of its drafts.
    drafts = engine.config.num_speculative_tokens * bool(engine.model.config.mtp_pattern)
    for row in schedule.rows:
        tables = engine.cache.block_ids(row.request.request_id)
        for group, table in zip(engine.cache.groups, tables, strict=True):
            if group.spec.kind == "attention":
                size = group.spec.block_size
                last = (row.seq_len - 1 + drafts) // size
                pages |= set(table[row.num_computed // size : last + 1])
    return pages - {0}


def watch_pages(engine: Engine) -> None:
    """From now on, a step of ``engine`` that changes a bit of a page not its own is an error."""
    execute, num_blocks = engine.runner.execute, engine.cache.pool.num_blocks
    buffers = [
        raw.view(num_blocks, -1).view(torch.int32) for raw in raw_buffers(engine.runner.caches)
    ]

    def watched(schedule: Schedule) -> Any:
        before, start = [raw.clone() for raw in buffers], len(engine.events)
        results = execute(schedule)
        allowed = pages_of_step(engine, schedule, start)
        for raw, old in zip(buffers, before, strict=True):
            changed = set((raw != old).any(1).nonzero()[:, 0].tolist())
            assert changed <= allowed, (
                f"pages {sorted(changed - allowed)} are not the step's to write"
            )
        return results

    engine.runner.execute = watched  # type: ignore[method-assign]


class Lockstep:
    """Two engines, one with graphs.

    Attributes:
        eager, graphs: the engines.
        diverged: whether rounding decided a token; from then on they need not agree.
        done: request id -> tokens of requests that ended.
        replays: graph size -> rows of the steps that it served, in order.
    """

    def __init__(self, make: Callable[[str], Engine]) -> None:
        with patterned_pages():
            self.eager, self.graphs = make("off"), make("record")
        self.exact = not isinstance(self.graphs.model, HybridModel)  # the ghost knows no rounding
        for ours, theirs in zip(*self._memory(), strict=True):
            assert torch.equal(ours, theirs), "the capture has touched a page"
        watch_pages(self.graphs)
        for graph in recorded_graphs(self.graphs):
            graph.poison_empty = True
        self.diverged = False
        self.done: dict[str, list[int]] = {}
        self.replays: dict[int, list[int]] = {}
        self._fixed = self._fixed_things()

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        first, second = (e.add_request(prompt, params) for e in (self.eager, self.graphs))
        assert first == second
        return first

    def abort(self, which: int) -> None:
        live = [*self.eager.scheduler.running, *self.eager.scheduler.waiting]
        if live:
            for engine in (self.eager, self.graphs):
                engine.abort(live[which % len(live)].request_id)

    def preempt(self, which: int) -> None:
        for engine in (self.eager, self.graphs):
            if running := engine.scheduler.running:
                engine.scheduler.preempt(running[which % len(running)])

    def step(self) -> None:
        """One step of both; they agree, or rounding has decided a token."""
        start = len(self.graphs.events)
        outputs = self.graphs.step()
        self._count(start, len(outputs))
        assert_consistent(self.graphs)
        for output in outputs:
            if output.finish_reason:
                self.done[output.request_id] = list(output.token_ids)
        if self.diverged:
            return
        for ours, theirs in zip(outputs, self.eager.step(), strict=True):
            self._agree(ours, theirs)
        if not self.diverged:
            for ours, theirs in zip(*self._memory(), strict=True):
                if self.exact:
                    assert torch.equal(ours, theirs)
                    continue
                ours, theirs = ours.view(torch.float32), theirs.view(torch.float32)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)

    def to_the_end(self) -> None:
        for _ in range(500):
            if not self.graphs.has_unfinished_requests():
                break
            self.step()
        assert not self.graphs.has_unfinished_requests(), "requests starve"
        assert self._fixed == self._fixed_things(), "something moved or grew"

    def _count(self, start: int, num_rows: int) -> None:
        for event in self.graphs.events[start:]:
            if isinstance(event, StepDispatched) and event.path == "graph":
                self.replays.setdefault(event.graph_size, []).append(num_rows)

    def _agree(self, ours: RequestOutput, theirs: RequestOutput) -> None:
        assert ours.request_id == theirs.request_id
        if ours.token_ids == theirs.token_ids:
            return
        assert isinstance(self.graphs.model, HybridModel), (ours.token_ids, theirs.token_ids)
        prompt = list(ours.prompt_token_ids)
        gaps = [greedy_gap(self.graphs.model, prompt, list(o.token_ids)) for o in (ours, theirs)]
        assert max(gaps) <= NEAR_TIE, f"{ours.token_ids} instead of {theirs.token_ids}, by {gaps}"
        self.diverged = True

    def _memory(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return raw_buffers(self.graphs.runner.caches), raw_buffers(self.eager.runner.caches)

    def _fixed_things(self) -> tuple[Any, ...]:
        """Everything that no replay may move or let grow."""
        runner, graphs = self.graphs.runner, recorded_graphs(self.graphs)
        pools = {id(graph.pool): graph.pool for graph in graphs}.values()
        steps = graphs_of(self.graphs).steps.values()
        return (
            [t.data_ptr() for t in tensors_in(runner.caches)],
            [t.data_ptr() for t in tensors_in(runner.metadata.padding(1).metadata)],
            [(s.hidden.data_ptr(), s.logits.data_ptr(), s.addresses) for s in steps],
            [(dict(graph.inputs), len(graph.nodes)) for graph in graphs],
            [size_of(pool) for pool in pools],
        )


def size_of(pool: GraphPool) -> tuple[int, int, int, list[int]]:
    addresses = [segment.data_ptr() for segment in pool.segments]
    return pool.reserved_bytes, pool.peak_bytes, pool.num_reused, addresses


def drafts_of(texts: dict[str, list[int]], vocab: int, full: float = 0.9) -> Script:
    """As many drafts as there can be with a probability of ``full``, or fewer; none to all of them
    right. ``texts`` are what the requests say, prompts included."""

    def guess(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        choice = Random(f"{request_id} {len(tokens)}")
        count = max_drafts if choice.random() < full else choice.randint(0, max_drafts)
        coming = texts[request_id][len(tokens) :][:count]
        coming += [0] * (count - len(coming))  # behind the end of the text anything is a guess
        right = choice.randint(0, count)
        return coming[:right] + [(token + 1) % vocab for token in coming[right:]]

    return guess
