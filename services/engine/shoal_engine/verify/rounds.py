"""Rounds of full width, written down to fit a calibration from.

A file of lines. The first is a JSON object: {"format", "draft_id", "width"}. Each other line is a JSON array of one
round: mode ("greedy" or "sampled"), how many drafts were right before the first wrong one, the draft head's raw logits
and the margins (none where unknown), `width` numbers each. No token is in it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal_engine.planner import FixedWidth, PlannerStats, StepTimes, VerifiedRound, WidthView
from shoal_engine.verify.calibration import LARGEST_MARGIN, MOST_WIDTH, CalibrationError, Mode
from shoal_engine.verify.small_files import BadFile, member, numbers, open_regular, parse_json, whole

logger = logging.getLogger(__name__)

FORMAT = "shoal draft rounds 1"
MOST_BYTES = 64 << 20
"""About half a million rounds: more than a calibration needs."""
MOST_LINE_BYTES = 1 << 14
LARGEST_LOGIT = 1e4

_Round: TypeAlias = tuple[int, tuple[float, ...], tuple[float, ...]]


class RoundLog:
    """Appends rounds to a file up to a size. Used by one thread; several processes may share a file.

    A step's rounds go out in one write of whole lines. One that was cut off all the same, by a full disk or a dead
    machine, costs its own line: the next writer begins on a fresh one. A log that can no longer be written ends; the
    worker goes on.
    """

    def __init__(self, path: Path, *, draft_id: str, width: int, most_bytes: int = MOST_BYTES) -> None:
        """Go on with a file of the same draft and width, or begin one. Raises CalibrationError."""
        self._path, self._most_bytes = path, most_bytes
        self._lines: list[str] = []
        self._is_full = False
        header = _header_line(draft_id, width)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_begun, ends_line = _beginning(path, header)
            self._file: BinaryIO | None = path.open("ab", buffering=0)
            if not is_begun:
                self._file.truncate(0)
                self._file.write(header.encode())
            elif not ends_line:
                self._file.write(b"\n")
        except OSError as error:
            raise CalibrationError(f"{path}: {error.strerror or error}") from error

    def write(self, mode: Mode, accepted: int, logits: Sequence[float], margins: Sequence[float]) -> None:
        """One round, kept until `flush`; nothing happens once the file is full, or for logits that are no numbers."""
        if self._file is None or not all(abs(x) <= LARGEST_LOGIT for x in logits):
            return
        known = [round(min(x, LARGEST_MARGIN), 5) for x in margins if x >= 0.0]
        numbers = [[round(x, 5) for x in logits], known if len(known) == len(logits) else []]
        self._lines.append(json.dumps([mode.value, accepted, *numbers], separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Hand what was written to the system."""
        if self._file is None or not self._lines:
            return
        left = self._most_bytes - os.fstat(self._file.fileno()).st_size
        lines, self._lines = self._lines, []
        while lines and sum(map(len, lines)) > left:
            lines.pop()
            self._is_full = True
        data = "".join(lines).encode()
        try:
            is_written = self._file.write(data) == len(data)
            reason = "no room"
        except OSError as error:
            is_written, reason = False, error.strerror or str(error)
        if not is_written:
            logger.warning(
                "the log of draft rounds cannot be written", extra={"path": str(self._path), "error": reason}
            )
        elif self._is_full:
            logger.info("the log of draft rounds is full", extra={"path": str(self._path)})
        if not is_written or self._is_full:
            self._file.close()
            self._file = None


def check_round_log(path: Path, *, draft_id: str, width: int) -> None:
    """Raise CalibrationError for a file that is there and that a `RoundLog` would not go on with."""
    try:
        _beginning(path, _header_line(draft_id, width))
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from error


def _header_line(draft_id: str, width: int) -> str:
    return json.dumps({"format": FORMAT, "draft_id": draft_id, "width": width}) + "\n"


def _beginning(path: Path, header: str) -> tuple[bool, bool]:
    """Whether a file has this header; whether its last line is whole. Raises OSError; CalibrationError for others."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return False, True
    except BadFile as error:
        raise CalibrationError(f"{path} {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = file.readline(MOST_LINE_BYTES).decode("utf-8", "replace")
        if len(found) < len(header) and header.startswith(found):
            # Nothing yet, or a header that was cut off.
            return False, True
        if _header(found, path) != _header(header, path):
            raise CalibrationError(f"{path} is of another draft or width")
        file.seek(-1, os.SEEK_END)
        return True, file.read(1) == b"\n"


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
    """What a log holds, by mode; `skipped` lines were no rounds."""

    draft_id: str
    width: int
    modes: dict[Mode, Rounds]
    skipped: int = 0


def read_rounds(path: Path) -> RoundFile:
    """Read a log; lines that are no rounds are skipped, such as one that was cut off. Raises CalibrationError."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from error
    except BadFile as error:
        raise CalibrationError(f"{path} {error}") from error
    rounds: dict[Mode, list[_Round]] = {}
    skipped = 0
    with os.fdopen(descriptor, "rb") as file:
        draft_id, width = _header(file.readline(MOST_LINE_BYTES).decode("utf-8", "replace"), path)
        while line := file.readline(MOST_LINE_BYTES):
            try:
                mode, one = _round(line, width)
            except ValueError:
                # A writer that begins on a fresh line may leave an empty one.
                skipped += bool(line.strip())
                continue
            rounds.setdefault(mode, []).append(one)
    return RoundFile(draft_id, width, {mode: _arrays(mine) for mode, mine in rounds.items()}, skipped)


def _round(line: bytes, width: int) -> tuple[Mode, _Round]:
    """Raises ValueError for a line that is no whole round."""
    values = parse_json(line)
    if not line.endswith(b"\n") or not isinstance(values, list) or len(values) != 4:
        raise BadFile("is no round")
    logits, margins = numbers(values[2], -LARGEST_LOGIT, LARGEST_LOGIT), numbers(values[3], 0.0, LARGEST_MARGIN)
    if len(logits) != width or len(margins) not in (0, width):
        raise BadFile("has another number of drafts")
    return Mode(values[0]), (whole(values[1], 0, width), logits, margins or (float("nan"),) * width)


def _arrays(rounds: list[_Round]) -> Rounds:
    accepted, logits, margins = zip(*rounds, strict=True)
    return Rounds(
        np.array(logits, dtype=np.float32), np.array(margins, dtype=np.float32), np.array(accepted, dtype=np.int64)
    )


def _header(line: str, path: Path) -> tuple[str, int]:
    try:
        values = parse_json(line)
        draft_id = member(values, "draft_id")
        if member(values, "format") != FORMAT or not isinstance(draft_id, str):
            raise BadFile("is of another format")
        return draft_id, whole(member(values, "width"), 1, MOST_WIDTH)
    except BadFile as error:
        raise CalibrationError(f"{path} is no log of draft rounds") from error
