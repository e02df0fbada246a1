"""The rows of a step as a few small tensors on the host: all that metadata is made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_teach.runner.block_table import BlockTables
from mamba_teach.runner.replay_index import ReplayRows
from mamba_teach.runner.state_index import StateIndex
from mamba_teach.scheduler import Schedule


@dataclass(frozen=True)
class StepRows:
    """``R`` rows, the first ``num_decodes`` of them decode.

    Attributes:
        request_ids: of the rows.
        num_computed: ``(R,)`` int64, tokens before the step.
        query_start_loc: ``(R + 1,)`` int64, where each row's tokens begin.
        table_rows: ``(R,)`` int64, row of each in the block tables.
        block_idx_last_scheduled_token_prev_step: ``(R,)`` int32 anchors, -1 where unknown.
        num_accepted_tokens: ``(R,)`` int32; both None without speculation.
        replay: cursors of the rows, or None without replay.
    """

    request_ids: list[str]
    num_decodes: int
    num_computed: torch.Tensor
    query_start_loc: torch.Tensor
    table_rows: torch.Tensor
    block_idx_last_scheduled_token_prev_step: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    replay: ReplayRows | None = None

    @classmethod
    def of(cls, schedule: Schedule, tables: BlockTables, state_index: StateIndex) -> StepRows:
        """The rows of a non-empty schedule whose blocks are already in the tables."""
        request_ids = [row.request.request_id for row in schedule.rows]
        anchors, counts = state_index.preprocess_mamba(schedule.rows)
        table_rows = tables.rows(request_ids)
        replay = None
        if state_index.replay is not None:
            replay = state_index.replay.preprocess(schedule.rows, table_rows)
        return cls(
            request_ids=request_ids,
            num_decodes=sum(row.is_decode for row in schedule.rows),
            num_computed=torch.tensor([row.num_computed for row in schedule.rows]),
            query_start_loc=torch.tensor([0, *(r.num_tokens for r in schedule.rows)]).cumsum(0),
            table_rows=table_rows,
            block_idx_last_scheduled_token_prev_step=anchors,
            num_accepted_tokens=counts,
            replay=replay,
        )

    @property
    def num_decode_tokens(self) -> int:
        return int(self.query_start_loc[self.num_decodes])

    @property
    def lengths(self) -> torch.Tensor:
        """``(R,)`` int64 tokens of each row."""
        return self.query_start_loc.diff()

    @property
    def seq_lens(self) -> torch.Tensor:
        """``(R,)`` int64 tokens after the step."""
        return self.num_computed + self.lengths
