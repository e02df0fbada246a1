"""Host and device in every order: which designs of asynchronous scheduling mix counts up, and when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from mamba_teach.two_clocks import (
    DESIGNS,
    ENGINE,
    MINIATURE,
    Count,
    Design,
    Outcome,
    Step,
    explore,
)
from mamba_teach.two_clocks.queues import host_program

MOVES = ["A finishes", "C to row 0", "D into row 2"]
WITHOUT_D = Step(MINIATURE.accepted, finished=("A",))
SAFE = {"wait, then move", "by id, rows stay"}

every_design = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)


def moves_before_copy(outcome: Outcome) -> int:
    return sum(name in MOVES for name in outcome.order[: outcome.order.index("copy")])


def small_steps() -> Iterator[Step]:
    """Up to four requests, anybody finishes, up to two arrive; all counts differ."""
    for size in range(1, 5):
        requests = "ABCD"[:size]
        accepted = {request: 2 + i for i, request in enumerate(requests)}
        for leaving in range(size + 1):
            for finished in combinations(requests, leaving):
                for arriving in ((), ("X",), ("X", "Y")):
                    yield Step(accepted, finished, arriving)
                    yield Step(accepted, finished[::-1], arriving)


# The miniature ------------------------------------------------------------------------------------


def by_hand(landing: int) -> dict[str, int]:
    """The gather's design with bare integers; the copy lands after so many of the three moves."""
    counts = [7, 7, 7]  # of the step before
    for move in range(4):
        if move == landing:
            counts[:] = [3, 1, 2]
        if move == 1:  # C to row 0
            counts[0] = counts[2]
        if move == 2:  # D into row 2
            counts[2] = 1
    return {"C": counts[2], "B": counts[1], "D": 1}  # gathered: C was in row 2


def test_a_gather_is_right_only_if_the_copy_lands_after_all_moves() -> None:
    outcomes = explore(DESIGNS["gather by old rows"])
    assert [moves_before_copy(outcome) for outcome in outcomes] == [0, 1, 2, 3]
    for outcome in outcomes:
        read = {request: count.tokens for request, count in outcome.read.items()}
        assert read == by_hand(moves_before_copy(outcome))
    assert [outcome.wrong for outcome in outcomes] == [{"C": Count("D", 1)}] * 3 + [{}]


def test_without_somebody_new_the_second_permutation_hides() -> None:
    for name in ("gather by old rows", "wait, then gather"):
        assert not any(outcome.wrong for outcome in explore(DESIGNS[name], WITHOUT_D))


def test_waiting_does_not_help_a_second_permutation() -> None:
    (outcome,) = explore(DESIGNS["wait, then gather"])
    assert outcome.order == ("copy", "wait", *MOVES, "launch", "read")
    assert outcome.wrong == {"C": Count("D", 1)}


def test_waiting_first_and_dropping_the_gather_is_right() -> None:
    (outcome,) = explore(DESIGNS["wait, then move"])
    assert outcome.order == ("copy", "wait", *MOVES, "launch", "read")
    assert outcome.wrong == {}
    assert outcome.read == {"C": Count("C", 2), "B": Count("B", 1), "D": Count("D", 1)}


def test_dropping_the_gather_alone_lets_late_copies_land_on_others() -> None:
    outcomes = explore(DESIGNS["move, do not wait"])
    assert len(outcomes) == 5  # around the three moves and the launch
    late = {"C": Count("A", 3)}
    assert [o.wrong for o in outcomes[:3]] == [{}, {}, late]
    assert [o.wrong for o in outcomes[3:]] == [late | {"D": Count("C", 2)}] * 2


def test_the_engines_design_is_right_in_every_order() -> None:
    outcomes = explore(ENGINE)
    assert len(outcomes) == 3  # around two moves: rows stay, D fills the gap
    for outcome in outcomes:
        assert outcome.read == {"D": Count("D", 1), "B": Count("B", 1), "C": Count("C", 2)}
        assert outcome.wrong == {}


def test_ids_say_whose_but_not_when() -> None:
    *in_time, late = explore(DESIGNS["by id, do not wait"])
    assert len(in_time) == 3
    assert not any(outcome.wrong for outcome in in_time)
    assert late.order[-2:] == ("read", "copy")
    assert set(late.wrong) == {"B", "C"}
    assert all(count.of == request and count.is_old for request, count in late.wrong.items())


# Any step -----------------------------------------------------------------------------------------


@every_design
def test_orders_are_all_merges_of_the_two_queues(design: Design) -> None:
    for step in small_steps():
        host = [operation.name for operation in host_program(design, step)]
        orders = [outcome.order for outcome in explore(design, step)]
        assert len(set(orders)) == len(orders)
        for order in orders:
            device = ["copy", "read"] if design.counts_by == "row" else ["copy"]
            assert [name for name in order if name in device] == device
            assert [name for name in order if name not in device] == host
        # The copy can land in front of any of the host's operations up to the wait, or at the end.
        places = host.index("wait") + 1 if "wait" in host else len(host) + 1
        assert len(orders) == places


@every_design
def test_who_is_safe_in_every_step(design: Design) -> None:
    outcomes = [(step, o) for step in small_steps() for o in explore(design, step)]
    for step, outcome in outcomes:
        stayed = {request for request in step.accepted if request not in step.finished}
        assert set(outcome.read) == stayed | set(step.arriving)
    assert any(outcome.wrong for _, outcome in outcomes) is (design.name not in SAFE)


def test_ids_do_not_mind_rows_that_move() -> None:
    moving = Design("by id, rows move", "request", rows_move=True, wait="last")
    assert not any(o.wrong for step in small_steps() for o in explore(moving, step))


def test_rows_that_stay_do_not_save_counts_by_row() -> None:
    staying = Design("by row, rows stay", "row", rows_move=False, wait="never")
    wrong = [outcome.wrong for outcome in explore(staying)]
    assert wrong == [{}, {}, {"D": Count("A", 3)}, {"D": Count("A", 3)}]  # D sits in A's place


def test_a_right_number_of_somebody_else_is_wrong() -> None:
    by_luck = explore(DESIGNS["wait, then gather"], Step({"A": 3, "B": 1, "C": 1}, ("A",), ("D",)))
    assert by_luck[0].wrong == {"C": Count("D", 1)}


def test_exploring_leaves_nothing_behind() -> None:
    for design in DESIGNS.values():
        assert explore(design) == explore(design)


def test_counts_say_whose_they_are() -> None:
    assert [str(Count("C", 2)), str(Count("C", 1, is_old=True))] == ["C's 2", "C's old 1"]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Z' finishes; the rows are \['A'\]"):
        Step({"A": 1}, finished=("Z",))
    with pytest.raises(ValueError, match=r"'A' arrives, and is in \['A'\] already"):
        Step({"A": 1}, arriving=("A",))
    with pytest.raises(ValueError, match="'odd' gathers by rows, and keeps its counts by request"):
        Design("odd", "request", rows_move=False, wait="last", gathers=True)
