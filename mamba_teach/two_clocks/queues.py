"""The two queues: what the host does between two steps, and what it gives the device to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mamba_teach.two_clocks.design import Design
from mamba_teach.two_clocks.step import Count, Step


@dataclass
class World:
    """Host and device at one moment.

    Attributes:
        rows: who is in which row, None for a gap.
        previous: who was in which row in the verify step.
        on_device: its counts, by those rows.
        by_row: the host's counts by row, at first those of the step before.
        by_id: the same by request.
        queue: what the device has been given and has not done.
        read: what the next step's kernel reads, by request.
    """

    rows: list[str | None]
    previous: tuple[str, ...]
    on_device: tuple[Count, ...]
    by_row: list[Count | None]
    by_id: dict[str, Count]
    queue: list[Operation] = field(default_factory=list)
    read: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """One entry of a queue: it happens at once, and changes the world.

    Attributes:
        waits: cannot begin before the device has nothing left to do.
    """

    name: str
    act: Callable[[World], None]
    waits: bool = False


def begin(design: Design, step: Step) -> World:
    """The moment after the verify step: the copy of its counts has been launched."""
    requests = list(step.accepted)
    old = [Count(request, 1, is_old=True) for request in requests]
    copy = _copy_to_rows if design.counts_by == "row" else _copy_to_ids
    return World(
        rows=[*requests],
        previous=tuple(requests),
        on_device=tuple(step.right(request) for request in requests),
        by_row=[*old],
        by_id=dict(zip(requests, old, strict=True)),
        queue=[Operation("copy", copy)],
    )


# The host's part ----------------------------------------------------------------------------------


def host_program(design: Design, step: Step) -> list[Operation]:
    """What the host does between two steps, in its order."""
    rows: list[str | None] = list(step.accepted)
    program = []
    if design.wait == "first":
        program.append(Operation("wait", lambda world: None, waits=True))
    for request in step.finished:
        rows[rows.index(request)] = None
        program.append(_finish(request))
    while design.rows_move and None in rows:
        gap, last = rows.index(None), rows.pop()
        if last is not None:
            program.append(_move(last, len(rows), gap))
            rows[gap] = last
    for request in step.arriving:
        row = rows.index(None) if None in rows else len(rows)
        rows[row:] = [request, *rows[row + 1 :]]
        program.append(_admit(request, row))
    if design.wait == "last":
        program.append(Operation("wait", lambda world: None, waits=True))
    program.append(_read_ids() if design.counts_by == "request" else _read_rows(design.gathers))
    return program


def _finish(request: str) -> Operation:
    def act(world: World) -> None:
        world.rows[world.rows.index(request)] = None
        world.by_id.pop(request)

    return Operation(f"{request} finishes", act)


def _move(request: str, source: int, target: int) -> Operation:
    def act(world: World) -> None:
        world.rows[target], world.rows[source] = request, None
        world.by_row[target] = world.by_row[source]  # the count goes along

    return Operation(f"{request} to row {target}", act)


def _admit(request: str, row: int) -> Operation:
    def act(world: World) -> None:
        missing = row + 1 - len(world.rows)
        world.rows += [None] * missing
        world.by_row += [None] * missing
        world.rows[row] = request
        world.by_row[row] = world.by_id[request] = Count(request, 1)

    return Operation(f"{request} into row {row}", act)


def _read_ids() -> Operation:
    def act(world: World) -> None:
        world.read = {r: world.by_id[r] for r in world.rows if r is not None}

    return Operation("read", act)


def _read_rows(gathers: bool) -> Operation:
    """Launches the step; the device reads the host's counts when it gets there."""

    def act(world: World) -> None:
        world.queue.append(Operation("read", _gather if gathers else _as_they_stand))

    return Operation("launch", act)


# The device's part --------------------------------------------------------------------------------


def _copy_to_rows(world: World) -> None:
    world.by_row[: len(world.on_device)] = world.on_device


def _copy_to_ids(world: World) -> None:
    # The names travel with the numbers. A count of somebody who has left is never asked for.
    world.by_id.update(zip(world.previous, world.on_device, strict=True))


def _as_they_stand(world: World) -> None:
    pairs = zip(world.rows, world.by_row, strict=True)
    world.read = {r: count for r, count in pairs if r is not None and count is not None}


def _gather(world: World) -> None:
    for request in filter(None, world.rows):
        world.read[request] = Count(request, 1)
        if request in world.previous:
            count = world.by_row[world.previous.index(request)]
            assert count is not None
            world.read[request] = count
