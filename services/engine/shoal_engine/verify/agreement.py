"""What ranks that step together must agree on before each step: one small message, the larger of all wishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepIntent:
    """Rows of a rank's next step, and the drafts that it makes for each choice after it."""

    rows: int
    draft_width: int

    def joined(self, other: StepIntent) -> StepIntent:
        """What suits both: a rank that wanted less fills up, with drafts or with padding."""
        return StepIntent(max(self.rows, other.rows), max(self.draft_width, other.draft_width))


class BudgetAgreement(Protocol):
    """Joins the intents of all ranks. Ranks run the same collectives only if every one calls it in every step."""

    def agree(self, intent: StepIntent) -> StepIntent:
        """The joined intents of all ranks for this step; the same on each of them."""
        ...


class OneRank:
    """A rank that steps alone."""

    def agree(self, intent: StepIntent) -> StepIntent:
        return intent
