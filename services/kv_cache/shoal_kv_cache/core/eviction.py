"""Which entry goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from shoal_kv_cache.core.entries import Key


class LeastRecentlyUsed:
    """Entries in order of last use. Leaves go before parents: an entry that something else stands on is passed over."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def touch(self, key: Key) -> None:
        """`key` is used now; it may be new."""
        self._order[key] = None
        self._order.move_to_end(key)

    def forget(self, key: Key) -> None:
        """`key` is gone."""
        self._order.pop(key, None)

    def next(self, can_go: Callable[[Key], bool]) -> Key | None:
        """The least recently used entry that can go, or None."""
        return next((key for key in self._order if can_go(key)), None)
