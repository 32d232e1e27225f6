"""Whether a JSON Schema can be enforced at all: well-formed, of bounded size, of keywords that are known, and finite.

What the engine itself refuses (formats, patterns, intersections without a value) it finds when it compiles.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from shoal_common.constraints.kinds import MAX_TEXT_BYTES, invalid

MAX_DEPTH = 64
MAX_NODES = 20_000
"""Subschemas and values of enums, in all."""
MAX_COUNT = 100_000
"""The largest lower or upper bound of a length that is enforced."""

Schema = dict[str, Any] | bool

_ANNOTATIONS = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"})
_ANNOTATIONS |= {"readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType"}
_ASSERTIONS = frozenset({"type", "enum", "const", "required", "pattern", "format", "multipleOf", "$ref"})
_ASSERTIONS |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_ONE_CHILD = ("additionalProperties", "items", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_KNOWN = _ANNOTATIONS | _ASSERTIONS | {*_COUNTS, *_ONE_CHILD, *_LISTS, *_MAPS}
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def parse_json(text: str, field: str) -> Any:
    """JSON text as a value. Raises ConstraintInvalid: too large, malformed, or not valid Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode: {error.reason}") from error
    if size > MAX_TEXT_BYTES:
        raise invalid(field, f"has {size} bytes, at most {MAX_TEXT_BYTES} are taken")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid(field, "holds half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from error
    return value


def check_schema(schema: Any, field: str) -> Schema:
    """The schema itself. Raises ConstraintInvalid, which says where in the schema something is wrong.

    A schema that has no finite value (an object that requires itself), or a part that has none, is refused: generation
    would enter it and never come out.
    """
    nodes = dict(_walk(schema, field))
    for path, node in nodes.items():
        if isinstance(node, dict) and "$ref" in node and _target(node["$ref"]) not in nodes:
            raise invalid(field, f"{path or '#'}: $ref {_shown(node['$ref'])} names no schema in this document")
    endless = _endless(nodes)
    if endless is not None:
        raise invalid(field, f"{endless or '#'}: has no finite value: it always contains itself")
    checked: Schema = schema
    return checked


def compact(schema: Schema) -> str:
    """The schema as text, members in their order: properties are generated in it."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def resolve(root: Schema, schema: Schema) -> Schema:
    """What a schema of a checked document refers to, through any number of bare `$ref`s; else itself."""
    for _ in range(MAX_NODES):
        if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            break
        target: Any = root
        for part in _target(schema["$ref"]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target[int(key)] if isinstance(target, list) else target[key]
        schema = target
    return schema


def _walk(root: Any, field: str) -> Iterator[tuple[str, Schema]]:
    """Every subschema with its JSON pointer, each checked by itself."""
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    count = 0
    while stack:
        path, node, depth = stack.pop()
        count += 1
        if isinstance(node, dict):
            _check_node(node, path, field)
            count += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
            children = list(_children(node, path, field))
            if children and depth >= MAX_DEPTH:
                raise invalid(field, f"{path}: is nested more than {MAX_DEPTH} deep")
            stack += [(child_path, child, depth + 1) for child_path, child in children]
        elif not isinstance(node, bool):
            raise invalid(field, f"{path or '#'}: must be a schema, an object or true or false")
        if count > MAX_NODES:
            raise invalid(field, f"has more than {MAX_NODES} parts")
        yield path, node


def _check_node(node: dict[str, Any], path: str, field: str) -> None:
    where = path or "#"
    unknown = node.keys() - _KNOWN
    if unknown:
        raise invalid(field, f"{where}: keyword {_shown(min(unknown))} is not supported")
    if "$id" in node and path:
        raise invalid(field, f"{where}: $id is supported at the top only")
    for name in _COUNTS:
        value = node.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT):
            raise invalid(field, f"{where}: {name} must be a whole number from 0 to {MAX_COUNT}")
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        raise invalid(field, f"{where}: enum must be a list of at least one value")
    if "required" in node and not _is_names(node["required"]):
        raise invalid(field, f"{where}: required must be a list of names")
    if "$ref" in node and not (isinstance(node["$ref"], str) and node["$ref"].startswith("#")):
        raise invalid(field, f"{where}: $ref must point into this document")
    if "type" in node and not (isinstance(node["type"], str) or _is_names(node["type"])):
        raise invalid(field, f"{where}: type must be a name or a list of names")


def _children(node: dict[str, Any], path: str, field: str) -> Iterator[tuple[str, Any]]:
    for name in _ONE_CHILD:
        if name in node:
            # Before 2020-12, `items` could be a list of schemas.
            if name == "items" and isinstance(node[name], list):
                raise invalid(field, f"{path or '#'}: items must be a schema; a list belongs into prefixItems")
            yield f"{path}/{name}", node[name]
    for name in _LISTS:
        if name in node:
            if not isinstance(node[name], list) or not node[name]:
                raise invalid(field, f"{path or '#'}: {name} must be a list of at least one schema")
            for index, child in enumerate(node[name]):
                yield f"{path}/{name}/{index}", child
    for name in _MAPS:
        if name in node:
            if not isinstance(node[name], dict):
                raise invalid(field, f"{path or '#'}: {name} must be an object")
            for key, child in node[name].items():
                yield f"{path}/{name}/{key.replace('~', '~0').replace('/', '~1')}", child


def _endless(nodes: dict[str, Schema]) -> str | None:
    """A subschema without a finite value, by least fixpoint: each waits for those that every value of it contains."""
    waits: dict[str, list[list[str]]] = {path: _needs(node, path, nodes) for path, node in nodes.items()}
    dependents: dict[str, list[str]] = {}
    for path, groups in waits.items():
        for group in groups:
            for other in group:
                dependents.setdefault(other, []).append(path)
    finite: set[str] = set()
    queue = deque(waits)
    while queue:
        path = queue.popleft()
        if path not in finite and all(any(other in finite for other in group) for group in waits[path]):
            finite.add(path)
            queue.extend(dependents.get(path, ()))
    return next((path for path in nodes if path not in finite), None)


def _needs(node: Schema, path: str, nodes: dict[str, Schema]) -> list[list[str]]:
    """Of every group at least one must have a finite value."""
    if isinstance(node, bool) or "enum" in node or "const" in node:
        return []
    groups = [[_target(node["$ref"])]] if "$ref" in node else []
    groups += [[f"{path}/allOf/{i}"] for i in range(len(node.get("allOf", ())))]
    groups += [[f"{path}/{name}/{i}" for i in range(len(node[name]))] for name in ("anyOf", "oneOf") if name in node]
    kind = node.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or _SCALARS)
    if kinds & _SCALARS:
        return groups
    if kinds == {"array"} and node.get("minItems", 0):
        inner = [f"{path}/prefixItems/{i}" for i in range(len(node.get("prefixItems", ())))][: node["minItems"]]
        if len(inner) < node["minItems"]:
            inner.append(f"{path}/items")
        groups += [[one] for one in inner if one in nodes]
    elif kinds == {"object"}:
        for name in node.get("required", ()):
            inside = f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            other = f"{path}/additionalProperties"
            groups += [[one] for one in ([inside] if inside in nodes else [other]) if one in nodes]
    return groups


def _target(reference: str) -> str:
    return unquote(reference[1:])


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
