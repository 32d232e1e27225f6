"""Which field of a body the recipe means when it refuses it.

Some of its messages name the field, some are about a known one. The others come from its parser, which reads a body in
order and stops at the first fault without saying where: that is found by asking again with parts of the body. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeAlias

from shoal_common.errors import FieldViolation, InvalidArgument

from shoal_gateway.blame_in_lists import OF_LISTS, objects

Said: TypeAlias = Callable[[Any], str | None]
"""What the recipe says where this value stands; None: nothing."""

_PATH = re.compile(r"\.?\b(messages|input|tools|stop)((?:\[\d+\]|\.\d+)(?:\[\d+\]|\.\w+)*)?")
_QUOTED = re.compile(r"Invalid '([a-z_]+[\w.\[\]]*)'")
_QUOTED_FIRST = re.compile(_QUOTED.pattern + ": *")
_LEADING = re.compile(r"([\w.\[\]]+): *")
_VALUE_OF = re.compile(r"Invalid (\w+)(?: and \w+)? value, ")
_PARSER = "the request cannot be read: invalid request body: "
_MISSING = re.compile(r"missing field `(\w+)`$")
_OWN_FIELD = re.compile(r"field `(\w+)`: ")
_MAX_KEYS = 16
"""Of an object, how many keys are tried: parts of a conversation have fewer."""
_MAX_FIELDS = 1_000
"""Of a body, likewise."""
_MAX_ENTRIES = 256
"""Of a list, likewise, where they are tried one by one."""
_SCHEMAS = {"response_format": ".json_schema.schema", "text": ".format.schema"}
_GOOD_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
_OF_FIELD = (
    ("Empty input messages", "messages"),
    ("'tool_call'", "tool_choice"),
    ("does not support this tool_choice", "tool_choice"),
    ("Either input or instructions", "input"),
    ("response_format should not be used", "response_format"),
    ("response_format json_object should not be used", "response_format"),
)
# No field takes both: what is read before the fault is at fault itself with one of them.
_ODD = (-987654321, "\x00")


def blamed(message: str, body: Mapping[str, Any], least: Mapping[str, Any], said: Said) -> str | None:
    """The field's path as the client wrote it, like `messages[2].content[0].type`; None where no field is to blame.

    message   what `said(body)` says
    least     a body of this API that is refused for nothing but what is added to it
    said      about a whole body
    """
    if _PARSER not in message:
        return _named(message, body) or _alone(message, body, least, said)
    for key, value in islice(body.items(), _MAX_FIELDS):

        def here(other: Any, key: str = key) -> str | None:
            return said({**least, key: other})

        if here(value) == message:
            return _inside(key, value, here, message)
    missing = _MISSING.search(message)
    return missing[1] if missing is not None else None


def refused_at(field: str, message: str) -> InvalidArgument:
    """The refusal, whose message names the field once."""
    told = message.removeprefix(_PARSER)
    # What the recipe put in front, in its own spelling.
    if (path := _LEADING.match(told)) is not None and bracketed(path[1]) == field:
        told = told[path.end() :]
    quoted = _QUOTED_FIRST.match(told)
    pathless = told if quoted is None else told[quoted.end() :]
    if field in told:
        return InvalidArgument(told, violations=(FieldViolation(field, pathless),), field=field)
    return InvalidArgument.at(field, pathless)


def bracketed(path: str) -> str:
    """A path of the recipe's in one spelling: `.messages.2.content[0]` is `messages[2].content[0]`."""
    return re.sub(r"\.(\d+)", r"[\1]", path.lstrip(".")).removesuffix(".tool_result")


def _named(message: str, body: Mapping[str, Any]) -> str | None:
    """From the words alone, or what they say of the messages."""
    for words, field, find, rest in OF_LISTS:
        if (found := words.search(message)) is not None:
            index = find(objects(body.get(field)), found)
            return field if index is None else f"{field}[{index}]{rest}"
    for text, field in _OF_FIELD:
        if text in message:
            return field
    if quoted := _QUOTED.search(message) or _VALUE_OF.search(message):
        return _as_sent(bracketed(quoted[1]), body)
    if (path := _PATH.search(message)) and (path[2] or message.startswith(f"{path[1]}:")):
        return _as_sent(bracketed(path[0]), body)
    return None


