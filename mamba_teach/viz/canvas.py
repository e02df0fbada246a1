"""Paper for the board: a figure measured in inches from its top, and how one block looks on it.

Nothing is placed by a layout engine: the same board gives the same picture to the pixel, and texts
that fit once fit always.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mamba_teach.viz.cells import FREE, SCRATCH, Cell

# All lengths are inches; y grows downwards.
WIDTH, MARGIN = 9.5, 0.1
CELL, CELL_HEIGHT, ARROWS = 0.34, 0.36, 0.17  # arrows cross the lower edge of a cell
LINE = 0.2
# Characters on a cell's first line -> sizes of the slot and of the letter beside it.
FONTS = {1: (7.5, 6.5), 2: (7.5, 6.5), 3: (7.5, 6.5), 4: (6.5, 6), 5: (6, 5.5), 6: (5.5, 5)}
INK, FAINT = "#000000", "#666666"


class Canvas:
    """A figure in inches that grows downwards; the height is known at the end."""

    def __init__(self) -> None:
        # Not drawn in the figure's coordinates: their unit is the height, which is not known yet.
        self.figure = plt.figure(figsize=(WIDTH, 1), dpi=100)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.y = MARGIN

    def text(self, x: float, y: float, said: str, **style: Any) -> None:
        """Small print, centred vertically on ``y``."""
        usual: dict[str, Any] = {"fontsize": 7, "ha": "left", "va": "center", "color": INK}
        self.axes.text(x, y, said, **(usual | style))

    def line(
        self, said: str, *, size: float = 8, colour: str = INK, weight: str = "normal"
    ) -> None:
        """A line of text; goes on below it."""
        self.text(MARGIN, self.y + LINE / 2, said, fontsize=size, color=colour, fontweight=weight)
        self.y += LINE + 0.03

    def cell(self, x: float, y: float, cell: Cell, *, faded: bool = False) -> None:
        """One block; its arrows reach below it."""
        style = "--" if faded else "-"
        box = Rectangle(
            (x + 0.015, y), CELL - 0.03, CELL_HEIGHT, facecolor=cell.role.colour, linestyle=style,
            edgecolor=INK if cell.role is not FREE else FAINT, linewidth=0.7,
        )  # fmt: skip
        self.axes.add_patch(box)
        if cell.role is SCRATCH:
            stripe = Rectangle(
                (x + 0.015, y + CELL_HEIGHT - 0.05), CELL - 0.03, 0.05, facecolor="none",
                edgecolor=INK, linewidth=0.4, hatch="////",
            )  # fmt: skip
            self.axes.add_patch(stripe)
        size, small = FONTS[min(6, len(str(cell.block)) + len(cell.letter))]
        self.text(x + 0.035, y + 0.11, str(cell.block), fontsize=size, fontweight="bold")
        self.text(x + CELL - 0.035, y + 0.11, cell.letter, fontsize=small, ha="right")
        self.text(x + CELL / 2, y + 0.25, cell.tokens, fontsize=6.5, ha="center")
        self.arrows(x, y + CELL_HEIGHT, cell)

    def arrows(self, x: float, edge: float, cell: Cell) -> None:
        """*r* leaves the cell, *w* enters it."""
        for flag, letter, at, start, end in (
            (cell.reads, "r", x + 0.07, edge - 0.05, edge + 0.12),
            (cell.writes, "w", x + CELL - 0.07, edge + 0.12, edge - 0.05),
        ):
            if flag:
                self.axes.annotate(
                    "", (at, end), (at, start),
                    arrowprops={"arrowstyle": "-|>", "lw": 0.9, "shrinkA": 0, "shrinkB": 0,
                                "mutation_scale": 6, "color": INK},
                )  # fmt: skip
                beside = at + 0.055 if letter == "r" else at - 0.06
                self.text(beside, edge + 0.075, letter, fontsize=6.5, ha="center")

    def finish(self) -> Figure:
        """The figure, now that its height is known."""
        height = self.y + MARGIN
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()
        return self.figure
