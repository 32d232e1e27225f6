"""Drafts by their position in the draft. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class DraftCounts:
    """Drafts made, sent to verification and accepted, one number per draft position that ever had any.

    Drafts of a step fill the first positions, so a number of drafts says which positions had one. Steps are kept by
    their numbers, of which there are few kinds, and spread over the positions where somebody asks: most never do.

    drafted, verified, accepted   counts to begin with, by position
    """

    __slots__ = ("_first", "_steps")

    def __init__(self, drafted: Iterable[int] = (), verified: Iterable[int] = (), accepted: Iterable[int] = ()) -> None:
        self._first = (list(drafted), list(verified), list(accepted))
        self._steps: dict[tuple[int, int, int], int] = {}

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        """One step of one choice."""
        step = (drafted, verified, accepted)
        self._steps[step] = self._steps.get(step, 0) + 1

    @property
    def drafted(self) -> list[int]:
        """Drafts made."""
        return self._by_position(0)

    @property
    def verified(self) -> list[int]:
        """Of these, sent to verification."""
        return self._by_position(1)

    @property
    def accepted(self) -> list[int]:
        """Of these, accepted."""
        return self._by_position(2)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftCounts):
            return NotImplemented
        return all(self._by_position(kind) == other._by_position(kind) for kind in range(3))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DraftCounts(drafted={self.drafted}, verified={self.verified}, accepted={self.accepted})"

    def _by_position(self, kind: int) -> list[int]:
        counts = list(self._first[kind])
        for step, times in self._steps.items():
            number = step[kind]
            counts.extend([0] * (number - len(counts)))
            for position in range(number):
                counts[position] += times
        return counts
