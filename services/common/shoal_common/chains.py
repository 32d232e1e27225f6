"""The hash chain of one token stream, extended as it grows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_common.identity import BLOCK_TOKENS, block_hash


class HashChain:
    """Hashes of the full blocks of a prompt and of what follows it.

    Invariant: `hashes` are those of the first len(hashes) blocks of the tokens given so far.
    """

    def __init__(self, root: bytes, token_ids: Sequence[int] = ()) -> None:
        """root: 32 bytes, the parent of the first block."""
        self._root = root
        self._rest: list[int] = []
        self.hashes: list[bytes] = []
        self.extend(token_ids)

    @property
    def token_count(self) -> int:
        """Tokens given so far."""
        return len(self.hashes) * BLOCK_TOKENS + len(self._rest)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More tokens came."""
        known = [*self._rest, *token_ids]
        # By offset: cutting blocks off the front would copy a long prompt once per block.
        begin = 0
        while begin + BLOCK_TOKENS <= len(known):
            self.hashes.append(block_hash(self.parent_of(len(self.hashes)), known[begin : begin + BLOCK_TOKENS]))
            begin += BLOCK_TOKENS
        self._rest = known[begin:]

    def parent_of(self, block_index: int) -> bytes:
        """Hash of the block before `block_index`: the root for the first."""
        return self.hashes[block_index - 1] if block_index else self._root

    def fork(self) -> HashChain:
        """A copy that grows on its own."""
        other = HashChain(self._root)
        other.hashes, other._rest = list(self.hashes), list(self._rest)
        return other
