"""Which schemas of a document one value must fit together, and what the engine cannot see in their bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shoal_common.constraints.kinds import invalid

Node = Mapping[str, Any]
MAX_VISITS = 25_000
"""Of schemas, in all that one value must fit; a document without references has one for each of its parts."""
_SUSPECT = frozenset({"multipleOf", "pattern", "format"})
_SCALAR = _SUSPECT | {"type", "const", "enum", "minLength", "maxLength"}
_SCALAR |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OPPOSITE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


@dataclass(frozen=True, slots=True)
class Member:
    """A schema that a value must fit where these branches were chosen."""

    path: str
    choices: frozenset[tuple[str, str]] = frozenset()

    def fits(self, other: Member) -> bool:
        """Whether a value can have to fit both: they are not of two branches of one choice."""
        chosen = dict(self.choices)
        return all(chosen.get(point, branch) == branch for point, branch in other.choices)


def check_bounds(nodes: Mapping[str, Any], target: Callable[[str], str], field: str) -> None:
    """Refuse a whole exclusive bound of a number that another bound of the same value comes nearer to than 1.

    The engine writes it as if it were inclusive. Raises ConstraintInvalid.

    nodes    of a checked document, by path
    target   the path that a reference leads to
    """
    values = {name: _values(name, nodes) for name in (*_OPPOSITE, "minimum", "maximum")}
    if not any(
        _is_near(end, values[other]) for name, others in _OPPOSITE.items() for end in values[name] for other in others
    ):
        return
    for group in groups(nodes, target, field):
        found = _near(group, nodes)
        if found is not None:
            path, name = found
            text = f"{path or '#'}: a whole {name} less than 1 from the other bound is not supported"
            raise invalid(field, text)


def scalar_alternatives(
    nodes: Mapping[str, Any], target: Callable[[str], str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Where numbers and strings must fit several assertions: the path, and schemas of which one must have a value.

    The schemas are of one value without what is in it, and stand alone. Of very large documents only the first.
    """
    if not any(isinstance(node, dict) and not _SUSPECT.isdisjoint(node) for node in nodes.values()):
        return
    for group in groups(nodes, target, None):
        members = [(one, nodes[one.path]) for one in group if isinstance(nodes[one.path], dict)]
        if _count(members, {"multipleOf"}) == 0 and _count(members, {"pattern", "format"}) < 2:
            continue
        always = [_scalar(node) for one, node in members if not one.choices]
        branches: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for one, node in members:
            if len(one.choices) == 1:
                ((point, branch),) = one.choices
                branches.setdefault(point, {}).setdefault(branch, []).append(_scalar(node))
        yield group[0].path, [{"allOf": always}] if always else [{}]
        for point, of_point in branches.items():
            yield point, [{"allOf": always + inner} for inner in of_point.values()]


def _count(members: list[tuple[Member, Node]], names: set[str]) -> int:
    return sum(name in node for _, node in members for name in names)


def _scalar(node: Node) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name in _SCALAR}


def groups(nodes: Mapping[str, Any], target: Callable[[str], str], field: str | None) -> Iterator[list[Member]]:
    """Schemas that apply to one value together: what stands at its place, and what that is put together of.

    Raises ConstraintInvalid naming `field` where there are too many; without a field it ends there.
    """
    elsewhere = set(chain.from_iterable(_not_by_themselves(path, node) for path, node in nodes.items()))
    roots = [frozenset({Member(path)}) for path in nodes if path not in elsewhere]
    seen = set(roots)
    visits = 0
    while roots:
        group = _closure(roots.pop(), nodes, target)
        visits += len(group)
        if visits > MAX_VISITS:
            if field is None:
                return
            raise invalid(field, "its parts are put together in too many ways")
        yield group
        for inner in _children(group, nodes):
            if len(inner) > 1 and inner not in seen:
                seen.add(inner)
                roots.append(inner)


