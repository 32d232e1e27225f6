"""ARC, as a baseline: it learns how much to give to what was used once, and how much to what was used again.

Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4, with bytes for pages: a
remembered entry that comes again moves the target by its size, times how much longer the other list of remembered ones
is. A put makes room for all of its entries at once: the target moves for all of them first. Where the list that is
to shrink has no leaf that can go, the other one does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bench.kv_tree import Ghosts, Item, LeafQueue, Tree


class Arc:
    """A cache of `capacity_bytes`. Invariant: an entry of the tree is in one of the two lists, and not remembered."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._tree = Tree()
        self._once, self._again = LeafQueue(self._tree), LeafQueue(self._tree)
        self._gone_once, self._gone_again = Ghosts(), Ghosts()
        self._target = 0.0

    def use(self, names: Sequence[bytes]) -> None:
        """See TreePolicy."""
        for name in reversed(names):
            self._once.discard(name)
            self._again.push(name)

    def make_room(self, size_bytes: int, coming: Sequence[Item], kept: Collection[bytes]) -> list[bytes]:
        """See TreePolicy."""
        for item in coming:
            self._learn(item)
        gone: list[bytes] = []
        while size_bytes > 0 and (name := self._victim(kept)) is not None:
            size_bytes -= self._tree.size_bytes(name)
            self._remove(name)
            gone.append(name)
        return gone

    def store(self, items: Sequence[Item]) -> None:
        """See TreePolicy."""
        for item in items:
            self._tree.add(item)
        for name in (item.name for item in reversed(items)):
            is_known = self._gone_once.discard(name) or self._gone_again.discard(name)
            (self._again if is_known else self._once).push(name)
        self._trim()

    def _learn(self, item: Item) -> None:
        once, again = self._gone_once, self._gone_again
        if item.name in once:
            step = item.size_bytes * max(1.0, again.used_bytes / once.used_bytes)
            self._target = min(self._target + step, float(self._capacity_bytes))
        elif item.name in again:
            step = item.size_bytes * max(1.0, once.used_bytes / again.used_bytes)
            self._target = max(self._target - step, 0.0)

    def _victim(self, kept: Collection[bytes]) -> bytes | None:
        once, again = self._once.oldest_leaf(kept), self._again.oldest_leaf(kept)
        if once is not None and (again is None or self._once.used_bytes > self._target):
            return once
        return again

    def _remove(self, name: bytes) -> None:
        gone = self._gone_once if name in self._once else self._gone_again
        gone.add(name, self._tree.size_bytes(name))
        for queue in (self._once, self._again):
            queue.discard(name)
        parent = self._tree.remove(name)
        if parent is not None:
            self._once.offer(parent)
            self._again.offer(parent)

    def _trim(self) -> None:
        """What was used once, held and remembered, is at most the capacity; all together at most twice that."""
        self._gone_once.shrink(self._capacity_bytes - self._once.used_bytes)
        held = self._once.used_bytes + self._again.used_bytes
        self._gone_again.shrink(2 * self._capacity_bytes - held - self._gone_once.used_bytes)
