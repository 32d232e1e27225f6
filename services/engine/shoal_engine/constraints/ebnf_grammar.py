"""EBNF rules as a Lark grammar of llguidance, with the same language.

llguidance lexes greedily: a lexeme that could be longer is. EBNF knows no lexemes, so every character becomes a lexeme
of its own; none is a prefix of another, and greed changes nothing. A mask then takes milliseconds where a lexer takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_common.constraints.ebnf import ROOT, CharClass, Choice, Expression, Literal, Ref, Repeat, Sequence


def ebnf_to_lark(rules: Mapping[str, Expression]) -> str:
    """Lark text; `rules` as `parse_ebnf` returns them."""
    names = {name: "start" if name == ROOT else f"r{index}" for index, name in enumerate(rules)}
    lines = [f"{names[name]}: {_lark(rule, names)}" for name, rule in rules.items()]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _lark(one: Expression, names: Mapping[str, str]) -> str:
    match one:
        case Literal(text):
            return " ".join(_char(char) for char in text) or '""'
        case CharClass():
            return _class(one)
        case Ref(name):
            return names[name]
        case Sequence(parts):
            return " ".join(_grouped(part, names) for part in parts) or '""'
        case Choice(options):
            return " | ".join(_lark(option, names) for option in options)
        case Repeat(part, low, high):
            return f"({_lark(part, names)}){_bounds(low, high)}"


def _grouped(one: Expression, names: Mapping[str, str]) -> str:
    text = _lark(one, names)
    return f"({text})" if isinstance(one, Choice) else text


def _bounds(low: int, high: int | None) -> str:
    plain = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
    return plain or f"{{{low},{'' if high is None else high}}}"


def _char(char: str) -> str:
    return f"/{_escaped(ord(char))}/"


def _class(one: CharClass) -> str:
    inner = "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in one.ranges)
    return f"/[{'^' if one.is_negated else ''}{inner}]/"


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"
