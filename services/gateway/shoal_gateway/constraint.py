"""Which constraint a request's answer is held to, checked, and by which of the client's fields it came. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_recipe import ConversationRequest
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal_common.constraints import MAX_TEXT_BYTES, ConstraintKind, OutputConstraint, invalid, normalise
from shoal_common.constraints.wire import constraint_message, kind_and_text
from shoal_common.errors import InvalidArgument, MeshError

from shoal_gateway.fields import Fields

_TOOLS_FIELD = "tools"
_GRAMMAR_FIELD = "shoal.ebnf"
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintFields:
    """Where clients of one API write what an answer is held to."""

    form: str
    schema: str
    parameters: str
    """Inside of one of `tools`."""

    @property
    def regex(self) -> str:
        """A regular expression."""
        return f"{self.form}.regex"


_COMPLETION_FIELDS = ConstraintFields(
    form="response_format", schema="response_format.json_schema.schema", parameters=""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConstraint:
    """A checked constraint. `field` is where the client wrote it."""

    constraint: OutputConstraint
    field: str

    def message(self) -> decode_pb.OutputConstraint:
        """What the worker is told."""
        return decode_pb.OutputConstraint(
            constraint=constraint_message(self.constraint),
            engine=self.constraint.engine,
            start_after_ids=self.constraint.start_after_ids,
        )

    def as_asked(self, error: MeshError) -> MeshError:
        """A worker's error about the constraint, naming the client's own field."""
        if not isinstance(error, InvalidArgument) or not error.reason.startswith("CONSTRAINT_"):
            return error
        said = error.violations[0].description if error.violations else error.message
        return InvalidArgument.at(self.field, said, reason=error.reason)


def of_message(message: sampling_pb2.Constraint, field: str, start_after_ids: tuple[int, ...]) -> AskedConstraint:
    """Of a gRPC request. Raises ConstraintInvalid."""
    kind, text = kind_and_text(message, field)
    where = f"{field}.{kind.value}"
    return _asked(kind, text, where, start_after_ids)


def of_response_format(value: Any) -> AskedConstraint | None:
    """Of a completions request, whose text is held to it from its first token. Raises ConstraintInvalid."""
    fields = Fields({_COMPLETION_FIELDS.form: value}).mapping(_COMPLETION_FIELDS.form)
    kind = fields.text("type", 64) if fields else "text"
    if fields is None or kind == "text":
        return None
    if kind == "json_object":
        return _asked(ConstraintKind.JSON_OBJECT, "", _COMPLETION_FIELDS.form, ())
    if kind == "json_schema":
        named = fields.mapping("json_schema")
        if named is None or named.mapping("schema") is None:
            raise invalid(_COMPLETION_FIELDS.schema, "is required")
        schema = value["json_schema"]["schema"]
        return _asked(ConstraintKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), _COMPLETION_FIELDS.schema, ())
    if kind == "regex":
        regex = fields.text("regex", MAX_TEXT_BYTES)
        if regex is None:
            raise invalid(_COMPLETION_FIELDS.regex, "is required")
        return _asked(ConstraintKind.REGEX, regex, _COMPLETION_FIELDS.regex, ())
    raise invalid(f"{_COMPLETION_FIELDS.form}.type", "must be one of text, json_object, json_schema and regex")


def with_grammar(
    asked: AskedConstraint | None, ebnf: str | None, *, has_tools: bool = False, start_after_ids: tuple[int, ...] = ()
) -> AskedConstraint | None:
    """`asked`, or the grammar that came in the extension. Raises ConstraintInvalid where there is both."""
    if ebnf is None:
        return asked
    other = asked.field if asked is not None else _TOOLS_FIELD if has_tools else ""
    if other:
        raise invalid(_GRAMMAR_FIELD, f"cannot be combined with {other}")
    return _asked(ConstraintKind.EBNF, ebnf, _GRAMMAR_FIELD, start_after_ids)


def of_conversation(
    converted: ConversationRequest,
    *,
    fields: ConstraintFields,
    sent_schemas: Mapping[str, Any],
    strict_tools: str | None,
    is_parallel: bool,
    demands_call: bool,
    content_schema: Any,
    start_after_ids: tuple[int, ...],
) -> AskedConstraint | None:
    """Of a conversation, as the recipe understands its response format and tools. Raises ConstraintInvalid.

    sent_schemas   by the name of a tool, the client's own schema, which the recipe has taken
    strict_tools   the recipe's list of tools where the one that came with the conversation does not say who is strict
    demands_call   some tool must be called, though the recipe's prompt does not begin a call
    content_schema what the text must fit, where the recipe's converter leaves that out; None: the converter knows
    """
    wanted = converted.inference_options.output_constraint
    if wanted is None:
        if content_schema is None:
            return None
        text = json.dumps(content_schema, ensure_ascii=False)
        return _asked(ConstraintKind.JSON_SCHEMA, text, fields.schema, start_after_ids)
    if wanted.kind == "json":
        if not wanted.schema:
            return _asked(ConstraintKind.JSON_OBJECT, "", fields.form, start_after_ids)
        schema = _with_definitions(json.loads(wanted.schema), converted.conversation.response_schema)
        text = json.dumps(schema, ensure_ascii=False)
        return _asked(ConstraintKind.JSON_SCHEMA, text, fields.schema, start_after_ids)
    if wanted.kind == "regex":
        return _asked(ConstraintKind.REGEX, wanted.schema, fields.regex, start_after_ids)
    if wanted.kind in ("tool_call", "tool_call_required"):
        listed = json.loads(wanted.schema if strict_tools is None else strict_tools)
        tools = [_with_sent_definitions(tool["function"], sent_schemas) for tool in listed]
        choice = "required" if wanted.kind == "tool_call_required" else "any" if demands_call else "auto"
        content = None
        if choice == "auto":
            content = _content(converted, fields) if content_schema is None else content_schema
        tag = _tag(tools, choice, content, is_parallel)
        return None if tag is None else _asked_tag(tag, fields, start_after_ids)
    raise invalid(fields.form, f"{wanted.kind} is not supported")


def _tag(functions: list[dict[str, Any]], choice: str, content: Any, is_parallel: bool) -> dict[str, Any] | None:
    """The structural tag; None where nothing is asked for beyond what the model does by itself."""
    tag: dict[str, Any] = {"type": "tool_calls", "choice": choice}
    if not is_parallel:
        tag["parallel"] = False
    # Arguments of a tool that is not strict are the model's own affair.
    tag["tools"] = [
        {"name": one["name"], **({"parameters": one["parameters"]} if one.get("strict") else {})} for one in functions
    ]
    if content is not None:
        tag["content"] = content
    is_strict = any(one.get("strict") for one in functions)
    return tag if choice != "auto" or is_strict or content is not None else None


def _content(converted: ConversationRequest, fields: ConstraintFields) -> Any:
    """The schema of the text beside tool calls; None: any text."""
    conversation = converted.conversation
    if conversation.response_regex is not None:
        raise invalid(fields.regex, "cannot be combined with tools")
    if conversation.response_schema is not None:
        return conversation.response_schema
    return {"type": "object"} if conversation.response_format == "json_object" else None


def _asked(kind: ConstraintKind, text: str, field: str, start_after_ids: tuple[int, ...]) -> AskedConstraint:
    checked = normalise(kind, text, field=field, start_after_ids=start_after_ids)
    return AskedConstraint(constraint=checked, field=field)


def _asked_tag(tag: dict[str, Any], fields: ConstraintFields, start_after_ids: tuple[int, ...]) -> AskedConstraint:
    text = json.dumps(tag, ensure_ascii=False)
    try:
        return _asked(ConstraintKind.STRUCTURAL_TAG, text, _TOOLS_FIELD, start_after_ids)
    except InvalidArgument as error:
        field = error.violations[0].field
        if field == f"{_TOOLS_FIELD}.content":
            asked = fields.schema
        else:
            asked = field.replace("tools.tools[", "tools[").replace("].parameters", f"].{fields.parameters}", 1)
        raise invalid(asked, error.violations[0].description) from error


def _with_sent_definitions(function: dict[str, Any], sent_schemas: Mapping[str, Any]) -> dict[str, Any]:
    if "parameters" not in function:
        return function
    sent = sent_schemas.get(function["name"])
    return {**function, "parameters": _with_definitions(function["parameters"], sent)}


def _with_definitions(schema: Any, sent: Any) -> Any:
    """The recipe's strict form of a schema leaves out what `$ref`s point at."""
    if isinstance(schema, dict) and isinstance(sent, dict):
        return {**schema, **{key: sent[key] for key in _DEFINITIONS if key in sent and key not in schema}}
    return schema
