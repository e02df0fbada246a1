"""One manager per kind of layer: which blocks a request holds in one group, and what can be hit.

Attention needs every block from the first token on, so its look-up goes left to right and stops at
the first gap. A Mamba state is the sum of everything before it, so one block is enough, and its look-up
goes right to left: the longest prefix at whose end a state was kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from mamba_teach.cache.block_pool import NULL_BLOCK_ID, BlockKey, BlockPool
from mamba_teach.cache.columns import (
    boundaries,
    first_scheduled_column,
    last_scheduled_column,
)
from mamba_teach.cache.specs import AttentionSpec, LayerSpec, MambaSpec, cdiv

HashList = Sequence[bytes]  # chained hashes of a request's full blocks


class GroupManager:
    """Block tables of all requests in one group.

    Attributes:
        tables: request id -> block ids by column; the null block where nothing is held.
    """

    def __init__(self, group: int, spec: LayerSpec, pool: BlockPool) -> None:
        self.group = group
        self.spec = spec
        self.pool = pool
        self.tables: dict[str, list[int]] = {}

    def longest_hit(self, hashes: HashList, limit: int) -> int:
        """Blocks of the longest prefix, at most ``limit``, that this group can supply."""
        raise NotImplementedError

    def hit_blocks(self, hashes: HashList, num_blocks: int) -> list[int]:
        """The table of a hit of ``num_blocks`` blocks; the null block where none is needed."""
        raise NotImplementedError

    def missing_columns(
        self, request_id: str, n: int, seq_len: int, num_drafts: int, known: int
    ) -> list[int]:
        """Columns that must get a block before tokens ``n .. seq_len - 1`` can be computed.

        Args:
            num_drafts: how many of these tokens are drafts.
            known: tokens to have keys for: those the request has, computed or not, its drafts, and
                those it may draft next.
        """
        raise NotImplementedError

    def prefill_need(self, hit: int, known: int, budget: int, missing: int) -> int:
        """Blocks to have free before a request is let in, so that no later chunk throws it out.

        Args:
            hit: tokens it starts behind.
            known: tokens it has.
            budget: tokens of a chunk at most.
            missing: free blocks that its first chunk takes, for new columns and as hits.
        """
        return missing

    def place(self, request_id: str, columns: Sequence[int], blocks: Sequence[int]) -> None:
        """Put new blocks into a request's columns."""
        table = self.tables.setdefault(request_id, [])
        for column, block in zip(columns, blocks, strict=True):
            table.extend([NULL_BLOCK_ID] * (column + 1 - len(table)))
            assert table[column] == NULL_BLOCK_ID, f"{request_id}: column {column} is taken"
            table[column] = block

    def publish(
        self, request_id: str, hashes: HashList, n: int, n_after: int, num_drafts: int
    ) -> list[tuple[int, int]]:
        """Publish the blocks completed by tokens ``n .. n_after - 1``; they must have been written.

        Args:
            num_drafts: of the step, kept or not.

        Returns:
            *(column, block)* of those that were not known before.
        """
        published = []
        table = self.tables[request_id]
        for end in self.written_boundaries(n, n_after, num_drafts):
            column = end // self.spec.block_size - 1
            block = table[column]
            if block == NULL_BLOCK_ID or self.pool.key_of(block) is not None:
                continue
            if self.pool.publish(block, BlockKey(hashes[column], self.group)):
                published.append((column, block))
        return published

    def written_boundaries(self, n: int, n_after: int, num_drafts: int) -> range:
        """Positions at which tokens ``n .. n_after - 1`` of a step complete a block that is kept."""
        return boundaries(n, n_after, self.spec.block_size)

    def blocks_behind(
        self, request_id: str, n_after: int, seq_len: int, is_decode: bool
    ) -> list[tuple[int, int]]:
        """*(column, block)* of what the request will not need again.

        Args:
            n_after: tokens that are computed now.
            seq_len: tokens up to the end of the step, drafts that were not kept included.
            is_decode: whether the step was one of decode.
        """
        return []

    def drop_columns(self, request_id: str, columns: Sequence[int]) -> None:
        """Replace columns by the null block, without freeing."""
        for column in columns:
            self.tables[request_id][column] = NULL_BLOCK_ID

    def release(self, request_id: str) -> list[int]:
        """Forget a request; returns the blocks it held, the last column first.

        That order makes its tail the first to be evicted, and a prefix the last.
        """
        table = self.tables.pop(request_id, [])
        return [block for block in reversed(table) if block != NULL_BLOCK_ID]


