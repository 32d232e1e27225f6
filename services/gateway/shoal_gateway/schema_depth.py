"""How deep a schema leads whoever follows its references. The recipe does, by recursion, on a stack that has an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

from shoal_common.constraints import invalid

MAX_LEVELS = 1_000
"""Of JSON, from the root of a schema through its references. The recipe's stack holds four times as many."""
MAX_VISITS = 500_000
"""Values looked at for one schema with references: those below a target count again for it."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_INDEX_DIGITS = 10
_ROOTS = frozenset({"schema", "parameters", "input_schema"})
"""What schemas are called in the bodies of all APIs."""
_Way: TypeAlias = "tuple[_Way | None, str | int]"
"""The keys to a value, the last one first."""


def check_depth(body: dict[str, Any]) -> None:
    """Raise ConstraintInvalid, which names the schema, if one in the body of a request leads too deep."""
    for way, schema in _schemas(body):
        levels = levels_of(schema)
        if levels > MAX_LEVELS:
            raise invalid(_path(way), f"its references lead more than {MAX_LEVELS} levels deep")


def levels_of(schema: Any) -> int:
    """Levels on the longest way through references that enters none twice, or a bound of it where they are circular.

    More than MAX_LEVELS for a schema that is too large to tell.
    """
    parts: dict[str, tuple[int, set[str]]] = {}
    unseen, visits = ["#"], 0
    while unseen:
        pointer = unseen.pop()
        if pointer in parts:
            continue
        levels, references = 0, set()
        for level, value in _values(_at(schema, pointer)):
            levels = max(levels, level)
            visits += 1
            if visits > MAX_VISITS:
                return MAX_LEVELS + 1
            if isinstance(value, dict):
                references |= {value[name] for name in _REFERENCES if isinstance(value.get(name), str)}
        parts[pointer] = levels, references
        unseen += references
    return _longest(parts)


def _longest(parts: dict[str, tuple[int, set[str]]]) -> int:
    """Parts that none refers to come first; what is left in the end refers to itself, and is taken as a whole."""
    referring = dict.fromkeys(parts, 0)
    for _, references in parts.values():
        for one in references:
            referring[one] += 1
    before = dict.fromkeys(parts, 0)
    ready = [one for one, count in referring.items() if not count]
    longest = 0
    while ready:
        pointer = ready.pop()
        levels, references = parts.pop(pointer)
        behind = before[pointer] + levels
        longest = max(longest, behind)
        for one in references:
            before[one] = max(before[one], behind)
            referring[one] -= 1
            if not referring[one]:
                ready.append(one)
    return longest + sum(levels for levels, _ in parts.values())


def _schemas(body: dict[str, Any]) -> Iterator[tuple[_Way, Any]]:
    stack: list[tuple[_Way | None, Any]] = [(None, body)]
    while stack:
        way, value = stack.pop()
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if key in _ROOTS and isinstance(one, dict):
                yield (way, key), one
            elif isinstance(one, dict | list):
                stack.append(((way, key), one))


def _path(way: _Way | None) -> str:
    """Written out only where it is told: keys can be long, and what is below them much."""
    keys: list[str | int] = []
    while way is not None:
        way, key = way
        keys.append(key)
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(keys)).removeprefix(".")


def _values(value: Any) -> Iterator[tuple[int, Any]]:
    """The value and all below it, with their level, 1 for the value itself."""
    stack = [(1, value)]
    while stack:
        level, one = stack.pop()
        yield level, one
        if isinstance(one, dict):
            stack += [(level + 1, inner) for inner in one.values()]
        elif isinstance(one, list):
            stack += [(level + 1, inner) for inner in one]


def _at(root: Any, reference: str) -> Any:
    """What a reference leads to: by its pointer, or all of the schema where it has none that leads anywhere."""
    begin, *names = unquote(reference).split("/")
    at = root
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and key.isdecimal() and len(key) < _INDEX_DIGITS and int(key) < len(at):
            at = at[int(key)]
        elif isinstance(at, dict) and key in at:
            at = at[key]
        else:
            return root
    return at if begin == "#" else root
