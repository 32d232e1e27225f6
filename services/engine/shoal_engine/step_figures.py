"""Moving averages over the steps of one engine."""

from __future__ import annotations

from collections.abc import Sequence

_NEWEST_WEIGHT = 0.1


class StepFigures:
    """Averages in which the newest step weighs a tenth; 0 before the first step of their kind."""

    def __init__(self) -> None:
        self.step_time_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.accept_length = 0.0
        self.verify_width = 0.0
        self._steps = self._prefill_steps = self._decode_steps = 0

    def note(self, rows: int, seconds: float, *, has_prompt_rows: bool) -> None:
        """A step of `rows` rows took so long."""
        self._steps += 1
        self.step_time_s = _average(self.step_time_s, seconds, self._steps)
        if has_prompt_rows and seconds > 0:
            self._prefill_steps += 1
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, rows / seconds, self._prefill_steps)

    def note_drafts(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Verified and accepted drafts of each choice of a step."""
        if accepted:
            self._decode_steps += 1
            self.verify_width = _average(self.verify_width, sum(verified) / len(verified), self._decode_steps)
            self.accept_length = _average(self.accept_length, sum(accepted) / len(accepted), self._decode_steps)


def _average(old: float, new: float, count: int) -> float:
    return new if count <= 1 else old + _NEWEST_WEIGHT * (new - old)
