"""Constraints on an output, checked: kinds, limits, and which engine takes which. No torch, no engine."""

from shoal_common.constraints.engines import LLGUIDANCE, TABLE, constraint_id, engine_of
from shoal_common.constraints.kinds import (
    MAX_START_IDS,
    MAX_TEXT_BYTES,
    ConstraintInvalid,
    ConstraintKind,
    OutputConstraint,
    invalid,
)
from shoal_common.constraints.normalise import normalise

__all__ = [
    "LLGUIDANCE",
    "MAX_START_IDS",
    "MAX_TEXT_BYTES",
    "TABLE",
    "ConstraintInvalid",
    "ConstraintKind",
    "OutputConstraint",
    "constraint_id",
    "engine_of",
    "invalid",
    "normalise",
]
