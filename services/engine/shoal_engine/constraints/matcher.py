"""One choice's place in its constraint, over llguidance's matcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal_engine.constraint import Mask
from shoal_engine.constraints.errors import ConstraintFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from shoal_engine.constraints.tokenizer import GrammarTokenizer

_MEMORY = 16
"""Masks kept behind and ahead of where it stands: more than a step goes forward or back."""


class TokenMatcher:
    """A `Matcher`. Masks are those of the accepted tokens alone, whatever was tried and taken back in between.

    Before the constraint has begun everything but the end of the sequence is allowed: an answer that ends in its
    thoughts would not have met it. Once the end of the sequence is accepted only that may follow.
    """

    def __init__(
        self,
        make: Callable[[], LLMatcher],
        tokenizer: GrammarTokenizer,
        *,
        start_after_ids: Sequence[int] = (),
        avoids_end: bool = False,
        fill_s: float,
    ) -> None:
        """`make` gives matchers that have accepted nothing. `fill_s`: CPU seconds that one mask may take."""
        self._make, self._engine = make, make()
        self._tokenizer, self._fill_s = tokenizer, fill_s
        self._avoids_end = avoids_end
        self._end = _only(tokenizer.mask_words, tokenizer.eos_id)
        self._start_ids = tuple(start_after_ids)
        self._found = [0]  # per token before the start: how many of start_ids the output ends with
        self._inside: list[int] = []  # tokens accepted since the start
        self._is_over = False
        self._path: dict[int, int] = {}  # by count of accepted tokens: the token that came next, last time
        self._masks: dict[int, Mask] = {}

    @property
    def count(self) -> int:
        """Tokens accepted."""
        return len(self._found) - 1 + len(self._inside) + self._is_over

    @property
    def has_begun(self) -> bool:
        """Whether the constraint applies."""
        return self._found[-1] == len(self._start_ids)

    def fill(self, mask: Mask) -> bool:
        """See `Matcher.fill`."""
        known = self._masks.get(self.count)
        if known is None:
            known = self._masks[self.count] = self._mask()
        mask[:] = known
        return True

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        count = self.count
        if not self._go_on(token_id):
            return False
        if self._path.get(count) != token_id:
            for later in [one for one in self._masks if one > count]:
                del self._masks[later]
            for later in [one for one in self._path if one > count]:
                del self._path[later]
            self._path[count] = token_id
        self._masks.pop(count - _MEMORY, None)
        self._path.pop(count - _MEMORY, None)
        return True

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        if count and self._is_over:
            self._is_over, count = False, count - 1
        inside = min(count, len(self._inside))
        if inside:
            del self._inside[-inside:]
        if self._engine.is_error():
            # It stays in error for good; what was tried and taken back must leave no trace.
            self._engine = self._make()
            self._engine.consume_tokens(self._inside)
        elif inside:
            self._engine.rollback(inside)
        if count > inside:
            del self._found[inside - count :]

    def _go_on(self, token_id: int) -> bool:
        if self._is_over:
            return False
        is_end = token_id == self._tokenizer.eos_id
        if not self.has_begun:
            if not is_end:
                self._found.append(self._next_found(token_id))
            return not is_end
        if is_end:
            self._is_over = self._engine.is_accepting()
            return self._is_over
        if not self._engine.try_consume_tokens([token_id]):
            if self._engine.is_error():
                raise ConstraintFailed(f"the constraint exceeds what one token may cost: {self._error()}")
            return False
        self._inside.append(token_id)
        return True

    def _next_found(self, token_id: int) -> int:
        """The longest beginning of start_ids that the output ends with, this token included."""
        matched = self._found[-1]
        tail = (*self._start_ids[:matched], token_id)
        for length in range(len(tail), 0, -1):
            if tail[len(tail) - length :] == self._start_ids[:length]:
                return length
        return 0

    def _mask(self) -> Mask:
        if self._is_over:
            return self._end
        if not self.has_begun:
            return ~self._end
        mask = np.zeros(self._tokenizer.mask_words, dtype=np.int32)
        began_s = time.thread_time()
        self._engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._engine.is_error():
            raise ConstraintFailed(f"the constraint exceeds what one token may cost: {self._error()}")
        if time.thread_time() - began_s > self._fill_s:
            raise ConstraintFailed(f"a mask of the constraint took more than {self._fill_s:g} s")
        if not mask.any():
            raise ConstraintFailed("the constraint allows no token here")
        if self._avoids_end and (mask & ~self._end).any():
            mask &= ~self._end
        return mask

    def _error(self) -> str:
        lines = self._engine.get_error().splitlines()
        return lines[0][:200] if lines else "unknown error"


def _only(words: int, token_id: int) -> Mask:
    mask = np.zeros(words, dtype=np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)
