"""From what a client sent to a checked constraint. Pure; the same at the gateway and at the worker, the last judge."""

from __future__ import annotations

import json
from typing import Any

from shoal_common.constraints.ebnf import parse_ebnf
from shoal_common.constraints.engines import engine_of
from shoal_common.constraints.json_schema import check_schema, compact, parse_json
from shoal_common.constraints.kinds import MAX_START_IDS, MAX_TEXT_BYTES, ConstraintKind, OutputConstraint, invalid
from shoal_common.constraints.patterns import PatternBudget
from shoal_common.constraints.tool_calls import parse_tag


def normalise(
    kind: ConstraintKind, text: str, *, field: str = "constraint", start_after_ids: tuple[int, ...] = ()
) -> OutputConstraint:
    """The constraint to send to a worker. Raises ConstraintInvalid naming `field`, its path in the request.

    Not all that passes can be compiled: the engine finds bad patterns and formats, and schemas that contradict
    themselves.
    """
    if len(start_after_ids) > MAX_START_IDS:
        raise invalid(field, f"may begin behind at most {MAX_START_IDS} tokens")
    try:
        checked = _CHECKS[kind](text, field)
    except RecursionError as error:
        raise invalid(field, "is nested too deep") from error
    return OutputConstraint(kind=kind, text=checked, engine=engine_of(kind), start_after_ids=start_after_ids)


def _json_schema(text: str, field: str) -> str:
    return compact(check_schema(parse_json(text, field), field))


def _json_object(text: str, field: str) -> str:
    return ""


def _regex(text: str, field: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode: {error.reason}") from error
    if not 0 < size <= MAX_TEXT_BYTES:
        raise invalid(field, f"must have 1 to {MAX_TEXT_BYTES} bytes, has {size}")
    PatternBudget().take(text, field, "")
    return text


def _ebnf(text: str, field: str) -> str:
    parse_ebnf(text, field)
    return text


def _structural_tag(text: str, field: str) -> str:
    parse_tag(text, field)
    value: Any = json.loads(text)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_CHECKS = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.EBNF: _ebnf,
    ConstraintKind.STRUCTURAL_TAG: _structural_tag,
}
