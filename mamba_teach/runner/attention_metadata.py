"""Positions to pages: what one attention group is told about a step."""

from __future__ import annotations

import torch

from mamba_teach.cache.specs import LayerSpec
from mamba_teach.model.metadata import AttentionMetadata
from mamba_teach.runner.step_rows import StepRows


def attention_metadata(
    spec: LayerSpec, table: torch.Tensor, rows: StepRows, device: torch.device
) -> AttentionMetadata:
    """Metadata for a step, or for rows that a drafter makes of it.

    Args:
        spec: of the group.
        table: ``(max_num_seqs, width)`` block table of the group.
        rows: whose tokens all have a page.
    """
    block_size, lengths, seq_lens = spec.block_size, rows.lengths, rows.seq_lens
    # Position of every packed token in its request, and from it its page and place.
    row = torch.repeat_interleave(lengths)  # (T,): 0 0 0 1 2 2 ...
    packed = torch.arange(row.numel())
    position = packed - rows.query_start_loc[row] + rows.num_computed[row]
    page = table[rows.table_rows[row], position // block_size].long()
    columns = spec.columns_for(int(seq_lens.max()))  # however wide the table is

    def send(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return AttentionMetadata(
        query_start_loc=send(rows.query_start_loc),
        seq_lens=send(seq_lens),
        block_table=send(table[rows.table_rows, :columns].long()),
        slot_mapping=send(page * block_size + position % block_size),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
    )
