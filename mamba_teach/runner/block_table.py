"""Block tables as tensors: one row per running request, one table per group.

A request keeps its row for as long as it runs; nobody is moved when a neighbour leaves. A step picks
the rows it needs, in its own order, so no per-row number can end up with the wrong request by being
read before or after a move.
"""

from __future__ import annotations

import torch

from mamba_teach.cache.block_pool import NULL_BLOCK_ID
from mamba_teach.cache.coordinator import TableUpdates
from mamba_teach.cache.groups import CacheGroup


class BlockTables:
    """``(max_num_seqs, width)`` int32 per group; entries that hold nothing are the null block.

    Attributes:
        tables: one per group, on the host.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], max_num_seqs: int, max_model_len: int
    ) -> None:
        self.tables = [
            torch.full(
                (max_num_seqs, group.spec.columns_for(max_model_len)),
                NULL_BLOCK_ID,
                dtype=torch.int32,
            )
            for group in groups
        ]
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def apply(self, updates: TableUpdates) -> None:
        """Bring the tables up to date: clear rows of requests that left, then write entries."""
        for request_id in updates.cleared:
            if (row := self._row_of.pop(request_id, None)) is not None:
                for table in self.tables:
                    table[row] = NULL_BLOCK_ID
                self._free_rows.append(row)
        for group, table in enumerate(self.tables):
            entries = [
                (self._row_for(request_id), column, block)
                for request_id, of_group, column, block in updates.writes
                if of_group == group
            ]
            if entries:
                row, column, block = torch.tensor(entries).T
                table[row, column] = block.int()

    def rows(self, request_ids: list[str]) -> torch.Tensor:
        """Row numbers of requests, ``(len(request_ids),)`` int64, in the order asked for."""
        return torch.tensor([self._row_of[r] for r in request_ids], dtype=torch.int64)

    def _row_for(self, request_id: str) -> int:
        if request_id not in self._row_of:
            self._row_of[request_id] = self._free_rows.pop()
        return self._row_of[request_id]
