"""Matchers led along drafts: the masks of a verify step's rows, and of drafts while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from shoal_common.errors import MeshError

from shoal_engine.constraint import Mask, Matcher
from shoal_engine.sequence import Sequence as OutputSequence


@dataclass(slots=True)
class RowMasks:
    """Of the rows of one choice: after its last token, after its first draft, and so on. None: anything may come.

    failure   why the row behind the last mask has none; the request fails if that row counts
    """

    masks: list[Mask | None] = field(default_factory=list)
    failure: MeshError | None = None

    def at(self, row: int) -> Mask | None:
        """The mask of a row; None where there is none."""
        return self.masks[row] if row < len(self.masks) else None

    def fails_at(self, row: int) -> bool:
        """Whether the row has no token for lack of a mask."""
        return self.failure is not None and row >= len(self.masks)


def row_masks(matcher: Matcher | None, drafts: Sequence[int], vocab: int) -> RowMasks:
    """Masks of 1 + len(drafts) rows, of drafts that the matcher allows. It is left where it stood."""
    rows = RowMasks()
    if matcher is None:
        return rows
    accepted = 0
    try:
        for row in range(len(drafts) + 1):
            mask = np.empty(-(-vocab // 32), dtype=np.int32)
            rows.masks.append(mask if matcher.fill(mask) else None)
            if row < len(drafts):
                is_allowed = matcher.accept(drafts[row])
                assert is_allowed, "drafts are cut before the first that the constraint forbids"
                accepted += 1
    except MeshError as error:
        rows.failure = error
    matcher.rollback(accepted)
    return rows


def emit(sequence: OutputSequence, tokens: Sequence[int]) -> None:
    """Sampled tokens become output, and the choice's matcher goes on behind them; one that fails leaves it stuck."""
    sequence.output += tokens
    if sequence.matcher is None:
        return
    try:
        for token in tokens:
            is_allowed = sequence.matcher.accept(token)
            assert is_allowed, "sampled under the matcher's mask"
    except MeshError as error:
        sequence.is_stuck, sequence.failure = True, error


def allowed_count(matcher: Matcher | None, drafts: Sequence[int]) -> int:
    """How many leading drafts the matcher allows: rows behind the first other one would have no defined state."""
    if matcher is None:
        return len(drafts)
    accepted = 0
    try:
        while accepted < len(drafts) and matcher.accept(drafts[accepted]):
            accepted += 1
    except MeshError:
        # The next step meets it again if it is still on the way.
        pass
    matcher.rollback(accepted)
    return accepted


class DraftMasks:
    """The matchers of one round, led along the drafts. Ends where it began: `close` takes every draft back.

    A matcher that fails, or meets a draft that it forbids, masks nothing from there on: nobody verifies those drafts.
    """

    def __init__(self, matchers: Sequence[Matcher | None], vocab: int) -> None:
        self._matchers = list(matchers)
        self._accepted = [0] * len(self._matchers)
        self._words = -(-vocab // 32)

    def mask(self, index: int) -> Mask | None:
        """What the next draft of one choice may be; None: anything."""
        matcher = self._matchers[index]
        if matcher is None:
            return None
        mask = np.empty(self._words, dtype=np.int32)
        try:
            return mask if matcher.fill(mask) else None
        except MeshError:
            # The next step meets it again, and fails the request.
            self._drop(index)
            return None

    def took(self, index: int, token_id: int) -> None:
        """The choice's next draft is this token."""
        matcher = self._matchers[index]
        if matcher is None:
            return
        try:
            is_allowed = matcher.accept(token_id)
        except MeshError:
            is_allowed = False
        if is_allowed:
            self._accepted[index] += 1
        else:
            self._drop(index)

    def close(self) -> None:
        """Leave the matchers where they stood."""
        for index in range(len(self._matchers)):
            self._drop(index)

    def _drop(self, index: int) -> None:
        matcher, self._matchers[index] = self._matchers[index], None
        if matcher is not None:
            matcher.rollback(self._accepted[index])
