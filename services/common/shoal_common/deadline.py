"""How much time is left. Remaining time travels between processes, never a point of a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal_common.errors import DeadlineExceeded

HOP_MARGIN_S = 0.02
"""Kept back on each hop, so that the caller hears the callee's answer before its own time is up."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the caller's monotonic clock, in seconds; infinite for streams that live as long as their peers."""

    at_s: float

    @classmethod
    def after(cls, seconds: float, *, now_s: float) -> Deadline:
        """`seconds` from `now_s` on."""
        return cls(now_s + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """No limit: for streams that have beats instead."""
        return cls(math.inf)

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - now_s)

    def pass_on_s(self, now_s: float, *, at_most_s: float = math.inf, margin_s: float = HOP_MARGIN_S) -> float:
        """Seconds to give to a callee: what is left less the margin, at most `at_most_s`. Raises DeadlineExceeded."""
        left = self.at_s - now_s - margin_s
        if left <= 0:
            raise DeadlineExceeded(
                f"{self.remaining_s(now_s):.3f} s left, a call needs more than {margin_s:.3f} s",
                remaining_s=f"{self.remaining_s(now_s):.3f}",
                margin_s=margin_s,
            )
        return min(left, at_most_s)
