"""Tokens of one request between the engine and their reader: kept until acknowledged. Pure."""

from __future__ import annotations

from shoal_decode_worker.entries import ChoiceEnd, FinishReason, RequestUsage, TokenEntry

MAX_UNACKNOWLEDGED = 256
"""Tokens of one choice kept for its reader; a choice that would have more is paused."""


class ChoiceLedger:
    """Tokens of one choice that are not acknowledged yet.

    Invariant: acknowledged <= emitted <= acknowledged + MAX_UNACKNOWLEDGED, and the kept entries hold exactly the
    tokens of [acknowledged, emitted), in order. An ended choice emits nothing more.
    """

    def __init__(self, *, first_index: int, is_finished: bool) -> None:
        self.acknowledged = first_index
        self.emitted = first_index
        self.end: ChoiceEnd | None = None
        if is_finished:
            self.end = ChoiceEnd(finish_reason=FinishReason.UNKNOWN, token_count=first_index)
        self._entries: list[TokenEntry] = []
        self._sent_count = 0  # leading entries that the present stream has been given

    @property
    def limit(self) -> int:
        """Output index from which on the engine must not emit."""
        return self.acknowledged + MAX_UNACKNOWLEDGED

    @property
    def has_unsent(self) -> bool:
        """True if `take` would give something."""
        return self._sent_count < len(self._entries)

    @property
    def is_settled(self) -> bool:
        """True once it has ended and its reader has all of it."""
        return self.end is not None and not self._entries and self.acknowledged == self.emitted

    def emit(self, entry: TokenEntry) -> None:
        """Keep what the engine made; dropped if the choice was ended meanwhile."""
        if self.end is not None:
            return
        emitted = self.emitted + len(entry.token_ids)
        assert entry.output_index == self.emitted, (entry.output_index, self.emitted)
        assert emitted <= self.acknowledged + MAX_UNACKNOWLEDGED, (emitted, self.limit)
        entries = self._entries
        # What waits leaves as one: its reader pays per entry.
        joined = entries[-1].followed_by(entry) if self._sent_count < len(entries) else None
        if joined is None:
            entries.append(entry)
        else:
            entries[-1] = joined
        self.emitted = emitted
        if entry.finish_reason is not None:
            self.end = ChoiceEnd(finish_reason=entry.finish_reason, token_count=self.emitted)

    def take(self, max_tokens: int) -> list[TokenEntry]:
        """The next unsent entries, about `max_tokens` tokens of them (at least one entry), sent from now on."""
        taken: list[TokenEntry] = []
        for entry in self._entries[self._sent_count :]:
            taken.append(entry)
            max_tokens -= len(entry.token_ids)
            if entry.token_ids:
                self._sent_count += 1
            else:
                # Nothing in it can be acknowledged; the end of the request says the same.
                del self._entries[self._sent_count]
            if max_tokens <= 0:
                break
        return taken

    def acknowledge(self, next_index: int) -> bool:
        """The reader has everything below `next_index`. False if it says nothing new, or more than was emitted."""
        if not self.acknowledged < next_index <= self.emitted:
            return False
        entries, had = self._entries, 0
        while had < len(entries) and entries[had].next_index <= next_index and entries[had].token_ids:
            had += 1
        del entries[:had]
        self._sent_count = max(0, self._sent_count - had)
        if entries and entries[0].output_index < next_index:
            entries[0] = entries[0].from_index(next_index)
        self.acknowledged = next_index
        return True

    def rewind(self) -> None:
        """Give everything unacknowledged to the next stream again."""
        self._sent_count = 0

    def end_at(self, index: int, *, is_taken_over: bool) -> None:
        """The caller keeps the tokens below `index` (at most `emitted`); the rest never was. Safe to repeat.

        is_taken_over   the caller has those tokens already: they count as acknowledged
        """
        assert index <= self.emitted, (index, self.emitted)
        if self.end is not None and self.end.token_count <= index:
            return
        kept = [entry.below_index(index) for entry in self._entries if entry.output_index < index]
        self._entries = kept
        self._sent_count = min(self._sent_count, len(kept))
        self.emitted = index
        self.acknowledged = min(self.acknowledged, index)
        self.end = ChoiceEnd(finish_reason=FinishReason.STOP, token_count=index)
        if is_taken_over:
            self.acknowledge(index)


class RequestLedger:
    """One attempt of one request: its choices, whether it runs yet, and how it ended."""

    def __init__(
        self, *, request_id: str, attempt: int, gateway_id: str, choices: list[ChoiceLedger], first_number: int = 0
    ) -> None:
        """`first_number` names choice 0 to the gateway, the next number the next choice; 0: they have no numbers."""
        self.request_id, self.attempt, self.gateway_id = request_id, attempt, gateway_id
        self.key = (request_id, attempt)
        self.first_number = first_number
        self.choices = choices
        self.is_started = False
        self.usage: RequestUsage | None = None

    @property
    def has_unsent(self) -> bool:
        """True if a choice has entries that no stream was given."""
        return any(choice.has_unsent for choice in self.choices)

    @property
    def is_settled(self) -> bool:
        """True once the engine has let go of it and the reader has all of it: its end may be told."""
        return self.usage is not None and all(choice.is_settled for choice in self.choices)

    def is_runnable(self, step_tokens: int) -> bool:
        """True if the next step, of at most `step_tokens` tokens a choice, could run one of its choices."""
        return self.is_started and any(
            choice.end is None and choice.emitted + step_tokens <= choice.limit for choice in self.choices
        )

    def next_indices(self) -> list[int]:
        """Per choice, the output index at which another worker would go on."""
        return [choice.emitted for choice in self.choices]

    def take(self, max_tokens: int) -> list[TokenEntry]:
        """Unsent entries of all choices, about `max_tokens` tokens."""
        if len(self.choices) == 1:
            return self.choices[0].take(max_tokens)
        taken: list[TokenEntry] = []
        left = max_tokens
        for choice in self.choices:
            if left <= 0:
                break
            if choice.has_unsent:
                entries = choice.take(left)
                left -= sum(len(entry.token_ids) for entry in entries)
                taken += entries
        return taken
