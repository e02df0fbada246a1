"""The block tables as text: the board for a terminal.

    step 7   8 running   201 blocks of 48 tokens, 57 free
    request  kind         tokens  mamba 0   mamba 1   attention 0
    r0       decode     611 +  1  [..  48]  [..  50]  [..  43  44  45  46]

Two dots stand for earlier columns; a Mamba group holds nothing there.
"""

from __future__ import annotations

from mamba_teach.events import Board, Row

MAX_IDS = 4  # of one table, the newest; the rest becomes ".."


def render_board(board: Board) -> str:
    """One line per request: what it does in this step, and its blocks in every group."""
    running = {rid: row for rid, row in board.rows.items() if row.tables}
    header = ["request", "kind", "tokens", *board.groups]
    lines = [[rid, *_cells(row, len(board.groups))] for rid, row in running.items()]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    title = (
        f"step {board.step}   {len(running)} running, {len(board.rows) - len(running)} waiting   "
        f"{board.num_blocks} blocks of {board.block_size} tokens, {board.num_free} free"
    )
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *lines]
    ]
    return "\n".join([title, *table])


def _cells(row: Row, num_groups: int) -> list[str]:
    tables = (row.tables.get(group, []) for group in range(num_groups))
    tokens = f"{row.num_computed:4d} + {row.num_scheduled:3d}" if row.num_scheduled else "waits"
    return [row.kind, tokens, *(_ids(table) for table in tables)]


def _ids(table: list[int]) -> str:
    held = next((column for column, block in enumerate(table) if block), len(table))
    first = max(held, len(table) - MAX_IDS)
    ids = [f"{block:3d}" if block else "  ." for block in table[first:]]
    return f"[{' '.join(['..', *ids] if first else ids)}]"
