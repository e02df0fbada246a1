"""The board as a figure: who holds which block, what is in it, what the step does, who is next to go.

Requests are rows. Every group of layers has its own block table, so every group has its own columns.
A cell shows its slot, its role as a colour and a letter, the tokens in it, and small arrows: *r* out
of a state that the step reads, *w* into a block that it writes. Below lies the pool: the null block,
then the free blocks in the order in which they will be handed out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mamba_teach.events import Board
from mamba_teach.viz.canvas import (
    ARROWS,
    CELL,
    CELL_HEIGHT,
    FAINT,
    INK,
    LINE,
    MARGIN,
    WIDTH,
    Canvas,
)
from mamba_teach.viz.cells import (
    NULL,
    NULL_CELL,
    PUBLISHED,
    BoardView,
    Cell,
    Role,
    roles_in,
    view,
)

LABEL = 0.98  # inches, like all lengths here: the requests' names
NARROW = 0.14  # a column in which nobody holds anything
GROUP_GAP = 0.2
MAX_ROWS, MAX_COLUMNS, MAX_FREE = 8, 12, 46


def draw_board(board: Board, *, title: str | None = None, evicted: Collection[int] = ()) -> Figure:
    """Draw a board at notebook width.

    Args:
        board: from :func:`~mamba_teach.events.reduce`, or a frame of a player.
        title: instead of the line that says step, requests and blocks.
        evicted: blocks evicted in this step (:func:`~mamba_teach.viz.history.evicted_in_step`).
    """
    seen = view(board, evicted)
    canvas = Canvas()
    canvas.line(title or seen.title, size=10, weight="bold")
    for band in _bands(seen):
        _draw_tables(canvas, seen, band)
    if not seen.rows:
        canvas.line("no request holds a block", colour=FAINT)
    _draw_notes(canvas, seen)
    _draw_pool(canvas, seen)
    _draw_legend(canvas, seen)
    return canvas.finish()


def board_alt_text(board: Board, evicted: Collection[int] = ()) -> str:
    """One sentence for somebody who cannot see the figure."""
    seen = view(board, evicted)
    rows = [f"{row.request_id} ({row.doing}) holds "
            + "; ".join(_held(name, cells) for name, cells in zip(seen.groups, row.cells))
            for row in seen.rows[:MAX_ROWS]]  # fmt: skip
    rows += [f"{len(seen.rows) - MAX_ROWS} more requests"] if len(seen.rows) > MAX_ROWS else []
    next_up = ", ".join(map(str, list(board.free)[:3]))
    pool = f"the next blocks to be handed out are {next_up}" if next_up else "no block is free"
    hashed = sum(cell.role is PUBLISHED for cell in seen.free)
    said = f"{seen.title}, {hashed} of them still published; {pool}"
    return ". ".join(["Block tables at " + said, *rows]) + "."


def _held(group: str, cells: Sequence[Cell]) -> str:
    held = [str(cell.block) for cell in cells if cell.role is not NULL]
    shown = " ".join(held[-4:]) or "nothing"
    return f"{group}: {'... ' if len(held) > 4 else ''}{shown}"


# Tables ---------------------------------------------------------------------------------------


def _shown_columns(seen: BoardView, group: int) -> range:
    """The newest columns; older ones are folded."""
    last = max((len(row.cells[group]) for row in seen.rows[:MAX_ROWS]), default=0)
    return range(max(0, last - MAX_COLUMNS), last)


def _num_folded(cells: Sequence[Cell], shown: range) -> int:
    """Blocks of a table that lie before the shown columns."""
    return sum(cell.role is not NULL for cell in cells[: shown.start])


def _column_widths(seen: BoardView, group: int) -> tuple[float, list[float]]:
    """Of the place for a word about folded blocks, and of each shown column."""
    shown = _shown_columns(seen, group)
    tables = [row.cells[group] for row in seen.rows[:MAX_ROWS]]
    held = [any(c < len(t) and t[c].role is not NULL for t in tables) for c in shown]
    folds = any(_num_folded(table, shown) for table in tables)
    return CELL * folds, [CELL if is_held else NARROW for is_held in held]


def _group_width(seen: BoardView, group: int) -> float:
    folded, widths = _column_widths(seen, group)
    return max(2.2 * CELL, folded + sum(widths)) + GROUP_GAP


def _bands(seen: BoardView) -> Iterator[list[int]]:
    """Groups side by side, as many as fit."""
    band: list[int] = []
    used = 0.0
    for group in range(len(seen.groups)) if seen.rows else ():
        width = _group_width(seen, group)
        if band and used + width > WIDTH - 2 * MARGIN - LABEL + GROUP_GAP:
            yield band
            band, used = [], 0.0
        band.append(group)
        used += width
    if band:
        yield band


def _draw_tables(canvas: Canvas, seen: BoardView, band: list[int]) -> None:
    top = canvas.y
    canvas.y += 0.36
    rows = seen.rows[:MAX_ROWS]
    small = {"fontsize": 6, "color": FAINT}
    dot = {"fontsize": 11, "color": FAINT, "ha": "center"}
    for i, row in enumerate(rows):
        y = canvas.y + i * (CELL_HEIGHT + ARROWS)
        canvas.text(MARGIN, y + 0.1, row.request_id, fontsize=8.5, fontweight="bold")
        canvas.text(MARGIN, y + 0.26, row.doing, fontsize=6, color=FAINT)
    x = MARGIN + LABEL
    for group in band:
        shown = _shown_columns(seen, group)
        canvas.text(x, top + 0.1, seen.groups[group], fontsize=8, fontweight="bold")
        folded, widths = _column_widths(seen, group)
        lefts = [x + folded + sum(widths[:i]) for i in range(len(widths))]
        if folded:
            canvas.text(x + CELL / 2, top + 0.28, "older", ha="center", **small)
        for column, left, width in zip(shown, lefts, widths):
            canvas.text(left + width / 2, top + 0.28, str(column), ha="center", **small)
        for i, row in enumerate(rows):
            y = canvas.y + i * (CELL_HEIGHT + ARROWS)
            cells = row.cells[group]
            if more := _num_folded(cells, shown):
                middle = y + CELL_HEIGHT / 2
                canvas.text(x + CELL / 2, middle, f"+{more}", ha="center", color=FAINT)
            for cell, left, width in zip(cells[shown.start :], lefts, widths):
                if cell.role is NULL:
                    canvas.text(left + width / 2, y + CELL_HEIGHT / 2, ".", **dot)
                else:
                    canvas.cell(left, y, cell)
        x += _group_width(seen, group)
    canvas.y += len(rows) * (CELL_HEIGHT + ARROWS)


def _draw_notes(canvas: Canvas, seen: BoardView) -> None:
    if len(seen.rows) > MAX_ROWS:
        canvas.line(f"+{len(seen.rows) - MAX_ROWS} more requests hold blocks", colour=FAINT)
    if seen.waiting:
        more = f", +{len(seen.waiting) - 12} more" if len(seen.waiting) > 12 else ""
        canvas.line(f"waiting: {', '.join(seen.waiting[:12])}{more}", colour=FAINT)


# The pool and the legend ----------------------------------------------------------------------


def _draw_pool(canvas: Canvas, seen: BoardView) -> None:
    canvas.y += 0.05
    canvas.line("pool: the null block, then free blocks; the next to be handed out first", size=8)
    canvas.text(MARGIN, canvas.y + CELL_HEIGHT / 2, "null", color=FAINT)
    canvas.cell(MARGIN + LABEL - CELL - 0.1, canvas.y, NULL_CELL, faded=True)
    _draw_queue(canvas, seen.free, "free blocks")
    if seen.evicted:
        canvas.text(MARGIN, canvas.y + CELL_HEIGHT / 2, "evicted", color=FAINT)
        _draw_queue(canvas, seen.evicted, "evicted blocks", faded=True)


def _draw_queue(canvas: Canvas, cells: Sequence[Cell], what: str, *, faded: bool = False) -> None:
    """Cells in reading order, as many as there is room for."""
    per_line = int((WIDTH - 2 * MARGIN - LABEL) / CELL)
    shown = cells[:MAX_FREE]
    if not shown:
        canvas.text(MARGIN + LABEL, canvas.y + CELL_HEIGHT / 2, f"no {what}", color=FAINT)
    for start in range(0, max(1, len(shown)), per_line):
        line = shown[start : start + per_line]
        for i, cell in enumerate(line):
            canvas.cell(MARGIN + LABEL + CELL * i, canvas.y, cell, faded=faded)
        has_arrows = any(cell.reads or cell.writes for cell in line)
        canvas.y += CELL_HEIGHT + (ARROWS if has_arrows else 0.06)
    if more := sum(cell.count for cell in cells[MAX_FREE:]):
        canvas.text(MARGIN + LABEL, canvas.y + LINE / 2, f"+{more} more {what}", color=FAINT)
        canvas.y += LINE


def _draw_legend(canvas: Canvas, seen: BoardView) -> None:
    step = (WIDTH - 2 * MARGIN) / 3
    entries: list[Role] = list(roles_in([seen]))
    for i, role in enumerate(entries):
        x, y = MARGIN + step * (i % 3), canvas.y + 0.1 + LINE * (i // 3)
        box = Rectangle((x, y - 0.07), 0.22, 0.14, facecolor=role.colour, edgecolor=INK, lw=0.5)
        canvas.axes.add_patch(box)
        canvas.text(x + 0.11, y, role.letter, fontsize=6, ha="center")
        canvas.text(x + 0.28, y, role.meaning, fontsize=7)
    canvas.y += LINE * ((len(entries) + 2) // 3) + 0.02
    canvas.line(
        "in a cell: slot; role; =12 the state after 12 tokens, +4 the keys of 4 tokens.   "
        "r: the step reads this state.   w: the step writes to this block.",
        size=7,
    )
