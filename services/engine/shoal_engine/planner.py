"""How many drafts each choice verifies in a step. Pure. Any answer gives the same tokens; it only changes the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WidthView:
    """What a planner may know of one choice.

    cap          most drafts it can verify: those it has, its remaining tokens, its request's limit
    confidence_logits, margins   of its drafts, see `model_port.Draft`
    is_greedy    its tokens are the likeliest ones
    context      positions in front of its next row
    slot, generation    its state slot, and which holder of that slot it is
    """

    cap: int
    confidence_logits: tuple[float, ...]
    margins: tuple[float, ...] = ()
    is_greedy: bool = False
    context: int = 0
    slot: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """The outcome for one view of the last plan: of its first `width` drafts, the `accepted` first ones were sampled.

    What comes after a token that ends the choice counts like the rest: the model was asked all the same.
    """

    index: int
    width: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step as it was.

    rows         that ran, those of prompts among them
    choices      that verified; context: positions in front of them, summed
    prompt_rows  rows of prompts and of tokens that were rerun
    drafted      choices that drafts were made for afterwards
    step_s       forward and sampling; draft_s: drafting. Seconds
    """

    rows: int
    choices: int
    context: int
    prompt_rows: int
    drafted: int
    step_s: float
    draft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStats:
    """What a planner does now.

    is_planned           widths follow costs and confidences; False: they are fixed
    budget               drafts verified in the last step; width: per choice
    is_drafting, gain    drafting is expected to pay; tokens per second with drafts over those without
    calibration_errors   by mode of sampling: expected calibration error over recent drafts, in [0, 1]
    has_drifted          one of them is above the limit
    costs_measured_at_s  when the table of costs was measured, seconds since 1970; None without one
    is_fallback          widths are fixed because the costs measured here say nothing
    """

    is_planned: bool = False
    budget: int = 0
    width: float = 0.0
    is_drafting: bool = False
    gain: float = 1.0
    calibration_errors: Mapping[str, float] = field(default_factory=dict)
    has_drifted: bool = False
    costs_measured_at_s: float | None = None
    is_fallback: bool = False


class WidthPlanner(Protocol):
    """Chooses verify widths, and whether drafts are made. Asked once before every step, also for no choices."""

    @property
    def max_width(self) -> int:
        """Drafts of a choice at most."""
        ...

    @property
    def draft_width(self) -> int:
        """Drafts to make for each choice after the step that was planned last: at most max_width, 0 makes none."""
        ...

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        """One width per view, each in [0, cap]."""
        ...

    def verified(self, rounds: Sequence[VerifiedRound]) -> None:
        """What became of the drafts of the last plan, of those choices that ran."""
        ...

    def observe(self, step: StepTimes) -> None:
        """How long the last step took."""
        ...

    def stats(self) -> PlannerStats:
        """This moment's numbers."""
        ...


class FixedWidth:
    """Every choice verifies the same number of drafts, as far as it has them."""

    def __init__(self, width: int, *, is_fallback: bool = False) -> None:
        """`is_fallback`: widths should have been planned, see `PlannerStats`."""
        if width < 0:
            raise ValueError(f"verify width must not be negative, got {width}")
        self._width, self._is_fallback = width, is_fallback
        self._budget = self._choices = 0

    @property
    def max_width(self) -> int:
        return self._width

    @property
    def draft_width(self) -> int:
        return self._width

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        widths = [min(self._width, view.cap) for view in views]
        self._budget, self._choices = sum(widths), len(widths)
        return widths

    def verified(self, rounds: Sequence[VerifiedRound]) -> None:
        """A fixed width learns nothing."""

    def observe(self, step: StepTimes) -> None:
        """A fixed width learns nothing."""

    def stats(self) -> PlannerStats:
        width = self._budget / self._choices if self._choices else 0.0
        return PlannerStats(
            budget=self._budget, width=width, is_drafting=self._width > 0, is_fallback=self._is_fallback
        )
