"""One choice's place in its constraint, over llguidance's matchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shoal_engine.constraint import Mask
from shoal_engine.constraints.errors import ConstraintFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from shoal_engine.constraints.tokenizer import GrammarTokenizer

NO_TOKEN = "the constraint allows no token here"
_MAX_SCOUTS = 3
"""Engines for drafts that one choice may use up; behind the last, nothing is drafted for it."""


class Scouts(Protocol):
    """Where engines for drafts come from."""

    def scout(self) -> tuple[LLMatcher, object] | None:
        """One that has accepted nothing, and what it shares with others; None while there is none."""
        ...

    def lost(self, shared: object) -> None:
        """What was shared is used up."""
        ...


class TokenMatcher:
    """A `Matcher` of two engines.

    The judge belongs to this choice and sees its output alone: a mask, a token, a mask, and so on. An engine's bounds
    count what it has ever built, so only such a one exceeds them at the same token whatever happened beside it: the
    drafts taken back, other requests, what was compiled before. The scout is for drafts. It shares what it builds with
    every other request of the same constraint, and is replaced when it is used up.

    Before the constraint has begun everything but the end of the sequence is allowed: an answer that ends in its
    thoughts would not have met it. Once the end of the sequence is accepted only that may follow.
    """

    def __init__(
        self,
        judge: LLMatcher,
        scouts: Scouts | None,
        tokenizer: GrammarTokenizer,
        *,
        start_after_ids: Sequence[int] = (),
    ) -> None:
        """`judge` has seen nothing. `scouts` None: nothing will be drafted."""
        self.avoids_end = False
        self._judge, self._scouts, self._tokenizer = judge, scouts, tokenizer
        self._end = _only(tokenizer.mask_words, tokenizer.eos_id)
        self._end_word, self._end_bit = tokenizer.eos_id // 32, tokenizer.eos_id % 32
        self._start_ids = tuple(start_after_ids)
        self._found = [0]  # per token before the start: how many of start_ids the output ends with
        self._inside: list[int] = []  # tokens since the start
        self._is_over = False
        self._output_count = 0
        self._mask: Mask | None = None  # behind the output
        self._failure: ConstraintFailed | None = None
        self._scout: LLMatcher | None = None
        self._shared: object = None  # what the scout shares
        self._scouted = 0  # leading tokens of _inside that the scout has accepted
        self._lost_scouts = 0
        self._ahead: dict[int, Mask] = {}  # behind drafts, by count of tokens
        self._drafts: dict[int, int] = {}  # by count of tokens: the draft that came next, last time

    @property
    def count(self) -> int:
        """Tokens that it stands behind, drafts included."""
        return len(self._found) - 1 + len(self._inside) + self._is_over

    @property
    def has_begun(self) -> bool:
        """Whether the constraint applies."""
        return self._found[-1] == len(self._start_ids)

    def fill(self, mask: Mask) -> bool:
        """See `Matcher.fill`."""
        known = self._output_mask() if self.count == self._output_count else self._draft_mask()
        mask[:] = known
        if self.avoids_end and (known[self._end_word] >> self._end_bit) & 1:
            mask &= ~self._end
            if not mask.any():
                mask[:] = known
        return True

    def commit(self, token_id: int) -> bool:
        """See `Matcher.commit`."""
        assert self.count == self._output_count, "drafts are taken back before"
        mask = self._output_mask()
        if self._is_over or not (int(mask[token_id // 32]) >> token_id % 32) & 1:
            return False
        if not self.has_begun:
            self._found.append(self._next_found(token_id))
        elif token_id == self._tokenizer.eos_id:
            self._is_over = True
        else:
            if not self._judge.consume_token(token_id):
                # The token is output already; what comes behind it fails.
                self._failure = _too_costly(self._judge)
            self._inside.append(token_id)
        self._output_count += 1
        self._mask = None
        self._ahead.clear()
        self._drafts.clear()
        return True

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        count = self.count
        is_known = self._drafts.get(count) == token_id and count + 1 in self._ahead
        if not self._try(token_id, is_known):
            return False
        if self._drafts.get(count) != token_id:
            for later in [one for one in self._ahead if one > count]:
                del self._ahead[later]
            for later in [one for one in self._drafts if one > count]:
                del self._drafts[later]
            self._drafts[count] = token_id
        return True

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        assert count <= self.count - self._output_count, "output is never taken back"
        if count and self._is_over:
            self._is_over, count = False, count - 1
        inside = min(count, len(self._inside))
        if inside:
            del self._inside[-inside:]
        if count > inside:
            del self._found[inside - count :]
        self._scout_back(len(self._inside))

    def _output_mask(self) -> Mask:
        if self._failure is not None:
            raise self._failure
        if self._mask is None:
            try:
                self._mask = self._mask_of(lambda: self._judge)
            except ConstraintFailed as error:
                self._failure = error
                raise
        return self._mask

    def _draft_mask(self) -> Mask:
        known = self._ahead.get(self.count)
        if known is None:
            try:
                known = self._ahead[self.count] = self._mask_of(self._led_scout)
            except ConstraintFailed:
                self._check_scout()
                raise
        return known

    def _mask_of(self, engine: Callable[[], LLMatcher]) -> Mask:
        if self._is_over:
            return self._end
        if not self.has_begun:
            return ~self._end
        one, mask = engine(), np.empty(self._tokenizer.mask_words, dtype=np.int32)
        one.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if one.is_error():
            raise _too_costly(one)
        if not mask.any():
            raise ConstraintFailed(NO_TOKEN)
        return mask

    def _try(self, token_id: int, is_known: bool) -> bool:
        """Stand behind this draft if it is allowed. What is known to be allowed needs no engine."""
        if self._is_over:
            return False
        is_end = token_id == self._tokenizer.eos_id
        if not self.has_begun:
            if not is_end:
                self._found.append(self._next_found(token_id))
            return not is_end
        if is_known:
            self._is_over = is_end
            if not is_end:
                self._inside.append(token_id)
            return True
        scout = self._led_scout()
        if is_end:
            self._is_over = scout.is_accepting()
            return self._is_over
        if not scout.try_consume_tokens([token_id]):
            self._check_scout()
            return False
        self._inside.append(token_id)
        self._scouted += 1
        return True

    def _led_scout(self) -> LLMatcher:
        """The scout, where this stands."""
        if self._scout is None:
            found = self._scouts.scout() if self._scouts is not None and self._lost_scouts < _MAX_SCOUTS else None
            if found is None:
                raise ConstraintFailed("the constraint costs too much to try drafts here")
            (self._scout, self._shared), self._scouted = found, 0
        if self._scouted < len(self._inside):
            self._scout.consume_tokens(self._inside[self._scouted :])
            self._scouted = len(self._inside)
            self._check_scout()
        assert self._scout is not None, "it has no error"
        return self._scout

    def _scout_back(self, count: int) -> None:
        if self._scout is not None and self._scouted > count:
            self._scout.rollback(self._scouted - count)
            self._scouted = count

    def _check_scout(self) -> None:
        """Raises ConstraintFailed for one in error: it stays so for good, and is given away."""
        if self._scout is not None and self._scout.is_error():
            error = _too_costly(self._scout)
            self._scout, self._lost_scouts = None, self._lost_scouts + 1
            if self._scouts is not None:
                self._scouts.lost(self._shared)
            raise error

    def _next_found(self, token_id: int) -> int:
        """The longest beginning of start_ids that the output ends with, this token included."""
        matched = self._found[-1]
        tail = (*self._start_ids[:matched], token_id)
        for length in range(len(tail), 0, -1):
            if tail[len(tail) - length :] == self._start_ids[:length]:
                return length
        return 0


def _too_costly(engine: LLMatcher) -> ConstraintFailed:
    lines = engine.get_error().splitlines()
    if lines and "NoExtension" in lines[0]:
        return ConstraintFailed(NO_TOKEN)
    said = lines[0][:200] if lines else "unknown error"
    return ConstraintFailed(f"the constraint exceeds what one token may cost: {said}")


def _only(words: int, token_id: int) -> Mask:
    mask = np.zeros(words, dtype=np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)
