"""From what the draft head says to the chance that a draft is accepted. Pure. Source: dspark.md sections 2.5, 10.4.

Per draft position and mode of sampling, logit c = w0 + w1 * (the head's logit) + w2 * log(margin), divided by a
temperature; without a margin the head's logit alone, divided by a temperature of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from shoal_engine.verify.small_files import BadFile, member, numbers, parse_json, whole

FORMAT = "shoal draft calibration 1"
SMALLEST_MARGIN, LARGEST_MARGIN = 1e-4, 50.0
"""Margins count as at least and at most this: a tie and a forced token have finite logarithms."""

LARGEST_WEIGHT, LARGEST_TEMPERATURE = 1e4, 1e3
MOST_WIDTH = 64
"""Draft positions."""


class Mode(Enum):
    """How the tokens of a choice are chosen; drafts are accepted at different rates."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


class CalibrationError(ValueError):
    """A calibration that cannot be used, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCalibration:
    """Of one mode, each by draft position.

    temperatures          of the head's logit where the margin is not known
    margin_weights        (w0, w1, w2), and margin_temperatures of the result; empty: margins are not used
    rounds                rounds it was fitted from
    errors                expected calibration error of each position on rounds that were not fitted
    """

    temperatures: tuple[float, ...]
    margin_weights: tuple[tuple[float, float, float], ...] = ()
    margin_temperatures: tuple[float, ...] = ()
    rounds: int = 0
    errors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        width = len(self.temperatures)
        if self.margin_weights and not len(self.margin_weights) == len(self.margin_temperatures) == width:
            raise CalibrationError("has not as many weights and temperatures as draft positions")
        if any(len(row) != 3 or not all(abs(w) <= LARGEST_WEIGHT for w in row) for row in self.margin_weights):
            raise CalibrationError(f"has weights other than three a position, each at most {LARGEST_WEIGHT:g}")
        temperatures = (*self.temperatures, *self.margin_temperatures)
        if not all(1.0 / LARGEST_TEMPERATURE <= t <= LARGEST_TEMPERATURE for t in temperatures):
            raise CalibrationError(f"has temperatures outside 1 / {LARGEST_TEMPERATURE:g} .. {LARGEST_TEMPERATURE:g}")

    @classmethod
    def none(cls, width: int) -> ModeCalibration:
        """The head's word as it is."""
        return cls(temperatures=(1.0,) * width)

    def confidences(self, logits: NDArray[np.float32], margins: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [R, S] and [R, S], NaN where unknown -> float32 [R, S]: the chance of each draft, those before given.

        An unknown confidence counts as 1.
        """
        count = logits.shape[1]
        z = logits / np.asarray(self.temperatures, dtype=np.float32)[:count]
        if self.margin_weights:
            w = np.asarray(self.margin_weights, dtype=np.float32)[:count]
            with_margin = w[:, 0] + w[:, 1] * logits + w[:, 2] * log_margins(margins)
            with_margin /= np.asarray(self.margin_temperatures, dtype=np.float32)[:count]
            z = np.where(np.isnan(with_margin), z, with_margin)
        chances: NDArray[np.float32] = sigmoid(z)
        return np.where(np.isnan(chances), np.float32(1.0), chances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The calibration of one draft head at one width.

    draft_id   of the draft; width: draft positions of a round
    modes      those that were fitted
    """

    draft_id: str
    width: int
    modes: Mapping[Mode, ModeCalibration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode, one in self.modes.items():
            if len(one.temperatures) != self.width:
                raise CalibrationError(f"{mode.value}: {len(one.temperatures)} positions, width is {self.width}")

    def of(self, mode: Mode) -> ModeCalibration:
        """That of a mode; the head's word as it is where it was not fitted."""
        return self.modes.get(mode) or ModeCalibration.none(self.width)

    def checked(self, *, draft_id: str, width: int) -> Calibration:
        """Itself. Raises CalibrationError if it is of another draft or width, or calibrates nothing."""
        if self.draft_id != draft_id:
            raise CalibrationError(f"is of draft {self.draft_id or 'none'}, this model's is {draft_id or 'none'}")
        if self.width != width:
            raise CalibrationError(f"is of {self.width} draft positions, this model has {width}")
        if not self.modes:
            raise CalibrationError("has no mode: it calibrates nothing")
        return self

    def to_json(self) -> str:
        """As `from_json` reads it."""
        modes = {mode.value: asdict(one) for mode, one in self.modes.items()}
        return json.dumps({"format": FORMAT, "draft_id": self.draft_id, "width": self.width, "modes": modes}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises CalibrationError for anything else than what `to_json` wrote."""
        try:
            values = parse_json(text)
            if member(values, "format") != FORMAT:
                raise BadFile("is of another format")
            draft_id, modes = member(values, "draft_id"), member(values, "modes")
            if not isinstance(draft_id, str) or not isinstance(modes, dict):
                raise BadFile("has no draft_id or no modes")
            return cls(
                draft_id=draft_id,
                width=whole(member(values, "width"), 1, MOST_WIDTH),
                modes={_mode_named(name): _mode(one) for name, one in modes.items()},
            )
        except BadFile as error:
            raise CalibrationError(f"is no calibration: {error}") from error


def _mode_named(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError as error:
        raise BadFile("has a mode of sampling that is not known") from error


def _mode(values: object) -> ModeCalibration:
    weights = member(values, "margin_weights")
    if not isinstance(weights, list):
        raise BadFile("has no list of margin_weights")
    rows = [numbers(row, -LARGEST_WEIGHT, LARGEST_WEIGHT) for row in weights]
    if any(len(row) != 3 for row in rows):
        raise BadFile("has other than three margin_weights of a position")
    return ModeCalibration(
        temperatures=numbers(member(values, "temperatures"), 0.0, LARGEST_TEMPERATURE),
        margin_weights=tuple((w0, w1, w2) for w0, w1, w2 in rows),
        margin_temperatures=numbers(member(values, "margin_temperatures"), 0.0, LARGEST_TEMPERATURE),
        rounds=whole(member(values, "rounds"), 0, 1 << 62),
        errors=numbers(member(values, "errors"), 0.0, 1.0),
    )


def sigmoid(z: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + exp(-z)) without overflow."""
    result: NDArray[np.float32] = 0.5 * (1.0 + np.tanh(0.5 * z))
    return result


def log_margins(margins: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithms of margins within their bounds; NaN stays."""
    result: NDArray[np.float32] = np.log(np.clip(margins, SMALLEST_MARGIN, LARGEST_MARGIN))
    return result
