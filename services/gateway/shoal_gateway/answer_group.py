"""Several answers read as one: what a body with several prompts gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.encode import Prepared
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.waiting import Waiting

_COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "reasoning_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "decode_step_count",
)
_BY_POSITION = ("drafted_by_position", "verified_by_position", "accepted_by_position")


class Member(Protocol):
    """One answer of the group; see `Answer`."""

    request_id: str
    prepared: Prepared

    @property
    def is_finished(self) -> bool: ...
    @property
    def is_admitted(self) -> bool: ...
    @property
    def attempts(self) -> int: ...
    @property
    def outcome(self) -> str: ...
    @property
    def has_news(self) -> bool: ...
    def usage(self) -> sampling_pb2.Usage: ...
    def acknowledge(self) -> None: ...
    def take(self) -> list[ChoiceOutput]: ...
    def close(self) -> None: ...


class AnswerGroup:
    """Choice k of member m is choice m * n + k here. Read and closed as one Answer is; an error of one ends all.

    waiting   woken by every member that has news
    """

    def __init__(self, members: Sequence[Member], waiting: Waiting) -> None:
        self._members, self._waiting = members, waiting
        self._error: MeshError | None = None
        self.request_id = members[0].request_id

    @property
    def is_finished(self) -> bool:
        """All choices of all members have been read to their end."""
        return all(member.is_finished for member in self._members)

    @property
    def is_admitted(self) -> bool:
        """A worker has taken one of them at least once."""
        return any(member.is_admitted for member in self._members)

    @property
    def attempts(self) -> int:
        """Workers that the member which moved most was given to."""
        return max(member.attempts for member in self._members)

    @property
    def outcome(self) -> str:
        """Of the first member that did not end well, if there is one."""
        outcomes = [member.outcome for member in self._members]
        return next((one for one in outcomes if one != "ok"), "ok")

    def usage(self) -> sampling_pb2.Usage:
        """What those used that a worker took, up to what was read; what none took, as if it was."""
        admitted = [member for member in self._members if member.is_admitted]
        return add_usages(member.usage() for member in admitted or self._members)

    async def read(self, timeout_s: float) -> list[ChoiceOutput]:
        """The next batch of whichever have something; see `Answer.read`."""
        self.acknowledge()
        if self._error is not None:
            raise self._error
        if not self._has_news and not await self._waiting.wait(timeout_s):
            return []
        return self._take()

    def on_news(self, write_through: object) -> None:
        """A group is read by its reader alone."""

    def wake(self) -> None:
        """There is something to read."""
        self._waiting.wake()

    def plain(self, choice_index: int, token_ids: list[int]) -> None:
        """So nothing is taken past it."""

    def take(self) -> list[ChoiceOutput]:
        """What is there, without waiting; else as `read`."""
        if self._error is not None:
            raise self._error
        return self._take()

    def acknowledge(self) -> None:
        """What was read is delivered."""
        for member in self._members:
            member.acknowledge()

    def close(self) -> None:
        """The reader leaves. Safe to repeat."""
        for member in self._members:
            member.close()

    @property
    def _has_news(self) -> bool:
        return any(member.has_news and not member.is_finished for member in self._members)

    def _take(self) -> list[ChoiceOutput]:
        outputs: list[ChoiceOutput] = []
        first = 0
        for member in self._members:
            if member.has_news and not member.is_finished:
                try:
                    taken = member.take()
                except MeshError as error:
                    # What the others said before is read first.
                    self._error = self._error or error
                    taken = []
                for output in taken:
                    output.choice_index += first
                outputs += taken
            first += member.prepared.choice_count
        if self._error is not None and not outputs:
            raise self._error
        return outputs

    async def __aenter__(self) -> AnswerGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def add_usages(usages: Iterable[sampling_pb2.Usage]) -> sampling_pb2.Usage:
    """The sum of each count; counts by position are added position by position."""
    total = sampling_pb2.Usage()
    for usage in usages:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(usage, name))
        for name in _BY_POSITION:
            sums, more = getattr(total, name), getattr(usage, name)
            sums.extend([0] * (len(more) - len(sums)))
            for position, count in enumerate(more):
                sums[position] += count
    return total
