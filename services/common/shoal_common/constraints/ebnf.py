r"""Grammars in EBNF, as llama.cpp and XGrammar write them, parsed and checked.

    root ::= "yes" | "no" reason?      # alternatives, sequence, ? * + {2} {2,} {2,5}, groups ( ), comments
    reason ::= ": " [^\n"]+ .          # classes with ranges and escapes \n \r \t \\ \" \] \- \xHH \uHHHH \UHHHHHHHH

A rule ends where the next `name ::=` begins. Strings and classes match characters; `.` is any character but newline.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal_common.constraints.kinds import MAX_TEXT_BYTES, invalid

ROOT = "root"
MAX_NESTING = 64
MAX_PARTS = 20_000
"""Characters of strings, classes, names, groups and repetitions, in all."""
MAX_REPEAT = 1_000
MAX_STACKED = 4
"""Repetitions of repetitions without a group, as in a?*+."""


@dataclass(frozen=True, slots=True)
class Literal:
    """These characters."""

    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character in, or with `is_negated` in none of, these ranges of code points, ends included."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule derives."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; nothing at all if empty."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of them."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; None: without end."""

    part: Expression
    low: int
    high: int | None


Expression = Literal | CharClass | Ref | Sequence | Choice | Repeat

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)(?:[ \t\r\n]|#[^\n]*)*::=")
_BOUNDS = re.compile(r"\{\s*(\d{1,6})\s*(?:(,)\s*(\d{1,6})?\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", **{c: c for c in "\\\"'[]-^/.{}()|?*+"}}


def parse_ebnf(text: str, field: str) -> dict[str, Expression]:
    """The rules by name, `root` among them. Raises ConstraintInvalid, which says where."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode: {error.reason}") from error
    if size > MAX_TEXT_BYTES:
        raise invalid(field, f"has {size} bytes, at most {MAX_TEXT_BYTES} are taken")
    rules = _Parser(text, field).rules()
    if ROOT not in rules:
        raise invalid(field, f"has no rule {ROOT!r}")
    for name, rule in rules.items():
        for part in parts_of(rule):
            if isinstance(part, Ref) and part.name not in rules:
                raise invalid(field, f"rule {name!r} uses {part.name!r}, which is not defined")
    endless = _endless(rules)
    if endless is not None:
        raise invalid(field, f"rule {endless!r} derives no finite text: it always contains itself")
    return rules


def parts_of(expression: Expression) -> Iterator[Expression]:
    """The expression and all inside it."""
    stack = [expression]
    while stack:
        one = stack.pop()
        yield one
        if isinstance(one, Sequence):
            stack += one.parts
        elif isinstance(one, Choice):
            stack += one.options
        elif isinstance(one, Repeat):
            stack.append(one.part)


def _endless(rules: dict[str, Expression]) -> str | None:
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for part in parts_of(rule):
            if isinstance(part, Ref):
                users.setdefault(part.name, []).append(name)
    finite: set[str] = set()
    queue = deque(rules)
    while queue:
        name = queue.popleft()
        if name not in finite and _is_finite(rules[name], finite):
            finite.add(name)
            queue.extend(users.get(name, ()))
    return next((name for name in rules if name not in finite), None)


def _is_finite(one: Expression, finite: set[str]) -> bool:
    if isinstance(one, Ref):
        return one.name in finite
    if isinstance(one, Sequence):
        return all(_is_finite(part, finite) for part in one.parts)
    if isinstance(one, Choice):
        return any(_is_finite(part, finite) for part in one.options)
    return not isinstance(one, Repeat) or one.low == 0 or _is_finite(one.part, finite)


def _is_everything(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether no character is left. Surrogates are none."""
    missing = 0
    for low, high in sorted(ranges):
        if low > missing and not 0xD800 <= missing < low <= 0xE000:
            return False
        missing = max(missing, high + 1)
    return missing > 0x10FFFF


class _Parser:
    def __init__(self, text: str, field: str) -> None:
        self._text, self._field, self._at, self._count = text, field, 0, 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._skip()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._error("a rule, name ::= ..., was expected")
            if head[1] in rules:
                raise self._error(f"rule {head[1]!r} is defined twice")
            self._at = head.end()
            rules[head[1]] = self._choice(0)
        return rules

    def _choice(self, depth: int) -> Expression:
        if depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep")
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while True:
            self._skip()
            part = self._atom(depth)
            if part is None:
                return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
            parts.append(self._repeated(part))

    def _atom(self, depth: int) -> Expression | None:
        self._count_part()
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._char_class()
        if char == "(":
            self._at += 1
            inner = self._choice(depth + 1)
            self._expect(")")
            return inner
        if char == ".":
            self._at += 1
            return CharClass(((10, 10),), is_negated=True)
        name = _NAME.match(self._text, self._at)
        if name is not None and _HEAD.match(self._text, self._at) is None:
            self._at = name.end()
            return Ref(name[0])
        if char and char not in "|)" and name is None:
            raise self._error(f"{char!r} was not expected")
        return None

    def _repeated(self, part: Expression) -> Expression:
        depth = 0
        while (char := self._peek()) and char in "?*+{":
            if char == "{":
                bounds = _BOUNDS.match(self._text, self._at)
                if bounds is None:
                    raise self._error("bounds like {2} or {2,5} were expected")
                low = int(bounds[1])
                high = low if bounds[2] is None else int(bounds[3]) if bounds[3] else None
                if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
                    raise self._error(f"bounds must ascend and be at most {MAX_REPEAT}")
                self._at = bounds.end()
            else:
                low, high = {"?": (0, 1), "*": (0, None), "+": (1, None)}[char]
                self._at += 1
            # Nothing at all, where it is repeated no times: the engine has no word for that.
            part, depth = Sequence(()) if high == 0 else Repeat(part, low, high), depth + 1
            self._count_part()
            if depth > MAX_STACKED:
                raise self._error(f"more than {MAX_STACKED} repetitions follow each other")
        return part

    def _literal(self) -> Literal:
        self._at += 1
        made = []
        while (char := self._next("the string")) != '"':
            self._count_part()
            made.append(self._escaped() if char == "\\" else char)
        return Literal("".join(made))

    def _char_class(self) -> CharClass:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges = []
        while (char := self._next("the class")) != "]":
            low = high = ord(self._escaped() if char == "\\" else char)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                end = self._next("the class")
                high = ord(self._escaped() if end == "\\" else end)
            if high < low:
                raise self._error("the ends of a range must ascend")
            ranges.append((low, high))
        if not ranges or (is_negated and _is_everything(ranges)):
            raise self._error("a class must hold at least one character")
        return CharClass(tuple(ranges), is_negated)

    def _escaped(self) -> str:
        char = self._next("the escape")
        if char in _HEX:
            digits = self._text[self._at : self._at + _HEX[char]]
            self._at += len(digits)
            if len(digits) == _HEX[char] and re.fullmatch("[0-9A-Fa-f]+", digits):
                code = int(digits, 16)
                if code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
                    return chr(code)
            raise self._error(f"\\{char} needs {_HEX[char]} hex digits of a character")
        if char not in _PLAIN:
            raise self._error(f"escape \\{char} is unknown")
        return _PLAIN[char]

    def _count_part(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise self._error(f"more than {MAX_PARTS} parts")

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None, "it also matches nothing"
        self._at = space.end()

    def _peek(self) -> str:
        self._skip()
        return self._text[self._at : self._at + 1]

    def _next(self, what: str) -> str:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise self._error(f"{what} does not end")
        self._at += 1
        return char

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise self._error(f"{char!r} was expected")
        self._at += 1

    def _error(self, description: str) -> Exception:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return invalid(self._field, f"line {line}, column {column}: {description}")
