"""Every order in which two queues can be worked off, and what comes of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

from mamba_teach.two_clocks.design import Design
from mamba_teach.two_clocks.queues import Operation, World, begin, host_program
from mamba_teach.two_clocks.step import MINIATURE, Count, Step


@dataclass(frozen=True)
class Outcome:
    """One order, and what came of it.

    Attributes:
        order: names of all operations, of both queues.
        read: what each request of the next step read.
        wrong: those of them that were not the request's own, or not of this step.
    """

    order: tuple[str, ...]
    read: Mapping[str, Count]
    wrong: Mapping[str, Count]


def explore(design: Design, step: Step = MINIATURE) -> list[Outcome]:
    """Run a step in every order that the design allows.

    Returns:
        one outcome per order; those in which the device is quick come first.
    """
    outcomes = []
    for order, after in _orders(begin(design, step), host_program(design, step), ()):
        wrong = {r: count for r, count in after.read.items() if count != step.right(r)}
        outcomes.append(Outcome(order, after.read, wrong))
    return outcomes


def _orders(
    world: World, host: list[Operation], done: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], World]]:
    """Every way to run both queues to their ends from here."""
    if world.queue:
        after = deepcopy(world)
        operation = after.queue.pop(0)
        operation.act(after)
        yield from _orders(after, host, (*done, operation.name))
    if host and not (host[0].waits and world.queue):
        after = deepcopy(world)
        host[0].act(after)
        yield from _orders(after, host[1:], (*done, host[0].name))
    if not host and not world.queue:
        yield done, world
