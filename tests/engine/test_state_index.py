"""The state index: which column a step wrote, how many of its tokens count, and who remembers that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ghost_checks import ScriptedEngine, of_kind

from mamba_teach.events import (
    BlocksAllocated,
    DraftsVerified,
    Event,
    PrefixHit,
    RequestFinished,
    RequestPreempted,
    RowScheduled,
    StateAccess,
    StateCopied,
)
from mamba_teach.runner import state_index

# Anchors ------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    """16 tokens per block, 3 drafts, a prompt of 13; the numbers are those of the module's docstring."""
    s = ScriptedEngine("M", k=3, block_size=16)
    rid = s.add(list(range(13)), [(3, 1), (3, 0)])

    events = s.step()
    table = s.engine.cache.block_ids(rid)[0]
    assert of_kind(events, StateAccess) == [StateAccess(rid, 0, None, ((table[0], 13),))]
    assert (s.index.mamba_state_idx, s.index.num_accepted_tokens) == ({rid: 0}, {rid: 1})

    events = s.step()  # tokens 13 .. 16; one draft is right, so two tokens count
    table = s.engine.cache.block_ids(rid)[0]
    assert len(set(table)) == 5 and 0 not in table, "columns 0 .. 4 have slots of their own"
    written = ((table[1], 14), (table[2], 15), (table[3], 16), (table[4], 17))
    assert of_kind(events, StateAccess) == [StateAccess(rid, 0, table[0], written)]
    assert (s.index.mamba_state_idx, s.index.num_accepted_tokens) == ({rid: 1}, {rid: 2})
    assert s.engine.scheduler.running[0].num_computed_tokens == 15

    events = s.step()  # reads behind the anchor, not at (15 - 1) // 16 = 0; no draft is right
    written = ((table[1], 16), (table[2], 17), (table[3], 18), (table[4], 19))
    assert of_kind(events, StateAccess) == [StateAccess(rid, 0, table[2], written)]
    # 16 tokens count now: the first block is complete, and its state goes home before it is freed.
    assert of_kind(events, StateCopied) == [StateCopied(rid, 0, table[1], table[0], 16)]
    assert (s.index.mamba_state_idx, s.index.num_accepted_tokens) == ({rid: 1}, {rid: 1})
    assert s.asked == [{rid: (-1, 1)}, {rid: (0, 1)}, {rid: (1, 2)}]
    s.to_the_end()


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_the_anchor_is_kept_after_every_step_whatever_its_width(mode: str) -> None:
    size = 64 if mode == "none" else 4
    s = ScriptedEngine("MM*M", k=3, block_size=4, mamba_cache_mode=mode, max_num_batched_tokens=16)
    for i, length in enumerate([27, 3, 13, 1]):  # chunks of prompts, and decodes beside them
        steps = [(1, 0), (0, 0), (3, 3), (2, 1), (0, 0), (3, 0), (0, 0)]
        s.add(range(30 * i, 30 * i + length), steps[i:] + steps[:i])
    widths = set()
    while s.engine.has_unfinished_requests():
        rows = of_kind(s.step(), RowScheduled)
        for row in rows:
            widths.add((row.kind, row.num_tokens))
            column = (row.num_computed + row.num_tokens - 1) // size
            assert s.index.mamba_state_idx[row.request_id] == column
            if row.kind == "prefill":
                assert s.index.num_accepted_tokens[row.request_id] == 1
    assert widths >= {("decode", n) for n in (1, 2, 3, 4)} | {("prefill", 1), ("prefill", 16)}


@pytest.mark.parametrize("how", ["length", "abort", "preempt"])
def test_the_anchor_is_dropped_with_the_blocks(how: str) -> None:
    s = ScriptedEngine("MM", k=3, block_size=4)
    other = s.add(range(5))
    rid = s.add(range(20, 30), [(3, 2), (3, 1)], max_tokens=6 if how == "length" else 20)
    for _ in range(3):
        s.step()  # 10 tokens of the prompt, then 3, then 2
    assert rid in s.index.mamba_state_idx
    if how == "abort":
        s.engine.abort(rid)
    elif how == "preempt":
        s.engine.scheduler.preempt(s.engine.scheduler.running[1])
        only_one = replace(s.engine.config, max_num_seqs=1)
        s.engine.scheduler.config = only_one  # so that it is not let in again at once
    s.step()
    assert set(s.index.mamba_state_idx) == set(s.index.num_accepted_tokens) == {other}


