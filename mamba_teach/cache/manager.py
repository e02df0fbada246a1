"""The cache manager: every request's blocks, in every group.

A request grows by tokens; this class turns that into blocks. It is all or nothing: a request either
gets what it needs in *every* group, or nothing changes.
"""

from __future__ import annotations

from mamba_teach.cache.block_pool import BlockPool
from mamba_teach.cache.groups import CacheGroup


class CacheManager:
    """Block tables of all requests over one pool.

    Attributes:
        groups: in the order in which tables are kept and returned.
        pool: the free list.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: int) -> None:
        self.groups = groups
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[list[int]]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds, all groups together."""
        return sum(group.spec.blocks_for(num_tokens) for group in self.groups)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's block ids, one list per group; empty lists if it holds none."""
        return [list(table) for table in self._tables.get(request_id, [[] for _ in self.groups])]

    def allocate(self, request_id: str, num_tokens: int) -> list[list[int]] | None:
        """Grow a request to ``num_tokens`` tokens.

        Returns:
            The new block ids, one list per group, or None if the pool has too few; then nothing
            has changed.
        """
        held = self._tables.get(request_id, [[] for _ in self.groups])
        missing = [
            max(0, group.spec.blocks_for(num_tokens) - len(table))
            for group, table in zip(self.groups, held, strict=True)
        ]
        if sum(missing) > self.pool.num_free:
            return None
        new = [self.pool.allocate(count) for count in missing]
        for table, blocks in zip(held, new, strict=True):
            table.extend(blocks)
        self._tables[request_id] = held
        return new

    def free(self, request_id: str) -> list[int]:
        """Give back all blocks of a request, the last ones first; none if it holds none."""
        tables = self._tables.pop(request_id, [])
        blocks = [block for table in tables for block in reversed(table)]
        self.pool.free(blocks)
        return blocks
