"""Limits per minute and in number, and this gateway's share of them. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0
_SLACK = 1e-9
"""Of a bucket's size: what a sum of floats may be off after a wait that was exactly long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one key may use, over all gateways. None: as much as it likes.

    cached_input_weight   what an input token counts whose KV came from the cache, 0 to 1
    """

    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    cached_input_weight: float = 1.0


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Share:
    """This gateway's part of every limit: it is number `index` (from 0) of `count` live ones."""

    index: int = 0
    count: int = 1

    def of_rate(self, limit: int) -> float:
        """Of a limit per minute."""
        return limit / self.count

    def of_slots(self, limit: int) -> int:
        """Of a limit in number: the shares add up to it. At least 1: a key must be served wherever it comes."""
        return max(1, limit // self.count + (self.index < limit % self.count))


class Bucket:
    """A limit per minute: holds one minute's worth, is filled evenly, and is taken from when something is admitted.

    What is larger than a full bucket goes when it is full, and those after it wait off the debt.
    Invariant: if everyone asks `wait_s` first, at most size + t / 60 * per_minute + (the largest amount) is taken in
    any t seconds; the level never exceeds the size.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        """Full. `per_minute` is positive."""
        self._size = self._level = per_minute
        self._at_s = now_s

    def resize(self, per_minute: float, now_s: float) -> None:
        """Another limit from now on; what is left or owed keeps its proportion to it."""
        self._refill(now_s)
        if per_minute != self._size:
            self._level *= per_minute / self._size
            self._size = per_minute

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until `amount` may be taken if nobody else takes anything; 0: now."""
        self._refill(now_s)
        missing = min(amount, self._size) - self._level
        return missing / self._rate if missing > self._size * _SLACK else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Book it, down to a debt. A negative amount gives back."""
        self._refill(now_s)
        self._level = min(self._size, self._level - amount)

    def left(self, now_s: float) -> float:
        """What may be taken now, never negative."""
        self._refill(now_s)
        return max(0.0, self._level)

    def full_in_s(self, now_s: float) -> float:
        """When nothing that was taken counts any more."""
        self._refill(now_s)
        return (self._size - self._level) / self._rate

    @property
    def _rate(self) -> float:
        return self._size / MINUTE_S

    def _refill(self, now_s: float) -> None:
        # A clock that jumped back adds nothing.
        self._level = min(self._size, self._level + self._rate * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)
