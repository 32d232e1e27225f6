"""Keeps each choice of an engine below the limit that its reader granted. Used by two threads under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_decode_worker.engine_like import STEP_TOKENS
from shoal_decode_worker.generation import GenerationStart
from shoal_decode_worker.ledger import MAX_UNACKNOWLEDGED

SetPaused = Callable[[str, int, bool], None]
"""Pauses (True) or resumes a choice of a request, by the engine's name of the request."""


class _Choice:
    __slots__ = ("is_paused", "limit", "next_index")

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        self.limit = next_index + MAX_UNACKNOWLEDGED
        self.is_paused = False

    @property
    def must_pause(self) -> bool:
        return self.next_index + STEP_TOKENS > self.limit


class Flow:
    """Invariant: a choice that runs has room for one more step below its limit; any other is paused.

    The engine's thread tells what was emitted and pauses before its next step; the event loop grants and resumes.
    """

    def __init__(self, set_paused: SetPaused) -> None:
        self._set_paused = set_paused
        self._lock = threading.Lock()
        self._choices: dict[str, list[_Choice]] = {}

    def opened(self, key: str, start: GenerationStart) -> None:
        """A request is about to be admitted."""
        with self._lock:
            self._choices[key] = [_Choice(len(one.output_ids)) for one in start.choices]

    def closed(self, key: str) -> None:
        """It is over. Safe to repeat."""
        with self._lock:
            self._choices.pop(key, None)

    def emitted(self, key: str, choice_index: int, next_index: int) -> None:
        """A choice has tokens below `next_index`; it is paused if another step could pass its limit."""
        with self._lock:
            choice = self._find(key, choice_index)
            if choice is not None:
                choice.next_index = next_index
                self._settle(key, choice_index, choice)

    def grant(self, key: str, choice_index: int, limit: int) -> None:
        """A choice may emit indices below `limit`."""
        with self._lock:
            choice = self._find(key, choice_index)
            if choice is not None and limit > choice.limit:
                choice.limit = limit
                self._settle(key, choice_index, choice)

    def _find(self, key: str, choice_index: int) -> _Choice | None:
        choices = self._choices.get(key)
        return choices[choice_index] if choices is not None else None

    def _settle(self, key: str, choice_index: int, choice: _Choice) -> None:
        if choice.must_pause != choice.is_paused:
            choice.is_paused = choice.must_pause
            self._set_paused(key, choice_index, choice.is_paused)
