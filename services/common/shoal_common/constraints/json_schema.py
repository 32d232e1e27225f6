"""Whether a JSON Schema can be enforced at all: well-formed, of bounded size, of keywords that are known, and finite.

What the engine itself refuses (formats, patterns, intersections without a value) it finds when it compiles.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from shoal_common.constraints import merged
from shoal_common.constraints.kinds import MAX_TEXT_BYTES, invalid
from shoal_common.constraints.patterns import UNWRITABLE, PatternBudget, writable

MAX_DEPTH = 64
MAX_NODES = 20_000
"""Subschemas and values of enums, in all."""
MAX_COUNT = 100_000
"""The largest lower or upper bound of a length that is enforced."""

MAX_NUMBER = 2**53
"""The largest magnitude of a number in an assertion, and of its digits as an integer: doubles are exact up to here."""
MAX_PLACES = 22
"""Behind the point of such a number."""

Schema = dict[str, Any] | bool

_ANNOTATIONS = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"})
_ANNOTATIONS |= {"readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType"}
_ASSERTIONS = frozenset({"type", "enum", "const", "required", "pattern", "format", "$ref"})
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ONE_CHILD = ("additionalProperties", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_KNOWN = _ANNOTATIONS | _ASSERTIONS | {*_COUNTS, *_NUMBERS, *_ONE_CHILD, *_LISTS, *_MAPS}
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_TYPES = _SCALARS | {"array", "object"}
_STRINGS = ("pattern", "format", "$schema", "$id", "$comment", "title", "description")


def parse_json(text: str, field: str) -> Any:
    """JSON text as a value. Raises ConstraintInvalid: too large, malformed, or not valid Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode: {error.reason}") from error
    if size > MAX_TEXT_BYTES:
        raise invalid(field, f"has {size} bytes, at most {MAX_TEXT_BYTES} are taken")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_members)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid(field, "holds half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from error
    return value


def check_schema(schema: Any, field: str, budget: PatternBudget | None = None) -> Schema:
    """The schema itself. Raises ConstraintInvalid, which says where in the schema something is wrong.

    A schema that has no finite value (an object that requires itself), or a part that has none, is refused: generation
    would enter it and never come out.

    budget   of the constraint that the schema is a part of
    """
    nodes = dict(_walk(schema, field, budget or PatternBudget()))
    for path, node in nodes.items():
        if isinstance(node, dict) and "$ref" in node and _target(node["$ref"]) not in nodes:
            raise invalid(field, f"{path or '#'}: $ref {_shown(node['$ref'])} names no schema in this document")
    endless = _endless(nodes)
    if endless is not None:
        raise invalid(field, f"{endless or '#'}: has no finite value: it always contains itself")
    merged.check_bounds(nodes, _target, field)
    checked: Schema = schema
    return checked


def with_writable_patterns(schema: Any) -> Any:
    """A checked schema whose patterns match nothing that JSON can only write as `\\u`; see `patterns.writable`."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name, value in schema.items():
        if name == "pattern":
            made[name] = writable(value)
        elif name in _ONE_CHILD:
            made[name] = with_writable_patterns(value)
        elif name in _LISTS:
            made[name] = [with_writable_patterns(one) for one in value]
        elif name in _MAPS:
            is_pattern = name == "patternProperties"
            inner = {writable(key) if is_pattern else key: with_writable_patterns(one) for key, one in value.items()}
            made[name] = inner
    return made


def scalar_alternatives(schema: Schema, field: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """See `merged.scalar_alternatives`; of a checked document."""
    return merged.scalar_alternatives(dict(_walk(schema, field, PatternBudget())), _target)


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


def _walk(root: Any, field: str, budget: PatternBudget) -> Iterator[tuple[str, Schema]]:
    """Every subschema with its JSON pointer, each checked by itself."""
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    count = 0
    while stack:
        path, node, depth = stack.pop()
        count += 1
        if isinstance(node, dict):
            _check_node(node, path, field)
            _check_patterns(node, path or "#", field, budget)
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
        value = node.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise invalid(field, f"{where}: {name} must be a whole number from 0 to {MAX_COUNT}")
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        raise invalid(field, f"{where}: enum must be a list of at least one value")
    if "required" in node and not (_is_names(node["required"]) and _is_distinct(node["required"])):
        raise invalid(field, f"{where}: required must be a list of names, each once")
    if "$ref" in node and not (isinstance(node["$ref"], str) and node["$ref"].startswith("#")):
        raise invalid(field, f"{where}: $ref must point into this document")
    if "type" in node:
        kinds = [node["type"]] if isinstance(node["type"], str) else node["type"]
        if not (_is_names(kinds) and kinds and _is_distinct(kinds) and _TYPES.issuperset(kinds)):
            raise invalid(field, f"{where}: type must be one or more of {', '.join(sorted(_TYPES))}")
    for name in _STRINGS:
        if name in node and not isinstance(node[name], str):
            raise invalid(field, f"{where}: {name} must be a string")
    for name in _NUMBERS:
        if name in node and not (_is_number(node[name]) and (name != "multipleOf" or node[name] > 0)):
            raise invalid(
                field, f"{where}: {name} must be a number of at most 2 ** 53 and 15 digits, and multipleOf positive"
            )
    for name in ("const", "enum"):
        if name in node:
            _check_value(node[name], f"{where}: {name}", field)
    # Free names may come twice, and are then one property.
    has_free_names = node.get("additionalProperties", True) is not False or node.get("patternProperties")
    if has_free_names and node.get("minProperties", 0) > len(node.get("required", ())) + 1:
        raise invalid(field, f"{where}: minProperties above required + 1 needs additionalProperties: false")


def _check_patterns(node: dict[str, Any], where: str, field: str, budget: PatternBudget) -> None:
    keys = node.get("patternProperties")
    for pattern in [*([node["pattern"]] if "pattern" in node else ()), *(keys if isinstance(keys, dict) else ())]:
        budget.take(pattern, field, f"{where}: pattern {_shown(pattern)} ")


def _check_value(value: Any, where: str, field: str) -> None:
    """That a value of `const` or `enum` is generated as it is."""
    stack = [(value, 0)]
    while stack:
        one, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise invalid(field, f"{where}: is nested more than {MAX_DEPTH} deep")
        if isinstance(one, list | dict):
            stack += [(inner, depth + 1) for inner in (one.values() if isinstance(one, dict) else one)]
        elif isinstance(one, str):
            if not UNWRITABLE.isdisjoint(one):
                raise invalid(field, f"{where}: control characters that need \\u are not supported")
        elif isinstance(one, int | float) and not isinstance(one, bool) and not _is_number(one):
            raise invalid(field, f"{where}: numbers above 2 ** 53, or of more than 15 digits, are not supported")


def _is_number(value: Any) -> bool:
    """Whether an engine reads it as it is: an integer that a double holds, times a power of ten that one holds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        return False
    digits, exponent = Decimal(repr(value)).as_tuple()[1:]
    return int("".join(map(str, digits))) <= MAX_NUMBER and int(exponent) >= -MAX_PLACES


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


def _is_distinct(names: list[str]) -> bool:
    return len(set(names)) == len(names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a member is given twice")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
