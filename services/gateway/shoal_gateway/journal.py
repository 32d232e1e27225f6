"""What every choice of a running answer has emitted so far: the one thing a move needs. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.common.v1 import sampling_pb2
from shoal_common.errors import Internal

FinishReason: TypeAlias = "sampling_pb2.FinishReason.ValueType"
UNFINISHED: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED


class EntriesMissing(Internal):
    """A worker sent entries that do not follow on what came before."""

    reason = "ENTRIES_MISSING"


@dataclass(slots=True)
class ChoiceJournal:
    """One choice. Invariant: output_ids only grow until the choice is finished, and never change after."""

    output_ids: array[int] = field(default_factory=lambda: array("I"))
    finish_reason: FinishReason = UNFINISHED

    @property
    def is_finished(self) -> bool:
        """Nothing more is wanted of it."""
        return self.finish_reason != UNFINISHED


class Journal:
    """All choices of one answer."""

    def __init__(self, choice_count: int) -> None:
        self.choices = tuple(ChoiceJournal() for _ in range(choice_count))

    @property
    def is_finished(self) -> bool:
        """Every choice is."""
        return all(choice.is_finished for choice in self.choices)

    @property
    def has_output(self) -> bool:
        """Some choice has emitted something."""
        return any(choice.output_ids for choice in self.choices)

    def counts(self) -> list[int]:
        """Output tokens per choice."""
        return [len(choice.output_ids) for choice in self.choices]

    def take(
        self,
        choice_index: int,
        output_index: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
    ) -> int:
        """Append an entry. Returns how many of its leading tokens were here before and are to be dropped.

        All of them if the choice is finished. Raises EntriesMissing for a gap or a choice that does not exist.
        """
        if choice_index >= len(self.choices):
            raise EntriesMissing(f"no choice {choice_index}", choice_index=choice_index)
        choice = self.choices[choice_index]
        if choice.is_finished:
            return len(token_ids)
        have = len(choice.output_ids)
        if output_index > have:
            raise EntriesMissing(
                f"choice {choice_index} stands at {have}, the entry begins at {output_index}",
                choice_index=choice_index,
                have=have,
                output_index=output_index,
            )
        known = min(have - output_index, len(token_ids))
        choice.output_ids.extend(token_ids[known:])
        choice.finish_reason = finish_reason
        return known

    def finish(self, choice_index: int, end_index: int, reason: FinishReason) -> None:
        """The gateway ends a choice: tokens at `end_index` and above do not belong to it."""
        choice = self.choices[choice_index]
        del choice.output_ids[end_index:]
        choice.finish_reason = reason
