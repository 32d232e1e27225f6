"""Which repetitions of an EBNF grammar may be one lexeme each for a greedy lexer, without a change of the language.

Every character of the grammar is a place. Which place may come behind which is what an automaton over the places says
(Glushkov's, with the rules' returns not told apart): it takes more texts than the grammar, never fewer. A repetition is
one lexeme if in that automaton, whatever was read,

* a place of its own is never reached together with any other place: so greed has no choice between the repetition and
  another text, nor between its going on and what follows it, and each of its characters leaves the lexer one state;
* it does not begin again right behind itself, by what is outside of it: two lexemes would come out as one. It would do
  so where it goes on by itself too, so this shows as a way from place to place for two reasons.

Characters outside ASCII all pass for the same here, since they share their first bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal_common.constraints.ebnf import ROOT, CharClass, Choice, Expression, Literal, Ref, Repeat, Sequence

from shoal_engine.constraints.ebnf_written_out import MAX_PARTS, TooMuchError, written_out

MAX_WORK = 200_000
"""Steps of the search, about a microsecond each. A grammar that takes more has no lexemes."""
MAX_STATES = 10_000
"""Of the lexer for all lexemes of a grammar, estimated: half of what an engine may build."""
_ROUNDS = 50
_OTHERS = 1 << 128
_UTF8_STATES = 8


@dataclass(frozen=True, slots=True)
class Lexemes:
    """A grammar and the repetitions in it that are lexemes: without a Ref, of parts that are never empty."""

    rules: Mapping[str, Expression]
    ids: frozenset[int] = frozenset()
    """Of the objects, which are no one else's."""

    def hold(self, repeat: Repeat) -> bool:
        """Whether this object is one."""
        return id(repeat) in self.ids


