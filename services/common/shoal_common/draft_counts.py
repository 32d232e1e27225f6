"""Drafts by their position in the draft. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Drafts made, sent to verification and accepted, one number per draft position that ever had any.

    Drafts of a step fill the first positions, so a number of drafts says which positions had one.
    """

    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        """One step of one choice."""
        for counts, number in ((self.drafted, drafted), (self.verified, verified), (self.accepted, accepted)):
            if number > len(counts):
                counts.extend([0] * (number - len(counts)))
            for position in range(number):
                counts[position] += 1
