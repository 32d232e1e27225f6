"""The short way of a stream's output: from where its tokens arrive to the connection, without waking its task."""

from __future__ import annotations

from collections.abc import Callable

from shoal_common.errors import MeshError

from shoal_gateway.http.form import AnswerForm, OpenAnswer
from shoal_gateway.output_reader import ChoiceOutput


class WriteThrough:
    """Writes output of a stream that has begun, while its task waits and the client keeps up.

    Invariant: what it took and could not write is the next that the task writes, before an error too; until then it
    takes nothing more.

    write_now   more of the body; False: the client is behind, and nothing was written
    wrote       called when something was
    """

    def __init__(
        self,
        write_now: Callable[[bytes], bool],
        answer: OpenAnswer,
        form: AnswerForm,
        wrote: Callable[[], None],
    ) -> None:
        self._write_now, self._answer, self._form, self._wrote = write_now, answer, form, wrote
        self._left = self._pending = b""
        self._error: Exception | None = None

    def __call__(self) -> bool:
        """False: the task has to go on, at the end of the answer, for a client that is behind, or to raise."""
        if self._left or self._pending or self._error is not None:
            return False
        answer = self._answer
        try:
            outputs = answer.take()
            events = self._form.events(outputs) if outputs else b""
            if answer.is_finished or (events and not self._write_now(events)):
                self._left = events
                return False
        except Exception as error:
            # It is this answer's alone, whoever calls.
            self._error = error
            return False
        if events:
            self._wrote()
        answer.acknowledge()
        return True

    def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
        """Write tokens that have just come. False: they are not taken."""
        if self._left or self._error is not None:
            return False
        try:
            chunks = self._answer.plain(choice_index, token_ids)
            if not chunks:
                return chunks is not None
            # Written by `flush`, when those of the other streams are taken too: a write wakes its client, which takes
            # the processor from what is still to come.
            self._pending += self._form.pieces(choice_index, chunks)
        except Exception as error:
            self._error = error
            self._answer.wake()
        return True

    def flush(self) -> None:
        """Write what the tokens taken have led to."""
        events = self._pending
        if not events:
            return
        self._pending = b""
        try:
            if self._write_now(events):
                self._wrote()
                return
            self._left = events
        except Exception as error:
            self._error = error
        self._answer.wake()

    async def read(self, timeout_s: float) -> tuple[bytes, list[ChoiceOutput]]:
        """For the task: what it has to write, and behind that what there is to read, as by `Answer.read`.

        Raises what was raised on the way.
        """
        try:
            outputs = await self._answer.read(timeout_s)
        except MeshError:
            if not self._left:
                raise
            # Raised again by the next call: what was taken came before it.
            outputs = []
        return self._left_over(), outputs

    def _left_over(self) -> bytes:
        if self._error is not None:
            raise self._error
        left, self._left, self._pending = self._left + self._pending, b"", b""
        return left
