"""Columns to slots: what one Mamba group is told about a step.

The gather that gave this project its subject: a decode row *writes* to the column of its last scheduled
token and the ``k`` columns behind it, one state per token. It *reads* from where its previous step did
the same, moved on by the tokens that were kept of it. Two sets of columns, two gathers, two tensors of
``1 + k`` slots each; the conv window, one per step, is found through the first of each.

The gathers are done once per step and group. (vLLM does them in every layer's forward pass.) Which
*columns* are meant is the same in every Mamba group, since they have one block size: that is planned
once per step, and a further group only looks the columns up in its own table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_kernels import ChunkLayout, build_chunk_layout
from mamba_teach.cache.columns import (
    first_scheduled_column,
    last_computed_column,
    last_scheduled_column,
)
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.config import EngineConfig
from mamba_teach.events import StateAccess
from mamba_teach.model.metadata import MambaMetadata, MambaPrefill
from mamba_teach.runner.decode_buffers import DecodeBuffers, ReplaySlots
from mamba_teach.runner.replay_index import ReplayRows
from mamba_teach.runner.step_rows import StepRows


@dataclass(frozen=True)
class StatePlan:
    """What all Mamba groups share of a step: columns, and what prefill rows are cut into.

    Attributes:
        rows: of the step.
        read_from, write_to: ``(R,)`` int64 columns.
        checkpoints: ``(C, 3)`` int64 *(prefill row, end position in its query, column)*, or None.
        starts, computed, layout: of the prefill rows, on the device; None without any.
    """

    rows: StepRows
    read_from: torch.Tensor
    write_to: torch.Tensor
    checkpoints: torch.Tensor | None
    starts: torch.Tensor | None
    computed: torch.Tensor | None
    layout: ChunkLayout | None


class MambaMetadataBuilder:
    """Metadata of one Mamba group.

    Attributes:
        decode_state_offsets: ``(1, 1 + k)`` = 0 .. k, made once; with replay ``(1, 1)``.
        buffers: the group's own, for its decode rows.
    """

    def __init__(
        self,
        index: int,
        group: CacheGroup,
        config: EngineConfig,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        assert isinstance(group.spec, MambaSpec)
        self.index = index
        self.spec = group.spec
        self.chunk_size = chunk_size
        self.device = device
        k, slots = config.num_speculative_tokens, 1 + group.spec.num_speculative_blocks
        self.tokens_per_row = 1 + k
        self.decode_state_offsets = torch.arange(slots)[None]
        self.buffers = DecodeBuffers(group.name, config.max_num_seqs, k, slots, device)

    def build(
        self, table: torch.Tensor, rows: StepRows, num_padded: int | None = None
    ) -> tuple[MambaMetadata, list[StateAccess]]:
        """Metadata for a step, and what it does to the group's states, for the log.

        Args:
            table: ``(max_num_seqs, width)`` block table of the group.
            rows: of the step.
            num_padded: rows to pad the decode rows to, for a graph; None pads nothing.
        """
        return self.update_block_table(self.plan(rows), table, num_padded)

    def plan(self, rows: StepRows) -> StatePlan:
        """The part of it that is the same in every Mamba group."""
        size, decodes = self.spec.block_size, rows.num_decodes
        checkpoints = starts = computed = layout = None
        if decodes < len(rows.request_ids):
            n = rows.num_computed[decodes:]
            if self.spec.mamba_cache_mode == "all":
                checkpoints = block_checkpoints(n, rows.seq_lens[decodes:], size)
            starts = (rows.query_start_loc[decodes:] - rows.num_decode_tokens).int()
            layout = build_chunk_layout(starts, n.int(), self.chunk_size, checkpoints)
            layout = layout.to(self.device, non_blocking=True)
            starts, computed = self._send(starts), self._send(n.int())
        return StatePlan(
            rows=rows,
            read_from=source_column(rows, size),
            write_to=last_scheduled_column(rows.seq_lens, size),
            checkpoints=checkpoints,
            starts=starts,
            computed=computed,
            layout=layout,
        )

    def update_block_table(
        self, plan: StatePlan, table: torch.Tensor, num_padded: int | None = None
    ) -> tuple[MambaMetadata, list[StateAccess]]:
        """Metadata from a plan, whichever group made it: looks its columns up in this group's table
        and puts the slots into this group's buffers."""
        rows, decodes = plan.rows, plan.rows.num_decodes
        offsets = self.decode_state_offsets
        src_slots = gather_slots(table, rows.table_rows, plan.read_from, offsets)
        dst_slots = gather_slots(table, rows.table_rows, plan.write_to, offsets)
        decode = prefill = checkpoints = None
        replay = None if rows.replay is None else self._replay_slots(rows, rows.replay, table)
        if decodes:
            counts = rows.num_accepted_tokens
            decode = self.buffers.refill(
                rows.query_start_loc[: decodes + 1],
                src_slots[:decodes],
                dst_slots[:decodes],
                None if counts is None else counts[:decodes],
                num_padded,
                replay,
            )
        if plan.layout is not None and plan.starts is not None and plan.computed is not None:
            if plan.checkpoints is not None:
                row, end, column = plan.checkpoints.T
                slot = table[rows.table_rows[decodes:][row], column]
                checkpoints = torch.stack([row, end, slot], dim=1).int()
            prefill = MambaPrefill(
                query_start_loc=plan.starts,
                num_computed_tokens=plan.computed,
                src_slots=self._send(src_slots[decodes:, 0].contiguous()),
                dst_slots=self._send(dst_slots[decodes:, 0].contiguous()),
                has_initial_state=plan.computed > 0,
                layout=plan.layout,
                checkpoints=None if checkpoints is None else self._send(checkpoints),
            )
        accesses = state_accesses(self.index, rows, src_slots, dst_slots, checkpoints)
        if replay is not None:
            accesses[:decodes] = replay_accesses(self.index, rows, replay)
        num_decode_tokens = rows.num_decode_tokens
        if num_padded is not None:
            num_decode_tokens = num_padded * self.tokens_per_row  # every row as long as it can be
        return MambaMetadata(num_decode_tokens, decode, prefill), accesses

    def padding(self, num_rows: int) -> MambaMetadata:
        """Decode metadata of rows that nobody has: null slots, no tokens, a count of 1."""
        slots = torch.zeros(0, self.decode_state_offsets.shape[1], dtype=torch.int32)
        none = slots[:, 0]
        counts = none if self.buffers.num_accepted_tokens is not None else None
        replay = None if self.spec.ring is None else ReplaySlots(*[none] * 5)
        start = torch.zeros(1, dtype=torch.int32)
        decode = self.buffers.refill(start, slots, slots, counts, num_rows, replay)
        return MambaMetadata(num_rows * self.tokens_per_row, decode, None)

    def _replay_slots(
        self, rows: StepRows, replay: ReplayRows, table: torch.Tensor
    ) -> ReplaySlots:
        decodes = rows.num_decodes
        table_rows = rows.table_rows[:decodes]
        flushed = first_scheduled_column(rows.num_computed[:decodes], self.spec.block_size)
        return ReplaySlots(
            src_slots=table[table_rows, replay.column[:decodes]],
            dst_slots=table[table_rows, flushed],
            ring_row=replay.ring_row[:decodes],
            ring_start=replay.ring_start[:decodes],
            num_pending=replay.num_pending[:decodes],
        )

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def source_column(rows: StepRows, block_size: int) -> torch.Tensor:
    """Where each row's previous step began to write, ``(R,)``.

    Where nothing is known of it (a row right after a prefix hit, or an engine without speculation),
    that is the column of the last computed token.
    """
    last_computed = last_computed_column(rows.num_computed, block_size).clamp(min=0)
    anchors = rows.block_idx_last_scheduled_token_prev_step
    if anchors is None:
        return last_computed
    return torch.where(anchors >= 0, anchors, last_computed)


