"""The board as an HTML table: for the player, and for pages that show notebooks without a kernel.

Styles stand in the tags, and the words alone say everything: viewers like GitHub's take styles away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from mamba_teach.viz.cells import FREE, NULL, BoardView, Cell, Role, roles_in

MAX_POOL = 40  # cells of the queue that are shown
TABLE = "border-collapse:collapse;font:12px/1.35 monospace;background:#fff;color:#000"
EDGE = "border:1px solid #ccc;padding:3px 6px;text-align:left;vertical-align:top"
BLOCK = (
    "display:inline-block;vertical-align:top;border:1px solid #000;margin:1px;padding:0 3px;"
    "white-space:nowrap"
)
MAX_DOTS = 7
STRIP_FRAMES, STRIP_BYTES = 6, 60_000


def board_table(seen: BoardView, *, tall: bool = False, note: str = "") -> str:
    """One board.

    Args:
        tall: two lines per cell, for a place that keeps styles.
        note: goes into the caption, after the title.
    """
    head = "".join(
        f'<th scope="col" style="{EDGE}">{escape(name)}</th>' for name in ("request", *seen.groups)
    )
    lines = [f"<tr>{head}</tr>"]
    for row in seen.rows:
        tables = "".join(f'<td style="{EDGE}">{_blocks(cells, tall)}</td>' for cells in row.cells)
        name = f'<th scope="row" style="{EDGE}">{escape(f"{row.request_id}: {row.doing}")}</th>'
        lines.append(f"<tr>{name}{tables}</tr>")
    span = len(seen.groups)
    for name, text in _other_lines(seen, tall):
        lines.append(
            f'<tr><th scope="row" style="{EDGE}">{name}</th>'
            f'<td colspan="{span}" style="{EDGE}">{text}</td></tr>'
        )
    caption = escape(seen.title + note)
    return (
        f'<table style="{TABLE}"><caption style="text-align:left;color:inherit">{caption}</caption>'
        f"{''.join(lines)}</table>"
    )


def _other_lines(seen: BoardView, tall: bool) -> Iterable[tuple[str, str]]:
    if seen.waiting:
        yield "waiting", escape(", ".join(seen.waiting))
    if seen.evicted:
        yield "evicted", _blocks(seen.evicted[:MAX_POOL], tall)
    hidden = sum(cell.count for cell in seen.free[MAX_POOL:])
    more = f" +{hidden} more" if hidden else ""
    yield "free, next first", (_blocks(seen.free[:MAX_POOL], tall) or "none") + more


def _blocks(cells: Sequence[Cell], tall: bool) -> str:
    """Cells in a row; dots for runs of columns that hold nothing."""
    parts = []
    for is_null, run in groupby(cells, key=lambda cell: cell.role is NULL):
        held = list(run)
        dots = "." * len(held) if len(held) < MAX_DOTS else f".×{len(held)}"
        parts += [dots] if is_null else [_block(cell, tall) for cell in held]
    return ("" if tall else " ").join(parts)


def _block(cell: Cell, tall: bool) -> str:
    flags = "r" * cell.reads + "w" * cell.writes
    if not tall:
        words = cell.text.replace(" ", "·")
        colour = "" if cell.role is FREE else f' style="background:{cell.role.colour}"'
        return f"<span{colour}>{words}</span>"
    arrows = {"r": "r↗", "w": "w↙", "rw": "r↗w↙", "": ""}[flags]
    tokens = f"{cell.tokens} {arrows}".strip() or "&nbsp;"
    return (
        f'<span style="{BLOCK};background:{cell.role.colour}" title="{cell.role.name}">'
        f"<b>{cell.block}</b> {cell.letter}<br>{tokens}</span>"
    )


def legend(roles: Iterable[Role]) -> str:
    """One line that explains letters, colours and numbers."""
    marks = [
        f'<span style="color:#000;background:{role.colour}">{role.letter or "no letter"}</span> '
        f"{escape(role.meaning)}"
        for role in roles
    ]
    numbers = (
        "=12 the state after 12 tokens; +4 the keys of 4 tokens; r read, w written in this step"
    )
    style = "font:12px/1.5 sans-serif;margin:4px 0"
    return f'<p style="{style}">slot, then its role: {"; ".join(marks)}; {numbers}.</p>'


def film_strip(seen: Sequence[BoardView], notes: Sequence[str], heading: str) -> str:
    """Key frames below each other: the first, the last, and some between, under ``STRIP_BYTES``.

    Args:
        notes: by frame, see :func:`board_table`.
    """
    text = ""
    for count in range(min(STRIP_FRAMES, len(seen)), 0, -1):
        gap = (len(seen) - 1) / max(1, count - 1)
        picked = sorted({round(i * gap) for i in range(count)})
        tables = [board_table(seen[i], note=notes[i]) for i in picked]
        text = "<br>".join([*tables, legend(roles_in(seen[i] for i in picked))])
        if len(text.encode()) < STRIP_BYTES - 1000:
            break
    else:
        text = "<p>The board is too large for a strip.</p>"
    return (
        f'<div role="group" aria-label="film strip of block tables"><p>{escape(heading)}</p>'
        f"{text}</div>"
    )
