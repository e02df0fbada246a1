"""Block tables as tensors: one row per running request, one table per group.

A request keeps its row for as long as it runs; nobody is moved when a neighbour leaves. A step picks
the rows it needs, in its own order, so no per-row number can end up with the wrong request by being
read before or after a move.
"""

from __future__ import annotations

import torch

from mamba_teach.cache.block_pool import NULL_BLOCK_ID
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.scheduler import Schedule


class BlockTables:
    """``(max_num_seqs, width)`` int32 per group; unused entries are the null block.

    Attributes:
        tables: one per group, on the host.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], max_num_seqs: int, max_model_len: int
    ) -> None:
        self.tables = [
            torch.full(
                (max_num_seqs, group.spec.blocks_for(max_model_len)), NULL_BLOCK_ID,
                dtype=torch.int32,
            )
            for group in groups
        ]  # fmt: skip
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._filled: dict[str, list[int]] = {}  # entries in use, per group

    def apply(self, schedule: Schedule) -> None:
        """Bring the tables up to a schedule: clear rows of freed requests, append new blocks."""
        for request_id in schedule.freed:
            if (row := self._row_of.pop(request_id, None)) is not None:
                for table in self.tables:
                    table[row] = NULL_BLOCK_ID
                self._free_rows.append(row)
                del self._filled[request_id]
        for request_id, new_blocks in schedule.new_blocks.items():
            if request_id not in self._row_of:
                self._row_of[request_id] = self._free_rows.pop()
                self._filled[request_id] = [0] * len(self.tables)
            row, filled = self._row_of[request_id], self._filled[request_id]
            for group, blocks in enumerate(new_blocks):
                start, stop = filled[group], filled[group] + len(blocks)
                self.tables[group][row, start:stop] = torch.tensor(blocks, dtype=torch.int32)
                filled[group] = stop

    def rows(self, request_ids: list[str]) -> torch.Tensor:
        """Row numbers of requests, ``(len(request_ids),)`` int64, in the order asked for."""
        return torch.tensor([self._row_of[r] for r in request_ids], dtype=torch.int64)
