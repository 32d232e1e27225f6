"""S3-FIFO, as a baseline: three queues, a small one that lets go early of what is not used again.

Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. What is new
enters the small queue, a tenth of the cache, unless it went from there lately: then the main one. What was used more
than once by the end of the small queue moves to the main one; the rest goes and is remembered, as many bytes as the
main queue has. At the end of the main queue what was used is queued once more, with one use less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bench.kv_tree import Ghosts, Item, LeafQueue, Tree

_SMALL_SHARE = 0.1
_MAX_USES = 3
_MOVES_FROM_USES = 2


class S3Fifo:
    """A cache of `capacity_bytes`. Invariant: an entry of the tree is in one of the two queues."""

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes = int(_SMALL_SHARE * capacity_bytes)
        self._main_bytes = capacity_bytes - self._small_bytes
        self._tree = Tree()
        self._small, self._main = LeafQueue(self._tree), LeafQueue(self._tree)
        self._gone = Ghosts()
        self._uses: dict[bytes, int] = {}

    def use(self, names: Sequence[bytes]) -> None:
        """See TreePolicy. Nothing moves: only counted."""
        for name in names:
            self._uses[name] = min(_MAX_USES, self._uses[name] + 1)

    def make_room(self, size_bytes: int, coming: Sequence[Item], kept: Collection[bytes]) -> list[bytes]:
        """See TreePolicy."""
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
            self._uses[item.name] = 0
        for name in (item.name for item in reversed(items)):
            (self._main if self._gone.discard(name) else self._small).push(name)

    def _victim(self, kept: Collection[bytes]) -> bytes | None:
        while True:
            small = self._small.oldest_leaf(kept)
            is_full = small is not None and self._small.used_bytes >= self._small_bytes
            main = None if is_full else self._main.oldest_leaf(kept)
            if small is not None and main is None:
                if self._uses[small] < _MOVES_FROM_USES:
                    return small
                self._small.discard(small)
                self._uses[small] = 0
                self._main.push(small)
            elif main is not None and self._uses[main]:
                self._uses[main] -= 1
                self._main.push(main)
            else:
                return main

    def _remove(self, name: bytes) -> None:
        if name in self._small:
            self._gone.add(name, self._tree.size_bytes(name))
            self._gone.shrink(self._main_bytes)
        for queue in (self._small, self._main):
            queue.discard(name)
        del self._uses[name]
        parent = self._tree.remove(name)
        if parent is not None:
            self._small.offer(parent)
            self._main.offer(parent)
