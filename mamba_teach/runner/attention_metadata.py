"""Positions to pages: what one attention group is told about a step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mamba_teach.cache.groups import CacheGroup
from mamba_teach.config import EngineConfig
from mamba_teach.model.metadata import AttentionMetadata
from mamba_teach.runner.persistent_buffer import PersistentBuffer
from mamba_teach.runner.step_rows import StepRows


class AttentionMetadataBuilder:
    """Metadata of one attention group.

    A graph is captured for one number of rows and tokens and for the longest sequence there may be;
    then everything has to lie in persistent buffers, as wide as they can ever be. Otherwise tensors
    are as small as the step.

    Attributes:
        query_start_loc, seq_lens, block_table, slot_mapping: buffers of the group, for graphs.
    """

    def __init__(
        self, index: int, group: CacheGroup, config: EngineConfig, device: torch.device
    ) -> None:
        self.index = index
        self.spec = group.spec
        self.device = device
        self.max_model_len = config.max_model_len
        self.tokens_per_row = 1 + config.num_speculative_tokens
        rows = config.max_num_seqs

        def buffer(name: str, *shape: int) -> PersistentBuffer:
            name = f"{name} ({group.name})"
            return PersistentBuffer(name, *shape, padding=0, device=device, dtype=torch.int64)

        self.query_start_loc = buffer("query_start_loc", rows + 1)
        self.seq_lens = buffer("seq_lens", rows)
        self.block_table = buffer("block_table", rows, group.spec.columns_for(config.max_model_len))
        self.slot_mapping = buffer("slot_mapping", rows * self.tokens_per_row)

    def build(
        self, table: torch.Tensor, rows: StepRows, num_padded: int | None = None
    ) -> AttentionMetadata:
        """Metadata for a step, or for rows that a drafter makes of it.

        Args:
            table: ``(max_num_seqs, width)`` block table of the group.
            rows: whose tokens all have a page.
            num_padded: rows to pad to, for a graph; None pads nothing.
        """
        block_size, lengths, seq_lens = self.spec.block_size, rows.lengths, rows.seq_lens
        # Position of every packed token in its request, and from it its page and place.
        row = torch.repeat_interleave(lengths)  # (T,): 0 0 0 1 2 2 ...
        packed = torch.arange(row.numel())
        position = packed - rows.query_start_loc[row] + rows.num_computed[row]
        page = table[rows.table_rows[row], position // block_size].long()
        slots = page * block_size + position % block_size
        columns = self.spec.columns_for(int(seq_lens.max()))  # however wide the table is
        pages = table[rows.table_rows, :columns].long()
        if num_padded is not None:
            return self._fill(rows.query_start_loc, seq_lens, pages, slots, num_padded)
        return AttentionMetadata(
            query_start_loc=self._send(rows.query_start_loc),
            seq_lens=self._send(seq_lens),
            block_table=self._send(pages),
            slot_mapping=self._send(slots),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def padding(self, num_rows: int) -> AttentionMetadata:
        """Metadata of rows that nobody has: no tokens, null pages."""
        none = torch.zeros(0, dtype=torch.int64)
        return self._fill(torch.zeros(1, dtype=torch.int64), none, none[:, None], none, num_rows)

    def _fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        num_rows: int,
    ) -> AttentionMetadata:
        starts = F.pad(query_start_loc, (0, num_rows - len(seq_lens)), value=int(query_start_loc[-1]))
        return AttentionMetadata(
            query_start_loc=self.query_start_loc.refill(starts),
            seq_lens=self.seq_lens.refill(seq_lens, num_rows),
            block_table=self.block_table.refill(pages, num_rows),
            slot_mapping=self.slot_mapping.refill(slots, num_rows * self.tokens_per_row),
            max_query_len=self.tokens_per_row,
            max_seq_len=self.max_model_len,
        )

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)
