"""Small pieces that JSON Schemas are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

IGNORED = "Ignored."
REFUSED = "Refused."

BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def integer(low: int, high: int) -> Schema:
    """A whole number in [low, high]."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """A number in [low, high]."""
    return {"type": "number", "minimum": low, "maximum": high}


def positive_number(high: float) -> Schema:
    """A number above 0, at most `high`."""
    return {"type": "number", "exclusiveMinimum": 0, "maximum": high}


def text(max_length: int) -> Schema:
    """A string; the gateway counts bytes of UTF-8, of which there are never fewer than characters."""
    return {"type": "string", "maxLength": max_length}


def some_text(max_length: int) -> Schema:
    """A string that is not empty."""
    return {"type": "string", "minLength": 1, "maxLength": max_length}


def enum(*values: str) -> Schema:
    """One of these."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, *, low: int = 0, high: int | None = None) -> Schema:
    """A list."""
    made: Schema = {"type": "array", "items": items}
    if low:
        made["minItems"] = low
    if high is not None:
        made["maxItems"] = high
    return made


def any_of(*options: Schema) -> Schema:
    """At least one of these."""
    return {"anyOf": list(options)}


def nullable(schema: Schema) -> Schema:
    """This or null, which means the same as leaving it out."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return any_of(schema, NULL)


def accepts(
    fields: Mapping[str, Schema],
    required: Mapping[str, Schema] | None = None,
    *,
    ignored: Sequence[str] = (),
    refused: Sequence[str] = (),
    is_closed: bool = False,
) -> Schema:
    """An object of a request. Optional fields may be null.

    ignored     known fields whose values mean nothing here, whatever they are
    refused     known fields that no value but null is taken for
    is_closed   unknown fields are refused; otherwise they are ignored
    """
    properties = {name: nullable(schema) for name, schema in fields.items()}
    properties |= dict(required or {})
    properties |= {name: {"description": IGNORED} for name in ignored}
    properties |= {name: {"type": "null", "description": REFUSED} for name in refused}
    made: Schema = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    if is_closed:
        made["additionalProperties"] = False
    return made


def answers(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of an answer: all of `fields`, perhaps some of `optional`, nothing else."""
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


def typed_event(name: str, fields: Mapping[str, Schema]) -> Schema:
    """The data of an event that says its own type."""
    return answers({"type": enum(name), **fields})
