"""Which ids stand in a choice's prompt and output, and how often: kept up to date as it grows, for the penalties.

Counting anew would cost the length of the output for every row of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_engine.requests import TokenIds

T = TypeVar("T", bound=np.generic)

_FIRST_ROOM = 64


@dataclass(frozen=True, slots=True)
class Counted:
    """Distinct ids of an output with their counts, and those of prompt and output; drafts before a row included."""

    output_ids: TokenIds
    output_counts: NDArray[np.int32]
    seen_ids: TokenIds


class TokenHistory:
    """One choice. Invariant: what is counted is output[:counted] of an output that only grows."""

    def __init__(self, prompt: TokenIds) -> None:
        self._prompt = prompt
        self._counted = 0
        self._places: dict[int, int] = {}  # of an id among the output's
        self._ids: TokenIds = np.empty(_FIRST_ROOM, dtype=np.int64)
        self._counts: NDArray[np.int32] = np.empty(_FIRST_ROOM, dtype=np.int32)
        # Filled at the first use: most requests have no penalties.
        self._seen: TokenIds = np.empty(0, dtype=np.int64)
        self._seen_count = 0
        self._known: set[int] = set()

    def counted(self, output: Sequence[int], assumed: Sequence[int]) -> Counted:
        """Counts of output + assumed. Views of arrays that later calls write to, unless drafts are assumed."""
        self._advance(output)
        size = len(self._places)
        ids, counts, seen = self._ids[:size], self._counts[:size], self._seen[: self._seen_count]
        if not assumed:
            return Counted(ids, counts, seen)
        counts = counts.copy()
        added: dict[int, int] = {}
        for token in assumed:
            place = self._places.get(token)
            if place is None:
                added[token] = added.get(token, 0) + 1
            else:
                counts[place] += 1
        if added:
            ids = np.concatenate([ids, np.fromiter(added, dtype=np.int64, count=len(added))])
            counts = np.concatenate([counts, np.fromiter(added.values(), dtype=np.int32, count=len(added))])
            seen = np.concatenate([seen, np.array([t for t in added if t not in self._known], dtype=np.int64)])
        return Counted(ids, counts, seen)

    def _advance(self, output: Sequence[int]) -> None:
        if not self._seen.size:
            self._seen = np.unique(self._prompt)
            self._seen_count = self._seen.size
            self._known.update(self._seen.tolist())
        for token in output[self._counted :]:
            place = self._places.get(token)
            if place is not None:
                self._counts[place] += 1
                continue
            place = self._places[token] = len(self._places)
            if place == self._ids.size:
                self._ids, self._counts = _grown(self._ids), _grown(self._counts)
            self._ids[place], self._counts[place] = token, 1
            if token not in self._known:
                self._known.add(token)
                if self._seen_count == self._seen.size:
                    self._seen = _grown(self._seen)
                self._seen[self._seen_count] = token
                self._seen_count += 1
        self._counted = len(output)


def _grown(array: NDArray[T]) -> NDArray[T]:
    return np.concatenate([array, np.empty_like(array)])
