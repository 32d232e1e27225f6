"""How much of what confidences promise comes true on the present requests."""

from __future__ import annotations

_KEPT = 0.98  # of what is known, per step: fifty steps count
_PRIOR = 20.0  # drafts that are taken to have come true as expected
_LEAST, _MOST = 0.1, 1.5


class OutcomeRatio:
    """Accepted over expected drafts of the last steps; 1 before any.

    A calibration holds for the texts that it was fitted on. Others are all a bit better or worse: this one number moves
    with them at once, long before `DriftWatch` can tell that a new calibration is due.
    """

    def __init__(self) -> None:
        self._accepted = self._expected = _PRIOR

    @property
    def value(self) -> float:
        """What to multiply expectations by."""
        return min(max(self._accepted / self._expected, _LEAST), _MOST)

    def note(self, expected: float, accepted: int) -> None:
        """The verified drafts of a step: the sum of their chances, and how many were accepted."""
        self._accepted = _KEPT * (self._accepted - _PRIOR) + accepted + _PRIOR
        self._expected = _KEPT * (self._expected - _PRIOR) + expected + _PRIOR
