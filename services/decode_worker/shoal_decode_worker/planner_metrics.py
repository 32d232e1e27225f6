"""What the planner of drafts does, as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from shoal_common.telemetry import Metrics
from shoal_engine.planner import PlannerStats

_MODES = ("greedy", "sampled")


def register_planner_metrics(metrics: Metrics, read: Callable[[], PlannerStats]) -> None:
    """Read at each scrape, on any thread."""
    figures: dict[str, tuple[str, Callable[[PlannerStats], float]]] = {
        "decode_draft_budget": ("Drafts verified in the last step, all choices together", lambda p: p.budget),
        "decode_drafting": ("1 while drafting is expected to pay, 0 while steps are plain", lambda p: p.is_drafting),
        "decode_draft_gain_ratio": ("Expected tokens per second with drafts over those without", lambda p: p.gain),
        "decode_planned": ("1 where costs and confidences decide how many drafts are verified", lambda p: p.is_planned),
        "decode_flat_costs": ("1 where step costs say nothing and every draft is verified", lambda p: p.is_fallback),
        "decode_calibration_drifted": ("1 while a calibration error is above its limit", lambda p: p.has_drifted),
        "decode_cost_table_age_seconds": ("Since step costs were measured; NaN without them", _age_s),
    }
    for name, (text, take) in figures.items():
        metrics.gauge(name, text).set_function(lambda take=take: float(take(read())))  # type: ignore[misc]
    errors = metrics.gauge(
        "decode_calibration_error_ratio", "Expected calibration error of draft confidences, recent drafts", ["mode"]
    )
    for mode in _MODES:
        errors.labels(mode).set_function(partial(_error, read, mode))


def _error(read: Callable[[], PlannerStats], mode: str) -> float:
    return read().calibration_errors.get(mode, 0.0)


def _age_s(planner: PlannerStats) -> float:
    return float("nan") if planner.costs_measured_at_s is None else time.time() - planner.costs_measured_at_s
