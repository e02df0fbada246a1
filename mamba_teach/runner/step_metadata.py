"""A step's inputs: tokens, and what every group's layers are told, made once per step.

All index arithmetic of a step happens here and in the two files for the two kinds of groups, on the
host, on a few small tensors: which slots a Mamba row reads and writes, which pages an attention row
sees, where chunks begin. The layers get slots and never ask what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_teach.cache.groups import CacheGroup
from mamba_teach.config import EngineConfig
from mamba_teach.events import StateAccess
from mamba_teach.model.metadata import LayerMetadata
from mamba_teach.runner.attention_metadata import AttentionMetadataBuilder
from mamba_teach.runner.block_table import BlockTables
from mamba_teach.runner.mamba_metadata import MambaMetadataBuilder
from mamba_teach.runner.persistent_buffer import PersistentBuffer
from mamba_teach.runner.state_index import StateIndex
from mamba_teach.runner.step_rows import StepRows
from mamba_teach.scheduler import Schedule


@dataclass(frozen=True)
class StepInputs:
    """Everything a forward pass needs.

    Attributes:
        token_ids: ``(T,)`` int64 packed tokens, decode rows first.
        sample_positions: ``(S,)`` int64, packed positions whose logits are wanted: the last known
            token of a row that samples, and all of its drafts.
        metadata: one per layer.
        accesses: which states the step reads and writes, for the log.
    """

    token_ids: torch.Tensor
    sample_positions: torch.Tensor
    metadata: list[LayerMetadata]
    accesses: list[StateAccess]


class StepMetadataBuilder:
    """Builds :class:`StepInputs` from a schedule and the block tables.

    Attributes:
        mamba: Mamba group -> its builder, with the group's persistent buffers.
        attention: attention group -> its builder, likewise.
        token_ids: persistent buffer for the tokens of a graph, padded with token 0.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_layers: int,
        config: EngineConfig,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        self.groups = groups
        self.num_layers = num_layers
        self.device = device
        self.tokens_per_row = 1 + config.num_speculative_tokens
        kinds = [group.spec.kind for group in groups]
        self.mamba = {
            i: MambaMetadataBuilder(i, group, config, chunk_size, device)
            for i, group in enumerate(groups)
            if kinds[i] == "mamba"
        }
        self.attention = {
            i: AttentionMetadataBuilder(i, group, config, device)
            for i, group in enumerate(groups)
            if kinds[i] == "attention"
        }
        self.token_ids = PersistentBuffer(
            "token_ids",
            config.max_num_seqs * self.tokens_per_row,
            padding=0,
            device=device,
            dtype=torch.int64,
        )

    def build(
        self,
        schedule: Schedule,
        tables: BlockTables,
        state_index: StateIndex,
        num_padded: int | None = None,
    ) -> StepInputs:
        """Inputs of a non-empty schedule whose blocks are already in the tables.

        Args:
            num_padded: pad a step of decode rows to so many, for a graph; None pads nothing.
        """
        rows = StepRows.of(schedule, tables, state_index)
        metadata = self._attention(rows, tables, num_padded)
        accesses: list[StateAccess] = []
        plan = next((builder.plan(rows) for builder in self.mamba.values()), None)
        for i, builder in self.mamba.items():
            assert plan is not None
            of_group, of_rows = builder.update_block_table(plan, tables.tables[i], num_padded)
            accesses += of_rows
            for layer in self.groups[i].layers:
                metadata[layer] = of_group
        ends = rows.query_start_loc[1:].tolist()
        wanted = [
            position
            for row, end in zip(schedule.rows, ends, strict=True)
            if row.samples
            for position in range(end - 1 - row.num_drafts, end)
        ]
        token_ids = torch.tensor([token for row in schedule.rows for token in row.token_ids])
        if num_padded is None:
            token_ids = token_ids.to(self.device, non_blocking=True)
        else:
            token_ids = self.token_ids.refill(token_ids, num_padded * self.tokens_per_row)
        return StepInputs(
            token_ids=token_ids,
            sample_positions=torch.tensor(wanted, dtype=torch.int64).to(self.device),
            metadata=metadata,
            accesses=accesses,
        )

    def padding(self, num_rows: int) -> StepInputs:
        """Inputs of a decode step of rows that nobody has: what a graph is captured on."""
        num_tokens = num_rows * self.tokens_per_row
        metadata: list[LayerMetadata] = [None] * self.num_layers
        for i, group in enumerate(self.groups):
            of_group: LayerMetadata
            if i in self.mamba:
                of_group = self.mamba[i].padding(num_rows)
            else:
                of_group = self.attention[i].padding(num_rows)
            for layer in group.layers:
                metadata[layer] = of_group
        none = torch.zeros(0, dtype=torch.int64)
        return StepInputs(
            token_ids=self.token_ids.refill(none, num_tokens),
            sample_positions=none.to(self.device),
            metadata=metadata,
            accesses=[],
        )

    def attention_for(
        self, request_ids: list[str], starts: list[int], lengths: list[int], tables: BlockTables
    ) -> list[LayerMetadata]:
        """Attention metadata by layer for other rows than the step's: a drafter's.

        Args:
            request_ids: one per row.
            starts: position of each row's first token.
            lengths: tokens of each row.
            tables: the block tables; they have blocks for all of these tokens.
        """
        rows = StepRows(
            request_ids=request_ids,
            num_decodes=0,
            num_computed=torch.tensor(starts),
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
            table_rows=tables.rows(request_ids),
        )
        return self._attention(rows, tables, None)

    def _attention(
        self, rows: StepRows, tables: BlockTables, num_padded: int | None
    ) -> list[LayerMetadata]:
        metadata: list[LayerMetadata] = [None] * self.num_layers
        for i, builder in self.attention.items():
            of_group = builder.build(tables.tables[i], rows, num_padded)
            for layer in self.groups[i].layers:
                metadata[layer] = of_group
        return metadata
