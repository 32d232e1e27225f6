"""Which flushes a node knows of, so that one that was away hears of those it missed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_kv_cache.core.flush_epochs import Filter


@dataclass(frozen=True, slots=True)
class FlushRecord:
    """One flush by the name that it has on every node. `is_done`: nothing of it is left to do here."""

    flush_id: str
    what: Filter
    is_done: bool = False


class FlushLog:
    """Records in the order in which this node heard of them; the oldest go past `max_records`.

    No time is in it: a node that hears of a flush that it does not know was away or cut off when it was given, and then
    drops what it holds of it now. That may be more than was meant, never less.

    Invariant: what a log has dropped is covered by `has_forgotten`: who knows none of the records that are left may
    have missed some of those, and drops everything.
    """

    def __init__(self, records: Sequence[FlushRecord] = (), *, has_forgotten: bool = False, max_records: int = 1024):
        self.has_forgotten = has_forgotten
        self._max_records = max_records
        self._records: dict[str, FlushRecord] = {}
        for one in records:
            self.note(one.flush_id, one.what, is_done=one.is_done)

    def __contains__(self, flush_id: str) -> bool:
        return flush_id in self._records

    @property
    def records(self) -> Sequence[FlushRecord]:
        """Oldest first."""
        return list(self._records.values())

    def note(self, flush_id: str, what: Filter, *, is_done: bool) -> None:
        """A flush begins here, or is done. One that is done stays so until it is begun again."""
        known = self._records.get(flush_id)
        if known is not None:
            # What another meant by this name must not be lost.
            what = what if what == known.what else Filter()
        self._records[flush_id] = FlushRecord(flush_id, what, is_done)
        while len(self._records) > self._max_records:
            oldest = next((one for one in self._records.values() if one.is_done), None)
            if oldest is None:
                # One that is not done must not be forgotten: the next one stands for both.
                oldest, second = list(self._records.values())[:2]
                self._records[second.flush_id] = replace(second, what=Filter())
            del self._records[oldest.flush_id]
            self.has_forgotten = True

    def unfinished(self) -> Sequence[FlushRecord]:
        """Begun, and not known to be done."""
        return [one for one in self._records.values() if not one.is_done]

    def digest(self) -> bytes:
        """The same for logs that know the same flushes."""
        return hashlib.sha256(b"".join(one.encode() + b"\0" for one in sorted(self._records))).digest()

    def missed(self, theirs: Sequence[FlushRecord], *, has_forgotten: bool) -> Sequence[FlushRecord]:
        """What another node knows and this one does not, to be done here; `theirs` oldest first."""
        unknown = [FlushRecord(one.flush_id, one.what) for one in theirs if one.flush_id not in self._records]
        shared = next((n for n, one in enumerate(theirs) if one.flush_id in self._records), None)
        if shared is None:
            return [replace(one, what=Filter()) if has_forgotten else one for one in unknown]
        # Those before the first one that both know may be what this log has forgotten: they were done.
        return unknown[shared:] if self.has_forgotten else unknown
