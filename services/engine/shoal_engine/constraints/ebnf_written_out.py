"""EBNF rules with those that a repetition uses written out in it, as far as there is no recursion."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_common.constraints.ebnf import Choice, Expression, Ref, Repeat, Sequence, parts_of

MAX_PARTS = 4_000
"""Of a grammar; what is written out counts too. A larger one has no lexemes."""
MAX_WORK = 50_000
"""Parts that are looked at or copied, in all."""
MAX_DEPTH = 100
"""Of expressions in each other. A deeper grammar has no lexemes, and what would be deeper is not written out."""
MAX_COPIES = 16
"""Of a part that is repeated a fixed number of times inside of a repetition."""


class TooMuchError(Exception):
    """The search for lexemes costs more than it may."""


def written_out(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """The same language. Every Repeat is an object that stands in one place. Raises TooMuchError."""
    if sum(1 for rule in rules.values() for _ in parts_of(rule)) > MAX_PARTS:
        raise TooMuchError
    writer = _Writer(rules)
    return {name: writer.copy(rule) for name, rule in rules.items()}


class _Writer:
    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules, self._open, self._work = rules, set[str](), 0

    def copy(self, one: Expression, depth: int = 0) -> Expression:
        """Of a rule or a part of it, which stands this deep."""
        if depth > MAX_DEPTH:
            raise TooMuchError
        match one:
            case Sequence(parts):
                return Sequence(tuple(self.copy(part, depth + 1) for part in parts))
            case Choice(options):
                return Choice(tuple(self.copy(option, depth + 1) for option in options))
            case Repeat(part, low, high):
                flat = self._flat(one, depth, inside=False)
                return Repeat(self.copy(part, depth + 1), low, high) if flat is None else flat
        return one

    def _flat(self, one: Expression, depth: int, *, inside: bool = True) -> Expression | None:
        """A copy without Ref, if there can be one. `inside` of a repetition, which is a copy itself."""
        self._work += 1
        if self._work > MAX_WORK:
            raise TooMuchError
        if depth > MAX_DEPTH:
            return None
        match one:
            case Ref(name):
                if name in self._open:
                    return None
                self._open.add(name)
                made = self._flat(self._rules[name], depth + 1)
                self._open.remove(name)
                return made
            case Sequence(parts):
                flat = self._all_flat(parts, depth + 1)
                return None if flat is None else Sequence(flat)
            case Choice(options):
                flat = self._all_flat(options, depth + 1)
                return None if flat is None else Choice(flat)
            case Repeat(part, low, high) if inside and low == high and low <= MAX_COPIES:
                # As often as it says, which the automaton would not count.
                flat = self._all_flat((part,) * low, depth + 1)
                return None if flat is None else Sequence(flat)
            case Repeat(part, low, high):
                inner = self._flat(part, depth + 1)
                return None if inner is None else Repeat(inner, low, high)
        return one

    def _all_flat(self, parts: tuple[Expression, ...], depth: int) -> tuple[Expression, ...] | None:
        made: list[Expression] = []
        for part in parts:
            flat = self._flat(part, depth)
            if flat is None:
                return None
            made.append(flat)
        return tuple(made)
