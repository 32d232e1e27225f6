"""Places in a schema where no token may come, though the engine took it: found before a choice comes there.

The engine sees most contradictions, and refuses them or leaves out what is optional. Those of the forms that numbers
and strings are written in it does not see: a multiple of 0.3 that is whole, two patterns that share no writable text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
from llguidance import LLMatcher
from shoal_common.constraints import ConstraintKind, OutputConstraint, invalid
from shoal_common.constraints.json_schema import scalar_alternatives
from shoal_common.constraints.tool_calls import parse_tag

from shoal_engine.constraints.errors import ConstraintFailed
from shoal_engine.constraints.grammar import json_grammar
from shoal_engine.constraints.matcher import NO_TOKEN, TokenMatcher
from shoal_engine.constraints.tokenizer import GrammarTokenizer

_STEPS = 48
_MAX_PROBES = 1_000
"""Of values that are tried by themselves, about a millisecond each."""
_CLOSING = '"}],:'
_LOOKED_AT = 256
_WITH_SCHEMAS = (ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG)


class _Begin(Enum):
    """Where a value may begin: with some token, with none, or the engine says itself that there is no value."""

    SOMEWHERE = 1
    NOWHERE = 2
    REFUSED = 3


Engine = Callable[[str], LLMatcher]
"""Makes an engine of a grammar."""


def refuse_dead_ends(
    source: OutputConstraint, grammar: str, tokenizer: GrammarTokenizer, engine: Engine, field: str
) -> None:
    """Raise ConstraintInvalid, naming `field`, for a checked constraint that runs into a place without a token.

    Looked at are the values of every schema by themselves, and one short text: what is required is on its way.
    """
    if source.kind not in _WITH_SCHEMAS:
        return
    known: dict[str, _Begin] = {}

    def begin(schema: dict[str, Any]) -> _Begin:
        text = json.dumps(schema, ensure_ascii=False)
        if text not in known:
            is_tried = len(known) < _MAX_PROBES
            known[text] = _begin_of(engine(json_grammar(text)), tokenizer) if is_tried else _Begin.SOMEWHERE
        return known[text]

    for schema in _schemas(source):
        for path, alternatives in scalar_alternatives(schema, field):
            begins = set(map(begin, alternatives))
            # What the engine refuses it leaves out by itself, and refuses where nothing else is left.
            if _Begin.NOWHERE in begins and _Begin.SOMEWHERE not in begins:
                raise invalid(field, f"{path or '#'}: no value fits that can be written")
    if _walk_ends(engine(grammar), tokenizer):
        raise invalid(field, "no answer fits: the constraint allows no token somewhere")


def _schemas(source: OutputConstraint) -> Iterator[Any]:
    if source.kind is ConstraintKind.JSON_SCHEMA:
        yield json.loads(source.text)
        return
    tag = parse_tag(source.text, source.kind.value)
    yield from (tool.parameters for tool in tag.tools if tool.parameters is not None)
    if tag.content is not None:
        yield tag.content


def _begin_of(engine: LLMatcher, tokenizer: GrammarTokenizer) -> _Begin:
    if engine.is_error():
        return _Begin.REFUSED
    has_token, _ = _has_token(TokenMatcher(engine, None, tokenizer), tokenizer)
    return _Begin.SOMEWHERE if has_token else _Begin.NOWHERE


def _walk_ends(engine: LLMatcher, tokenizer: GrammarTokenizer) -> bool:
    """Whether a text that closes what it can closes in on a place without a token."""
    matcher = TokenMatcher(engine, None, tokenizer)
    closing = [ids[0] for char in _CLOSING if len(ids := tokenizer.engine.tokenize_str(char)) == 1]
    for _ in range(_STEPS):
        has_token, allowed = _has_token(matcher, tokenizer)
        if not has_token:
            return True
        if not allowed.any() or allowed[tokenizer.eos_id]:
            return False
        token = next((token for token in closing if allowed[token]), None)
        matcher.commit(_first(np.flatnonzero(allowed)[:_LOOKED_AT].tolist(), tokenizer) if token is None else token)
    return False


def _first(ids: list[int], tokenizer: GrammarTokenizer) -> int:
    """The first that is no blank, else the longest: blanks may come where nothing else can, but not for long."""
    texts = {token: tokenizer.engine.decode_bytes([token]) for token in ids}
    return next((token for token in ids if texts[token].strip()), max(ids, key=lambda token: len(texts[token])))


def _has_token(matcher: TokenMatcher, tokenizer: GrammarTokenizer) -> tuple[bool, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Whether a token may come, and which. One that costs too much is none: that shows where it is asked for."""
    mask = np.zeros(tokenizer.mask_words, dtype=np.int32)
    has_token = True
    try:
        matcher.fill(mask)
    except ConstraintFailed as error:
        has_token = error.message != NO_TOKEN
    return has_token, np.unpackbits(mask.view(np.uint8), bitorder="little")