def find_lexemes(rules: Mapping[str, Expression]) -> Lexemes:
    """A pure function of the grammar: `rules` as `parse_ebnf` returns them, or with the same language."""
    try:
        written = written_out(rules)
        ids = _Search(written).lexemes()
    except TooMuchError:
        return Lexemes(rules)
    return Lexemes(written, ids) if ids else Lexemes(rules)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Whether it may be empty, and the places, as bits, where it may begin and end."""

    is_nullable: bool = False
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class _Node:
    """An expression at its place in the grammar: what is one object may stand there twice."""

    source: Expression
    begin: int
    children: list[_Node] = field(default_factory=list)
    end: int = 0
    has_ref: bool = False
    states: int = 0
    """Of a lexer, estimated."""
    is_counted_well: bool = True
    """Nothing inside is repeated that may be empty."""
    facts: _Facts | None = None

    @property
    def places(self) -> int:
        """As bits."""
        return (1 << self.end) - (1 << self.begin)


class _Search:
    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._work, self._parts = 0, 0
        self._chars: list[int] = []  # by place: ASCII characters and _OTHERS, as bits
        self._nodes = {name: self._node(rule) for name, rule in rules.items()}
        count = len(self._chars)
        # By place, all as bits: what may come next, for two reasons, and what else the same text may reach.
        self._follow, self._twice, self._together = [0] * count, [0] * count, [0] * count
        self._reached = 0
        self._rules = dict.fromkeys(rules, _Facts())

    def lexemes(self) -> frozenset[int]:
        """Ids of the repetitions."""
        candidates = [node for rule in self._nodes.values() for node in _candidates(rule)]
        if not candidates:
            return frozenset()
        self._find_facts()
        for node in self._nodes.values():
            self._link(node)
        self._find_pairs()
        found, taken, states = set[int](), 0, 0
        for node in candidates:
            fits = states + node.states <= MAX_STATES and not node.places & taken
            if fits and self._is_lexeme(node):
                found.add(id(node.source))
                taken, states = taken | node.places, states + node.states
        return frozenset(found)

    def _is_lexeme(self, node: _Node) -> bool:
        inside = range(node.begin, node.end)
        return bool(
            node.is_counted_well
            and self._reached & node.places
            and not any(self._together[place] or self._twice[place] & node.places for place in inside)
        )

    def _pay(self) -> None:
        self._work += 1
        if self._work > MAX_WORK:
            raise TooMuchError

    def _node(self, source: Expression) -> _Node:
        self._parts += 1
        if self._parts + len(self._chars) > MAX_PARTS:
            raise TooMuchError
        node = _Node(source, len(self._chars))
        match source:
            case Literal(text):
                self._chars += [_bits_of(ord(char), ord(char)) for char in text]
                node.states = len(text) * _UTF8_STATES if not text.isascii() else len(text)
            case CharClass(ranges, is_negated):
                listed = _class_bits(source)
                self._chars.append(listed)
                others = sum(high > 127 for _, high in ranges)
                node.states = _UTF8_STATES + 2 * others if listed & _OTHERS or is_negated else 1
            case Ref():
                node.has_ref = True
            case Sequence(parts) | Choice(parts):
                node.children = [self._node(part) for part in parts]
            case Repeat(part, low, high):
                node.children = [self._node(part)]
                times = max(low + 1, 2) if high is None else high
                node.states = times * node.children[0].states
                if high != 1 and not node.children[0].has_ref:
                    node.is_counted_well = not self._facts(node.children[0]).is_nullable
        node.end = len(self._chars)
        node.has_ref |= any(child.has_ref for child in node.children)
        node.is_counted_well &= all(child.is_counted_well for child in node.children)
        node.states = node.states or sum(child.states for child in node.children)
        return node

    def _facts(self, node: _Node) -> _Facts:
        if node.facts is not None:
            return node.facts
        found = self._facts_of(node)
        if not node.has_ref:
            node.facts = found
        return found

    def _facts_of(self, node: _Node) -> _Facts:
        self._pay()
        match node.source:
            case Ref(name):
                return self._rules[name]
            case Literal("") | Sequence(()):
                return _Facts(is_nullable=True)
            case Literal() | CharClass():
                return _Facts(first=1 << node.begin, last=1 << (node.end - 1))
        facts = [self._facts(child) for child in node.children]
        if isinstance(node.source, Repeat):
            return _Facts(facts[0].is_nullable or node.source.low == 0, facts[0].first, facts[0].last)
        if isinstance(node.source, Choice):
            is_nullable, first, last = False, 0, 0
            for one in facts:
                is_nullable, first, last = is_nullable or one.is_nullable, first | one.first, last | one.last
            return _Facts(is_nullable, first, last)
        made = _Facts(is_nullable=True)
        for one in facts:
            made = _Facts(
                made.is_nullable and one.is_nullable,
                made.first | (one.first if made.is_nullable else 0),
                one.last | (made.last if one.is_nullable else 0),
            )
        return made

    def _find_facts(self) -> None:
        for _ in range(_ROUNDS):
            before = dict(self._rules)
            for name, node in self._nodes.items():
                self._rules[name] = self._facts(node)
            if self._rules == before:
                return
        raise TooMuchError

    def _link(self, node: _Node) -> None:
        """What may come behind what inside of the node."""
        for child in node.children:
            self._link(child)
        match node.source:
            case Literal():
                for place in range(node.begin, node.end - 1):
                    self._join(1 << place, 1 << (place + 1))
            case Sequence():
                last = 0
                for child in node.children:
                    facts = self._facts(child)
                    self._join(last, facts.first)
                    last = facts.last | (last if facts.is_nullable else 0)
            case Repeat(_, _, high) if high != 1:
                facts = self._facts(node.children[0])
                self._join(facts.last, facts.first)

    def _join(self, last: int, first: int) -> None:
        for place in _each(last):
            self._pay()
            self._twice[place] |= self._follow[place] & first
            self._follow[place] |= first

    def _find_pairs(self) -> None:
        """Which places may be reached by the same text."""
        by_char = [sum(1 << place for place, own in enumerate(self._chars) if own >> bit & 1) for bit in range(129)]
        alike = [0] * len(self._chars)
        for place, own in enumerate(self._chars):
            for bit in _each(own):
                alike[place] |= by_char[bit]
        start = self._rules[ROOT].first
        waiting = [(start, start)]
        while waiting:
            one, other = waiting.pop()
            for place in _each(one):
                self._pay()
                if other >> place & 1 and not self._reached >> place & 1:
                    self._reached |= 1 << place
                    waiting.append((self._follow[place], self._follow[place]))
                new = other & alike[place] & ~(1 << place) & ~self._together[place]
                for mate in _each(new):
                    self._pay()
                    self._together[place] |= 1 << mate
                    self._together[mate] |= 1 << place
                    waiting.append((self._follow[place], self._follow[mate]))


def _candidates(node: _Node) -> Iterator[_Node]:
    """Repetitions without a Ref, the outer ones first."""
    if isinstance(node.source, Repeat) and not node.has_ref and node.source.high != 1:
        yield node
    for child in node.children:
        yield from _candidates(child)


def _each(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _bits_of(low: int, high: int) -> int:
    ascii_part = (1 << (min(high, 127) + 1)) - (1 << low) if low < 128 else 0
    return ascii_part | (_OTHERS if high > 127 else 0)


def _class_bits(one: CharClass) -> int:
    found = 0
    for low, high in one.ranges:
        found |= _bits_of(low, high)
    return (~found & (_OTHERS - 1)) | _OTHERS if one.is_negated else found
