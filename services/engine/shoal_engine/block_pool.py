"""KV blocks of one engine, shared by reference count."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_engine.errors import OutOfBlocks

BLOCK_TOKENS = 128
"""Tokens in a block, in every model."""

NULL_BLOCK = 0
"""Block id that is never a sequence's."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that `num_tokens` positions from 0 on touch."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """Block ids 1 .. block_count. Invariant: free blocks and blocks with a reference partition these ids."""

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError(f"block_count must be positive, got {block_count}")
        self.block_count = block_count
        # Low ids go out first and come back last-in first-out: a small working set stays in the caches.
        self._free = list(range(block_count, NULL_BLOCK, -1))
        self._references = [0] * (block_count + 1)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocks, then takes nothing."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free", wanted=count, free=len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less; a block without any is free again."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def references(self, block: int) -> int:
        """How many tables hold this block."""
        return self._references[block]
