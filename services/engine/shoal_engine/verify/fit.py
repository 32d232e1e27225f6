"""Fit a calibration from logged rounds. Pure numpy. Source: dspark.md sections 2.5 and 10.4.

Per draft position a logistic fit of acceptance on the head's logit and the logarithm of the margin, over the rounds in
which all drafts before it were accepted; then one temperature per position, left to right, such that the products of
chances up to each position fit what was accepted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal_engine.verify.calibration import Calibration, CalibrationError, ModeCalibration, log_margins, sigmoid
from shoal_engine.verify.drift import expected_calibration_error
from shoal_engine.verify.rounds import RoundFile, Rounds

LEAST_ROUNDS = 500
"""Fewer rounds of a mode do not tell a calibration from chance."""

_TEMPERATURES = np.geomspace(0.1, 10.0, 81)
_RIDGE = 1e-3
_NEWTON_STEPS = 50
_PARTS = 5
_NOISE = 0.3
_SMALLEST_STEP = 1e-7


def fit(file: RoundFile, *, least_rounds: int = LEAST_ROUNDS) -> Calibration:
    """A calibration of every mode with enough rounds. Raises CalibrationError when there is none."""
    modes = {mode: fit_mode(rounds) for mode, rounds in file.modes.items() if len(rounds) >= least_rounds}
    if not modes:
        counts = ", ".join(f"{len(rounds)} {mode.value}" for mode, rounds in file.modes.items()) or "none"
        raise CalibrationError(f"{least_rounds} rounds of a mode wanted, there are {counts}")
    return Calibration(draft_id=file.draft_id, width=file.width, modes=modes)


def fit_mode(rounds: Rounds) -> ModeCalibration:
    """Fit one mode; `errors` come from rounds held out in turn, a fifth at a time."""
    index = np.arange(len(rounds))
    chances = np.empty_like(rounds.logits)
    for part in range(_PARTS):
        held_out = np.flatnonzero(index % _PARTS == part)
        one, out = _fit(rounds.part(np.flatnonzero(index % _PARTS != part))), rounds.part(held_out)
        chances[held_out] = one.confidences(out.logits, out.margins)
    whole = _fit(rounds)
    return ModeCalibration(
        temperatures=whole.temperatures,
        margin_weights=whole.margin_weights,
        margin_temperatures=whole.margin_temperatures,
        rounds=len(rounds),
        errors=cumulative_errors(chances, rounds.accepted),
    )


def cumulative_errors(confidences: NDArray[np.float32], accepted: NDArray[np.int64]) -> tuple[float, ...]:
    """By draft position: the calibration error of the chance that it and all before it are accepted.

    confidences  float32 [n, S] of each draft, those before it given; accepted int64 [n]
    """
    chances = np.cumprod(confidences, axis=1)
    return tuple(round(expected_calibration_error(chances[:, j], accepted > j), 5) for j in range(confidences.shape[1]))


def _fit(rounds: Rounds) -> ModeCalibration:
    logits = rounds.logits.astype(np.float64)
    temperatures = _sequential_temperatures(logits, rounds.accepted)
    has_margins = ~np.isnan(rounds.margins).any(axis=1)
    if not has_margins.any():
        return ModeCalibration(temperatures=temperatures)
    known = rounds.part(np.flatnonzero(has_margins))
    weights, scored = [], np.empty(known.logits.shape)
    for j in range(known.logits.shape[1]):
        features = np.column_stack([np.ones(len(known)), known.logits[:, j], log_margins(known.margins[:, j])])
        reached = known.accepted >= j
        found = _logistic(features[reached], known.accepted[reached] > j)
        weights.append((float(found[0]), float(found[1]), float(found[2])))
        scored[:, j] = features @ found
    return ModeCalibration(
        temperatures=temperatures,
        margin_weights=tuple(weights),
        margin_temperatures=_sequential_temperatures(scored, known.accepted),
    )


def _sequential_temperatures(logits: NDArray[np.float64], accepted: NDArray[np.int64]) -> tuple[float, ...]:
    """Float64 [n, S], int64 [n] -> one temperature per position, earlier ones fixed before later ones are chosen."""
    chances = np.ones(len(logits))
    found = []
    for j in range(logits.shape[1]):
        tried = [chances * sigmoid(logits[:, j] / t) for t in _TEMPERATURES]
        errors = [expected_calibration_error(one, accepted > j) for one in tried]
        # Errors this near cannot be told apart with so many rounds: among them the one nearest to 1 is taken.
        good = np.flatnonzero(np.array(errors) <= min(errors) + _NOISE / math.sqrt(len(logits)))
        best = int(good[np.argmin(np.abs(np.log(_TEMPERATURES[good])))])
        found.append(float(_TEMPERATURES[best]))
        chances = tried[best]
    return tuple(found)


def _logistic(features: NDArray[np.float64], hits: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Weights of a logistic regression, by Newton's method with a little ridge towards the head's own word."""
    prior = np.array([0.0, 1.0, 0.0])

    def loss(weights: NDArray[np.float64]) -> float:
        scores = features @ weights
        apart = weights - prior
        return float(np.logaddexp(0.0, np.where(hits, -scores, scores)).sum() + 0.5 * _RIDGE * (apart @ apart))

    weights, least = prior, loss(prior)
    for _ in range(_NEWTON_STEPS):
        chances = sigmoid(features @ weights)
        gradient = features.T @ (chances - hits) + _RIDGE * (weights - prior)
        curvature = (features * (chances * (1.0 - chances))[:, None]).T @ features + _RIDGE * np.eye(3)
        step = np.linalg.solve(curvature, gradient)
        # A whole step may overshoot where most chances are near 0 or 1.
        while loss(weights - step) > least and np.abs(step).max() > _SMALLEST_STEP:
            step *= 0.5
        if np.abs(step).max() <= _SMALLEST_STEP:
            break
        weights = weights - step
        least = loss(weights)
    return weights
