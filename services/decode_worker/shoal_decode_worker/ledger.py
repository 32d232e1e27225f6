"""Tokens of one request between the engine and their reader: kept until acknowledged. Pure."""

from __future__ import annotations

from collections import deque

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
        self._entries: deque[TokenEntry] = deque()
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
        assert entry.output_index == self.emitted, (entry.output_index, self.emitted)
        assert entry.next_index <= self.limit, (entry.next_index, self.limit)
        self._entries.append(entry)
        self.emitted = entry.next_index
        if entry.finish_reason is not None:
            self.end = ChoiceEnd(finish_reason=entry.finish_reason, token_count=self.emitted)

    def take(self, max_tokens: int) -> list[TokenEntry]:
        """The next unsent entries, about `max_tokens` tokens of them (at least one entry), sent from now on."""
        taken: list[TokenEntry] = []
        count = 0
        while self._sent_count < len(self._entries) and (not taken or count < max_tokens):
            entry = self._entries[self._sent_count]
            taken.append(entry)
            count += len(entry.token_ids)
            if entry.token_ids:
                self._sent_count += 1
            else:
                # Nothing in it can be acknowledged; the end of the request says the same.
                del self._entries[self._sent_count]
        return taken

    def acknowledge(self, next_index: int) -> bool:
        """The reader has everything below `next_index`. False if it says nothing new, or more than was emitted."""
        if not self.acknowledged < next_index <= self.emitted:
            return False
        while self._entries and self._entries[0].next_index <= next_index and self._entries[0].token_ids:
            self._entries.popleft()
            self._sent_count = max(0, self._sent_count - 1)
        if self._entries and self._entries[0].output_index < next_index:
            self._entries[0] = self._entries[0].from_index(next_index)
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
        self._entries = deque(kept)
        self._sent_count = min(self._sent_count, len(kept))
        self.emitted = index
        self.acknowledged = min(self.acknowledged, index)
        self.end = ChoiceEnd(finish_reason=FinishReason.STOP, token_count=index)
        if is_taken_over:
            self.acknowledge(index)


class RequestLedger:
    """One attempt of one request: its choices, whether it runs yet, and how it ended."""

    def __init__(self, *, request_id: str, attempt: int, gateway_id: str, choices: list[ChoiceLedger]) -> None:
        self.request_id, self.attempt, self.gateway_id = request_id, attempt, gateway_id
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