def test_a_request_that_resumes_falls_back_to_the_last_computed_column() -> None:
    """Thrown out and let in again between two steps, behind a hit of 12 tokens: an anchor left over
    from its life before, column 4 with a count of 2, would send it to a scratch slot of somebody."""
    s = ScriptedEngine("MM", k=3, block_size=4)
    rid = s.add(range(10), [(3, 2), (3, 1)])
    for _ in range(3):
        s.step()
    request = s.engine.scheduler.running[0]
    assert request.num_computed_tokens == 15
    assert (s.index.mamba_state_idx[rid], s.index.num_accepted_tokens[rid]) == (4, 2)
    s.engine.scheduler.preempt(request)
    events = s.step()
    (hit,) = of_kind(events, PrefixHit)
    assert hit.num_tokens == 12
    assert s.asked[-1] == {rid: (-1, 1)}
    (access,) = of_kind(events, StateAccess)
    assert access.read == hit.tables[0][(12 - 1) // 4]
    assert s.index.mamba_state_idx[rid] == (16 - 1) // 4
    s.to_the_end()


# Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["length", "abort"])
def test_counts_stay_with_their_requests_when_one_ends_and_one_arrives(how: str) -> None:
    """Counts 1, 3, 2; the first request ends, another takes its row of the tables in the same step."""
    s = ScriptedEngine("MM*M", k=2, block_size=16)
    a = s.add(range(5), [(2, 0)], max_tokens=2 if how == "length" else 20)
    b = s.add(range(10, 15), [(2, 2)])
    c = s.add(range(20, 25), [(2, 1)])
    s.step()
    s.step()
    assert [s.index.num_accepted_tokens[request_id] for request_id in (a, b, c)] == [1, 3, 2]
    row_of_a = int(s.engine.runner.tables.rows([a]))
    if how == "abort":
        s.engine.abort(a)
    d = s.add(range(30, 35))
    s.step()
    assert int(s.engine.runner.tables.rows([d])) == row_of_a
    assert {rid: count for rid, (_, count) in s.asked[-1].items()} == {b: 3, c: 2, d: 1}
    assert list(s.asked[-1]) == [b, c, d]
    s.to_the_end()


class CountModel:
    """Counts as they must be, told from the log alone: what the kernels are given has to agree."""

    def __init__(self, block_size: int, in_place: bool) -> None:
        self.block_size = block_size
        self.in_place = in_place
        self.counts: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RowScheduled):
                self.counts[event.request_id] = 1
                self._ends[event.request_id] = event.num_computed + event.num_tokens
            elif isinstance(event, DraftsVerified):
                count, full = 1 + event.num_accepted, event.num_accepted == event.num_drafts
                if self.in_place and full and self._ends[event.request_id] % self.block_size == 0:
                    count = 1  # the last state lies in the last block's own column now
                self.counts[event.request_id] = count
            elif isinstance(event, RequestFinished | RequestPreempted):
                self.counts.pop(event.request_id, None)


operations = st.lists(
    st.sampled_from(["step", "step", "step", "add", "add", "abort", "preempt"]).flatmap(
        lambda name: st.tuples(st.just(name), st.integers(0, 30))
    ),
    min_size=10,
    max_size=50,
)
steps_of_a_request = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda d: (d[0], min(d))), max_size=8
)


