"""Several sides timed in turns, because a machine changes its mind: A, B, C, B, C, A, C, A, B, ...

Each turn is measured twice. *Wall* seconds are what a user waits. *CPU* seconds are what the process
used, in all of its threads; they hardly notice other processes on the machine, and for one thread on an
idle machine they equal wall seconds. Sides are compared turn by turn: a ratio of two medians would mix
good minutes of one with bad minutes of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any


@dataclass
class Turns:
    """What one side took, turn by turn, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Clock:
    """``with clock: ...`` adds a turn's seconds to ``turns``; may be entered several times a turn."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = perf_counter(), process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.wall += perf_counter() - self._wall
        self.cpu += process_time() - self._cpu


def in_turns(
    sides: Mapping[str, Callable[[int, Clock], None]], rounds: int, warm_up: int = 1
) -> dict[str, Turns]:
    """Run every side once per round, each round beginning with another one.

    Args:
        sides: by name; called with the round's number and a clock to hold while it counts.
        rounds: that are kept.
        warm_up: rounds before them that are not.
    """
    names = list(sides)
    turns = {name: Turns() for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            clock = Clock()
            sides[name](number, clock)
            if number >= warm_up:
                turns[name].wall.append(clock.wall)
                turns[name].cpu.append(clock.cpu)
    return turns


def compare(turns: Mapping[str, Turns], tokens: int, clock: str) -> list[dict[str, Any]]:
    """A line per side: tokens per second, and how much faster the first side is.

    Args:
        turns: the first one is held against all.
        tokens: of a turn.
        clock: ``"wall"`` or ``"cpu"``, by which the sides are compared; medians of both are kept.
    """
    lines = []
    ours = getattr(next(iter(turns.values())), clock)
    for name, of_side in turns.items():
        seconds = getattr(of_side, clock)
        ratios = [theirs / mine for mine, theirs in zip(ours, seconds, strict=True)]
        lines.append(
            {
                "side": name,
                "tokens_per_s": round(tokens / statistics.median(seconds), 1),
                "first_is_faster": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "wall_ms": round(1e3 * statistics.median(of_side.wall), 2),
                "cpu_ms": round(1e3 * statistics.median(of_side.cpu), 2),
            }
        )
    return lines