def _alone(message: str, body: Mapping[str, Any], least: Mapping[str, Any], said: Said) -> str | None:
    """The one field, or the element of it, of which the recipe says the same without all the others."""
    for key, value in islice(body.items(), _MAX_FIELDS):

        def whole(other: Any, key: str = key) -> str | None:
            return said({**least, key: other})

        def alone(other: Any, key: str = key) -> str | None:
            return said({**least, key: [other]})

        if whole(value) == message:
            for index, one in enumerate(value[:_MAX_ENTRIES] if isinstance(value, list) else ()):
                if alone(one) == message:
                    return f"{key}[{index}]" + _schema_at(one, _schema_of(one), alone, message)
            return key + _schema_at(value, _SCHEMAS.get(key, ""), whole, message)
    return None


def _schema_at(value: Any, path: str, said: Said, message: str) -> str:
    """`path` of a value's schema if another schema in its place ends the fault, else nothing."""
    if not path or not isinstance(value, dict):
        return ""
    other = _replaced(value, path.split(".")[1:])
    return path if other is not None and said(other) != message else ""


def _replaced(values: Mapping[str, Any], path: list[str]) -> dict[str, Any] | None:
    """With a schema there that no recipe refuses; None where the path leads nowhere."""
    key, *rest = path
    if not rest:
        return {**values, key: dict(_GOOD_SCHEMA)}
    inner = values.get(key)
    below = _replaced(inner, rest) if isinstance(inner, dict) else None
    return None if below is None else {**values, key: below}


def _schema_of(tool: Any) -> str:
    if not isinstance(tool, dict):
        return ""
    if "function" in tool:
        return ".function.parameters"
    return ".parameters" if tool.get("type") == "function" else ".input_schema"


def _inside(path: str, value: Any, said: Said, message: str) -> str:
    """The fault is at `path` or deeper."""
    if isinstance(value, list):
        return _in_list(path, value, said, message)
    if isinstance(value, dict):
        return _in_object(path, value, said, message)
    return path


def _in_list(path: str, value: list[Any], said: Said, message: str) -> str:
    low, high = 0, len(value)
    # Each half is read once more at most, so a long list costs what reading it twice does.
    while high - low > 1:
        middle = (low + high) // 2
        if said(value[low:middle]) == message:
            high = middle
        else:
            low = middle

    def here(other: Any) -> str | None:
        return said([other])

    if high == low or said([]) == message or here(value[low]) != message:
        return path
    return _inside(f"{path}[{low}]", value[low], here, message)


def _in_object(path: str, value: dict[str, Any], said: Said, message: str) -> str:
    found = path
    # What stands behind the fault is not read, so the last one that is read is at fault.
    key = next((key for key in list(value)[: -_MAX_KEYS - 1 : -1] if _changes(key, value, said, message)), None)
    if key is not None:

        def here(other: Any) -> str | None:
            return said({**value, key: other})

        found = _inside(f"{path}.{key}", value[key], here, message)
    missing = _MISSING.search(message) or _OWN_FIELD.search(message)
    # A field that is missing is missed at the end of its object, after all within.
    if missing is None or found.endswith(f".{missing[1]}") or missing[1] in value:
        return found
    return f"{path}.{missing[1]}" if _changes(missing[1], value, said, message) else found


def _changes(key: str, value: dict[str, Any], said: Said, message: str) -> bool:
    return any(said({**value, key: odd}) != message for odd in _ODD)


def _as_sent(path: str, body: Mapping[str, Any]) -> str:
    """The recipe knows Anthropic's `stop_sequences` by the name that they have in a chat."""
    if path.startswith("stop") and "stop" not in body and "stop_sequences" in body:
        return "stop_sequences" + path.removeprefix("stop")
    return path
