"""Whether to draft at all: where even the best budget cannot pay for the draft pass, plain steps are run."""

from __future__ import annotations

PROBE_STEPS = 64
"""While the gate is closed, one step in so many drafts, to notice when the load or the text changes."""
_NEWEST_WEIGHT = 0.3
_DOUBT = 4.0
"""What was known before counts like so many choices against one step's."""


class DraftGate:
    """Open while drafting is expected to pay, by an average over past steps. Source: dspark.md 5.3 and 11.3."""

    def __init__(self, probe_steps: int = PROBE_STEPS) -> None:
        if probe_steps < 1:
            raise ValueError(f"probe_steps must be positive, got {probe_steps}")
        self._probe_steps = probe_steps
        self._gain: float | None = None
        self._is_stale = False
        self._closed_steps = 0

    @property
    def gain(self) -> float:
        """Expected tokens per second with drafts over those without; 1 before the first step with drafts."""
        return 1.0 if self._gain is None else self._gain

    @property
    def is_open(self) -> bool:
        """Whether drafting pays, as far as is known."""
        return self._gain is None or self._gain > 1.0

    def note(self, drafted_rate: float, plain_rate: float, choices: int) -> None:
        """Expected tokens per second of one step of so many choices: with drafts and what they cost, and without any.

        The figure of few choices is mostly chance, so it counts for less.
        """
        newest = drafted_rate / plain_rate
        weight = choices / (choices + _DOUBT)
        if not self._is_stale:
            weight = min(weight, _NEWEST_WEIGHT)
        self._gain = newest if self._gain is None else (1 - weight) * self._gain + weight * newest
        self._is_stale = False

    def forget(self) -> None:
        """What was noted is of choices that are gone: probe at once, and let that count for all that it tells."""
        self._is_stale = True
        self._closed_steps = self._probe_steps - 1

    def take_step(self) -> bool:
        """Count one step and say whether drafts are made after it."""
        if self.is_open:
            self._closed_steps = 0
            return True
        self._closed_steps += 1
        return self._closed_steps % self._probe_steps == 0
