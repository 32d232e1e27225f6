r"""V4.1's tool calls as a Lark grammar of llguidance.

    \n\n<｜DSML｜ calls>
    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="K" string="true|false">VALUE</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

`｜DSML｜` is one special token, so text can contain no tag; its spelling in other tokens is kept out of text too,
since the output is parsed as text. Parameters come in the order of the schema. A value is raw text (string="true")
where its schema is a string that text can be held to, and JSON otherwise. Source: V4.1's prompt encoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shoal_common.constraints import ConstraintKind, invalid
from shoal_common.constraints.json_schema import Schema, resolve, with_writable_patterns
from shoal_common.constraints.tool_calls import DSML, Tool, ToolCallTag

MAX_GRAMMAR_BYTES = 4 * 1024 * 1024
NEWLINE, QUOTE = "\n", '"'
_ANY = r"(?s:.*)"
_NO_TAG = f"~/{_ANY}{DSML}{_ANY}/"
"""Text is parsed as text: what a tag's token is spelled like must not come out of other tokens."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated"})
_JSON_ONLY: Schema = {"type": ["number", "boolean", "null", "object", "array"]}


def tag_to_lark(tag: ToolCallTag, special_ids: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """Lark text. Raises ConstraintInvalid: the tokenizer has no ｜DSML｜, or the schemas together are too large."""
    field = ConstraintKind.STRUCTURAL_TAG.value
    if DSML not in special_ids:
        raise invalid(field, f"this model has no {DSML} token, and so no tool calls")
    text = "\n".join(_Lark(special_ids[DSML], json_options).lines(tag)) + "\n"
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"the tools' schemas make a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
    return text


class _Lark:
    def __init__(self, dsml_id: int, json_options: Mapping[str, Any]) -> None:
        self._dsml, self._json_options = f"<[{dsml_id}]>", json_options
        self._texts: dict[tuple[int, int | None], str] = {}

    def lines(self, tag: ToolCallTag) -> Iterator[str]:
        """The grammar, line by line."""
        yield "%llguidance {}"
        yield from self._start(tag)
        yield f"calls: invoke{'+' if tag.is_parallel else ''} {self._closing(' calls>')}"
        heads = " | ".join(f"tool{index}" for index in range(len(tag.tools)))
        yield f"invoke: {self._opening()} ({heads}) {self._closing(' invoke>' + NEWLINE)}"
        for index, tool in enumerate(tag.tools):
            yield from self._tool(f"tool{index}", tool)
        for (low, high), name in self._texts.items():
            count = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
            yield rf"{name}: /(?s:.{count})<\// & {_NO_TAG}"
        yield 'NAME: /[^"<>\\n]{1,256}/'

    def _start(self, tag: ToolCallTag) -> Iterator[str]:
        block = f"{self._dsml} {_text(' calls>' + NEWLINE)} calls"
        if tag.is_required:
            yield "start: calls" if tag.is_opened else f"start: {_text(NEWLINE * 2 + '<')} {block}"
        elif tag.content is None:
            yield f"start: PLAIN | BEFORE {block}"
            yield f"PLAIN: /{_ANY}/ & {_NO_TAG}"
            yield rf"BEFORE: /({_ANY}\n\n)?</ & {_NO_TAG}"
        else:
            yield f"start: content | (content {_text(NEWLINE * 2 + '<')} | {_text(NEWLINE * 2 + '<')}) {block}"
            yield f"content: {self._json(tag.content)}"

    def _tool(self, rule: str, tool: Tool) -> Iterator[str]:
        head = _text(f' invoke name="{tool.name}">\n')
        schema = tool.parameters
        if schema is None or ("properties" not in schema and schema.get("additionalProperties", True) is not False):
            extra = (schema or {}).get("additionalProperties", True)
            yield f"{rule}: {head} any_of_{rule}*"
            yield f"any_of_{rule}: {self._parameter(None, extra, schema or {})}"
            return
        required = schema.get("required", ())
        parts = []
        for index, (name, value) in enumerate(schema.get("properties", {}).items()):
            if resolve(schema, value) is False and name not in required:
                continue
            parts.append(f"{rule}_{index}{'' if name in required else '?'}")
            yield f"{rule}_{index}: {self._parameter(name, value, schema)}"
        yield f"{rule}: {head} {' '.join(parts)}"

    def _parameter(self, name: str | None, value: Schema, root: dict[str, Any]) -> str:
        """One parameter with its tags; None: of any name."""
        quoted = f"{_text(' parameter name=' + QUOTE)} NAME {_text(QUOTE + ' string=' + QUOTE)}"
        if name is not None:
            quoted = _text(f' parameter name="{name}" string="')
        forms = [f"{_text('true' + QUOTE + '>')} {text}" for text in self._as_text(resolve(root, value))]
        schema = self._as_json(value, root)
        if schema is not None:
            forms.append(f"{_text('false' + QUOTE + '>')} {self._json(schema)} {_text('</')}")
        return f"{self._opening()} {quoted} ({' | '.join(forms)}) {self._dsml} {_text(' parameter>' + NEWLINE)}"

    def _as_text(self, schema: Schema) -> Iterator[str]:
        """How a value is written as text, the `</` behind it included; nothing where it cannot be."""
        if _is_anything(schema):
            yield self._raw(0, None)
        elif isinstance(schema, dict) and _is_plain_string(schema):
            yield self._raw(schema.get("minLength", 0), schema.get("maxLength"))
        elif isinstance(schema, dict) and (choices := _string_choices(schema)):
            yield f"({' | '.join(_text(choice + '</') for choice in choices)})"

    def _as_json(self, value: Schema, root: dict[str, Any]) -> Schema | None:
        """The schema of a value that is written as JSON; None where text serves."""
        resolved = resolve(root, value)
        if _is_anything(resolved):
            return _JSON_ONLY
        if isinstance(resolved, dict) and (_is_plain_string(resolved) or _string_choices(resolved)):
            return None
        return _detached(value, root)

    def _raw(self, low: int, high: int | None) -> str:
        return self._texts.setdefault((low, high), f"RAW{len(self._texts)}")

    def _opening(self) -> str:
        return f"{_text('<')} {self._dsml}"

    def _closing(self, name: str) -> str:
        return f"{_text('</')} {self._dsml} {_text(name)}"

    def _json(self, schema: Schema) -> str:
        value = {} if schema is True else {"enum": []} if schema is False else with_writable_patterns(schema)
        return "%json " + json.dumps({**value, "x-guidance": dict(self._json_options)}, ensure_ascii=False)


def _is_anything(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _NOTES)


def _is_plain_string(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string" and schema.keys() <= _NOTES | {"type", "minLength", "maxLength"}


def _string_choices(schema: dict[str, Any]) -> list[str] | None:
    """The strings of an enum that text can be held to; None for any other schema."""
    if schema.keys() - _NOTES - {"type"} not in ({"enum"}, {"const"}) or schema.get("type", "string") != "string":
        return None
    choices = schema["enum"] if "enum" in schema else [schema["const"]]
    is_text = all(isinstance(one, str) and "<" not in one and DSML not in one for one in choices)
    return choices if is_text else None


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _detached(value: Schema, root: dict[str, Any]) -> Schema:
    """A subschema that can stand alone: with what its references point at."""
    if "$ref" not in json.dumps(value):
        return value
    return {"$ref": "#/$defs/value", "$defs": {"value": _moved(value), "root": _moved(root)}}


def _moved(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: f"#/$defs/root{one[1:]}" if key == "$ref" and isinstance(one, str) else _moved(one)
            for key, one in node.items()
        }
    return [_moved(one) for one in node] if isinstance(node, list) else node
