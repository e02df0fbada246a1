"""The coordinator: one request, all groups, one answer.

Groups differ in what they keep, but a request can only start from a position that *every* group can
supply. The coordinator finds that position, allocates all or nothing, publishes what a step has
really written, and gives back what no later step will read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mamba_teach import events
from mamba_teach.cache.block_hash import first_parent, hash_block
from mamba_teach.cache.block_pool import NULL_BLOCK_ID, BlockPool
from mamba_teach.cache.groups import CacheGroup
from mamba_teach.cache.managers import make_manager
from mamba_teach.request import Request


@dataclass
class TableUpdates:
    """What changed in the block tables, for whoever keeps a copy of them. To be applied in order.

    Attributes:
        cleared: requests that lost their rows; before everything else.
        writes: *(request id, group, column, block)*; the null block where one was given back.
        unowned: blocks that were handed out or given up: what they hold means nothing any more.
    """

    cleared: list[str] = field(default_factory=list)
    writes: list[tuple[str, int, int, int]] = field(default_factory=list)
    unowned: list[int] = field(default_factory=list)


class CacheCoordinator:
    """Block tables of all requests in all groups, over one pool.

    Attributes:
        groups: in the order in which tables are kept.
        pool: owners and published blocks.
        managers: one per group.
        caches_prefixes: whether blocks are published and looked up.
        num_lookahead_tokens: tokens behind a step for which a drafter with keys needs blocks.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        caches_prefixes: bool,
        emit: Callable[[events.Event], None],
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.groups = groups
        self.pool = BlockPool(num_blocks)
        self.managers = [make_manager(i, g.spec, self.pool) for i, g in enumerate(groups)]
        self.caches_prefixes = caches_prefixes
        self.num_lookahead_tokens = num_lookahead_tokens
        self._emit = emit
        self._updates = TableUpdates()

    @property
    def block_size(self) -> int:
        """Tokens per block of all groups, where prefixes are cached."""
        return self.managers[0].spec.block_size

    def max_blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds at most, all groups together."""
        return sum(group.spec.max_blocks_for(num_tokens) for group in self.groups)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's table in every group; the null block where it holds none."""
        return [list(manager.tables.get(request_id, [])) for manager in self.managers]

    def find_hit(self, request: Request) -> int:
        """Tokens of the longest prefix that every group can supply, in whole blocks.

        At least one token is left to compute: without it there would be no logits.
        """
        if not self.caches_prefixes:
            return 0
        hashes = self._hashes(request)
        block_size = self.block_size
        length = (request.num_tokens - 1) // block_size
        while True:  # each group can only shorten it, so this ends
            agreed = length
            for manager in self.managers:
                agreed = manager.longest_hit(hashes, agreed)
            if agreed == length:
                return length * block_size
            length = agreed

    def admit(self, request: Request, hit: int, num_tokens: int, budget: int) -> bool:
        """Give a request its hit blocks and blocks for its first ``num_tokens`` tokens behind them.

        Returns False, and changes nothing, if the pool has too few for these or for a later chunk of
        up to ``budget`` tokens: a request that is let in and thrown out half-way helps nobody.
        """
        rid = request.request_id
        hits = [
            manager.hit_blocks(self._hashes(request), hit // self.block_size)
            if hit
            else []
            for manager in self.managers
        ]
        for manager, blocks in zip(self.managers, hits, strict=True):
            manager.tables[rid] = list(blocks)
        touched = [block for blocks in hits for block in blocks if block != NULL_BLOCK_ID]
        missing = self._missing(request, hit, hit + num_tokens, 0)
        needed = 0
        for manager, blocks, columns in zip(self.managers, hits, missing, strict=True):
            # A hit block that waits in the free list is no longer free once it is touched.
            waiting = sum(b != NULL_BLOCK_ID and self.pool.num_owners(b) == 0 for b in blocks)
            needed += manager.prefill_need(
                hit, request.num_tokens, budget, waiting + len(columns)
            )
        if needed > self.pool.num_free:
            for manager in self.managers:
                del manager.tables[rid]
            return False
        for block in touched:
            self.pool.touch(block)  # before allocating, which could take them
        for group, blocks in enumerate(hits):
            writes = [(rid, group, c, b) for c, b in enumerate(blocks) if b != NULL_BLOCK_ID]
            self._updates.writes += writes
        if hit:
            held = tuple(tuple(blocks) for blocks in hits)
            self._emit(events.PrefixHit(rid, hit, held))
        self._allocate(request, missing)
        return True

    def allocate(self, request: Request, n: int, seq_len: int, num_drafts: int = 0) -> bool:
        """Blocks for tokens ``n .. seq_len - 1``, the last ``num_drafts`` of which are drafts.

        Returns False, and changes nothing, if the pool has too few.
        """
        missing = self._missing(request, n, seq_len, num_drafts)
        if sum(map(len, missing)) > self.pool.num_free:
            return False
        self._allocate(request, missing)
        return True

    def _missing(
        self, request: Request, n: int, seq_len: int, num_drafts: int
    ) -> list[list[int]]:
        """Columns that tokens ``n .. seq_len - 1`` need and the request does not have, by group."""
        # A drafter writes keys of the tokens that it guesses, behind those of this step.
        ahead = request.num_tokens + num_drafts + self.num_lookahead_tokens
        known = max(request.num_tokens, min(ahead, request.max_computed_tokens))
        return [
            manager.missing_columns(request.request_id, n, seq_len, num_drafts, known)
            for manager in self.managers
        ]

    def _allocate(self, request: Request, missing: list[list[int]]) -> None:
        rid = request.request_id
        for manager, columns in zip(self.managers, missing, strict=True):
            if not columns:
                continue
            blocks, evicted = self.pool.allocate(len(columns))
            for block in evicted:
                self._emit(events.BlockEvicted(block))
            manager.place(rid, columns, blocks)
            self._updates.unowned += blocks
            self._updates.writes += [
                (rid, manager.group, c, b) for c, b in zip(columns, blocks, strict=True)
            ]
            self._emit(
                events.BlocksAllocated(rid, manager.group, tuple(columns), tuple(blocks))
            )

    def commit(
        self,
        request: Request,
        n: int,
        n_after: int,
        seq_len: int,
        num_drafts: int,
        is_decode: bool,
    ) -> None:
        """Publish full blocks and give back those behind.

        Args:
            request: whose known tokens include all that were computed.
            n: tokens computed before the step.
            n_after: tokens computed now; those up to here count.
            seq_len: end of the step, drafts that were not kept included.
            num_drafts: of the step.
            is_decode: whether it was one of decode.
        """
        rid = request.request_id
        for manager in self.managers:
            if self.caches_prefixes:
                hashes = self._hashes(request)
                for column, block in manager.publish(rid, hashes, n, n_after, num_drafts):
                    self._emit(events.BlockPublished(rid, manager.group, column, block))
            if behind := manager.blocks_behind(rid, n_after, seq_len, is_decode):
                columns = [column for column, _ in behind]
                blocks = [block for _, block in behind]
                manager.drop_columns(rid, columns)
                self._updates.writes += [(rid, manager.group, c, NULL_BLOCK_ID) for c in columns]
                self._give_back(blocks)
                self._emit(
                    events.BlocksFreed(rid, manager.group, tuple(columns), tuple(blocks))
                )

    def release(self, request_id: str) -> None:
        """Take everything from a request. Published blocks stay known until they are needed."""
        blocks = [block for manager in self.managers for block in manager.release(request_id)]
        if blocks:
            self._updates.writes = [w for w in self._updates.writes if w[0] != request_id]
            self._updates.cleared.append(request_id)
            self._give_back(blocks)
            self._emit(events.RequestReleased(request_id, tuple(blocks)))

    def reset(self) -> None:
        """Forget all published blocks; running requests go on."""
        published = self.pool.reset()
        self._updates.unowned += [b for b in published if self.pool.num_owners(b) == 0]
        self._emit(events.CacheReset())

    def drain_updates(self) -> TableUpdates:
        """Changes since the last call."""
        updates, self._updates = self._updates, TableUpdates()
        return updates

    def _give_back(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self._updates.unowned += [
            b for b in blocks if self.pool.num_owners(b) == 0 and self.pool.key_of(b) is None
        ]

    def _hashes(self, request: Request) -> list[bytes]:
        """Chained hashes of the full blocks of all known tokens; kept on the request."""
        block_size = self.block_size
        hashes = request.block_hashes
        while (len(hashes) + 1) * block_size <= request.num_tokens:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else first_parent(request.cache_salt)
            hashes.append(hash_block(parent, request.tokens(start, start + block_size)))
        return hashes
