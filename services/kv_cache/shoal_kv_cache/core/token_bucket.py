"""A limit on bytes per second."""

from __future__ import annotations


class TokenBucket:
    """Says how long to wait before bytes may move; the clock is the caller's.

    Invariant: if every caller waits as told, at most b + bytes_per_s * t bytes begin to move in any t seconds, where b
    is the burst or, if larger, the largest piece: that one goes when the bucket is full, and those after it wait off
    its debt.
    """

    def __init__(self, bytes_per_s: float, *, burst_bytes: float, now_s: float) -> None:
        """bytes_per_s: 0 for no limit."""
        self._rate, self._burst = bytes_per_s, burst_bytes
        self._level = burst_bytes
        self._at_s = now_s

    def take(self, size_bytes: int, now_s: float) -> float:
        """Books `size_bytes` and returns the seconds to wait first."""
        if not self._rate:
            return 0.0
        # A clock that jumped back adds nothing.
        self._level = min(self._burst, self._level + self._rate * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)
        wait_s = max(0.0, min(float(size_bytes), self._burst) - self._level) / self._rate
        self._level -= size_bytes
        return wait_s