class AttentionManager(GroupManager):
    """Every block from the first token on."""

    spec: AttentionSpec

    def longest_hit(self, hashes: HashList, limit: int) -> int:
        for i, block_hash in enumerate(hashes[:limit]):
            if self.pool.lookup(BlockKey(block_hash, self.group)) is None:
                return i
        return min(limit, len(hashes))

    def hit_blocks(self, hashes: HashList, num_blocks: int) -> list[int]:
        found = [self.pool.lookup(BlockKey(h, self.group)) for h in hashes[:num_blocks]]
        assert None not in found, "a hit was shortened by nobody"
        return [block for block in found if block is not None]

    def missing_columns(
        self, request_id: str, n: int, seq_len: int, num_drafts: int, known: int
    ) -> list[int]:
        # Blocks for all known tokens, not for this chunk alone: a prompt that is let in bit by bit
        # is thrown out half-way.
        held = len(self.tables.get(request_id, []))
        return list(range(held, self.spec.columns_for(known)))


class MambaManager(GroupManager):
    """The running state, and what the mode keeps besides."""

    spec: MambaSpec

    def __init__(self, group: int, spec: MambaSpec, pool: BlockPool) -> None:
        super().__init__(group, spec, pool)
        self._first_held: dict[str, int] = {}  # no column before it holds a block

    def longest_hit(self, hashes: HashList, limit: int) -> int:
        for i in range(min(limit, len(hashes)), 0, -1):
            if self.pool.lookup(BlockKey(hashes[i - 1], self.group)) is not None:
                return i
        return 0

    def hit_blocks(self, hashes: HashList, num_blocks: int) -> list[int]:
        if num_blocks == 0:
            return []
        block = self.pool.lookup(BlockKey(hashes[num_blocks - 1], self.group))
        assert block is not None, "a hit was shortened by nobody"
        return [NULL_BLOCK_ID] * (num_blocks - 1) + [block]

    def missing_columns(
        self, request_id: str, n: int, seq_len: int, num_drafts: int, known: int
    ) -> list[int]:
        last = last_scheduled_column(seq_len, self.spec.block_size)
        # A chunk ends in one column, or passes through all of them in mode "all". A step with drafts
        # may complete any block that it touches, and keeps a state per draft behind the last one.
        # With replay it keeps inputs instead, which need no columns.
        touches = num_drafts > 0 or self.spec.mamba_cache_mode == "all"
        first = first_scheduled_column(n, self.spec.block_size) if touches else last
        table = self.tables.get(request_id, [])
        scratch = num_drafts if self.spec.ring is None else 0
        needed = range(first, last + 1 + scratch)
        return [c for c in needed if c >= len(table) or table[c] == NULL_BLOCK_ID]

    def prefill_need(self, hit: int, known: int, budget: int, missing: int) -> int:
        # A later chunk holds the running state it reads and the columns it writes.
        size, k = self.spec.block_size, self.spec.num_speculative_blocks
        written = cdiv(budget, size) if self.spec.mamba_cache_mode == "all" else 1
        return max(missing, min(1 + written, cdiv(known, size) - hit // size)) + k

    def written_boundaries(self, n: int, n_after: int, num_drafts: int) -> range:
        size = self.spec.block_size
        if self.spec.mamba_cache_mode == "all" or num_drafts:
            return boundaries(n, n_after, size)
        # Only the end of a chunk is kept, and it completes a block only if it lies on the grid.
        return range(n_after, n_after + 1 if n_after % size == 0 else n_after)

    def blocks_behind(
        self, request_id: str, n_after: int, seq_len: int, is_decode: bool
    ) -> list[tuple[int, int]]:
        # The next step reads at this step's last column or behind it, and may complete the block of
        # its own first token, which lies before that column when drafts were not kept.
        size = self.spec.block_size
        keep_from = min(last_scheduled_column(seq_len, size), first_scheduled_column(n_after, size))
        if self.spec.ring is not None and is_decode:
            # The checkpoint may be the last completed block itself.
            keep_from = max(0, min(keep_from, first_scheduled_column(n_after, size) - 1))
        first = self._first_held.get(request_id, 0)
        self._first_held[request_id] = max(first, keep_from)
        table = self.tables[request_id]
        behind = [(column, table[column]) for column in range(first, keep_from)]
        return [(column, block) for column, block in behind if block != NULL_BLOCK_ID]

    def release(self, request_id: str) -> list[int]:
        self._first_held.pop(request_id, None)
        return super().release(request_id)


def make_manager(group: int, spec: LayerSpec, pool: BlockPool) -> GroupManager:
    """The manager for a spec's kind."""
    if isinstance(spec, MambaSpec):
        return MambaManager(group, spec, pool)
    assert isinstance(spec, AttentionSpec)
    return AttentionManager(group, spec, pool)
