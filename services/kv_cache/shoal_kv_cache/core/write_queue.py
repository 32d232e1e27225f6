"""What waits to be written to a slower tier: in order, bounded in bytes, each thing once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class WriteQueue(Generic[T]):
    """First in, first out. Invariant: the sizes of what waits sum up to `queued_bytes` <= `max_bytes`.

    What would go over the bound is refused and counted, the newest first: a parent, offered before what stands on it,
    is never thrown away for its child.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.queued_bytes = 0
        self.dropped_count = 0
        self._waiting: OrderedDict[T, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: T, size_bytes: int) -> bool:
        """Queues an item; True also if it waits already. False: no room."""
        if item in self._waiting:
            return True
        if self.queued_bytes + size_bytes > self.max_bytes:
            self.dropped_count += 1
            return False
        self._waiting[item] = size_bytes
        self.queued_bytes += size_bytes
        return True

    def take(self, max_bytes: int, max_count: int) -> list[T]:
        """The oldest items, together at most `max_bytes` but at least one if any waits."""
        taken: list[T] = []
        size = 0
        while self._waiting and len(taken) < max_count:
            item, item_bytes = next(iter(self._waiting.items()))
            if taken and size + item_bytes > max_bytes:
                break
            del self._waiting[item]
            size += item_bytes
            taken.append(item)
        self.queued_bytes -= size
        return taken

    def clear(self) -> None:
        """Forgets all."""
        self._waiting.clear()
        self.queued_bytes = 0
