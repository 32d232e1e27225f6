"""Which KV cache node holds which blocks and snapshots. A hint: the nodes themselves know the truth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shoal_scheduler.core.requests import BLOCK_TOKENS


class PrefixIndex:
    """Holders per short hash, as one bit per node.

    Invariant: at most `max_entries` hashes of blocks and as many of snapshots; past that the longest untouched goes. A
    bit that is set belongs to a node that was added and not forgotten.
    """

    def __init__(self, *, max_entries: int) -> None:
        self._max_entries = max_entries
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._snapshots: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self.dropped_count = 0
        """Entries that went for the bound."""

    def __len__(self) -> int:
        return len(self._blocks) + len(self._snapshots)

    def add_node(self, node_id: str) -> None:
        """A node exists; it holds nothing yet. Safe to repeat."""
        if node_id not in self._bits:
            taken = sum(self._bits.values())
            # The lowest bit that nobody has: masks stay as short as the fleet is small.
            self._bits[node_id] = ~taken & (taken + 1)

    def forget_node(self, node_id: str) -> None:
        """A node is gone with all it held. Safe to repeat."""
        self.clear(node_id)
        self._bits.pop(node_id, None)

    def clear(self, node_id: str) -> None:
        """A node holds nothing any more."""
        bit = self._bits.get(node_id, 0)
        if not bit:
            return
        for table in (self._blocks, self._snapshots):
            for key in [key for key, mask in table.items() if mask & bit]:
                _unset(table, key, bit)

    def stored(self, node_id: str, blocks: Iterable[int], snapshots: Iterable[int]) -> None:
        """A node holds more."""
        bit = self._bits[node_id]
        for table, keys in ((self._blocks, blocks), (self._snapshots, snapshots)):
            for key in keys:
                table[key] = table.get(key, 0) | bit
                table.move_to_end(key)
                if len(table) > self._max_entries:
                    table.popitem(last=False)
                    self.dropped_count += 1

    def removed(self, node_id: str, blocks: Iterable[int], snapshots: Iterable[int]) -> None:
        """A node holds less."""
        bit = self._bits[node_id]
        for table, keys in ((self._blocks, blocks), (self._snapshots, snapshots)):
            for key in keys:
                _unset(table, key, bit)

    def held(self, node_id: str) -> tuple[set[int], set[int]]:
        """What a node holds by all we know: hashes of blocks and of snapshots."""
        bit = self._bits.get(node_id, 0)
        blocks, snapshots = (
            {key for key, mask in table.items() if mask & bit} for table in (self._blocks, self._snapshots)
        )
        return blocks, snapshots

    def hits(self, chain: Sequence[int], max_hit_tokens: int) -> Mapping[str, int]:
        """Per node the tokens that it can spare a prefill: blocks from 0 on without a gap and a snapshot at their end.

        chain            short hashes of the prompt's full blocks, from position 0
        max_hit_tokens   a hit reaches no further
        Nodes with no hit are not listed.
        """
        best: dict[int, int] = {}
        alive = -1
        for index, key in enumerate(chain[: max(0, max_hit_tokens) // BLOCK_TOKENS]):
            alive &= self._blocks.get(key, 0)
            if not alive:
                break
            for bit in _bits_of(alive & self._snapshots.get(key, 0)):
                best[bit] = (index + 1) * BLOCK_TOKENS
            self._blocks.move_to_end(key)
        return {node_id: best[bit] for node_id, bit in self._bits.items() if bit in best}

    def hit_of_all(self, chain: Sequence[int], max_hit_tokens: int) -> int:
        """Tokens that all nodes together can spare a prefill: each block and the snapshot at any of them."""
        best = 0
        for index, key in enumerate(chain[: max(0, max_hit_tokens) // BLOCK_TOKENS]):
            if not self._blocks.get(key, 0):
                break
            if self._snapshots.get(key, 0):
                best = (index + 1) * BLOCK_TOKENS
        return best


def _unset(table: OrderedDict[int, int], key: int, bit: int) -> None:
    mask = table.get(key)
    if mask is None:
        return
    if mask & ~bit:
        table[key] = mask & ~bit
    else:
        del table[key]


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
