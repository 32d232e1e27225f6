"""Rounds of full width, written down to fit a calibration from.

A file of lines. The first is a JSON object: {"format", "draft_id", "width"}. Each other line is a JSON array of one
round: mode ("greedy" or "sampled"), how many drafts were right before the first wrong one, the draft head's raw logits
and the margins (none where unknown), `width` numbers each. No token is in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal_engine.planner import FixedWidth, PlannerStats, StepTimes, VerifiedRound, WidthView
from shoal_engine.verify.calibration import LARGEST_MARGIN, CalibrationError, Mode

logger = logging.getLogger(__name__)

FORMAT = "shoal draft rounds 1"
MOST_BYTES = 64 << 20
"""About half a million rounds: more than a calibration needs."""


class RoundLog:
    """Appends rounds to a file up to a size. Used by one thread."""

    def __init__(self, path: Path, *, draft_id: str, width: int, most_bytes: int = MOST_BYTES) -> None:
        """Go on with a file of the same draft and width, or begin one. Raises CalibrationError, OSError."""
        header = {"format": FORMAT, "draft_id": draft_id, "width": width}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8") as file:
                found = _header(file.readline(), path)
            if found != header:
                raise CalibrationError(f"{path} is of another draft or width")
        self._file = path.open("a", encoding="utf-8")
        if not self._file.tell():
            self._file.write(json.dumps(header) + "\n")
        self._left = most_bytes - self._file.tell()
        self._path = path

    def write(self, mode: Mode, accepted: int, logits: Sequence[float], margins: Sequence[float]) -> None:
        """One round; nothing happens once the file is full."""
        if self._left <= 0:
            return
        numbers = [[round(x, 5) for x in logits], [round(min(x, LARGEST_MARGIN), 5) for x in margins]]
        line = json.dumps([mode.value, accepted, *numbers], separators=(",", ":")) + "\n"
        self._left -= len(line)
        self._file.write(line)
        if self._left <= 0:
            self._file.flush()
            logger.info("the log of draft rounds is full", extra={"path": str(self._path)})

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()


class LoggedRounds:
    """A `WidthPlanner` that verifies everything and writes down what became of it: cut rounds hide later drafts."""

    def __init__(self, width: int, log: RoundLog) -> None:
        self._fixed = FixedWidth(width)
        self._log = log
        self._views: Sequence[WidthView] = ()

    @property
    def max_width(self) -> int:
        return self._fixed.max_width

    @property
    def draft_width(self) -> int:
        return self._fixed.draft_width

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        self._views = views
        return self._fixed.widths(views)

    def verified(self, rounds: Sequence[VerifiedRound]) -> None:
        for one in rounds:
            view = self._views[one.index]
            if one.width == self.max_width == len(view.confidence_logits):
                mode = Mode.GREEDY if view.is_greedy else Mode.SAMPLED
                self._log.write(mode, one.accepted, view.confidence_logits, view.margins)
        if rounds:
            self._log.flush()

    def observe(self, step: StepTimes) -> None:
        """Costs do not matter here."""

    def stats(self) -> PlannerStats:
        return self._fixed.stats()


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one mode: float32 [n, S] logits and margins (NaN where unknown), int64 [n] right drafts."""

    logits: NDArray[np.float32]
    margins: NDArray[np.float32]
    accepted: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)

    def part(self, index: NDArray[np.int64]) -> Rounds:
        """Some of them."""
        return Rounds(self.logits[index], self.margins[index], self.accepted[index])


@dataclass(frozen=True, slots=True)
class RoundFile:
    """What a log holds, by mode."""

    draft_id: str
    width: int
    modes: dict[Mode, Rounds]


def read_rounds(path: Path) -> RoundFile:
    """Read a log; a last line that was cut off is left out. Raises CalibrationError, OSError."""
    with path.open(encoding="utf-8") as file:
        header = _header(file.readline(), path)
        width = int(str(header["width"]))
        rounds: dict[Mode, list[tuple[int, list[float], list[float]]]] = {}
        for number, line in enumerate(file, start=2):
            if not line.endswith("\n"):
                break
            try:
                mode, accepted, logits, margins = json.loads(line)
                if len(logits) != width or len(margins) not in (0, width) or not 0 <= accepted <= width:
                    raise ValueError("wrong number of values")
                rounds.setdefault(Mode(mode), []).append((accepted, logits, margins or [float("nan")] * width))
            except (ValueError, TypeError) as error:
                raise CalibrationError(f"{path}, line {number}: is no round: {error}") from error
    return RoundFile(str(header["draft_id"]), width, {mode: _arrays(mine) for mode, mine in rounds.items()})


def _arrays(rounds: list[tuple[int, list[float], list[float]]]) -> Rounds:
    accepted, logits, margins = zip(*rounds, strict=True)
    return Rounds(
        np.array(logits, dtype=np.float32), np.array(margins, dtype=np.float32), np.array(accepted, dtype=np.int64)
    )


def _header(line: str, path: Path) -> dict[str, object]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT or not {"draft_id", "width"} <= set(header):
            raise ValueError("format")
    except (ValueError, TypeError, KeyError) as error:
        raise CalibrationError(f"{path} is no log of draft rounds") from error
    return dict(header)
