"""Grammars as text and as engines: one for every choice, and one that the drafts of all choices share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from shoal_common.constraints import invalid

from shoal_engine.constraints.errors import ConstraintFailed
from shoal_engine.constraints.matcher import TokenMatcher
from shoal_engine.constraints.tokenizer import GrammarTokenizer

logger = logging.getLogger(__name__)

_FIXED_BYTES = 64 * 1024
_BYTES_PER_GRAMMAR_BYTE = 128
"""Measured with 129,280 tokens: 2.4 MB for a schema of 28 kB; rounded up."""
_MAX_MESSAGE = 300


class Prototype:
    """A checked grammar. May be used from any thread.

    An engine's copies share its lexer with it, and so its bounds: they serve for drafts only. `renew` is to call
    `build` on another thread, when what they share is used up.
    """

    def __init__(
        self,
        grammar: str,
        tokenizer: GrammarTokenizer,
        limits: LLParserLimits,
        field: str,
        renew: Callable[[Prototype], None],
    ) -> None:
        """Raises ConstraintInvalid naming `field`: the engine does not take the grammar, or not even begin with it."""
        self.size_bytes = _FIXED_BYTES + _BYTES_PER_GRAMMAR_BYTE * len(grammar.encode())
        self._grammar, self._tokenizer, self._limits = grammar, tokenizer, limits
        self._field, self._renew = field, renew
        self._lock = threading.Lock()
        self._shared: LLMatcher | None = self._checked()

    def engine(self) -> LLMatcher:
        """A new one, which shares nothing: what it does depends on nothing but the tokens that it is given."""
        return LLMatcher(self._tokenizer.engine, self._grammar, log_level=0, limits=self._limits)

    def scout(self) -> tuple[LLMatcher, object] | None:
        """An engine for drafts that has accepted nothing, and what it shares; None while that is built anew."""
        with self._lock:
            return None if self._shared is None else (self._shared.deep_copy(), self._shared)

    def lost(self, shared: object) -> None:
        """An engine for drafts failed, which shared this."""
        with self._lock:
            if self._shared is not shared:
                return
            self._shared = None
        self._renew(self)

    def build(self) -> None:
        """Make what the engines for drafts share; without, nothing is drafted."""
        try:
            made = self._checked()
        except Exception as error:
            logger.error("a constraint that was compiled once cannot be compiled again", exc_info=error)
            return
        with self._lock:
            self._shared = made

    def _checked(self) -> LLMatcher:
        made = self.engine()
        if made.is_error():
            raise invalid(self._field, short(_plain(made.get_error())))
        # The first mask makes what every copy would make anew, and some grammars fail at it already.
        try:
            TokenMatcher(made, None, self._tokenizer).fill(np.empty(self._tokenizer.mask_words, dtype=np.int32))
        except ConstraintFailed as error:
            raise invalid(self._field, error.message) from error
        return made


def _plain(message: str) -> str:
    """Without options of the engine that nobody here can set."""
    if "coerce_one_of" in message:
        return "oneOf: the alternatives do not exclude each other visibly; use anyOf"
    return message


def short(message: str) -> str:
    """On one line."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "..."
