"""The structural tag of V4.1: text in which a block of tool calls has its form, and arguments that fit their schemas.

As JSON text:

    {"type": "tool_calls", "choice": "auto" | "any" | "required", "parallel": true,
     "tools": [{"name": N, "parameters": S}], "content": S}

choice      auto: any text, or `content`, that may end in a block of calls; any: a block of at least one call and
            nothing else; required: the same where the prompt has opened the block already
parallel    false: one call at most. Absent: true
parameters  JSON Schema of the arguments, an object. Absent: any arguments
content     JSON Schema of the text outside the block, for choice auto. Absent: any text
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_common.constraints.json_schema import Schema, check_schema, parse_json
from shoal_common.constraints.kinds import invalid
from shoal_common.constraints.patterns import PatternBudget

MAX_TOOLS = 128
MAX_NAME_BYTES = 256
DSML = "｜DSML｜"
"""The special token that opens every tag of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that may be called. `parameters` None: with any arguments."""

    name: str
    parameters: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTag:
    """A parsed structural tag; fields as in the JSON."""

    tools: tuple[Tool, ...]
    is_required: bool
    is_opened: bool
    """By the prompt; only where calls are required."""
    is_parallel: bool
    content: Schema | None


def parse_tag(text: str, field: str) -> ToolCallTag:
    """The tag of a JSON text. Raises ConstraintInvalid."""
    value = parse_json(text, field)
    if not isinstance(value, dict) or value.get("type") != "tool_calls":
        raise invalid(field, 'must be an object of type "tool_calls"')
    unknown = value.keys() - {"type", "choice", "parallel", "tools", "content"}
    if unknown:
        raise invalid(field, f"field {min(unknown)[:100]!r} is unknown")
    choice, is_parallel = value.get("choice"), value.get("parallel", True)
    if choice not in ("auto", "any", "required"):
        raise invalid(field, 'choice must be "auto", "any" or "required"')
    if not isinstance(is_parallel, bool):
        raise invalid(field, "parallel must be true or false")
    tools = value.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid(field, f"tools must be a list of 1 to {MAX_TOOLS} tools")
    budget = PatternBudget()
    parsed = tuple(_tool(tool, f"{field}.tools[{index}]", budget) for index, tool in enumerate(tools))
    if len({tool.name for tool in parsed}) < len(parsed):
        raise invalid(field, "two tools have the same name")
    content = value.get("content")
    if content is not None:
        if choice != "auto":
            raise invalid(field, "content has no place where the calls are required")
        check_schema(content, f"{field}.content", budget)
    return ToolCallTag(
        tools=parsed,
        is_required=choice != "auto",
        is_opened=choice == "required",
        is_parallel=is_parallel,
        content=content,
    )


def _tool(tool: Any, field: str, budget: PatternBudget) -> Tool:
    if not isinstance(tool, dict) or tool.keys() - {"name", "parameters"}:
        raise invalid(field, "must be an object of name and parameters")
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES or not is_name(name):
        raise invalid(f"{field}.name", f"must be a name of 1 to {MAX_NAME_BYTES} bytes without quotes or tags")
    parameters = tool.get("parameters")
    if parameters is None:
        return Tool(name=name, parameters=None)
    where = f"{field}.parameters"
    check_schema(parameters, where, budget)
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(where, "must describe an object")
    for key in ("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "patternProperties", "minProperties"):
        if key in parameters:
            raise invalid(where, f"#: {key} is not supported at the top of a tool's parameters")
    properties = parameters.get("properties", {})
    wrong = [name for name in properties if not is_name(name)]
    if wrong:
        raise invalid(where, f"property {wrong[0][:100]!r} cannot be written as a parameter's name")
    if missing := [name for name in parameters.get("required", ()) if name not in properties]:
        raise invalid(where, f"required property {missing[0][:100]!r} is not among the properties")
    if "maxProperties" in parameters and parameters["maxProperties"] < len(properties):
        raise invalid(where, "#: maxProperties below the number of properties is not supported")
    return Tool(name=name, parameters=parameters)


def is_name(name: str) -> bool:
    """Whether it can stand in the quotes of a tag."""
    return bool(name) and '"' not in name and "<" not in name and DSML not in name and name.isprintable()