@settings(max_examples=150)
@given(
    history=operations, mode=st.sampled_from(["none", "align", "all"]),
    block_size=st.sampled_from([2, 4, 8]), k=st.sampled_from([1, 2, 3]),
    spare=st.integers(0, 12), data=st.data(),
)  # fmt: skip
def test_any_history_leaves_every_count_with_its_request(
    history: list[tuple[str, int]], mode: str, block_size: int, k: int, spare: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    smallest = {"none": 1 + k, "align": 5 + k, "all": 64 // block_size + k}[mode]
    s = ScriptedEngine(
        "M", k, block_size=block_size, mamba_cache_mode=mode, max_num_batched_tokens=16,
        num_blocks=1 + smallest + spare,
    )  # fmt: skip
    model = CountModel(block_size, in_place=mode != "none")
    for name, number in [("add", 9), *history, *[("step", 0)] * 3]:
        running, start = s.engine.scheduler.running, len(s.engine.events)
        if name == "add":
            s.add(range(number, 2 * number + 1), data.draw(steps_of_a_request))
        elif name == "abort" and running:
            s.engine.abort(running[number % len(running)].request_id)
        elif name == "preempt" and running:
            s.engine.scheduler.preempt(running[number % len(running)])
        if name != "step":
            model.read(s.engine.events[start:])
            continue
        asked = len(s.asked)
        events = s.step()
        rows = [i for i, event in enumerate(events) if isinstance(event, RowScheduled)]
        if not rows:
            continue
        model.read(events[: rows[0]])  # who was thrown out to make room
        before = dict(model.counts)
        model.read(events[rows[0] :])
        (seen,) = s.asked[asked:]
        assert {rid: count for rid, (_, count) in seen.items()} == {
            rid: before.get(rid, 1) for rid in seen
        }


# Copies -------------------------------------------------------------------------------------


def test_several_boundaries_in_one_step_and_the_last_one_in_place() -> None:
    """2 tokens per block, 5 drafts, all right: tokens 4 .. 9 complete the blocks of columns 2, 3, 4.
    Column 4 is also where the step begins to write, so its state, of token 9, comes home last; it is
    the running state from then on, and the only one that counts."""
    s = ScriptedEngine("MM", k=5, block_size=2)
    rid = s.add(range(4), [(5, 5), (5, 2)])
    s.step()
    events = s.step()
    (new,) = of_kind(events, BlocksAllocated)
    table = dict(zip(new.columns, new.block_ids, strict=True))
    assert list(table) == list(range(2, 10)), (
        "the blocks to complete, and 6 states from column 4 on"
    )
    (access,) = of_kind(events, StateAccess)
    assert access.writes == tuple((table[column], column + 1) for column in range(4, 10))
    assert of_kind(events, StateCopied) == [
        StateCopied(rid, 0, table[5], table[2], 6),
        StateCopied(rid, 0, table[7], table[3], 8),
        StateCopied(rid, 0, table[9], table[4], 10),
    ]
    assert (s.index.mamba_state_idx, s.index.num_accepted_tokens) == ({rid: 4}, {rid: 1})
    (access,) = of_kind(s.step(), StateAccess)
    assert access.read == table[4]
    s.to_the_end()


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_one_launch_moves_all_states_of_a_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three Mamba groups, four requests, several boundaries: one call, or none at all."""
    copy_states, calls = state_index.copy_states, []

    def counted(
        pairs: object, src_slots: torch.Tensor, *others: torch.Tensor, **more: object
    ) -> None:
        calls.append(src_slots.tolist())
        copy_states(pairs, src_slots, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(state_index, "copy_states", counted)
    s = ScriptedEngine("MM*M", k=3, block_size=4, mamba_cache_mode=mode)
    for i in range(4):
        s.add(range(20 * i, 20 * i + 5 + i), [(3, 3), (3, i), (0, 0), (2, 2), (1, 0), (3, 3)])
    sizes = []
    while s.engine.has_unfinished_requests():
        calls.clear()
        moved = of_kind(s.step(), StateCopied)
        sizes.append(len(moved))
        assert calls == ([[e.src for e in moved]] if moved else [])
    if mode == "none":
        assert sum(sizes) == 0
    else:
        assert 0 in sizes and max(sizes) >= 2 * 3, sizes  # two requests at once, in every group
