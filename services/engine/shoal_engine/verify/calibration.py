"""From what the draft head says to the chance that a draft is accepted. Pure. Source: dspark.md sections 2.5, 10.4.

Per draft position and mode of sampling, logit c = w0 + w1 * (the head's logit) + w2 * log(margin), divided by a
temperature; without a margin the head's logit alone, divided by a temperature of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

FORMAT = "shoal draft calibration 1"
SMALLEST_MARGIN, LARGEST_MARGIN = 1e-4, 50.0
"""Margins count as at least and at most this: a tie and a forced token have finite logarithms."""


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
            raise CalibrationError("as many weights and temperatures as draft positions wanted")
        numbers = [*self.temperatures, *self.margin_temperatures, *(w for row in self.margin_weights for w in row)]
        if not all(math.isfinite(number) for number in numbers) or any(len(row) != 3 for row in self.margin_weights):
            raise CalibrationError("weights and temperatures must be finite numbers, three weights a position")
        if any(t <= 0.0 for t in (*self.temperatures, *self.margin_temperatures)):
            raise CalibrationError("temperatures must be positive")

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
        """Itself. Raises CalibrationError if it is of another draft or width."""
        if self.draft_id != draft_id:
            raise CalibrationError(f"is of draft {self.draft_id or 'none'}, this model's is {draft_id or 'none'}")
        if self.width != width:
            raise CalibrationError(f"is of {self.width} draft positions, this model has {width}")
        return self

    def to_json(self) -> str:
        """As `from_json` reads it."""
        modes = {mode.value: asdict(one) for mode, one in self.modes.items()}
        return json.dumps({"format": FORMAT, "draft_id": self.draft_id, "width": self.width, "modes": modes}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises CalibrationError for anything else than what `to_json` wrote."""
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise CalibrationError(f"format is {values['format']!r}, not {FORMAT!r}")
            modes = {Mode(name): _mode(one) for name, one in values["modes"].items()}
            return cls(draft_id=str(values["draft_id"]), width=int(values["width"]), modes=modes)
        except CalibrationError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CalibrationError(f"is no calibration: {error!r}") from error


def _mode(values: Mapping[str, object]) -> ModeCalibration:
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    tuples["margin_weights"] = tuple(tuple(row) for row in values.get("margin_weights", ()))  # type: ignore[attr-defined]
    return ModeCalibration(**tuples)  # type: ignore[arg-type]


def sigmoid(z: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + exp(-z)) without overflow."""
    result: NDArray[np.float32] = 0.5 * (1.0 + np.tanh(0.5 * z))
    return result


def log_margins(margins: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithms of margins within their bounds; NaN stays."""
    result: NDArray[np.float32] = np.log(np.clip(margins, SMALLEST_MARGIN, LARGEST_MARGIN))
    return result