def _closure(roots: frozenset[Member], nodes: Mapping[str, Any], target: Callable[[str], str]) -> list[Member]:
    found = dict.fromkeys(roots)
    stack = list(roots)
    while stack:
        one = stack.pop()
        node = nodes[one.path]
        if not isinstance(node, dict):
            continue
        inner = [Member(target(node["$ref"]), one.choices)] if "$ref" in node else []
        inner += [Member(f"{one.path}/allOf/{i}", one.choices) for i in range(len(node.get("allOf", ())))]
        for name in ("anyOf", "oneOf"):
            point = f"{one.path}/{name}"
            for i in range(len(node.get(name, ()))):
                branch = Member(f"{point}/{i}", one.choices | {(point, str(i))})
                inner += [branch] if one.fits(branch) else []
        for member in inner:
            if member not in found and len(found) <= MAX_VISITS:
                found[member] = None
                stack.append(member)
    return list(found)


def _children(group: list[Member], nodes: Mapping[str, Any]) -> Iterator[frozenset[Member]]:
    """Of values inside the value: those that are named, those that are not, and items by their place."""
    members = [(one, nodes[one.path]) for one in group if isinstance(nodes[one.path], dict)]
    names = dict.fromkeys(chain.from_iterable(node.get("properties", ()) for _, node in members))
    others = frozenset(
        Member(f"{one.path}/additionalProperties", one.choices)
        for one, node in members
        if "additionalProperties" in node
    )
    patterns = frozenset(
        # Patterns of one schema exclude each other.
        Member(f"{one.path}/patternProperties/{_key(key)}", one.choices | {(f"{one.path}/patternProperties", key)})
        for one, node in members
        for key in node.get("patternProperties", ())
    )
    for name in names:
        named = frozenset(
            Member(f"{one.path}/properties/{_key(name)}", one.choices)
            for one, node in members
            if name in node.get("properties", ())
        )
        free = {one for one in others if name not in nodes[one.path.rpartition("/")[0]].get("properties", ())}
        yield named | free | patterns
    yield others | patterns
    for place in range(max((len(node.get("prefixItems", ())) for _, node in members), default=0) + 1):
        yield frozenset(
            Member(f"{one.path}/{_item(node, place)}", one.choices) for one, node in members if _item(node, place)
        )


def _not_by_themselves(path: str, node: Any) -> Iterator[str]:
    """Schemas inside of one that no value fits by its place: parts of it, and what is only referred to."""
    if isinstance(node, dict):
        for name in ("allOf", "anyOf", "oneOf"):
            yield from (f"{path}/{name}/{index}" for index in range(len(node.get(name, ()))))
        for name in ("$defs", "definitions"):
            yield from (f"{path}/{name}/{_key(key)}" for key in node.get(name, ()))


def _item(node: Node, place: int) -> str:
    if place < len(node.get("prefixItems", ())):
        return f"prefixItems/{place}"
    return "items" if "items" in node else ""


def _near(group: list[Member], nodes: Mapping[str, Any]) -> tuple[str, str] | None:
    """A whole exclusive bound and where it stands, with an opposite one less than 1 away."""
    members = [(one, nodes[one.path]) for one in group if isinstance(nodes[one.path], dict)]
    if any(not one.choices and not _may_be_fraction(node) for one, node in members):
        return None
    for name, others in _OPPOSITE.items():
        ends = [(one, node[name]) for one, node in members if name in node and node[name] == int(node[name])]
        for one, end in ends:
            for other, node in members:
                if any(bound in node and abs(node[bound] - end) < 1 for bound in others) and one.fits(other):
                    return one.path, name
    return None


def _values(name: str, nodes: Mapping[str, Any]) -> list[float]:
    return sorted({node[name] for node in nodes.values() if isinstance(node, dict) and name in node})


def _is_near(end: float, others: list[float]) -> bool:
    """Whether the end is whole and one of these, which ascend, less than 1 away."""
    place = bisect_left(others, end)
    return end == int(end) and any(abs(one - end) < 1 for one in others[max(0, place - 1) : place + 1])


def _may_be_fraction(node: Node) -> bool:
    kind = node.get("type", "number")
    return kind == "number" or "number" in kind


def _key(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
