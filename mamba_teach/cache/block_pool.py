"""The pool: block ids, handed out, shared, taken back, and remembered.

Block 0 is the null block. Nobody ever owns it, so a padded or forgotten table entry points at memory
that belongs to nobody. Ids are plain ints: nothing handed out can change behind its owner's back.

A block's life::

    free --allocate--> in use --publish--> in use, known by its hash
     ^                   |                        |  (hits add owners)
     |                  free                     free, by the last owner
     |                   v                        v
     +--- evicted <-- free ............ free but hashed: still hit, until somebody needs the block

Free blocks wait in the order in which they were freed (LRU): those without a hash and those with one
in the same queue, the one freed longest ago is handed out first, and forgets its hash then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

NULL_BLOCK_ID = 0


class BlockKey(NamedTuple):
    """What a published block holds: the prefix (as a chained hash), for which group."""

    block_hash: bytes
    group: int


class BlockPool:
    """Ids ``1 .. num_blocks - 1`` with reference counts and an index of published blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2, for block 0 is the null block")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._owners: dict[int, int] = {}  # reference counts of blocks in use
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, hashed ones included."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Free blocks, the next to be handed out first."""
        return list(self._free)

    def num_owners(self, block: int) -> int:
        return self._owners.get(block, 0)

    def key_of(self, block: int) -> BlockKey | None:
        """What the block is published as, or None."""
        return self._key_of.get(block)

    def lookup(self, key: BlockKey) -> int | None:
        """The block that holds ``key``, or None. Changes nothing; :meth:`touch` makes it one's own."""
        return self._block_of.get(key)

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Hand out ``count`` blocks.

        Returns:
            The blocks, and those among them that had to forget their hash (*evicted*).

        Raises:
            RuntimeError: fewer are free; callers ask ``num_free`` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        evicted = [block for block in blocks if self._forget(block)]
        self._owners.update(dict.fromkeys(blocks, 1))
        return blocks, evicted

    def touch(self, block: int) -> None:
        """Become an owner of a published block, in use or free.

        Raises:
            RuntimeError: the block is not published; its content is unknown.
        """
        if block not in self._key_of:
            raise RuntimeError(f"block {block} is taken as a hit but not published")
        self._free.pop(block, None)
        self._owners[block] = self._owners.get(block, 0) + 1

    def publish(self, block: int, key: BlockKey) -> bool:
        """Make a block in use known as ``key``.

        Returns False, and changes nothing, if another block already is: one key, one block.

        Raises:
            RuntimeError: nobody owns the block, or it is published as something else.
        """
        if block not in self._owners:
            raise RuntimeError(f"block {block} is published but not in use")
        if self._block_of.get(key) is not None:
            return self._block_of[key] == block
        if block in self._key_of:
            raise RuntimeError(f"block {block} is published twice, as different prefixes")
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def free(self, blocks: Iterable[int]) -> None:
        """Give up ownership; a block whose last owner leaves goes to the end of the queue.

        Raises:
            RuntimeError: a block is not in use: it was freed twice, or never handed out.
        """
        for block in blocks:
            if block not in self._owners:
                raise RuntimeError(f"block {block} is freed but not in use")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                del self._owners[block]
                self._free[block] = None

    def reset(self) -> list[int]:
        """Forget all hashes; blocks in use stay in use. Returns the blocks that were published."""
        published = list(self._key_of)
        for block in published:
            self._forget(block)
        return published

    def _forget(self, block: int) -> bool:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        return key is not None
