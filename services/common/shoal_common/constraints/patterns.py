r"""What can be said about a regular expression without an engine: what it costs, and whether JSON can write its text.

Read is the syntax of Rust's regex crate, roughly: whether an expression is well-formed the engine finds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal_common.constraints.kinds import invalid

UNWRITABLE = frozenset(map(chr, [*range(32), 127])) - frozenset("\b\t\n\f\r")
r"""What JSON can only write as `\u`, which is allowed nowhere."""
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
_WRITABLE = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_MANY = "avDWS"


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


def writable(pattern: str) -> str:
    r"""The expression without what JSON can only write as `\u`: it matches the same texts of other characters.

    Where the engine writes a set of characters as JSON and meets one of these, it allows every escape, and a quote for
    a set without quotes. A single one it leaves out.
    """
    return _scan(pattern)[2]


def _scan(pattern: str) -> tuple[int, int, str]:
    """Parts with repetitions written out, parts that may be left out, and `writable`."""
    sums, last, optional, at = [0], 0, 0, 0
    before = ""  # the previous kind of part, to find alternatives that are empty
    made: list[str] = []
    while at < len(pattern):
        begin, char = at, pattern[at]
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
        else:
            at = _class_end(pattern, at) if char == "[" else _char_end(pattern, at)
            last, before = 1, "part"
            sums[-1] += 1
        part = pattern[begin:at]
        made.append(f"[{part}{_WRITABLE}]" if _may_be_unwritable(part) else part)
        if sums[-1] > MAX_PARTS:
            break
    return sum(sums), optional, "".join(made)


def _may_be_unwritable(part: str) -> bool:
    """Of a character, a set or a class."""
    if part[0] == "[" or part in UNWRITABLE:
        return True
    escape = _ESCAPE.fullmatch(part)
    if escape is None:
        return False
    code = next((one for one in escape.groups()[:5] if one), None)
    if code is not None:
        return chr(min(int(code, 16), 0x10FFFF)) in UNWRITABLE
    return escape[6] is not None or escape[7] in _MANY


def _char_end(pattern: str, at: int) -> int:
    escape = _ESCAPE.match(pattern, at)
    return at + 1 if escape is None else escape.end()


def _class_end(pattern: str, at: int) -> int:
    """Behind the class that begins there, with the classes inside it."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "[":
            if depth and pattern.startswith("[:", at) and (end := pattern.find(":]", at)) > 0:
                at = end + 2
                continue
            depth, at = depth + 1, at + 1
            at += pattern.startswith("^", at)
            # A bracket at the beginning is a character.
            at += pattern.startswith("]", at)
        elif pattern[at] == "]":
            depth, at = depth - 1, at + 1
            if not depth:
                break
        else:
            at = _char_end(pattern, at)
    return at
