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
class BlocksAllocated:
    """Blocks joined the end of a request's table in one group."""

    request_id: str
    group: int
    block_ids: tuple[int, ...]


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
class BlocksFreed:
    """A request gave all its blocks back."""

    request_id: str
    block_ids: tuple[int, ...]


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
    EngineStarted | RequestAdded | StepStarted | BlocksAllocated | RowScheduled | BlocksFreed
    | RequestPreempted | TokenSampled | RequestFinished
)  # fmt: skip


@dataclass
class Row:
    """A request on the board."""

    num_prompt_tokens: int
    num_computed: int = 0
    num_sampled: int = 0
    kind: str = "waiting"
    num_scheduled: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)  # group -> block ids


@dataclass
class Board:
    """All block tables at one moment.

    Attributes:
        rows: live requests by id, in order of arrival.
        owner: block id -> request id, for every block in use.
    """

    step: int = 0
    num_blocks: int = 0
    block_size: int = 0
    groups: tuple[str, ...] = ()
    rows: dict[str, Row] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        """Blocks nobody owns; the null block does not count."""
        return self.num_blocks - 1 - len(self.owner)


def reduce(events: Iterable[Event]) -> Board:
    """Fold a log, or any prefix of one, into the board at its end."""
    board = Board()
    for event in events:
        _apply(board, event)
    return board


def _apply(board: Board, event: Event) -> None:
    match event:
        case EngineStarted(num_blocks, groups, block_size):
            board.num_blocks, board.groups, board.block_size = num_blocks, groups, block_size
        case RequestAdded(request_id, num_prompt_tokens):
            board.rows[request_id] = Row(num_prompt_tokens)
        case StepStarted(step):
            board.step = step
            for row in board.rows.values():
                row.num_computed += row.num_scheduled
                row.num_scheduled = 0
        case BlocksAllocated(request_id, group, block_ids):
            board.rows[request_id].tables.setdefault(group, []).extend(block_ids)
            board.owner.update(dict.fromkeys(block_ids, request_id))
        case RowScheduled(request_id, kind, num_computed, num_tokens):
            row = board.rows[request_id]
            row.kind, row.num_computed, row.num_scheduled = kind, num_computed, num_tokens
        case BlocksFreed(request_id, block_ids):
            for block_id in block_ids:
                del board.owner[block_id]
            board.rows[request_id].tables.clear()
        case RequestPreempted(request_id):
            row = board.rows[request_id]
            row.kind, row.num_computed, row.num_scheduled = "waiting", 0, 0
        case TokenSampled(request_id, _):
            board.rows[request_id].num_sampled += 1
        case RequestFinished(request_id, _):
            del board.rows[request_id]
