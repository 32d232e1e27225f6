"""What comes of an answer: entries into the journal, to the reader and into the counts, and what is said back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal_common.draft_counts import DraftCounts
from shoal_common.errors import MeshError

from shoal_gateway.entry_sinks import DraftStep
from shoal_gateway.journal import UNFINISHED, EntriesMissing, FinishReason
from shoal_gateway.output_reader import OutputReader
from shoal_gateway.session import Phase, Session
from shoal_gateway.worker_link import WorkerLink


class WritesThrough(Protocol):
    """Who may do a waiting reader's work."""

    def __call__(self) -> bool:
        """Read what there is. False: the reader is needed."""

    def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
        """Take tokens that have just come; `flush` follows. False: they are not taken."""

    def flush(self) -> None:
        """Write what the tokens taken have led to."""


def _nobody() -> None:
    """Listens no more."""


def _nobody_failed(attempt: int, error: MeshError) -> None:
    """Listens no more."""


class Intake:
    """An EntrySink: takes what the current attempt of a session brings, each token once, and drops what others do.

    on_change   called when there is output to read
    on_failed   called with the attempt and the error when what came makes no sense, or nothing comes any more
    """

    def __init__(
        self,
        *,
        request_id: str,
        session: Session,
        reader: OutputReader,
        prompt_tokens: int,
        on_change: Callable[[], None],
        on_failed: Callable[[int, MeshError], None],
    ) -> None:
        self._request_id, self._session, self._reader = request_id, session, reader
        self._prompt_tokens = prompt_tokens
        self._on_change, self._on_failed = on_change, on_failed
        self._received = session.journal.counts()
        self._last_step = -1
        self._cached_tokens = self._step_count = 0
        self._drafts = DraftCounts()
        self._last_usage: sampling_pb2.Usage | None = None
        """Of an answer that was read to its end: nothing changes it any more."""
        self.link: WorkerLink | None = None
        """Where acknowledgements and ends go, while an attempt runs."""
        self.through: WritesThrough | None = None
        """Takes tokens past the reader where it can."""

    def begin(self) -> None:
        """A new attempt goes on from what is here."""
        self._received = self._session.journal.counts()

    def leave(self) -> None:
        """The request is over: nobody is told anything any more."""
        self._on_change, self._on_failed = _nobody, _nobody_failed

    def on_entry(self, entry: decode_pb.Entry, step: int) -> None:
        """Tokens of the current attempt; entries of any other are dropped."""
        session = self._session
        # Entries may come before the admission does; they prove it.
        if not session.admitted(entry.attempt):
            return
        index, first = entry.choice_index, entry.output_index
        token_ids = list(entry.token_ids)
        finish_reason = entry.finish_reason
        journal = session.journal
        try:
            was_finished = index < len(self._received) and journal.choices[index].is_finished
            known = journal.take(index, first, token_ids, finish_reason)
        except EntriesMissing as error:
            self._on_failed(entry.attempt, error)
            return
        end = first + len(token_ids)
        if end > self._received[index]:
            self._received[index] = end
        if was_finished:
            self._acknowledge(index, self._received[index], is_end=True)
            return
        if not known:
            # What is sent once more was counted the first time.
            self._count(entry, step)
        self._reader.add(
            index,
            token_ids[known:] if known else token_ids,
            entry.logprobs[known:],
            finish_reason,
            prompt_logprobs=() if known else entry.prompt_logprobs,
        )

    def on_tokens(
        self, attempt: int, choice_index: int, output_index: int, token_ids: list[int], step: int, drafts: DraftStep
    ) -> bool:
        """The short way of an entry that says nothing else, which most are; see on_entry."""
        session = self._session
        if (attempt != session.attempt or session.phase is not Phase.RUNNING) and not session.admitted(attempt):
            return False
        choice = session.journal.choices[choice_index]
        if output_index != len(choice.output_ids) or choice.finish_reason != UNFINISHED:
            entry = decode_pb.Entry(
                attempt=attempt, choice_index=choice_index, output_index=output_index, token_ids=token_ids
            )
            entry.drafted_count, entry.verified_count, entry.accepted_count = drafts
            self.on_entry(entry, step)
            return False
        choice.output_ids.extend(token_ids)
        self._received[choice_index] = output_index + len(token_ids)
        if drafts[0]:
            self._drafts.add(*drafts)
        if step != self._last_step and output_index:
            self._step_count += 1
            self._last_step = step
        through = self.through
        if through is not None and through.tokens(choice_index, token_ids):
            return True
        self._reader.add(choice_index, token_ids, (), UNFINISHED)
        return False

    def on_frame_end(self) -> None:
        """There is something to read, unless all of it was known."""
        if self.through is not None:
            self.through.flush()
        if self._reader.has_arrived:
            self._on_change()

    def on_worker_lost(self, error: MeshError) -> None:
        """The stream of the worker is gone: so is the attempt."""
        self._on_failed(self._session.attempt, error)

    def next_indices(self) -> list[int]:
        """The next output index wanted, per choice."""
        return list(self._received)

    def taken(self, choice_index: int, next_index: int) -> None:
        """The client has everything below `next_index` of a choice."""
        is_end = self._session.journal.choices[choice_index].is_finished
        if is_end:
            next_index = max(next_index, self._received[choice_index])
        self._acknowledge(choice_index, next_index, is_end=is_end)

    def finish_choice(self, choice_index: int, end_index: int, reason: FinishReason) -> None:
        """The text of a choice ended: the worker is to stop there."""
        self._session.journal.finish(choice_index, end_index, reason)
        if self.link is not None:
            self.link.finish((self._request_id, self._session.attempt), choice_index, end_index)

    def acknowledge_all(self) -> None:
        """Nothing that came will be asked for again."""
        for choice_index, next_index in enumerate(self._received):
            self._acknowledge(choice_index, next_index, is_end=True)

    def usage(self) -> sampling_pb2.Usage:
        """What it used up to now; output counts what was read, up to the end of each choice."""
        if self._last_usage is not None:
            return self._last_usage
        completion_tokens = sum(self._reader.counts)
        usage = sampling_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            cached_prompt_tokens=self._cached_tokens,
            reasoning_tokens=min(self._reader.reasoning_tokens, completion_tokens),
            decode_step_count=self._step_count,
        )
        drafts = self._drafts
        if drafts.drafted:
            usage.draft_tokens, usage.accepted_draft_tokens = sum(drafts.verified), sum(drafts.accepted)
            usage.drafted_by_position.extend(drafts.drafted)
            usage.verified_by_position.extend(drafts.verified)
            usage.accepted_by_position.extend(drafts.accepted)
        if self._reader.is_finished:
            self._last_usage = usage
        return usage

    def _acknowledge(self, choice_index: int, next_index: int, *, is_end: bool) -> None:
        if self.link is not None:
            self.link.acknowledge((self._request_id, self._session.attempt), choice_index, next_index, is_end=is_end)

    def _count(self, entry: decode_pb.Entry, step: int) -> None:
        if entry.HasField("cached_tokens") and not self._cached_tokens:
            self._cached_tokens = min(entry.cached_tokens, self._prompt_tokens)
            self._reader.cached_tokens = self._cached_tokens
        if drafted := entry.drafted_count:
            self._drafts.add(drafted, entry.verified_count, entry.accepted_count)
        if entry.output_index and step != self._last_step:
            self._step_count += 1
            self._last_step = step
