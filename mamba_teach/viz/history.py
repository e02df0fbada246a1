"""Questions to an event log: where its steps are, who owned a block when, where two logs part.

A step has one telling moment, after its rows are planned and before they are committed: every block
that it reads or writes is still in a table. That moment is the step's frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mamba_teach.events import (
    BlockEvicted,
    BlockPublished,
    BlocksFreed,
    Board,
    CacheReset,
    DraftsVerified,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestReleased,
    RowScheduled,
    StateCopied,
    StepStarted,
    TokenSampled,
    reduce,
)
from mamba_teach.viz.cells import NULL, view

# What can follow once all rows of a step are planned: its commits, and what happens between steps.
AFTER_PLANNING = (
    StateCopied, DraftsVerified, TokenSampled, BlockPublished, BlocksFreed, RequestReleased,
    RequestPreempted, RequestFinished, RequestAdded, CacheReset, StepStarted,
)  # fmt: skip


def step_ends(events: Sequence[Event]) -> list[int]:
    """For every step, the length of the log's prefix that ends when its rows are planned.

    ``reduce(events[:step_ends(events)[i]])`` is the board while the i-th step computes.
    """
    ends: list[int] = []
    open_step = planned = False
    for index, event in enumerate(events):
        if open_step and planned and isinstance(event, AFTER_PLANNING):
            ends.append(index)
            open_step = False
        if isinstance(event, StepStarted):
            if open_step:  # a step without rows
                ends.append(index)
            open_step, planned = True, False
        planned = planned or isinstance(event, RowScheduled)
    return [*ends, len(events)] if open_step else ends


def evicted_in_step(events: Sequence[Event]) -> tuple[int, ...]:
    """Blocks evicted since the last step began; an evicted block is handed out at once."""
    found: list[int] = []
    for event in reversed(events):
        if isinstance(event, StepStarted):
            break
        if isinstance(event, BlockEvicted):
            found.append(event.block_id)
    return tuple(reversed(found))


def step_boards(events: Sequence[Event]) -> Iterator[tuple[Board, tuple[int, ...]]]:
    """*(board, blocks evicted in the step)* of every step in turn.

    It is one board, changed by going on: copy what you keep.
    """
    board, start = Board(), 0
    for end in step_ends(events):
        part = events[start:end]
        reduce(part, board)
        start = end
        yield board, evicted_in_step(part)


# Owners ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ownership:
    """A request held a block in these steps, at this place of its table.

    Attributes:
        roles: names of what the block was meanwhile, in order, each once in a row.
    """

    first_step: int
    last_step: int
    request_id: str
    group: str
    column: int
    roles: tuple[str, ...]

    def __str__(self) -> str:
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        where = f"column {self.column} of {self.group}"
        return f"{steps}: {self.request_id}, {where}, {', then '.join(self.roles)}"


def owner_histories(events: Sequence[Event]) -> dict[int, list[Ownership]]:
    """For every block that was ever held: who held it while which steps computed, in order."""
    running: dict[tuple[int, str, str, int], Ownership] = {}
    done: list[tuple[int, Ownership]] = []
    for board, _ in step_boards(events):
        held = {}
        for row in view(board).rows:
            for group, table in zip(board.groups, row.cells):
                for column, cell in enumerate(table):
                    if cell.role is not NULL:
                        held[cell.block, row.request_id, group, column] = cell.role.name
        done += [(key[0], running.pop(key)) for key in [*running] if key not in held]
        for key, role in held.items():
            old = running.get(key) or Ownership(board.step, board.step, *key[1:], ())
            roles = old.roles if old.roles[-1:] == (role,) else (*old.roles, role)
            running[key] = Ownership(old.first_step, board.step, *key[1:], roles)
    found: dict[int, list[Ownership]] = {}
    for slot, ownership in [*done, *((key[0], ownership) for key, ownership in running.items())]:
        found.setdefault(slot, []).append(ownership)
    for ownerships in found.values():  # stable: then in the order in which they end
        ownerships.sort(key=lambda ownership: ownership.first_step)
    return found


def owner_history(events: Sequence[Event], slot: int) -> list[Ownership]:
    """Who held ``slot``, in order of the first step.

    Raises:
        ValueError: the pool has no such block.
    """
    _check(events, slot)
    return owner_histories(events).get(slot, [])


def answers(events: Sequence[Event], slots: Iterable[int]) -> dict[int, str]:
    """The histories of slots in words, one owner per line."""
    histories = owner_histories(events)
    said = {}
    for slot in slots:
        _check(events, slot)
        lines = [f"  {ownership}" for ownership in histories.get(slot, [])]
        said[slot] = "\n".join([f"slot {slot}", *lines]) if lines else NOBODY.format(slot)
        if slot == 0:
            said[slot] = "slot 0 is the null block: nobody ever owns it"
    return said


NOBODY = "slot {}: nobody ever owned it"


def _check(events: Sequence[Event], slot: int) -> None:
    num_blocks = reduce(events[:1]).num_blocks
    if not 0 <= slot < num_blocks:
        raise ValueError(f"no slot {slot}: the pool has slots 0 to {num_blocks - 1}")


# Two logs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two logs part.

    Attributes:
        step: the step in which it happens; None before the first.
        index: of the first event that differs.
        a, b: the two events; None where a log has ended.
    """

    step: int | None
    index: int
    a: Event | None
    b: Event | None

    def __str__(self) -> str:
        where = "before the first step" if self.step is None else f"in step {self.step}"
        a, b = (repr(event) if event else "the log ends" for event in (self.a, self.b))
        return f"first difference {where}, at event {self.index}:\n  a: {a}\n  b: {b}"


def first_difference(log_a: Sequence[Event], log_b: Sequence[Event]) -> Difference | None:
    """The first event at which two runs differ, or None if they are the same."""
    step: int | None = None
    for index, (a, b) in enumerate(zip_longest(log_a, log_b)):
        if a != b:
            return Difference(step, index, a, b)
        if isinstance(a, StepStarted):
            step = a.step
    return None
