"""Columns to slots: what one Mamba group is told about a step.

The gather that gave this project its subject: a decode row *writes* to the column of its last scheduled
token and the ``k`` columns behind it, one state per token. It *reads* from where its previous step did
the same, moved on by the tokens that were kept of it. Two sets of columns, two gathers, two tensors of
``1 + k`` slots each; the conv window, one per step, is found through the first of each.

Done once per step and group. (vLLM does it in every layer's forward pass.)
"""

from __future__ import annotations

import torch

from mamba_kernels import build_chunk_layout
from mamba_teach.cache.columns import last_computed_column, last_scheduled_column
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.config import EngineConfig
from mamba_teach.events import StateAccess
from mamba_teach.model.metadata import MambaMetadata, MambaPrefill
from mamba_teach.runner.decode_buffers import DecodeBuffers
from mamba_teach.runner.step_rows import StepRows


class MambaMetadataBuilder:
    """Metadata of one Mamba group.

    Attributes:
        decode_state_offsets: ``(1, 1 + k)`` = 0 .. k, made once.
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
        k = config.num_speculative_tokens
        self.decode_state_offsets = torch.arange(1 + k)[None]
        self.buffers = DecodeBuffers(group.name, config.max_num_seqs, k, device)

    def build(
        self, table: torch.Tensor, rows: StepRows
    ) -> tuple[MambaMetadata, list[StateAccess]]:
        """Metadata for a step, and what it does to the group's states, for the log.

        Args:
            table: ``(max_num_seqs, width)`` block table of the group.
            rows: of the step.
        """
        seq_lens, decodes = rows.seq_lens, rows.num_decodes
        read_from = source_column(rows, self.spec.block_size)
        write_to = last_scheduled_column(seq_lens, self.spec.block_size)
        src_slots = gather_slots(table, rows.table_rows, read_from, self.decode_state_offsets)
        dst_slots = gather_slots(table, rows.table_rows, write_to, self.decode_state_offsets)
        decode = prefill = checkpoints = None
        if decodes:
            counts = rows.num_accepted_tokens
            decode = self.buffers.refill(
                rows.query_start_loc[: decodes + 1],
                src_slots[:decodes],
                dst_slots[:decodes],
                None if counts is None else counts[:decodes],
            )
        if decodes < len(seq_lens):
            n = rows.num_computed[decodes:]
            if self.spec.mamba_cache_mode == "all":
                checkpoints = block_checkpoints(
                    n, seq_lens[decodes:], table, rows.table_rows[decodes:], self.spec.block_size
                )
            starts = (rows.query_start_loc[decodes:] - rows.num_decode_tokens).int()
            layout = build_chunk_layout(starts, n.int(), self.chunk_size, checkpoints)
            prefill = MambaPrefill(
                query_start_loc=self._send(starts),
                num_computed_tokens=self._send(n.int()),
                src_slots=self._send(src_slots[decodes:, 0].contiguous()),
                dst_slots=self._send(dst_slots[decodes:, 0].contiguous()),
                has_initial_state=self._send(n > 0),
                layout=layout.to(self.device, non_blocking=True),
                checkpoints=None if checkpoints is None else self._send(checkpoints),
            )
        accesses = state_accesses(self.index, rows, src_slots, dst_slots, checkpoints)
        return MambaMetadata(rows.num_decode_tokens, decode, prefill), accesses

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


def block_checkpoints(
    n: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """The block boundaries strictly inside each prefill row's step.

    A boundary at the very end needs none: there the row's last scheduled column *is* the block.

    Args:
        n, seq_lens: ``(P,)`` tokens before and after the step.
        table: ``(max_num_seqs, width)`` block table.
        table_rows: ``(P,)`` the table row of each row of the step.

    Returns:
        ``(C, 3)`` int32 rows *(sequence, end position in its query, slot)*.
    """
    first = n // block_size
    counts = last_scheduled_column(seq_lens, block_size) - first  # (P,)
    row = torch.repeat_interleave(counts)  # (C,): 0 0 2 2 2 ...
    column = first[row] + torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
    end = (column + 1) * block_size - n[row]
    return torch.stack([row, end, table[table_rows[row], column]], dim=1).int()


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
    if rows.num_accepted_tokens is not None:
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
