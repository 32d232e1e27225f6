"""What an operation changed, for the tier and for the event stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_kv_cache.core.entries import Entry, Key


@dataclass(slots=True)
class Changes:
    """Keys that became visible or stopped being so, and locations that nobody needs any more."""

    stored: list[Key] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)
    freed: list[Entry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.freed)
