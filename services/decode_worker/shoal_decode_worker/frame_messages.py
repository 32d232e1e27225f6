"""Entries as frames: most are plain and leave as columns of numbers, which cost a fraction of a message each. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.decode.v1 import decode_service_pb2 as pb

from shoal_decode_worker.entries import TokenEntry
from shoal_decode_worker.ledger import RequestLedger
from shoal_decode_worker.wire import add_entry


def frame_messages(step: int, taken: Iterable[tuple[RequestLedger, TokenEntry]]) -> list[pb.FramesResponse]:
    """As few frames as keep the order of each choice: in a frame, messages come before columns.

    taken   in the order of each choice, the entries of a choice one after the other
    """
    messages: list[pb.FramesResponse] = []
    columns = _Columns(step, messages)
    for request, entry in taken:
        if request.first_number and entry.is_plain:
            columns.add(request.first_number + entry.choice_index, entry)
        else:
            if columns.numbers and columns.numbers[-1] == request.first_number + entry.choice_index:
                columns.close()
                columns = _Columns(step, messages)
            add_entry(columns.frame.entries, request, entry)
    columns.close()
    return messages


class _Columns:
    """One frame that is being filled."""

    __slots__ = ("counts", "drafts", "frame", "indices", "numbers", "token_ids")

    def __init__(self, step: int, messages: list[pb.FramesResponse]) -> None:
        message = pb.FramesResponse()
        messages.append(message)
        self.frame = message.frame
        self.frame.step = step
        self.numbers: list[int] = []
        self.indices: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.drafts: list[int] = []

    def add(self, number: int, entry: TokenEntry) -> None:
        """A plain entry of the choice of that number."""
        self.numbers.append(number)
        self.indices.append(entry.output_index)
        self.counts.append(len(entry.token_ids))
        self.token_ids += entry.token_ids
        self.drafts += (entry.drafted_count, entry.verified_count, entry.accepted_count)

    def close(self) -> None:
        """Put the columns into the message; those that say nothing are left out."""
        frame = self.frame
        if not self.numbers:
            return
        frame.choice_numbers.extend(self.numbers)
        frame.output_indices.extend(self.indices)
        frame.token_ids.extend(self.token_ids)
        if self.counts.count(1) != len(self.counts):
            frame.token_counts.extend(self.counts)
        if any(self.drafts):
            frame.draft_counts.extend(self.drafts)
