"""The planner: drafts are verified where they pay, by the cost of rows and the chance of each draft."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_engine.planner import PlannerStats, StepTimes, VerifiedRound, WidthView
from shoal_engine.verify.agreement import BudgetAgreement, OneRank, StepIntent
from shoal_engine.verify.allocate import allocate
from shoal_engine.verify.budget import budget
from shoal_engine.verify.calibration import Calibration, Mode
from shoal_engine.verify.cost import CostModel
from shoal_engine.verify.drift import ALARM_ABOVE, DriftWatch
from shoal_engine.verify.gate import DraftGate
from shoal_engine.verify.outcome import OutcomeRatio
from shoal_engine.verify.relay import ConfidenceRelay
from shoal_engine.verify.survival import survival

logger = logging.getLogger(__name__)

BUDGET_AGE = 2
"""Steps that a delayed budget lies behind: a device that runs ahead needs the next step's size before this one ends."""
_TELL_EVERY = 64  # steps with drafts
_NONE = np.zeros(0, dtype=np.int64)


class PlannedWidth:
    """A `WidthPlanner`: gate, budget, allocation. Tokens never depend on what it decides.

    Rows of prompts in the same step do not enter: they run once, whatever is verified beside them, and a long step
    would make any draft look cheap.

    width        drafts made and verified for each choice at most
    costs        of steps
    calibration  of the draft head; None takes its word as it is
    is_delayed   the budget comes from the confidences of the step before last, the allocation from this step's
    agreement    with the ranks that step together
    costs_measured_at_s    seconds since 1970, to be told
    """

    def __init__(
        self,
        width: int,
        costs: CostModel,
        *,
        calibration: Calibration | None = None,
        is_delayed: bool = False,
        agreement: BudgetAgreement | None = None,
        gate: DraftGate | None = None,
        costs_measured_at_s: float | None = None,
    ) -> None:
        if width < 1:
            raise ValueError(f"a planner needs at least one draft, got {width}")
        if calibration is not None and calibration.width < width:
            raise ValueError(f"the calibration has {calibration.width} draft positions, {width} wanted")
        self._width = width
        self._costs = costs
        calibration = calibration or Calibration(draft_id="", width=width)
        self._calibrations = {mode: calibration.of(mode) for mode in Mode}
        self._costs_measured_at_s = costs_measured_at_s
        self._relay = ConfidenceRelay(BUDGET_AGE) if is_delayed else None
        self._rates: deque[tuple[float, float, int] | None] = deque(maxlen=1 + BUDGET_AGE if is_delayed else 1)
        self._closed_over: set[tuple[int, int]] | None = None
        self._agreement = agreement or OneRank()
        self._gate = gate or DraftGate()
        self._outcome = OutcomeRatio()
        self._watches = {mode: DriftWatch() for mode in Mode}
        self._alarmed: set[Mode] = set()
        self._until_told = _TELL_EVERY
        self._chances = np.zeros((0, width), dtype=np.float32)
        self._is_greedy = np.zeros(0, dtype=np.bool_)
        self._draft_width = width
        self._budget = self._choices = 0

    @property
    def max_width(self) -> int:
        return self._width

    @property
    def draft_width(self) -> int:
        return self._draft_width

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        choices = len(views)
        caps = np.array([view.cap for view in views], dtype=np.int64)
        wanted = self._wanted(views, caps)
        self._follow_choices(views)
        is_drafting = self._gate.take_step() if choices else self._gate.is_open
        intent = StepIntent(choices + wanted, self._width if is_drafting else 0)
        agreed = self._agreement.agree(intent)
        self._draft_width = min(agreed.draft_width, self._width)
        widths = allocate(self._chances, agreed.rows - choices)
        self._budget, self._choices = int(widths.sum()), choices
        found: list[int] = widths.tolist()
        return found

    def _wanted(self, views: Sequence[WidthView], caps: NDArray[np.int64]) -> int:
        """Drafts that pay in this step. The chances of all are kept, and the gate is told."""
        choices = len(views)
        if not caps.any():
            self._chances = np.zeros((choices, self._width), dtype=np.float32)
            if self._relay is not None:
                self._relay.note(_NONE, _NONE, self._chances[:0])
            self._note_gain(None)
            return 0
        confidences = self._confidences(views)
        self._chances = survival(confidences, caps)
        expected = self._chances if self._relay is None else survival(self._earlier(views, caps, confidences), caps)
        count = max(int(np.count_nonzero(expected)), int(np.count_nonzero(self._chances)))
        ratio = np.float32(self._outcome.value)
        context = sum(view.context for view in views)
        costs = self._costs.costs(choices, count, choices=choices, context=context, drafted=choices)
        best = budget(expected * ratio, choices, costs)
        # A probe is for its confidences: what a delayed budget knows of them is nothing yet.
        wanted = best.drafts if self._relay is None or self._gate.is_open else 0
        if self._relay is not None:
            best = budget(self._chances * ratio, choices, costs)
        self._note_gain((best.rate, choices / (float(costs[0]) - self._costs.draft_s(choices)), choices))
        return wanted

    def observe(self, step: StepTimes) -> None:
        self._costs.observe(step)

    def verified(self, rounds: Sequence[VerifiedRound]) -> None:
        if not rounds:
            return
        rounds = [one for one in rounds if one.width]
        if not rounds:
            self._outcome.note(0.0, 0)
            return
        index = np.array([one.index for one in rounds])
        draft = np.arange(self._width)
        is_verified = draft < np.array([one.width for one in rounds])[:, None]
        hits = draft < np.array([one.accepted for one in rounds])[:, None]
        chances, is_greedy = self._chances[index], self._is_greedy[index]
        self._outcome.note(float(chances[is_verified].sum()), int((hits & is_verified).sum()))
        for mode, watch in self._watches.items():
            mine = is_verified & (is_greedy == (mode is Mode.GREEDY))[:, None]
            watch.note(chances[mine], hits[mine])
        self._until_told -= 1
        if not self._until_told:
            self._until_told = _TELL_EVERY
            for mode, watch in self._watches.items():
                self._tell(mode, watch)

    def stats(self) -> PlannerStats:
        return PlannerStats(
            is_planned=True,
            budget=self._budget,
            width=self._budget / self._choices if self._choices else 0.0,
            is_drafting=self._gate.is_open,
            gain=self._gate.gain,
            calibration_errors={mode.value: watch.error for mode, watch in self._watches.items()},
            has_drifted=bool(self._alarmed),
            costs_measured_at_s=self._costs_measured_at_s,
        )

    def _note_gain(self, rates: tuple[float, float, int] | None) -> None:
        """Tell the gate, as many steps later as confidences come late."""
        self._rates.append(rates)
        known = self._rates[0] if len(self._rates) == self._rates.maxlen else None
        if known is not None:
            self._gate.note(*known)

    def _follow_choices(self, views: Sequence[WidthView]) -> None:
        """A gate that was closed over other choices than these says nothing of them."""
        if self._gate.is_open:
            self._closed_over = None
            return
        now = {(view.slot, view.generation) for view in views}
        if self._closed_over is None:
            self._closed_over = now
        elif now and self._closed_over.isdisjoint(now):
            self._gate.forget()
            self._rates.clear()
            self._closed_over = now

    def _confidences(self, views: Sequence[WidthView]) -> NDArray[np.float32]:
        """float32 [R, S], calibrated; 1 where the head said nothing."""
        logits = _padded([view.confidence_logits for view in views], self._width)
        margins = _padded([view.margins for view in views], self._width)
        self._is_greedy = np.array([view.is_greedy for view in views], dtype=np.bool_)
        if self._is_greedy.all() or not self._is_greedy.any():
            mode = Mode.GREEDY if self._is_greedy.any() else Mode.SAMPLED
            return self._calibrations[mode].confidences(logits, margins)
        greedy, sampled = (self._calibrations[mode].confidences(logits, margins) for mode in Mode)
        return np.where(self._is_greedy[:, None], greedy, sampled)

    def _earlier(
        self, views: Sequence[WidthView], caps: NDArray[np.int64], confidences: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Of the step before last; what others had where a choice had no drafts then."""
        assert self._relay is not None, "asked of a delayed budget only"
        slots = np.array([view.slot for view in views], dtype=np.int64)
        generations = np.array([view.generation for view in views], dtype=np.int64)
        found = self._relay.oldest(slots, generations, self._width)
        known = caps > 0
        self._relay.note(slots[known], generations[known], confidences[known])
        return found

    def _tell(self, mode: Mode, watch: DriftWatch) -> None:
        """Log when the alarm goes on or off."""
        is_alarmed = watch.is_alarmed
        if is_alarmed == (mode in self._alarmed):
            return
        fields = {"mode": mode.value, "error": round(watch.error, 4), "limit": ALARM_ABOVE}
        if is_alarmed:
            self._alarmed.add(mode)
            logger.warning("draft confidences have drifted from what is accepted", extra=fields)
        else:
            self._alarmed.discard(mode)
            logger.info("draft confidences fit again", extra=fields)


def _padded(rows: Sequence[tuple[float, ...]], width: int) -> NDArray[np.float32]:
    """float32 [R, width], NaN behind the end of each row."""
    missing = (float("nan"),) * width
    full = [row if len(row) == width else (*row[:width], *missing[len(row) :]) for row in rows]
    return np.array(full, dtype=np.float32).reshape(len(rows), width)
