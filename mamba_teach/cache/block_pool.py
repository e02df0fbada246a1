"""The pool: block ids, handed out and taken back.

Block 0 is the null block. Nobody ever owns it, so a padded or forgotten table entry points at memory
that belongs to nobody. Ids are plain ints: nothing handed out can change behind its owner's back.
"""

from __future__ import annotations

from collections import deque

NULL_BLOCK_ID = 0


class BlockPool:
    """Ids ``1 .. num_blocks - 1``; the one freed longest ago is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2, for block 0 is the null block")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks.

        Raises:
            RuntimeError: fewer are free; callers ask ``num_free`` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._in_use.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back.

        Raises:
            RuntimeError: a block is not in use: it was freed twice, or never handed out.
        """
        for block in blocks:
            if block not in self._in_use:
                raise RuntimeError(f"block {block} is freed but not in use")
            self._in_use.remove(block)
            self._free.append(block)
