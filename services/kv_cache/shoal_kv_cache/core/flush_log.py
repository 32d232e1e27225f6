"""Which flushes a node knows of, so that one that was away hears of those it missed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_kv_cache.core.flush_epochs import Filter

_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class FlushRecord:
    """One flush by the name that it has on every node. `is_done`: nothing of it is left to do here."""

    flush_id: str
    what: Filter
    is_done: bool = False


class FlushLog:
    """Records in the order in which this node heard of them; the oldest go past `max_records`, their names stay.

    No time is in it: a node that hears of a flush that it does not know was away or cut off when it was given, and then
    drops what it holds of it now. That may be more than was meant, never less.

    Invariants: what a log has dropped is covered by `has_forgotten`: who does not know the oldest record that is left
    may have missed some of those, and drops everything. What a log has dropped itself it knows by name, the last
    `max_names` of them, and takes what is older for missed: what it does not know was never done here, or long ago.
    """

    def __init__(
        self,
        records: Sequence[FlushRecord] = (),
        *,
        forgotten: Sequence[bytes] = (),
        has_forgotten: bool = False,
        max_records: int = 1024,
        max_names: int = 8192,
    ):
        """forgotten: names of dropped records, 16 bytes each, the oldest first."""
        self.has_forgotten = has_forgotten
        self._max_records, self._max_names = max_records, max_names
        self._records: dict[str, FlushRecord] = {}
        self._forgotten = dict.fromkeys(forgotten)
        for one in records:
            self.note(one.flush_id, one.what, is_done=one.is_done)

    def __contains__(self, flush_id: str) -> bool:
        return flush_id in self._records

    @property
    def records(self) -> Sequence[FlushRecord]:
        """Oldest first."""
        return list(self._records.values())

    @property
    def forgotten(self) -> Sequence[bytes]:
        """Names of what was dropped, oldest first."""
        return list(self._forgotten)

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
            self._forgotten[_name(oldest.flush_id)] = None
            if len(self._forgotten) > self._max_names:
                del self._forgotten[next(iter(self._forgotten))]

    def unfinished(self) -> Sequence[FlushRecord]:
        """Begun, and not known to be done."""
        return [one for one in self._records.values() if not one.is_done]

    def digest(self) -> bytes:
        """The same for logs that know the same flushes."""
        return hashlib.sha256(b"".join(one.encode() + b"\0" for one in sorted(self._records))).digest()

    def missed(self, theirs: Sequence[FlushRecord], *, has_forgotten: bool) -> Sequence[FlushRecord]:
        """What another node knows and this one does not, to be done here; `theirs` oldest first."""
        unknown = [FlushRecord(one.flush_id, one.what) for one in theirs if not self._knows(one.flush_id)]
        if has_forgotten and unknown and unknown[0].flush_id == theirs[0].flush_id:
            return [replace(one, what=Filter()) for one in unknown]
        return unknown

    def _knows(self, flush_id: str) -> bool:
        return flush_id in self._records or _name(flush_id) in self._forgotten


def _name(flush_id: str) -> bytes:
    return hashlib.sha256(flush_id.encode()).digest()[:_NAME_BYTES]
