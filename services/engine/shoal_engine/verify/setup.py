"""From settings to a worker's planner: costs measured or found on disk, calibration read, what to do without them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.verify.calibration import Calibration, CalibrationError
from shoal_engine.verify.cost import CostModel, FlatCosts
from shoal_engine.verify.planned import PlannedWidth
from shoal_engine.verify.profile import measure_costs
from shoal_engine.verify.rounds import LoggedRounds, RoundLog, check_round_log
from shoal_engine.verify.small_files import BadFile, read_small
from shoal_engine.verify.store import CostStore, StoredCosts

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.json"
"""Beside a checkpoint's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How a worker verifies drafts. None of it changes a token.

    width             drafts made and verified per choice and step at most; 0 makes none
    is_planned        widths follow costs and confidences; else every draft is verified
    is_delayed        the budget of a step comes from the confidences of the step before last
    cost_directory    where step costs are kept; None: the user's cache folder
    cost_ttl_s        age from which they are measured again
    profile_s         seconds after which no further round of measurements is begun
    calibration       file to use; None: `CALIBRATION_FILE` beside the checkpoint, where there is one
    round_log         file to log rounds of full width to: then nothing is planned
    """

    width: int
    is_planned: bool = False
    is_delayed: bool = False
    cost_directory: Path | None = None
    cost_ttl_s: float = 7 * 86400.0
    profile_s: float = 3.0
    calibration: Path | None = None
    round_log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """What is known of the model whose drafts are verified.

    directory   of its checkpoint
    draft_id    empty without a draft head
    cost_key    everything that decides what its steps cost on this machine
    """

    directory: Path
    draft_id: str
    cost_key: Mapping[str, str]


def open_planner(
    model: StepModel[Hidden], drafter: Drafter, settings: VerifySettings, *, step_rows: int
) -> WidthPlanner:
    """The planner that the settings ask for; fixed widths, with a warning, where costs say nothing. Blocking: seconds.

    raises   CalibrationError for a calibration or a log that was named and cannot be used
    """
    width = min(settings.width, model.shape.draft_size)
    if not width:
        return FixedWidth(0)
    if settings.round_log is not None:
        width = model.shape.draft_size
        logger.info("logging draft rounds; all drafts are verified", extra={"path": str(settings.round_log)})
        return LoggedRounds(width, RoundLog(settings.round_log, draft_id=drafter.draft_id, width=width))
    if not settings.is_planned:
        return FixedWidth(width)
    calibration = read_calibration(drafter, settings.calibration, width=model.shape.draft_size)
    try:
        stored = _costs(model, drafter, settings, width, step_rows)
    except FlatCosts as error:
        logger.warning("step costs are flat: all drafts are verified", extra={"reason": str(error), "width": width})
        return FixedWidth(width, is_fallback=True)
    max_rows = step_rows + model.shape.slot_count * (1 + width)
    return PlannedWidth(
        width,
        CostModel(stored.table, max_rows),
        calibration=calibration,
        is_delayed=settings.is_delayed,
        costs_measured_at_s=stored.measured_at_s,
    )


def check_named_files(settings: VerifySettings, *, draft_id: str, width: int) -> None:
    """Raise CalibrationError, in one line, for a calibration or a log that was named and cannot be used."""
    if settings.round_log is not None:
        check_round_log(settings.round_log, draft_id=draft_id, width=width)
    elif settings.calibration is not None and settings.is_planned and settings.width:
        named = Drafter(directory=Path(), draft_id=draft_id, cost_key={})
        read_calibration(named, settings.calibration, width=width)


def read_calibration(drafter: Drafter, path: Path | None, *, width: int) -> Calibration | None:
    """The calibration to use; None where none was named and none that can be used lies beside the checkpoint.

    One that was named is wanted: raises CalibrationError, with the file's name, where it cannot be used. One beside a
    checkpoint only makes drafts faster: whatever is wrong with it costs a warning, never a start.
    """
    found = path or drafter.directory / CALIBRATION_FILE
    try:
        return _calibration(found).checked(draft_id=drafter.draft_id, width=width)
    except CalibrationError as error:
        if path is not None:
            raise CalibrationError(f"{found} {error}") from error
        if isinstance(error.__cause__, FileNotFoundError):
            logger.info("no calibration: the draft head's confidences count as they are", extra={"path": str(found)})
        else:
            logger.warning("calibration refused", extra={"path": str(found), "reason": str(error)})
    return None


def _calibration(path: Path) -> Calibration:
    try:
        return Calibration.from_json(read_small(path).decode("utf-8"))
    except OSError as error:
        raise CalibrationError(f"cannot be read: {error.strerror or error}") from error
    except (BadFile, UnicodeDecodeError) as error:
        raise CalibrationError(str(error) if isinstance(error, BadFile) else "is not text") from error


def _costs(
    model: StepModel[Hidden], drafter: Drafter, settings: VerifySettings, width: int, step_rows: int
) -> StoredCosts:
    directory = settings.cost_directory or default_cost_directory()
    store = None if directory is None else CostStore(directory, ttl_s=settings.cost_ttl_s)
    key = {
        **drafter.cost_key,
        "width": str(width),
        "step_rows": str(step_rows),
        "slots": str(model.shape.slot_count),
    }
    now_s = time.time()
    stored = store.load(key, now_s=now_s) if store else None
    if stored is not None:
        logger.info("step costs found", extra={"age_s": round(now_s - stored.measured_at_s)})
        return stored
    table = measure_costs(model, width=width, step_rows=step_rows, limit_s=settings.profile_s)
    if store:
        store.save(key, table, now_s=now_s)
    return StoredCosts(table, now_s)


def default_cost_directory() -> Path | None:
    """In the user's cache; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "shoal" / "step-costs"
    except RuntimeError:
        return None
