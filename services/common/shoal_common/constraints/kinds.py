"""What an output may be held to, as values. No engine here: the gateway checks constraints without one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal_common.errors import InvalidArgument

MAX_TEXT_BYTES = 256 * 1024
"""Of one constraint, in UTF-8. Compiling time and memory are bounded from here on."""
MAX_START_IDS = 64
"""Tokens behind whose first occurrence a constraint may begin."""


class ConstraintKind(Enum):
    """What kind of text the constraint is. The values are the names of the fields of `shoal.common.v1.Constraint`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """A checked constraint; see `normalise`.

    text              of its kind; empty for JSON_OBJECT
    engine            that compiles it
    start_after_ids   it begins behind the first occurrence of these output tokens; empty: at once
    """

    kind: ConstraintKind
    text: str
    engine: str
    start_after_ids: tuple[int, ...] = ()


class ConstraintInvalid(InvalidArgument):
    """The constraint is malformed, cannot be met, or uses what no engine here enforces."""

    reason = "CONSTRAINT_INVALID"


def invalid(field: str, description: str) -> InvalidArgument:
    """The error to raise: `field` is the constraint's path in the request."""
    return ConstraintInvalid.at(field, description, reason=ConstraintInvalid.reason)
