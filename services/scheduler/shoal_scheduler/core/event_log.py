"""The events of one KV cache node: put in order, doubles dropped, gaps found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChange:
    """One event of a node, hashes shortened. `is_cleared`: everything before it is gone."""

    number: int
    stored_blocks: Sequence[int] = ()
    removed_blocks: Sequence[int] = ()
    stored_snapshots: Sequence[int] = ()
    removed_snapshots: Sequence[int] = ()
    is_cleared: bool = False


class EventLog:
    """Gives the events of a node in the order of their numbers, each once.

    Invariant: what was given out are the events 1 .. `number`, or a list of all that is held as of some number and the
    events after it. While something is missing, later events wait, at most `max_waiting`; what is thrown away then is a
    gap like any other, closed by the next list.
    """

    def __init__(self, *, max_waiting: int) -> None:
        self.number = 0
        self._max_waiting = max_waiting
        self._waiting: dict[int, KvChange] = {}
        self._is_listed = False

    @property
    def needs_list(self) -> bool:
        """Only a list of all that the node holds helps."""
        return not self._is_listed or bool(self._waiting)

    def take(self, change: KvChange) -> Sequence[KvChange]:
        """An event came. Returns those that are next in order."""
        if change.number <= self.number:
            return ()
        self._waiting[change.number] = change
        if len(self._waiting) > self._max_waiting:
            # The oldest: a list will be newer than these.
            del self._waiting[min(self._waiting)]
        return self._ready()

    def listed(self, number: int) -> Sequence[KvChange] | None:
        """A list as of `number` came. Returns the events to apply on top; None if our view is exact and newer."""
        self._is_listed = True
        if number < self.number:
            return None
        self.number = number
        self._waiting = {key: value for key, value in self._waiting.items() if key > number}
        return self._ready()

    def doubt(self) -> None:
        """Events may have been missed without a trace, as over a lost connection: ask for a list."""
        self._is_listed = False

    def _ready(self) -> Sequence[KvChange]:
        ready = []
        while (change := self._waiting.pop(self.number + 1, None)) is not None:
            self.number += 1
            ready.append(change)
        return ready
