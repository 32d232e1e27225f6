"""Which field of a body the recipe means when it refuses a response format or a tool: its errors name none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal_common.constraints import invalid
from shoal_common.errors import InvalidArgument

from shoal_gateway.constraint import ConstraintFields

_TOOLS = "tools"
# A conversation in every API's form. It says json, without which there is no JSON object.
_BARE: Mapping[str, Any] = {"messages": [{"role": "user", "content": "json"}], "input": "json", "max_tokens": 1}
_GOOD_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}

Convert = Callable[[dict[str, Any]], object]
"""Converts a body. Raises InvalidArgument."""


def blamed(
    error: InvalidArgument, body: Mapping[str, Any], fields: ConstraintFields, convert: Convert
) -> InvalidArgument:
    """The error with the field that it is about, found by converting parts alone; itself if it is about none of them.

    A schema that the recipe refuses is as invalid as one that we do.
    """
    if error.violations:
        return error
    form = fields.form.split(".")[0]

    def refused(key: str, value: Any) -> bool:
        try:
            convert({**_BARE, "model": body.get("model"), key: value})
        except InvalidArgument:
            return True
        return False

    if form in body and (refused(form, body[form]) or "'response_format'" in error.message):
        path = fields.schema.split(".")
        is_schema = not refused(form, _replaced(body, path)[form])
        is_schema = is_schema and refused(form, body[form])
        return invalid(fields.schema, error.message) if is_schema else _at(fields.form, error)
    if _TOOLS not in body or not refused(_TOOLS, body[_TOOLS]):
        return error
    tools = body[_TOOLS]
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not refused(_TOOLS, [tool]):
            continue
        where = f"{_TOOLS}[{index}]"
        if isinstance(tool, dict) and not refused(_TOOLS, [_replaced(tool, fields.parameters.split("."))]):
            return invalid(f"{where}.{fields.parameters}", error.message)
        return _at(where, error)
    return _at(_TOOLS, error)


def _at(field: str, error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument.at(field, error.message, reason=error.reason)


def _replaced(values: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """With a schema there that no recipe refuses; as it is where the path leads nowhere."""
    key, *rest = path
    if not rest:
        return {**values, key: dict(_GOOD_SCHEMA)} if key in values else dict(values)
    inner = values.get(key)
    return {**values, key: _replaced(inner, rest)} if isinstance(inner, dict) else dict(values)
