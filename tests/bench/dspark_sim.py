"""A decode worker in numbers alone: synthetic step costs, requests of drifting difficulty, and the real planner.

Difficulty follows a slow walk around the mean of the request's domain; requests come and go. What the draft head says
is the true chance with noise and over-confidence. Source: dspark.md section 11.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal_engine.planner import FixedWidth, StepTimes, VerifiedRound, WidthPlanner, WidthView
from shoal_engine.verify import Calibration, CostModel, CostTable, ModeCalibration, PlannedWidth
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.fit import fit_mode
from shoal_engine.verify.rounds import Rounds

WIDTH = 5
TARGET_LAYERS, DRAFT_LAYERS = 43, 3
MOST_ROWS = 8192
WARM_UP_STEPS = 32
_DOMAINS = ((2.35, 0.30), (2.05, 0.35), (0.85, 0.35))  # mean logit of acceptance and share: mathematics, code, chat
_TURNOVER = 0.05
_NOISE, _OVERCONFIDENCE = 0.8, 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Milliseconds of a step: base + slope per row, steeper from the knee on, rows padded to a bucket."""

    name: str
    base: float
    slope: float
    knee: int = MOST_ROWS
    steep: float = 0.0
    bucket: int = 1

    def verify_ms(self, rows: int) -> float:
        """A step of so many rows."""
        padded = -(-rows // self.bucket) * self.bucket
        return self.base + self.slope * padded + max(self.steep - self.slope, 0.0) * max(padded - self.knee, 0)

    def draft_ms(self, choices: int, width: int = WIDTH, layers: int = DRAFT_LAYERS) -> float:
        """A draft pass: some layers of the target's size, and a short serial loop."""
        share = layers / TARGET_LAYERS
        return share * (self.base + self.slope * choices * width) + 0.04 * width

    def table(self, most_choices: int) -> CostTable:
        """What measuring such a machine would give."""
        rows = [1, *range(self.bucket, MOST_ROWS + 1, self.bucket)] if self.bucket > 1 else [1, self.knee, MOST_ROWS]
        counts = (1, max(2, most_choices))
        rows = sorted(set(rows))
        return CostTable(
            rows=tuple(rows),
            step_s=tuple(self.verify_ms(n) / 1e3 for n in rows),
            choices=counts,
            sampler_s=(0.0, 0.0),
            draft_s=tuple(self.draft_ms(n) / 1e3 for n in counts),
            is_staircase=self.bucket > 1,
        )


PROFILES = (
    Profile(name="linear", base=14.0, slope=0.030),
    Profile(name="saturating", base=14.0, slope=0.012, knee=512, steep=0.075),
    Profile(name="heavy", base=8.0, slope=0.060, bucket=64),
)


class Workload:
    """The requests of a closed loop."""

    def __init__(self, seed: int, requests: int) -> None:
        self._random = np.random.default_rng(seed)
        self._requests = requests
        self._mean = self._means(requests)
        self._drift = 0.8 * self._random.normal(size=requests)

    def step(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What the draft head says, float32 [R, WIDTH], and how many drafts the model would accept, int64 [R]."""
        g, shape = self._random, (self._requests, WIDTH)
        is_new = g.uniform(size=self._requests) < _TURNOVER
        self._mean = np.where(is_new, self._means(self._requests), self._mean)
        self._drift = 0.8 * self._drift + 0.48 * g.normal(size=self._requests)
        logits = (self._mean + self._drift)[:, None] + 1.5 * g.normal(size=shape)
        said = logits + _NOISE * g.normal(size=shape) + _OVERCONFIDENCE
        is_right = g.uniform(size=shape) < 1.0 / (1.0 + np.exp(-logits))
        return said.astype(np.float32), np.cumprod(is_right, axis=1).sum(axis=1)

    def _means(self, count: int) -> NDArray[np.float64]:
        means, shares = zip(*_DOMAINS, strict=True)
        return self._random.choice(means, size=count, p=shares)


def calibration(seed: int) -> Calibration:
    """Fitted to the rounds of another loop, as an operator would."""
    loop = Workload(seed, 4000)
    said, accepted = zip(*(loop.step() for _ in range(4)), strict=True)
    logits = np.concatenate(said)
    one: ModeCalibration = fit_mode(Rounds(logits, np.full_like(logits, np.nan), np.concatenate(accepted)))
    return Calibration(draft_id="", width=WIDTH, modes={Mode.SAMPLED: one})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens per second, of all requests and of one; rows a request and step."""

    rate: float
    per_user: float
    rows: float


def run(profile: Profile, requests: int, planner: WidthPlanner, *, seed: int, steps: int) -> Outcome:
    """A loop of some steps under a planner, which learns from them as in an engine; the first steps do not count.

    There every request is new at once, which no load is: a delayed budget takes what it does not know for certain.
    """
    loop = Workload(seed, requests)
    tokens, rows, total_ms, has_drafts = 0, 0, 0.0, False
    for step in range(-WARM_UP_STEPS, steps):
        said, right = loop.step()
        views = [
            WidthView(WIDTH if has_drafts else 0, tuple(row) if has_drafts else (), slot=slot, generation=1)
            for slot, row in enumerate(said.tolist())
        ]
        widths = planner.widths(views)
        planner.verified(
            [VerifiedRound(i, w, min(w, int(a))) for i, (w, a) in enumerate(zip(widths, right, strict=True))]
        )
        step_ms = profile.verify_ms(requests + sum(widths))
        draft_ms = profile.draft_ms(requests) if planner.draft_width else 0.0
        has_drafts = planner.draft_width > 0
        planner.observe(
            StepTimes(
                rows=requests + sum(widths),
                choices=requests,
                context=0,
                prompt_rows=0,
                drafted=requests if has_drafts else 0,
                step_s=step_ms / 1e3,
                draft_s=draft_ms / 1e3,
            )
        )
        if step < 0:
            continue
        tokens += requests + int(np.minimum(right, widths).sum())
        rows += requests + sum(widths)
        total_ms += step_ms + draft_ms
    return Outcome(tokens / total_ms * 1e3, tokens / total_ms * 1e3 / requests, rows / steps / requests)


def run_one_token(profile: Profile, requests: int, *, seed: int, steps: int) -> Outcome:
    """Drafting of one token by one layer, always verified: what the planner is to beat."""
    loop = Workload(seed, requests)
    right = sum(int(np.minimum(loop.step()[1], 1).sum()) for _ in range(WARM_UP_STEPS + steps))
    steps += WARM_UP_STEPS
    total_ms = steps * (profile.verify_ms(2 * requests) + profile.draft_ms(requests, 1, layers=1))
    rate = (steps * requests + right) / total_ms * 1e3
    return Outcome(rate, rate / requests, 2.0)


def planners(profile: Profile, requests: int, fitted: Calibration) -> dict[str, Callable[[], WidthPlanner]]:
    """By name: none, every draft, planned, planned from confidences of the step before last."""

    def planned(is_delayed: bool) -> WidthPlanner:
        costs = CostModel(profile.table(requests), MOST_ROWS)
        return PlannedWidth(WIDTH, costs, calibration=fitted, is_delayed=is_delayed)

    return {
        "none": lambda: FixedWidth(0),
        "fixed 5": lambda: FixedWidth(WIDTH),
        "planned": lambda: planned(False),
        "planned, delayed": lambda: planned(True),
    }


def rate_at_floor(outcomes: Sequence[Outcome], per_user: float) -> float:
    """Tokens per second at a speed per user, between the loads that were run; 0 where no load reaches it."""
    speeds, rates = [one.per_user for one in outcomes], [one.rate for one in outcomes]
    if max(speeds) < per_user:
        return 0.0
    return float(np.interp(-per_user, [-speed for speed in speeds], rates))
