"""A step's metadata: what every group's layers are told, made once per step.

All index arithmetic of a step happens here, on the host, on a few small tensors: which slots a Mamba
row reads and writes, which pages an attention row sees, where chunks begin. The layers get slots and
never ask what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_kernels import build_chunk_layout
from mamba_teach.cache.columns import last_computed_column, last_scheduled_column
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.specs import MambaSpec
from mamba_teach.model.metadata import (
    AttentionMetadata,
    LayerMetadata,
    MambaDecode,
    MambaMetadata,
    MambaPrefill,
)
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.scheduler import Schedule


@dataclass(frozen=True)
class StepInputs:
    """Everything a forward pass needs.

    Attributes:
        token_ids: ``(T,)`` int64 packed tokens, decode rows first.
        sample_positions: ``(S,)`` int64, packed positions whose logits are wanted.
        metadata: one per layer.
    """

    token_ids: torch.Tensor
    sample_positions: torch.Tensor
    metadata: list[LayerMetadata]


@dataclass(frozen=True)
class StepRows:
    """The step's rows as host tensors; ``R`` rows, the first ``num_decodes`` decode."""

    num_decodes: int
    num_computed: torch.Tensor  # (R,) int64
    query_start_loc: torch.Tensor  # (R + 1,) int64
    table_rows: torch.Tensor  # (R,) int64

    @property
    def num_decode_tokens(self) -> int:
        return int(self.query_start_loc[self.num_decodes])


class StepMetadataBuilder:
    """Builds :class:`StepInputs` from a schedule and the block tables."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_layers: int,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        self.groups = groups
        self.num_layers = num_layers
        self.chunk_size = chunk_size
        self.device = device

    def build(self, schedule: Schedule, tables: BlockTables) -> StepInputs:
        """Inputs of a non-empty schedule whose blocks are already in the tables."""
        lengths = torch.tensor([0, *(row.num_tokens for row in schedule.rows)])
        rows = StepRows(
            num_decodes=sum(row.is_decode for row in schedule.rows),
            num_computed=torch.tensor([row.num_computed for row in schedule.rows]),
            query_start_loc=lengths.cumsum(0),
            table_rows=tables.rows([row.request.request_id for row in schedule.rows]),
        )
        token_ids = [
            token
            for row in schedule.rows
            for token in row.request.tokens(row.num_computed, row.num_computed + row.num_tokens)
        ]
        samples = torch.tensor([row.samples for row in schedule.rows])
        metadata: list[LayerMetadata] = [None] * self.num_layers
        for group, table in zip(self.groups, tables.tables, strict=True):
            build = self._mamba if group.spec.kind == "mamba" else self._attention
            of_group = build(group, table, rows)
            for layer in group.layers:
                metadata[layer] = of_group
        return StepInputs(
            token_ids=self._send(torch.tensor(token_ids)),
            sample_positions=self._send(rows.query_start_loc[1:][samples] - 1),
            metadata=metadata,
        )

    def _mamba(self, group: CacheGroup, table: torch.Tensor, rows: StepRows) -> MambaMetadata:
        """Columns to slots: a row reads the state of its last computed token, writes that of its last
        scheduled one, and in mode "all" one at every block boundary in between."""
        spec = group.spec
        assert isinstance(spec, MambaSpec)
        n = rows.num_computed
        seq_lens = n + rows.query_start_loc.diff()
        src = table[rows.table_rows, last_computed_column(n, spec.block_size).clamp(min=0)]
        dst = table[rows.table_rows, last_scheduled_column(seq_lens, spec.block_size)]
        decodes = rows.num_decodes
        decode = prefill = None
        if decodes:
            decode_src, decode_dst = self._send(src[:decodes]), self._send(dst[:decodes])
            decode = MambaDecode(
                query_start_loc=self._send(rows.query_start_loc[: decodes + 1].int()),
                conv_src_slots=decode_src,
                conv_dst_slots=decode_dst,
                ssm_src_slots=decode_src[:, None],
                ssm_dst_slots=decode_dst[:, None],
            )
        if decodes < len(src):
            starts = (rows.query_start_loc[decodes:] - rows.num_decode_tokens).int()
            computed = n[decodes:].int()
            checkpoints = None
            if spec.mamba_cache_mode == "all":
                checkpoints = block_checkpoints(
                    n[decodes:],
                    seq_lens[decodes:],
                    table,
                    rows.table_rows[decodes:],
                    spec.block_size,
                )
            prefill = MambaPrefill(
                query_start_loc=self._send(starts),
                num_computed_tokens=self._send(computed),
                src_slots=self._send(src[decodes:]),
                dst_slots=self._send(dst[decodes:]),
                has_initial_state=self._send(computed > 0),
                layout=build_chunk_layout(starts, computed, self.chunk_size, checkpoints).to(
                    self.device, non_blocking=True
                ),
                checkpoints=None if checkpoints is None else self._send(checkpoints),
            )
        return MambaMetadata(rows.num_decode_tokens, decode, prefill)

    def _attention(
        self, group: CacheGroup, table: torch.Tensor, rows: StepRows
    ) -> AttentionMetadata:
        block_size = group.spec.block_size
        lengths = rows.query_start_loc.diff()
        seq_lens = rows.num_computed + lengths
        # Position of every packed token in its request, and from it its page and place.
        row = torch.repeat_interleave(lengths)  # (T,): 0 0 0 1 2 2 ...
        packed = torch.arange(row.numel())
        position = packed - rows.query_start_loc[row] + rows.num_computed[row]
        page = table[rows.table_rows[row], position // block_size].long()
        columns = group.spec.columns_for(int(seq_lens.max()))  # however wide the table is
        return AttentionMetadata(
            query_start_loc=self._send(rows.query_start_loc),
            seq_lens=self._send(seq_lens),
            block_table=self._send(table[rows.table_rows, :columns].long()),
            slot_mapping=self._send(page * block_size + position % block_size),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def block_checkpoints(
    n: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """The block boundaries strictly inside each row's step.

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
