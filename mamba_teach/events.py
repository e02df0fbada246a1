"""The event log: everything the engine does, in order, and the board that follows from it.

The engine appends small frozen records to a list. Pictures, tests and comparisons of two runs read
that list and nothing else: :func:`reduce` folds any prefix of it into a :class:`Board`, the state of
all block tables and of the pool at that moment. No torch, no engine needed to look at a log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStarted:
    """The pool and the groups that draw from it. ``groups`` names each group, e.g. ``"mamba 0"``."""

    num_blocks: int
    groups: tuple[str, ...]
    block_size: int


@dataclass(frozen=True)
class RequestAdded:
    """A request passed the door and waits."""

    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class StepStarted:
    """A step begins; what follows belongs to it."""

    step: int


@dataclass(frozen=True)
class PrefixHit:
    """A request starts behind ``num_tokens`` cached tokens, with these blocks by group and column.

    0, the null block, stands where a group needs none.
    """

    request_id: str
    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlocksAllocated:
    """New blocks joined a request's table in one group, at these columns."""

    request_id: str
    group: int
    columns: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockEvicted:
    """A free block is about to be handed out and forgets what it was published as."""

    block_id: int


@dataclass(frozen=True)
class BlockPublished:
    """A block is complete, has been written, and can be hit from now on."""

    request_id: str
    group: int
    column: int
    block_id: int


@dataclass(frozen=True)
class StateAccess:
    """What a row's step does to states in one group.

    ``read`` is a block, or None to start from zero; ``writes`` are *(block, tokens in the state)*.
    """

    request_id: str
    group: int
    read: int | None
    writes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RowScheduled:
    """A request takes part in the step: ``num_tokens`` tokens from position ``num_computed`` on.

    ``kind`` is "prefill" or "decode".
    """

    request_id: str
    kind: str
    num_computed: int
    num_tokens: int


@dataclass(frozen=True)
class StateCopied:
    """The state after ``num_tokens`` tokens, a block's boundary, moved from scratch to its block."""

    request_id: str
    group: int
    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True)
class DraftsVerified:
    """Of a row's drafts, the first ``num_accepted`` were right; what came behind does not count."""

    request_id: str
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True)
class StepDispatched:
    """How a step is run: ``path`` is "graph" (of ``graph_size`` requests) or "eager", and why."""

    path: str
    graph_size: int
    reason: str


@dataclass(frozen=True)
class BlocksFreed:
    """A request gave back columns that no later step of its own will read."""

    request_id: str
    group: int
    columns: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class RequestReleased:
    """A request gave back everything it held, in this order."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class CacheReset:
    """All published blocks were forgotten."""


@dataclass(frozen=True)
class RequestPreempted:
    """The pool ran dry and this request made room; it will be computed again."""

    request_id: str


@dataclass(frozen=True)
class TokenSampled:
    """A row's logits became a token."""

    request_id: str
    token_id: int


@dataclass(frozen=True)
class RequestFinished:
    """The request is over: "stop", "length" or "abort"."""

    request_id: str
    reason: str


Event = (
    EngineStarted | RequestAdded | StepStarted | PrefixHit | BlocksAllocated | BlockEvicted
    | RowScheduled | StepDispatched | StateAccess | StateCopied | DraftsVerified | TokenSampled
    | BlockPublished | BlocksFreed | RequestReleased | RequestPreempted | RequestFinished | CacheReset
)  # fmt: skip


@dataclass
class Row:
    """A request on the board.

    Attributes:
        tables: group -> block ids by column; 0 where nothing is held.
        reads: group -> the block its step reads, where it reads one.
        writes: group -> the blocks its step writes.
    """

    num_prompt_tokens: int
    num_computed: int = 0
    num_sampled: int = 0
    num_cached: int = 0
    kind: str = "waiting"
    num_scheduled: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Board:
    """All block tables and the pool at one moment.

    Attributes:
        rows: live requests by id, in order of arrival.
        owners: block id -> ids of the requests that hold it, for every block in use.
        free: free blocks, the next to be handed out first (a dict used as an ordered set).
        published: block id -> *(group, column)* it is published as.
        contents: block id -> tokens in the state it holds, for Mamba blocks that were written.
    """

    step: int = 0
    num_blocks: int = 0
    block_size: int = 0
    groups: tuple[str, ...] = ()
    rows: dict[str, Row] = field(default_factory=dict)
    owners: dict[int, list[str]] = field(default_factory=dict)
    free: dict[int, None] = field(default_factory=dict)
    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    contents: dict[int, int] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        """Blocks nobody owns; the null block does not count."""
        return len(self.free)


