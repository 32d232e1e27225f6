"""What a flush reaches although it is still under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What a flush drops: all that matches every field given. No field: everything."""

    kv_id: str | None = None
    tenant_tag: bytes | None = None

    def matches(self, kv_id: str, tenant_tag: bytes) -> bool:
        """Whether a group is meant."""
        return self.kv_id in (None, kv_id) and self.tenant_tag in (None, tenant_tag)


class FlushEpochs:
    """Numbers flushes. Work notes the number at its begin and asks before it makes anything visible.

    Invariant: what was begun before a flush that matches it is stale from that flush on. A filter keeps its newest
    number only, and past `max_filters` of them the oldest become one flush of everything: too much is stale then, never
    too little.
    """

    def __init__(self, *, max_filters: int = 1024) -> None:
        self.now = 0
        self._max_filters = max_filters
        self._newest: dict[Filter, int] = {}

    def flush(self, one: Filter) -> int:
        """A flush begins: work begun before it is stale. Returns its number."""
        self.now += 1
        self._newest.pop(one, None)
        self._newest[one] = self.now
        if len(self._newest) > self._max_filters:
            oldest = next(known for known in self._newest if known != Filter())
            self._newest[Filter()] = max(self._newest.pop(oldest), self._newest.get(Filter(), 0))
        return self.now

    def is_stale(self, begun: int, kv_id: str, tenant_tag: bytes) -> bool:
        """Whether work of a group that was begun at number `begun` must not be kept."""
        if begun >= self.now:
            return False
        return any(number > begun and one.matches(kv_id, tenant_tag) for one, number in self._newest.items())
