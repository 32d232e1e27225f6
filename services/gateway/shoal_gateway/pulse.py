"""Whether a worker still lives, from its beats alone. Pure: time is an argument."""

from __future__ import annotations

SILENCE_S = 4.0
"""Without a beat for so long a worker counts as stopped."""
STANDSTILL_S = 60.0
"""With runnable requests and no step for so long a worker counts as hung."""


class Pulse:
    """Beats of one worker over one stream. Before the first beat nothing is known, so nothing is judged."""

    def __init__(self, *, silence_s: float = SILENCE_S, standstill_s: float = STANDSTILL_S) -> None:
        self._silence_s, self._standstill_s = silence_s, standstill_s
        self._heard_at_s: float | None = None
        self._step = -1
        self._stepped_at_s = 0.0
        self._runnable_count = 0

    def heard(self, now_s: float) -> None:
        """Anything came from the worker."""
        self._heard_at_s = now_s

    def beat(self, step: int, runnable_count: int, now_s: float) -> None:
        """A beat came: steps since the worker started, and how many of our requests could run."""
        self._heard_at_s = now_s
        # A worker that just got work is given the whole time, however long it stood idle.
        if step != self._step or self._runnable_count == 0:
            self._step, self._stepped_at_s = step, now_s
        self._runnable_count = runnable_count

    def excuse(self, now_s: float) -> None:
        """The listener itself did not run for a while: beats may be waiting unread."""
        if self._heard_at_s is not None:
            self._heard_at_s = now_s

    def reset(self) -> None:
        """The stream is over; judge nothing until the next one's first beat."""
        self._heard_at_s = None
        self._runnable_count = 0

    def verdict(self, now_s: float) -> str | None:
        """What is wrong, for people; None while all is well."""
        if self._heard_at_s is None:
            return None
        silent_s = now_s - self._heard_at_s
        if silent_s > self._silence_s:
            return f"no beat for {silent_s:.1f} s"
        standing_s = now_s - self._stepped_at_s
        if self._runnable_count > 0 and standing_s > self._standstill_s:
            return f"no step for {standing_s:.1f} s with {self._runnable_count} runnable requests"
        return None
