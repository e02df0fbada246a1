"""What happens between two steps, and the numbers that must come through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """Tokens kept, and of whom: what a plain integer does not tell.

    Attributes:
        of: the request.
        tokens: at least 1.
        is_old: from the step before.
    """

    of: str
    tokens: int
    is_old: bool = False

    def __str__(self) -> str:
        return f"{self.of}'s {'old ' if self.is_old else ''}{self.tokens}"


@dataclass(frozen=True)
class Step:
    """What happens between two steps.

    Attributes:
        accepted: tokens kept of each request, in the order of the rows.
        finished: requests that leave.
        arriving: requests that are admitted afterwards; a new request's count is 1.
    """

    accepted: Mapping[str, int]
    finished: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for request in self.finished:
            if request not in self.accepted:
                raise ValueError(f"{request!r} finishes; the rows are {list(self.accepted)}")
        for request in self.arriving:
            if request in self.accepted:
                raise ValueError(f"{request!r} arrives, and is in {list(self.accepted)} already")

    def right(self, request: str) -> Count:
        """The count that a request must read."""
        return Count(request, self.accepted.get(request, 1))


MINIATURE = Step({"A": 3, "B": 1, "C": 2}, finished=("A",), arriving=("D",))
