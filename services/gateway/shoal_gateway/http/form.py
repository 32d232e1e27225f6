"""What one API's answers look like, as the endpoint sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.answer import Answer
from shoal_gateway.answer_group import AnswerGroup
from shoal_gateway.encode import Prepared
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.output_shape import Chunk

OpenAnswer: TypeAlias = Answer | AnswerGroup


class AnswerForm(Protocol):
    """The bytes of one answer, streamed or whole. Pure; bytes are UTF-8.

    A stream calls `events` for every batch, then `end`, or `error` where it fails after the first byte.
    A whole answer calls `add` for every batch, then `body`. An answer is one or the other.
    """

    @property
    def keep_alive(self) -> bytes:
        """What a stream says while it has nothing to say."""

    def events(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The events of a batch; nothing where all of it is held back."""

    def pieces(self, choice_index: int, chunks: Sequence[Chunk]) -> bytes:
        """The events of a choice that has begun and goes on, where chunks are all that there is."""

    def end(self, usage: sampling_pb2.Usage) -> bytes:
        """What comes after the last batch."""

    def error(self, error: MeshError) -> bytes:
        """The last event of a stream that fails."""

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """A batch of a whole answer."""

    def body(self, usage: sampling_pb2.Usage) -> bytes:
        """The whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer:
    """A checked request, and how its answer is to be written.

    others   of a body with several prompts: the requests of those after the first
    """

    request: Prepared
    is_stream: bool
    form: Callable[[OpenAnswer], AnswerForm]
    others: tuple[Prepared, ...] = ()

    @property
    def requests(self) -> tuple[Prepared, ...]:
        """All of them."""
        return (self.request, *self.others)


Prepare: TypeAlias = Callable[[dict[str, Any], int], Awaitable[PreparedAnswer]]
"""From a body and its size in bytes. Raises MeshError for what is wrong with it."""
