"""How fast waiting requests are served: what a truthful Retry-After stands on."""

from __future__ import annotations

from collections import deque

_KEPT = 64
_WINDOW_S = 30.0
_SHORTEST_S = 1.0
_LONGEST_S = 60.0
_UNKNOWN_S = 5.0


class ServiceRate:
    """The last placements, at most 64, of the last 30 s."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_KEPT)

    def placed(self, now_s: float) -> None:
        """A request was placed."""
        self._times_s.append(now_s)

    def wait_s(self, ahead_count: int, now_s: float) -> float:
        """Seconds until so many requests will have been served, 1 to 60; 5 if nothing was served of late."""
        recent = [at_s for at_s in self._times_s if now_s - at_s <= _WINDOW_S]
        if len(recent) < 2:
            return _UNKNOWN_S
        # From the oldest to now, not to the newest: a stall is part of the rate.
        rate = len(recent) / max(now_s - recent[0], 1e-3)
        return min(max(ahead_count / rate, _SHORTEST_S), _LONGEST_S)
