"""Ways to bring accepted counts from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Design:
    """A way to bring the counts to the next step.

    Attributes:
        name: what it is called in a table.
        counts_by: the host keeps them by row, where they move with their requests, or by request id.
        rows_move: gaps are closed by the last rows; otherwise rows stay, and gaps are filled by whoever
            arrives.
        wait: the host stands still for the device before it touches any row, just before the counts
            are read, or not at all.
        gathers: the device looks a row's count up at the row's previous position. Only by row.
    """

    name: str
    counts_by: Literal["row", "request"]
    rows_move: bool
    wait: Literal["first", "last", "never"]
    gathers: bool = False

    def __post_init__(self) -> None:
        if self.gathers and self.counts_by == "request":
            raise ValueError(f"{self.name!r} gathers by rows, and keeps its counts by request")


DESIGNS = {
    design.name: design
    for design in (
        Design("gather by old rows", "row", rows_move=True, wait="last", gathers=True),
        Design("wait, then gather", "row", rows_move=True, wait="first", gathers=True),
        Design("move, do not wait", "row", rows_move=True, wait="never"),
        Design("wait, then move", "row", rows_move=True, wait="first"),
        Design("by id, do not wait", "request", rows_move=False, wait="never"),
        Design("by id, rows stay", "request", rows_move=False, wait="last"),
    )
}
ENGINE = DESIGNS["by id, rows stay"]  # as in mamba_teach.runner.state_index
