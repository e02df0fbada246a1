"""Steps, owners and differences, against a second way to find them."""

from __future__ import annotations

import dataclasses

import pytest
from viz.ghost_logs import MODES, by_hand, ghost_log

from mamba_teach.events import (
    BlocksAllocated,
    BlocksFreed,
    EngineStarted,
    Event,
    PrefixHit,
    RequestReleased,
    RowScheduled,
    StateAccess,
    StepStarted,
    TokenSampled,
)
from mamba_teach.viz.history import (
    Difference,
    answers,
    evicted_in_step,
    first_difference,
    owner_history,
    step_ends,
)

SMALL = dict(num_blocks=34, followers=4)  # so few that blocks are evicted and requests preempted


def ends_by_search(log: tuple[Event, ...]) -> list[int]:
    """A step's rows are planned after its last RowScheduled or StateAccess."""
    last: dict[int, int] = {}
    step = None
    for index, event in enumerate(log):
        if isinstance(event, StepStarted):
            step = event.step
        if isinstance(event, RowScheduled | StateAccess):
            assert step is not None
            last[step] = index + 1
    return list(last.values())


def owners_by_search(log: tuple[Event, ...], slot: int) -> list[tuple[int, int, str]]:
    """Replays who holds ``slot`` from four kinds of events, and looks at the end of each planning."""
    holders: list[tuple[str, int]] = []  # a request, and the event that gave it the slot
    held_at: dict[tuple[str, int], list[int]] = {}
    ends = ends_by_search(log)
    for index, event in enumerate(log):
        match event:
            case BlocksAllocated(request_id, _, _, blocks) if slot in blocks:
                holders.append((request_id, index))
            case PrefixHit(request_id, _, tables) if any(slot in table for table in tables):
                holders.append((request_id, index))
            case BlocksFreed(request_id, _, _, blocks) if slot in blocks:
                holders = [holder for holder in holders if holder[0] != request_id]
            case RequestReleased(request_id, blocks) if slot in blocks:
                holders = [holder for holder in holders if holder[0] != request_id]
        if index + 1 in ends:
            for holder in holders:
                held_at.setdefault(holder, []).append(ends.index(index + 1))
    for steps in held_at.values():
        assert steps == list(range(steps[0], steps[-1] + 1))
    return sorted((steps[0], steps[-1], holder[0]) for holder, steps in held_at.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["roomy", "small"])
def test_step_ends(mode: str, settings: dict[str, int]) -> None:
    log = ghost_log(mode, **settings)
    assert step_ends(log) == ends_by_search(log)


def test_a_log_may_end_anywhere() -> None:
    log = ghost_log("all")
    for end in range(len(log)):
        steps = sum(isinstance(event, StepStarted) for event in log[:end])
        assert len(step_ends(log[:end])) == steps
    assert step_ends([EngineStarted(4, ("mamba 0",), 8)]) == []
    assert step_ends([StepStarted(0), StepStarted(1)]) == [1, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["roomy", "small"])
def test_owner_history(mode: str, settings: dict[str, int]) -> None:
    log = ghost_log(mode, **settings)
    owned = 0
    assert owner_history(log, 0) == []  # the null block
    for slot in range(1, log[0].num_blocks):  # type: ignore[union-attr]
        found = [(o.first_step, o.last_step, o.request_id) for o in owner_history(log, slot)]
        assert sorted(found) == owners_by_search(log, slot)
        owned += len(found)
    assert owned > 10


def test_an_answer_names_place_and_roles() -> None:
    assert answers(by_hand(), [0, 1, 3, 7]) == {
        0: "slot 0 is the null block: nobody ever owns it",
        1: "slot 1\n  steps 0 to 1: r0, column 0 of mamba 0, running, then published",
        3: "slot 3\n  step 1: r0, column 2 of mamba 0, running",
        7: "slot 7: nobody ever owned it",
    }


def test_a_slot_that_does_not_exist_is_refused() -> None:
    for slot in (-1, 16):
        with pytest.raises(ValueError, match=rf"no slot {slot}: the pool has slots 0 to 15"):
            owner_history(by_hand(), slot)


def test_evictions_of_a_step() -> None:
    log = ghost_log("all")
    by_step = [evicted_in_step(log[:end]) for end in step_ends(log)]
    assert any(by_step)
    assert sum(map(len, by_step)) == sum(type(e).__name__ == "BlockEvicted" for e in log)


# Two logs -------------------------------------------------------------------------------------


def test_equal_logs_do_not_differ() -> None:
    assert first_difference(ghost_log("all"), list(ghost_log("all"))) is None


def test_the_first_difference_is_found() -> None:
    log = by_hand()
    other = [*log]
    other[7] = dataclasses.replace(log[7], block_id=9)  # type: ignore[type-var, call-arg]
    other[9] = StepStarted(5)
    assert first_difference(log, other) == Difference(0, 7, log[7], other[7])
    assert str(first_difference(log, other)) == (
        "first difference in step 0, at event 7:\n"
        "  a: BlockPublished(request_id='r0', group=0, column=0, block_id=1)\n"
        "  b: BlockPublished(request_id='r0', group=0, column=0, block_id=9)"
    )


def test_a_log_that_ends_early_differs_there() -> None:
    log = by_hand()
    assert first_difference(log, log[:-1]) == Difference(1, len(log) - 1, log[-1], None)
    assert "b: the log ends" in str(first_difference(log, log[:-1]))
    longer = [*log, TokenSampled("r0", 7)]
    assert first_difference(log, longer) == Difference(1, len(log), None, longer[-1])


def test_before_the_first_step() -> None:
    other = [EngineStarted(17, ("mamba 0", "attention 0"), 4), *by_hand()[1:]]
    assert str(first_difference(by_hand(), other)).startswith(
        "first difference before the first step, at event 0:"
    )
