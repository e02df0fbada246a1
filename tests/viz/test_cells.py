"""The role of every block, worked out by hand."""

from __future__ import annotations

import pytest
from viz.ghost_logs import MODES, by_hand, ghost_log

from mamba_teach.events import (
    BlockPublished,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    EngineStarted,
    PrefixHit,
    RequestAdded,
    RowScheduled,
    StateAccess,
    StepStarted,
    reduce,
)
from mamba_teach.viz.cells import FREE, ROLES, Cell, fold_runs, roles_in, view


def texts(events: list, evicted: tuple[int, ...] = ()) -> list[list[str]]:
    """Of the first request, by group and column."""
    return [[cell.text for cell in table] for table in view(reduce(events), evicted).rows[0].cells]


def test_a_prefill_runs_and_reserves() -> None:
    assert texts(by_hand()[:7]) == [["1 R =4 w", "2 R =6 w"], ["4 R +4 w", "5 R +2 w", "6 s"]]


def test_a_published_block_is_marked() -> None:
    assert texts(by_hand()[:9]) == [["1 P =4 w", "2 R =6 w"], ["4 P +4 w", "5 R +2 w", "6 s"]]


def test_reads_and_writes_belong_to_the_step() -> None:
    assert texts(by_hand()) == [
        ["1 P =4", "2 R =8 rw", "3 R =9 w"],
        ["4 P +4", "5 R +4 w", "6 R +1 w"],
    ]


def test_states_of_drafts_are_scratch() -> None:
    log = [
        *by_hand(), StepStarted(2), BlocksAllocated("r0", 0, (3, 4), (7, 8)),
        RowScheduled("r0", "decode", 9, 3), StateAccess("r0", 0, 3, ((3, 10), (7, 11), (8, 12))),
    ]  # fmt: skip
    assert texts(log)[0][2:] == ["3 R =10 rw", "7 s =11 w", "8 s =12 w"]


def test_a_freed_column_is_null_and_its_block_waits_in_the_pool() -> None:
    log = [*by_hand(), BlocksFreed("r0", 0, (0,), (1,))]
    seen = view(reduce(log))
    assert texts(log)[0] == [".", "2 R =8 rw", "3 R =9 w"]
    assert [cell.text for cell in seen.free] == ["7 …15", "1 P =4"]
    assert seen.num_free == 10


def test_a_shared_block_counts_its_owners() -> None:
    log = [
        *by_hand(), RequestAdded("r1", 9), PrefixHit("r1", 4, ((1,), (4,))),
        RequestAdded("r2", 9), PrefixHit("r2", 4, ((1,), (4,))), RequestAdded("r3", 9),
    ]  # fmt: skip
    assert texts(log)[0][0] == "1 3x =4"
    seen = view(reduce(log))
    assert [row.request_id for row in seen.rows] == ["r0", "r1", "r2"]
    assert seen.waiting == ("r3",)
    assert seen.title == "step 1: 3 running, 1 waiting; 16 blocks of 4 tokens, 9 free"


def test_a_reset_leaves_blocks_to_their_owners() -> None:
    assert texts([*by_hand(), CacheReset()])[1] == ["4 R +4", "5 R +4 w", "6 R +1 w"]


def test_evicted_blocks_are_told_apart() -> None:
    seen = view(reduce(by_hand()), evicted=(3,))
    assert [cell.text for cell in seen.evicted] == ["3 E"]


def test_letters_and_colours_are_unique() -> None:
    assert (
        len({role.letter for role in ROLES}) == len({role.colour for role in ROLES}) == len(ROLES)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_legend_explains_what_occurs_and_nothing_else(mode: str) -> None:
    names = {role.name for role in roles_in([view(reduce(ghost_log(mode)[:40]))])}
    assert {"null", "free", "running"} <= names
    assert ("published" in names) == (mode != "none")


def test_long_runs_of_free_blocks_are_folded() -> None:
    queue = [Cell(b, FREE, "") for b in (9, 1, 2, 3, 4, 5, 6, 8, 10, 11)]
    folded = list(fold_runs(queue))
    assert [cell.text for cell in folded] == ["9", "1 …6", "8", "10", "11"]
    assert sum(cell.count for cell in folded) == len(queue)
    assert list(fold_runs([])) == []


def test_no_request_no_rows() -> None:
    seen = view(reduce([EngineStarted(4, ("mamba 0",), 8)]))
    assert (seen.rows, seen.num_free) == ((), 3)


def test_published_keys_in_the_pool_say_how_many() -> None:
    log = [*by_hand()[:9], BlockPublished("r0", 1, 1, 5), BlocksFreed("r0", 1, (0,), (4,))]
    assert view(reduce(log)).free[-1].text == "4 P +4"
