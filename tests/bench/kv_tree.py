"""What a cache of a prefix tree holds, for baselines of eviction: leaves go before what they stand on, sizes differ.

A published policy is about single pages of one size. Three things are different here, for each of them alike: sizes
and targets are in bytes; the entry that a queue gives out is the oldest of those in it on which nothing stands; and
what is used or stored together is queued with the leaf first, since nothing else of a chain can go before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the tree. `parent`: the entry that it stands on, held or not."""

    name: bytes
    parent: bytes
    size_bytes: int


class TreePolicy(Protocol):
    """A cache's choice of what goes. Pure: it is told what happens, and says what to evict."""

    def use(self, names: Sequence[bytes]) -> None:
        """A path that is held is asked for, its first entry first."""
        ...

    def make_room(self, size_bytes: int, coming: Sequence[Item], kept: Collection[bytes]) -> list[bytes]:
        """What goes, in this order, so that `size_bytes` more fit before `coming` is stored; none of `kept`.

        Shorter than asked for where the rest cannot go.
        """
        ...

    def store(self, items: Sequence[Item]) -> None:
        """Entries that were not held are stored, parents first."""
        ...


class Tree:
    """Sizes, and on what nothing stands. Invariant: an entry is a leaf as long as no entry held names it as parent."""

    def __init__(self) -> None:
        self._items: dict[bytes, Item] = {}
        self._children: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._items

    def size_bytes(self, name: bytes) -> int:
        """Of an entry that is held."""
        return self._items[name].size_bytes

    def is_leaf(self, name: bytes) -> bool:
        """Whether it could go now."""
        return not self._children.get(name)

    def add(self, item: Item) -> None:
        """An entry comes."""
        self._items[item.name] = item
        self._children[item.parent] = self._children.get(item.parent, 0) + 1

    def remove(self, name: bytes) -> bytes | None:
        """A leaf goes. Its parent, if that is held and a leaf now."""
        parent = self._items.pop(name).parent
        self._children[parent] -= 1
        if self._children[parent]:
            return None
        del self._children[parent]
        return parent if parent in self._items else None


class LeafQueue:
    """Entries of a tree in order of time, of which leaves are taken, the oldest first.

    Invariant: a leaf that is queued has an element of the heap with its newest number; other elements are stale, or of
    entries on which something stands, and are passed over.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._numbers: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []
        self._next = 0
        self.used_bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._numbers

    def push(self, name: bytes) -> None:
        """It is the newest now, whether it was queued or not."""
        if name not in self._numbers:
            self.used_bytes += self._tree.size_bytes(name)
        self._next += 1
        self._numbers[name] = self._next
        self.offer(name)

    def offer(self, name: bytes) -> None:
        """It may have become a leaf."""
        number = self._numbers.get(name)
        if number is not None and self._tree.is_leaf(name):
            heapq.heappush(self._heap, (number, name))

    def discard(self, name: bytes) -> None:
        """It goes to another queue, or out of the tree: call it before the tree forgets its size."""
        if self._numbers.pop(name, None) is not None:
            self.used_bytes -= self._tree.size_bytes(name)

    def oldest_leaf(self, kept: Collection[bytes]) -> bytes | None:
        """The oldest leaf that is none of `kept`; it stays queued."""
        passed: list[tuple[int, bytes]] = []
        found = None
        while self._heap:
            number, name = self._heap[0]
            if self._numbers.get(name) == number and self._tree.is_leaf(name):
                if name not in kept:
                    found = name
                    break
                passed.append((number, name))
            heapq.heappop(self._heap)
        for one in passed:
            heapq.heappush(self._heap, one)
        return found


class Ghosts:
    """Names and sizes of what went, the oldest first to be forgotten."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self.used_bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def add(self, name: bytes, size_bytes: int) -> None:
        """It has just gone."""
        self.discard(name)
        self._sizes[name] = size_bytes
        self.used_bytes += size_bytes

    def discard(self, name: bytes) -> bool:
        """Forget it; whether it was known."""
        size_bytes = self._sizes.pop(name, None)
        if size_bytes is None:
            return False
        self.used_bytes -= size_bytes
        return True

    def shrink(self, max_bytes: int) -> None:
        """Forget the oldest until the rest is no more than that."""
        while self.used_bytes > max(0, max_bytes):
            self.discard(next(iter(self._sizes)))
