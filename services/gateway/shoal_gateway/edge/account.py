"""What one key has under way and has used on this gateway. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_common.errors import QuotaExceeded

from shoal_gateway.edge.errors import (
    ConcurrencyExceeded,
    InputTokensPerMinute,
    OutputTokensPerMinute,
    RequestsPerMinute,
)
from shoal_gateway.edge.limits import Bucket, Limits, Share

_REVIEW_S = 1.0
"""What running answers have used is looked up this often at most, when someone asks to be admitted."""
_LEAST_WAIT_S = 1.0
_MOST_WAIT_S = 60.0
_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Used:
    """What a request has used so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Charge:
    """One admitted request on the books of its account, from its head to its end."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.is_counted = False
        """Taken from the requests per minute."""
        self.input = 0.0
        self.output = 0.0
        self.used: Callable[[], Used] | None = None
        """Asked while the request runs; None before it does."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit as headers tell it: this gateway's numbers, scaled to all."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Standings:
    """The limits per minute of one key; None where there is no limit."""

    requests: Standing | None
    input: Standing | None
    output: Standing | None


class Account:
    """Admits requests of one key within its limits.

    A request is booked with all it may count: its prompt, and of its output what `reserve` allows for. While it runs,
    and at its end, the booking is replaced by what it really used, cached input at its own weight: given back where it
    was less, and owed where it was more. Input is judged and booked as if nothing of it was cached.
    Invariant: `in_flight` is the number of charges that were entered and not ended, and is at most the share of
    max_concurrency at the moment of each admission.
    """

    def __init__(self, limits: Limits, share: Share, now_s: float) -> None:
        self._limits, self._share = limits, share
        self._requests = _bucket(limits.requests_per_minute, share, now_s)
        self._input = _bucket(limits.input_tokens_per_minute, share, now_s)
        self._output = _bucket(limits.output_tokens_per_minute, share, now_s)
        self._open: set[Charge] = set()
        self._reviewed_s = now_s
        self._mean_s = _LEAST_WAIT_S

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._open)

    @property
    def is_limited(self) -> bool:
        """Some limit per minute is kept."""
        return self._requests is not None or self._input is not None or self._output is not None

    def update(self, limits: Limits, share: Share, now_s: float) -> None:
        """Other limits, or another share of them. What was used keeps its proportion."""
        if (limits, share) == (self._limits, self._share):
            return
        self._requests = _resized(self._requests, limits.requests_per_minute, share, now_s)
        self._input = _resized(self._input, limits.input_tokens_per_minute, share, now_s)
        self._output = _resized(self._output, limits.output_tokens_per_minute, share, now_s)
        self._limits, self._share = limits, share

    def enter(self, now_s: float) -> Charge:
        """A request begins. Raises ConcurrencyExceeded or RequestsPerMinute; then nothing is booked.

        Where tokens are limited too, requests per minute are judged with them: only then is the wait told the whole.
        """
        limit = self._limits.max_concurrency
        if limit is not None and self.in_flight >= self._share.of_slots(limit):
            raise ConcurrencyExceeded(
                f"{self.in_flight} requests of this key are under way; its limit is {limit}",
                retry_after_s=self._next_end_s(),
                limit=limit,
            )
        charge = Charge(now_s)
        if self._input is None and self._output is None:
            for error in self._too_many(now_s):
                raise error
            self._count(charge, now_s)
        self._open.add(charge)
        return charge

    def book(self, charge: Charge, *, input_tokens: int, output_tokens: int, now_s: float) -> None:
        """The request's prompt is known, and how much output to reserve for it.

        Raises the QuotaExceeded that lasts longest; then nothing more is booked.
        """
        self._review(now_s)
        errors: list[QuotaExceeded] = [] if charge.is_counted else self._too_many(now_s)
        limit = self._limits.input_tokens_per_minute
        if self._input is not None and limit is not None:
            if input_tokens > limit:
                raise InputTokensPerMinute(
                    f"the prompt has {input_tokens} tokens, more than this key may send in a minute, {limit}",
                    limit=limit,
                    tokens=input_tokens,
                )
            if wait_s := self._input.wait_s(input_tokens, now_s):
                message = f"this key may send {limit} input tokens per minute; the prompt has {input_tokens}"
                errors.append(InputTokensPerMinute(message, retry_after_s=wait_s, limit=limit, tokens=input_tokens))
        limit = self._limits.output_tokens_per_minute
        if self._output is not None and limit is not None:
            output_tokens = min(output_tokens, limit)
            if wait_s := self._output.wait_s(output_tokens, now_s):
                message = f"this key may use {limit} output tokens per minute; the request reserves {output_tokens}"
                errors.append(OutputTokensPerMinute(message, retry_after_s=wait_s, limit=limit, tokens=output_tokens))
        if errors:
            raise max(errors, key=lambda error: error.retry_after_s or 0.0)
        self._count(charge, now_s)
        self._rebook(charge, input_tokens, output_tokens, now_s)

    def end(self, charge: Charge, used: Used, now_s: float) -> None:
        """The request is over: what it really used stands. Safe to repeat."""
        if charge not in self._open:
            return
        self._open.remove(charge)
        self._count(charge, now_s)
        self._rebook(charge, self._weigh(used), used.output_tokens, now_s)
        self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * max(0.0, now_s - charge.began_s)

    def refuse(self, charge: Charge, now_s: float) -> None:
        """The request is over and nothing was done for it: it counts for nothing. Safe to repeat."""
        if charge not in self._open:
            return
        self._open.remove(charge)
        self._rebook(charge, 0, 0, now_s)
        if self._requests is not None and charge.is_counted:
            self._requests.take(-1, now_s)

    def standings(self, now_s: float) -> Standings:
        """How the limits per minute stand."""
        limits = self._limits
        return Standings(
            self._standing(self._requests, limits.requests_per_minute, now_s),
            self._standing(self._input, limits.input_tokens_per_minute, now_s),
            self._standing(self._output, limits.output_tokens_per_minute, now_s),
        )

    def _too_many(self, now_s: float) -> list[QuotaExceeded]:
        limit = self._limits.requests_per_minute
        if self._requests is None or not (wait_s := self._requests.wait_s(1, now_s)):
            return []
        message = f"this key may send {limit} requests per minute"
        return [RequestsPerMinute(message, retry_after_s=wait_s, limit=limit)]

    def _count(self, charge: Charge, now_s: float) -> None:
        if self._requests is not None and not charge.is_counted:
            self._requests.take(1, now_s)
        charge.is_counted = True

    def _standing(self, bucket: Bucket | None, limit: int | None, now_s: float) -> Standing | None:
        if bucket is None or limit is None:
            return None
        remaining = min(limit, int(bucket.left(now_s) * self._share.count + 1e-6))
        return Standing(limit, remaining, bucket.full_in_s(now_s))

    def _weigh(self, used: Used) -> float:
        cached = min(used.cached_tokens, used.input_tokens)
        return used.input_tokens - cached * (1.0 - self._limits.cached_input_weight)

    def _review(self, now_s: float) -> None:
        """Book what running answers have used beyond their reservation, and give back input that was cached."""
        if now_s - self._reviewed_s < _REVIEW_S or (self._input is None and self._output is None):
            return
        self._reviewed_s = now_s
        for charge in self._open:
            if charge.used is not None:
                used = charge.used()
                self._rebook(charge, self._weigh(used), max(charge.output, used.output_tokens), now_s)

    def _rebook(self, charge: Charge, input_tokens: float, output_tokens: float, now_s: float) -> None:
        if self._input is not None:
            self._input.take(input_tokens - charge.input, now_s)
        if self._output is not None:
            self._output.take(output_tokens - charge.output, now_s)
        charge.input, charge.output = input_tokens, output_tokens

    def _next_end_s(self) -> float:
        """A guess: requests end one after the other, each after the usual time."""
        return min(_MOST_WAIT_S, max(_LEAST_WAIT_S, self._mean_s / max(1, self.in_flight)))


def _bucket(limit: int | None, share: Share, now_s: float) -> Bucket | None:
    return None if limit is None else Bucket(share.of_rate(limit), now_s)


def _resized(bucket: Bucket | None, limit: int | None, share: Share, now_s: float) -> Bucket | None:
    if bucket is None or limit is None:
        return _bucket(limit, share, now_s)
    bucket.resize(share.of_rate(limit), now_s)
    return bucket
