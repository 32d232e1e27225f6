r"""What can be said about a regular expression without an engine: what it costs, and whether JSON can write its text.

Read is the syntax of Rust's regex crate, roughly: whether an expression is well-formed the engine finds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal_common.constraints.kinds import invalid

UNWRITABLE = frozenset(map(chr, [*range(32), 127])) - frozenset("\b\t\n\f\r")
r"""What JSON can only write as `\u`. The engine leaves such a character out of a pattern, and so allows other texts."""
MAX_PARTS = 131_072
"""Characters and classes of an expression, its counted repetitions written out: 60 MB in the engine."""
MAX_OPTIONAL_SQUARES = 1_000_000
"""The number of optional parts of an expression, squared, and added up over those of a constraint: what a sequence of
such parts costs. That of one expression with 1,000 of them: half a second and 70 MB in the engine."""

_ESCAPE = re.compile(
    r"\\(?:x\{([0-9A-Fa-f]{1,8})\}|[uU]\{([0-9A-Fa-f]{1,8})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})"
    r"|U([0-9A-Fa-f]{8})|([pP])(?:\{[^}]*\}|.)|(.))",
    re.DOTALL,
)
_COUNTED = re.compile(r"\{\s*(\d{0,9})\s*(?:(,)\s*(\d{0,9})\s*)?\}")
_OPENING = re.compile(r"\((?:\?(?:P?<\w*>|[a-zA-Z-]*:?))?")
_CLASS_OPERATOR = ("&&", "--", "~~")
_CONTROLS = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_NAMED = "dDwWsSbBAzZ"


@dataclass
class PatternBudget:
    """What the expressions of one constraint may cost together."""

    optional_squares: int = 0

    def take(self, pattern: str, where: str, path: str) -> None:
        """Raises ConstraintInvalid naming `where`: the expression is too large, or all of them together."""
        parts, optional, _ = _scan(pattern)
        if parts > MAX_PARTS:
            raise invalid(where, f"{path}has more than {MAX_PARTS} parts with its repetitions written out")
        self.optional_squares += optional**2
        if self.optional_squares > MAX_OPTIONAL_SQUARES:
            raise invalid(where, f"{path}has too many optional parts")


def needs_unwritable(pattern: str) -> bool:
    r"""Whether some part of the expression matches nothing but characters that JSON can only write as `\u`."""
    return _scan(pattern)[2]


def _scan(pattern: str) -> tuple[int, int, bool]:
    """Parts with repetitions written out, parts that may be left out, and `needs_unwritable`."""
    sums, last, optional, is_bad, at = [0], 0, 0, False, 0
    before = ""  # the previous kind of part, to find alternatives that are empty
    while at < len(pattern):
        char = pattern[at]
        if char in "*+?":
            optional += char != "+" and before != "quantifier"
            before, at = "quantifier", at + 1
        elif char == "{" and (counted := _COUNTED.match(pattern, at)):
            low = int(counted[1] or 0)
            times = max(low, int(counted[3] or low) if counted[2] else low, 1)
            sums[-1] += last * (times - 1)
            last, before, at = last * times, "quantifier", counted.end()
            optional += low == 0
        elif char == "(":
            opening = _OPENING.match(pattern, at)
            assert opening is not None, "it begins with a parenthesis"
            sums.append(0)
            before, at = "open", opening.end()
        elif char in "|)":
            optional += before in ("open", "|")
            if char == ")" and len(sums) > 1:
                last = sums.pop()
                sums[-1] += last
            before, at = "part" if char == ")" else "|", at + 1
        elif char == "[":
            end, only_unwritable = _class(pattern, at + 1)
            is_bad |= only_unwritable
            last, before, at = 1, "part", end
            sums[-1] += 1
        else:
            literal, at = _char(pattern, at)
            is_bad |= literal in UNWRITABLE
            last, before = 1, "part"
            sums[-1] += 1
        if sums[-1] > MAX_PARTS:
            return sums[-1], optional, is_bad
    return sum(sums), optional, is_bad


def _char(pattern: str, at: int) -> tuple[str | None, int]:
    """The character there, None for what stands for several, and the place behind it."""
    if pattern[at] != "\\":
        return pattern[at], at + 1
    escape = _ESCAPE.match(pattern, at)
    if escape is None:
        return None, at + 1
    code = next((one for one in escape.groups()[:5] if one), None)
    if code is not None:
        return chr(min(int(code, 16), 0x10FFFF)), escape.end()
    if escape[6] or escape[7] in _NAMED:
        return None, escape.end()
    return _CONTROLS.get(escape[7], escape[7]), escape.end()


def _class(pattern: str, at: int) -> tuple[int, bool]:
    """Behind a bracket: the place behind the class, and whether it holds unwritable characters alone.

    A class made of others, by brackets or operators inside, is not computed: it counts as one of them if it names one.
    """
    is_negated = pattern.startswith("^", at)
    at += is_negated
    ranges: list[tuple[int, int]] = []
    first, depth, is_made, has_sets = at, 1, False, False
    while at < len(pattern):
        if pattern[at] == "]" and at > first:
            depth, at = depth - 1, at + 1
            if not depth:
                break
            continue
        if pattern.startswith("[:", at) and (end := pattern.find(":]", at)) > 0:
            has_sets, at = True, end + 2
            continue
        if pattern[at] == "[" or pattern.startswith(_CLASS_OPERATOR, at):
            is_made, depth = True, depth + (pattern[at] == "[")
            at += 1 if pattern[at] == "[" else 2
            first = at
            continue
        low, at = _char(pattern, at)
        high = low
        if pattern.startswith("-", at) and not pattern.startswith(("-]", "--"), at) and at + 1 < len(pattern):
            high, at = _char(pattern, at + 1)
        if low is None or high is None:
            has_sets = True
        else:
            ranges.append((ord(low), ord(high)))
    if is_made:
        return at, any(chr(code) in UNWRITABLE for low, high in ranges for code in (low, high))
    # Sets like \d hold some writable character. What is left by them where they are taken away is not computed.
    if has_sets:
        return at, False
    return at, _is_unwritable(_complement(ranges) if is_negated else ranges)


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            made.append((begin, low - 1))
        begin = max(begin, high + 1)
    if begin <= 0x10FFFF:
        made.append((begin, 0x10FFFF))
    return made


def _is_unwritable(ranges: list[tuple[int, int]]) -> bool:
    """Whether there is something in the ranges, and all of it is unwritable."""
    is_small = all(high < 128 for _, high in ranges)
    return (
        is_small
        and bool(codes := {c for low, high in ranges for c in range(low, high + 1)})
        and (UNWRITABLE.issuperset(map(chr, codes)))
    )
