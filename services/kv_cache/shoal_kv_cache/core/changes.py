"""What an operation changed, for the tiers and for the event stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_kv_cache.core.entries import Key


@dataclass(slots=True)
class Changes:
    """Collects over several operations; the caller settles it before the next await.

    stored       became visible, parents first: events
    removed      stopped being visible: events
    freed_slabs  first slabs of payloads that nobody reads any more: give them and what is chained to them back
    freed_ssd    copies on disk that count no more: tell the SSD tier to remove them
    """

    stored: list[Key] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)
    freed_slabs: list[int] = field(default_factory=list)
    freed_ssd: list[tuple[Key, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.freed_slabs or self.freed_ssd)
