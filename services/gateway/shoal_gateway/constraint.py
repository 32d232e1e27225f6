"""Which constraint a request's answer is held to, checked, and by which of the client's fields it came. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_recipe import ConversationRequest
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal_common.constraints import ConstraintKind, OutputConstraint, invalid, normalise
from shoal_common.constraints.wire import constraint_message, kind_and_text
from shoal_common.errors import InvalidArgument, MeshError

_TOOLS_FIELD = "tools"
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


def of_conversation(
    converted: ConversationRequest,
    *,
    fields: ConstraintFields,
    sent_schemas: Mapping[str, Any],
    strict_tools: str | None,
    is_parallel: bool,
    start_after_ids: tuple[int, ...],
) -> AskedConstraint | None:
    """Of a conversation, as the recipe understands its response format and tools. Raises ConstraintInvalid.

    sent_schemas   by the name of a tool, the client's own schema, which the recipe has taken
    strict_tools   the recipe's list of tools where the one that came with the conversation does not say who is strict
    """
    wanted = converted.inference_options.output_constraint
    if wanted is None:
        return None
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
        tag = _tag(converted, tools, fields, wanted.kind == "tool_call_required", is_parallel)
        return None if tag is None else _asked_tag(tag, fields, start_after_ids)
    raise invalid(fields.form, f"{wanted.kind} is not supported")


def _tag(
    converted: ConversationRequest,
    functions: list[dict[str, Any]],
    fields: ConstraintFields,
    is_required: bool,
    is_parallel: bool,
) -> dict[str, Any] | None:
    """The structural tag; None where nothing is asked for beyond what the model does by itself."""
    tag: dict[str, Any] = {"type": "tool_calls", "choice": "required" if is_required else "auto"}
    if not is_parallel:
        tag["parallel"] = False
    # Arguments of a tool that is not strict are the model's own affair.
    tag["tools"] = [
        {"name": one["name"], **({"parameters": one["parameters"]} if one.get("strict") else {})} for one in functions
    ]
    content = None if is_required else _content(converted, fields)
    if content is not None:
        tag["content"] = content
    is_strict = any(one.get("strict") for one in functions)
    return tag if is_required or is_strict or content is not None else None


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
