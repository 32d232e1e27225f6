"""How long a tier takes to load, by what was measured lately."""

from __future__ import annotations

_MEMORY = 0.8
"""Weight of what was known before at each new measurement: the last ten decide."""
_GUESS_S = 0.05
"""Seconds of loading that the first guess is worth."""


class LoadRate:
    """Latency and throughput of one tier. Begins with a guess: the first caller is not refused for ignorance."""

    def __init__(self, *, bytes_per_s: float, latency_s: float) -> None:
        self._seconds, self._bytes = _GUESS_S, bytes_per_s * _GUESS_S
        self._latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """Throughput, latency aside."""
        return self._bytes / self._seconds

    def observed(self, size_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        moving_s = max(seconds - self._latency_s, 1e-6)
        # By time, not by call: a thousand small loads would outvote the large one that matters.
        self._seconds = _MEMORY * self._seconds + moving_s
        self._bytes = _MEMORY * self._bytes + size_bytes

    def estimate_s(self, size_bytes: int) -> float:
        """Seconds that a load of so many bytes should take; 0 for nothing."""
        return self._latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0