def gather_slots(
    table: torch.Tensor, table_rows: torch.Tensor, column: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Slots in ``column .. column + k`` of each row, a tensor of their own: ``(R, 1 + k)``.

    Args:
        table: ``(max_num_seqs, width)``; the width has room for ``k`` columns behind the last token's.
        table_rows: ``(R,)``.
        column: ``(R,)``.
        offsets: ``(1, 1 + k)`` = 0 .. k.
    """
    return table[table_rows[:, None], column[:, None] + offsets]


def block_checkpoints(n: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """The block boundaries strictly inside each prefill row's step.

    A boundary at the very end needs none: there the row's last scheduled column *is* the block.

    Args:
        n, seq_lens: ``(P,)`` tokens before and after the step.

    Returns:
        ``(C, 3)`` int64 rows *(row, end position in its query, column)*.
    """
    first = n // block_size
    counts = last_scheduled_column(seq_lens, block_size) - first  # (P,)
    row = torch.repeat_interleave(counts)  # (C,): 0 0 2 2 2 ...
    column = first[row] + torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
    end = (column + 1) * block_size - n[row]
    return torch.stack([row, end, column], dim=1)


def state_accesses(
    group: int,
    rows: StepRows,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    checkpoints: torch.Tensor | None,
) -> list[StateAccess]:
    """What a step does to the states of a group, read off the very slots that the kernels get.

    Args:
        group: its number.
        rows: ``R`` rows.
        src_slots, dst_slots: ``(R, 1 + k)``.
        checkpoints: ``(C, 3)`` of the prefill rows, or None.
    """
    computed, lengths = rows.num_computed.tolist(), rows.lengths.tolist()
    counts = [1] * len(computed)
    if rows.num_accepted_tokens is not None and rows.replay is None:
        counts = rows.num_accepted_tokens.tolist()
    kept: dict[int, list[tuple[int, int]]] = {}
    for row, end, slot in [] if checkpoints is None else checkpoints.tolist():
        row += rows.num_decodes
        kept.setdefault(row, []).append((slot, computed[row] + end))
    accesses = []
    for r, (reads, writes) in enumerate(zip(src_slots.tolist(), dst_slots.tolist(), strict=True)):
        n, length = computed[r], lengths[r]
        if r < rows.num_decodes:
            written = [(slot, n + 1 + i) for i, slot in enumerate(writes[:length])]
        else:
            written = [*kept.get(r, []), (writes[0], n + length)]
        read = reads[counts[r] - 1] if n else None
        accesses.append(StateAccess(rows.request_ids[r], group, read, tuple(written)))
    return accesses


def replay_accesses(group: int, rows: StepRows, replay: ReplaySlots) -> list[StateAccess]:
    """Likewise for the decode rows of a step with replay: it reads checkpoints and rarely writes one."""
    assert rows.replay is not None
    slots = zip(replay.src_slots.tolist(), replay.dst_slots.tolist(), strict=True)
    computed = rows.num_computed.tolist()
    return [
        StateAccess(rows.request_ids[r], group, src, ((dst, computed[r]),) * rows.replay.flushes[r])
        for r, (src, dst) in enumerate(slots)
    ]
