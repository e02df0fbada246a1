"""What a board says about each block, before anybody draws it: one set of roles for all pictures.

:func:`view` turns a :class:`~mamba_teach.events.Board` into rows of cells. The figure, the notebook
player and the HTML page all show these cells, so they cannot disagree. Plain data, no matplotlib.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from mamba_teach.events import Board, Row
from mamba_teach.viz import palette


@dataclass(frozen=True)
class Role:
    """What a block is at the moment: a letter and a colour, never the colour alone."""

    name: str
    letter: str
    colour: str
    meaning: str


NULL = Role("null", ".", "#FFFFFF", "null: nothing held")
SCRATCH = Role("scratch", "s", palette.YELLOW, "scratch: reserved, no accepted token yet")
RUNNING = Role("running", "R", palette.ORANGE, "running: one request's own")
PUBLISHED = Role("published", "P", palette.SKY, "published: can be hit")
SHARED = Role("shared", "2x", palette.GREEN, "shared: owned twice (3x, ...)")
EVICTED = Role("evicted", "E", palette.VERMILLION, "evicted in this step: forgot its prefix")
FREE = Role("free", "", "#EEEEEE", "free: means nothing to anybody")
MIN_RUN = 6
ROLES = (NULL, SCRATCH, RUNNING, PUBLISHED, SHARED, EVICTED, FREE)


@dataclass(frozen=True)
class Cell:
    """One block in one place.

    Attributes:
        block: its id, which is the slot that the kernels see; 0 is the null block.
        letter: the role's, or the number of owners ("2x") of a shared block.
        tokens: "=12" for a state after 12 tokens, "+4" for the keys of 4 tokens, or "".
        reads, writes: whether the step reads the state, or writes to the block.
        count: of blocks that the cell stands for; more than one only for a run of free blocks, "…39"
            being the last of it.
    """

    block: int
    role: Role
    letter: str
    tokens: str = ""
    reads: bool = False
    writes: bool = False
    count: int = 1

    @property
    def text(self) -> str:
        """All of it in one word: "17 R =16 w"."""
        if self.role is NULL:
            return "."
        flags = "r" * self.reads + "w" * self.writes
        return " ".join(part for part in (str(self.block), self.letter, self.tokens, flags) if part)


NULL_CELL = Cell(0, NULL, NULL.letter)


@dataclass(frozen=True)
class RowView:
    """A request that holds blocks; ``cells`` by group and column."""

    request_id: str
    kind: str
    num_computed: int
    num_scheduled: int
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def doing(self) -> str:
        """Its part of the step: "prefill 12+5", five tokens behind twelve."""
        part = f" {self.num_computed}+{self.num_scheduled}" if self.num_scheduled else ""
        return self.kind + part


@dataclass(frozen=True)
class BoardView:
    """All that a picture of a board shows.

    Attributes:
        rows: requests with blocks, in order of arrival.
        waiting: ids of requests without.
        evicted: blocks that were evicted in this step, in order; they are in use again.
        free: the pool's queue, the next to be handed out first.
        num_free: blocks in it.
    """

    step: int
    num_blocks: int
    block_size: int
    groups: tuple[str, ...]
    rows: tuple[RowView, ...]
    waiting: tuple[str, ...]
    evicted: tuple[Cell, ...]
    free: tuple[Cell, ...]
    num_free: int

    @property
    def title(self) -> str:
        waiting = f", {len(self.waiting)} waiting" if self.waiting else ""
        return (
            f"step {self.step}: {len(self.rows)} running{waiting}; {self.num_blocks} blocks of "
            f"{self.block_size} tokens, {self.num_free} free"
        )


def is_state_group(name: str) -> bool:
    """Whether a group's blocks hold states (Mamba), not keys and values of their own tokens."""
    return name.startswith("mamba")


def view(board: Board, evicted: Collection[int] = ()) -> BoardView:
    """Name the role of every block on a board.

    Args:
        board: at any moment; pictures are fullest while a step computes (:func:`step_ends`).
        evicted: blocks evicted in this step, which a board does not remember.
    """
    rows, waiting = [], []
    for request_id, row in board.rows.items():
        if not row.tables:
            waiting.append(request_id)
            continue
        cells = tuple(
            tuple(_table_cell(board, row, group, c) for c in range(len(row.tables.get(group, []))))
            for group in range(len(board.groups))
        )
        rows.append(RowView(request_id, row.kind, row.num_computed, row.num_scheduled, cells))
    return BoardView(
        step=board.step,
        num_blocks=board.num_blocks,
        block_size=board.block_size,
        groups=board.groups,
        rows=tuple(rows),
        waiting=tuple(waiting),
        evicted=tuple(Cell(block, EVICTED, EVICTED.letter) for block in evicted),
        free=tuple(fold_runs([_pool_cell(board, block) for block in board.free])),
        num_free=board.num_free,
    )


def _table_cell(board: Board, row: Row, group: int, column: int) -> Cell:
    block = row.tables[group][column]
    if block == 0:
        return NULL_CELL
    n, seq_len = row.num_computed, row.num_computed + row.num_scheduled
    start = column * board.block_size
    if is_state_group(board.groups[group]):
        writes = block in row.writes.get(group, ())
        tokens = f"={board.contents[block]}" if block in board.contents else ""
        # A verify step writes one state after each of its tokens; only the first is sure to count.
        is_guess = row.kind == "decode" and block in row.writes.get(group, ())[1:]
        is_scratch = is_guess or block not in board.contents
    else:
        filled = min(board.block_size, seq_len - start)
        writes = n < seq_len and start < seq_len and n < start + board.block_size
        tokens = f"+{filled}" if filled > 0 else ""
        is_scratch = filled <= 0
    num_owners = len(board.owners.get(block, ()))
    if num_owners > 1:
        role = SHARED
    elif block in board.published:
        role = PUBLISHED
    else:
        role = SCRATCH if is_scratch else RUNNING
    letter = f"{num_owners}x" if role is SHARED else role.letter
    return Cell(block, role, letter, tokens, row.reads.get(group) == block, writes)


def _pool_cell(board: Board, block: int) -> Cell:
    if block not in board.published:
        return Cell(block, FREE, FREE.letter)
    group, _ = board.published[block]
    keys = f"+{board.block_size}"
    tokens = f"={board.contents[block]}" if is_state_group(board.groups[group]) else keys
    reads = any(row.reads.get(group) == block for row in board.rows.values())
    writes = any(block in row.writes.get(group, ()) for row in board.rows.values())
    return Cell(block, PUBLISHED, PUBLISHED.letter, tokens, reads, writes)


def fold_runs(queue: list[Cell]) -> Iterator[Cell]:
    """The queue, with every long run of free blocks with ids in a row as one cell."""
    start = 0
    for end in range(1, len(queue) + 1):
        length = end - start
        following = Cell(queue[start].block + length, FREE, FREE.letter)
        if queue[start].role is FREE and end < len(queue) and queue[end] == following:
            continue
        if length >= MIN_RUN:
            last = queue[end - 1].block
            yield Cell(queue[start].block, FREE, FREE.letter, f"…{last}", count=length)
        else:
            yield from queue[start:end]
        start = end


def roles_in(views: Iterable[BoardView]) -> tuple[Role, ...]:
    """The roles that occur, in the order of ``ROLES``: what a legend has to explain."""
    seen = {NULL, FREE}
    for board in views:
        tables = (cell for row in board.rows for table in row.cells for cell in table)
        seen |= {cell.role for cell in (*tables, *board.free, *board.evicted)}
    return tuple(role for role in ROLES if role in seen)
