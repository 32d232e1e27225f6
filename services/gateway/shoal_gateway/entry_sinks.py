"""Who the entries of a worker's frames are for: by the name of an attempt, or by the number of a choice. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_common.errors import MeshError

RequestKey = tuple[str, int]
"""request_id and attempt."""
ChoiceKey = tuple[RequestKey, int]
"""An attempt and a choice of it."""
DraftStep = tuple[int, int, int]
"""Drafts of one step: made, sent to verification, accepted."""


class EntrySink(Protocol):
    """Who the entries of one attempt are for. Called on the event loop; must not block."""

    def on_entry(self, entry: pb.Entry, step: int) -> None:
        """More tokens, maybe some that came before."""

    def on_tokens(
        self, attempt: int, choice_index: int, output_index: int, token_ids: list[int], step: int, drafts: DraftStep
    ) -> bool:
        """The same for an entry that says nothing else. True: they are taken over, and need no acknowledgement."""

    def on_frame_end(self) -> None:
        """Entries came, and no more are at hand: what they lead to is done once for all of them."""

    def on_worker_lost(self, error: MeshError) -> None:
        """No more entries will come for this attempt."""

    def next_indices(self) -> list[int]:
        """The next output index wanted, per choice."""


class EntrySinks:
    """The attached attempts of one worker. Invariant: every number belongs to a choice of an attached attempt.

    numbers   for the choices, from 1 on; none is ever used again
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._by_key: dict[RequestKey, EntrySink] = {}
        self._numbers_of: dict[RequestKey, list[int]] = {}
        self._by_number: dict[int, tuple[EntrySink, ChoiceKey]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def items(self) -> Iterable[tuple[RequestKey, EntrySink]]:
        """All of them."""
        return self._by_key.items()

    def attach(self, key: RequestKey, sink: EntrySink, choice_count: int) -> int:
        """Entries of this attempt go to `sink` from now on. Returns the number of its first choice."""
        self._by_key[key] = sink
        numbers = self._numbers_of[key] = list(itertools.islice(self._numbers, choice_count))
        for choice_index, number in enumerate(numbers):
            self._by_number[number] = (sink, (key, choice_index))
        return numbers[0]

    def detach(self, key: RequestKey) -> None:
        """The attempt is over. Safe to repeat."""
        self._by_key.pop(key, None)
        for number in self._numbers_of.pop(key, ()):
            del self._by_number[number]

    def take(self, frame: pb.Frame) -> list[tuple[ChoiceKey, int]]:
        """Hand out what a frame has. Returns the choices whose tokens are taken over, and their next index.

        Raises ValueError for columns of different lengths.
        """
        if frame.entries:
            self._take_entries(frame)
        return self._take_columns(frame) if frame.choice_numbers else []

    def _take_entries(self, frame: pb.Frame) -> None:
        step = frame.step
        told: dict[RequestKey, EntrySink] = {}
        for entry in frame.entries:
            key = (entry.request_id, entry.attempt)
            sink = self._by_key.get(key)
            if sink is not None:
                sink.on_entry(entry, step)
                told[key] = sink
        for sink in told.values():
            sink.on_frame_end()

    def _take_columns(self, frame: pb.Frame) -> list[tuple[ChoiceKey, int]]:
        step, by_number = frame.step, self._by_number
        taken: list[tuple[ChoiceKey, int]] = []
        told: dict[RequestKey, EntrySink] = {}
        columns = zip(frame.choice_numbers, frame.output_indices, _pieces(frame), _drafts(frame), strict=True)
        try:
            for number, output_index, token_ids, drafts in columns:
                found = by_number.get(number)
                if found is not None:
                    sink, choice = found
                    key, choice_index = choice
                    told[key] = sink
                    if sink.on_tokens(key[1], choice_index, output_index, token_ids, step, drafts):
                        taken.append((choice, output_index + len(token_ids)))
        finally:
            for sink in told.values():
                sink.on_frame_end()
        return taken


def _pieces(frame: pb.Frame) -> list[list[int]]:
    if not frame.token_counts:
        return [[token_id] for token_id in frame.token_ids]
    token_ids = list(frame.token_ids)
    ends = list(itertools.accumulate(frame.token_counts))
    if ends[-1] != len(token_ids):
        raise ValueError(f"{ends[-1]} tokens counted, {len(token_ids)} sent")
    return [token_ids[end - count : end] for end, count in zip(ends, frame.token_counts, strict=True)]


def _drafts(frame: pb.Frame) -> Iterable[DraftStep]:
    if not frame.draft_counts:
        return itertools.repeat((0, 0, 0), len(frame.choice_numbers))
    numbers = iter(frame.draft_counts)
    return zip(numbers, numbers, numbers, strict=True)