def reduce(events: Iterable[Event], board: Board | None = None) -> Board:
    """Fold a log, or any prefix of one, into the board at its end.

    Args:
        events: in order.
        board: go on from here instead of from the beginning; it is mutated.
    """
    board = Board() if board is None else board
    for event in events:
        _apply(board, event)
    return board


def _apply(board: Board, event: Event) -> None:
    match event:
        case EngineStarted(num_blocks, groups, block_size):
            board.num_blocks, board.groups, board.block_size = num_blocks, groups, block_size
            board.free = dict.fromkeys(range(1, num_blocks))
        case RequestAdded(request_id, num_prompt_tokens):
            board.rows[request_id] = Row(num_prompt_tokens)
        case StepStarted(step):
            board.step = step
            for row in board.rows.values():
                row.num_computed += row.num_scheduled
                row.num_scheduled = 0
                row.reads, row.writes = {}, {}
        case PrefixHit(request_id, num_tokens, tables):
            row = board.rows[request_id]
            row.num_computed = row.num_cached = num_tokens
            for group, blocks in enumerate(tables):
                for column, block in enumerate(blocks):
                    _hold(board, request_id, group, column, block)
        case BlocksAllocated(request_id, group, columns, block_ids):
            for column, block in zip(columns, block_ids, strict=True):
                board.contents.pop(block, None)
                _hold(board, request_id, group, column, block)
        case BlockEvicted(block_id):
            del board.published[block_id]
        case RowScheduled(request_id, kind, num_computed, num_tokens):
            row = board.rows[request_id]
            row.kind, row.num_computed, row.num_scheduled = kind, num_computed, num_tokens
        case StateAccess(request_id, group, read, writes):
            row = board.rows[request_id]
            if read is not None:
                row.reads[group] = read
            row.writes[group] = tuple(block for block, _ in writes)
            board.contents.update(writes)
        case StateCopied(_, _, _, dst, num_tokens):
            board.contents[dst] = num_tokens
        case DraftsVerified(request_id, _, num_accepted):
            row = board.rows[request_id]
            row.num_scheduled = 1 + num_accepted
            for block in (block for blocks in row.writes.values() for block in blocks):
                if board.contents.get(block, 0) > row.num_computed + row.num_scheduled:
                    del board.contents[block]  # a state behind a wrong guess
        case TokenSampled(request_id, _):
            board.rows[request_id].num_sampled += 1
        case BlockPublished(_, group, column, block_id):
            board.published[block_id] = (group, column)
        case BlocksFreed(request_id, group, columns, block_ids):
            for column, block in zip(columns, block_ids, strict=True):
                board.rows[request_id].tables[group][column] = 0
                _let_go(board, request_id, block)
        case RequestReleased(request_id, block_ids):
            board.rows[request_id].tables.clear()
            for block in block_ids:
                _let_go(board, request_id, block)
        case RequestPreempted(request_id):
            row = board.rows[request_id]
            row.kind, row.num_computed, row.num_scheduled = "waiting", 0, 0
            row.reads, row.writes = {}, {}
        case RequestFinished(request_id, _):
            del board.rows[request_id]
        case CacheReset():
            board.published.clear()


def _hold(board: Board, request_id: str, group: int, column: int, block: int) -> None:
    table = board.rows[request_id].tables.setdefault(group, [])
    table.extend([0] * (column + 1 - len(table)))
    if block:
        table[column] = block
        board.free.pop(block, None)
        board.owners.setdefault(block, []).append(request_id)


def _let_go(board: Board, request_id: str, block: int) -> None:
    board.owners[block].remove(request_id)
    if not board.owners[block]:
        del board.owners[block]
        board.free[block] = None
