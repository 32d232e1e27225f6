"""Leases that have ended: their ids ride on the next Acquire, or go by themselves soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

RELEASE_AFTER_S = 0.1
_MAX_RIDING = 64


class ReleaseQueue:
    """Ids by node. Invariant: an id that was added is taken once, after RELEASE_AFTER_S at the latest."""

    def __init__(self, release: Callable[[str, Sequence[str]], None], *, after_s: float = RELEASE_AFTER_S) -> None:
        """release: ends leases of the node at an address, for those that no Acquire took in time."""
        self._release, self._after_s = release, after_s
        self._waiting: dict[str, list[str]] = {}
        self._due_s: dict[str, float] = {}
        self._timed: set[str] = set()

    def add(self, address: str, lease_ids: Sequence[str]) -> None:
        """These have ended."""
        if not lease_ids:
            return
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(address)
        if waiting is None:
            waiting = self._waiting[address] = []
            self._due_s[address] = loop.time() + self._after_s
        waiting += lease_ids
        if len(waiting) >= _MAX_RIDING:
            self._flush(address)
        elif address not in self._timed:
            self._timed.add(address)
            loop.call_later(self._after_s, self._look, address)

    def take(self, address: str) -> list[str]:
        """All of a node, for an Acquire that is about to go there; `add` them again if it fails."""
        return self._waiting.pop(address, [])

    def flush(self) -> None:
        """Release what waits, now."""
        for address in list(self._waiting):
            self._flush(address)

    def _look(self, address: str) -> None:
        # Most leases ride, so one timer is left to run instead of one being made and cancelled for each.
        self._timed.discard(address)
        if address not in self._waiting:
            return
        loop = asyncio.get_running_loop()
        left_s = self._due_s[address] - loop.time()
        if left_s <= 0:
            self._flush(address)
        else:
            self._timed.add(address)
            loop.call_later(left_s, self._look, address)

    def _flush(self, address: str) -> None:
        lease_ids = self.take(address)
        if lease_ids:
            self._release(address, lease_ids)
