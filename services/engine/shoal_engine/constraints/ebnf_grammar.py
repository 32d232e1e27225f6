"""EBNF rules as a Lark grammar of llguidance, with the same language.

llguidance lexes greedily: a lexeme that could be longer is. EBNF knows no lexemes, so every character becomes a lexeme
of its own; none is a prefix of another, and greed changes nothing. A mask then takes milliseconds where much is allowed
and a lexer takes microseconds, so repetitions for which greed changes nothing either are lexemes as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_common.constraints.ebnf import ROOT, CharClass, Choice, Expression, Literal, Ref, Repeat, Sequence

from shoal_engine.constraints.ebnf_lexemes import Lexemes, find_lexemes


def ebnf_to_lark(rules: Mapping[str, Expression]) -> str:
    """Lark text; `rules` as `parse_ebnf` returns them."""
    return lark_of(find_lexemes(rules))


def lark_of(lexemes: Lexemes) -> str:
    """Lark text of a grammar with these lexemes; all its other characters are lexemes of their own."""
    names = {name: "start" if name == ROOT else f"r{index}" for index, name in enumerate(lexemes.rules)}
    writer = _Lark(lexemes, names)
    lines = [f"{names[name]}: {writer.rule(rule)}" for name, rule in lexemes.rules.items()]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


class _Lark:
    def __init__(self, lexemes: Lexemes, names: Mapping[str, str]) -> None:
        self._lexemes, self._names = lexemes, names

    def rule(self, one: Expression) -> str:
        """What stands behind the colon of a rule, or a part of that."""
        match one:
            case Literal(text):
                return " ".join(f"/{_escaped(ord(char))}/" for char in text) or '""'
            case CharClass():
                return f"/{_class(one)}/"
            case Ref(name):
                return self._names[name]
            case Sequence(parts):
                return " ".join(self._grouped(part) for part in parts) or '""'
            case Choice(options):
                return " | ".join(self.rule(option) for option in options)
            case Repeat(part, low, high) if self._lexemes.hold(one):
                # A lexeme is never empty.
                return f"/(?:{_regex(part)}){_bounds(max(low, 1), high)}/{'' if low else '?'}"
            case Repeat(part, low, high):
                return f"({self.rule(part)}){_bounds(low, high)}"

    def _grouped(self, one: Expression) -> str:
        text = self.rule(one)
        return f"({text})" if isinstance(one, Choice) else text


def _regex(one: Expression) -> str:
    match one:
        case Literal(text):
            return "".join(_escaped(ord(char)) for char in text)
        case CharClass():
            return _class(one)
        case Sequence(parts):
            return "".join(map(_regex, parts))
        case Choice(options):
            return f"(?:{'|'.join(map(_regex, options))})"
        case Repeat(part, low, high):
            return f"(?:{_regex(part)}){_bounds(low, high)}"
        case Ref():
            raise AssertionError("a lexeme has no Ref")


def _bounds(low: int, high: int | None) -> str:
    plain = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
    return plain or f"{{{low},{'' if high is None else high}}}"


def _class(one: CharClass) -> str:
    inner = "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in one.ranges)
    return f"[{'^' if one.is_negated else ''}{inner}]"


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"
