"""Which requests live on this worker: attempts, admission, finishing, drain. Pure; one event loop owns it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from shoal_common.errors import (
    AlreadyExists,
    Draining,
    MeshError,
    Moved,
    NotFound,
    OutOfCapacity,
    Superseded,
)

from shoal_decode_worker.entries import RequestUsage, TokenEntry
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.ledger import ChoiceLedger, RequestLedger
from shoal_decode_worker.wrong_field import wrong_field

E = TypeVar("E", bound=MeshError)


class AttemptNotNewer(AlreadyExists):
    """This attempt of the request, or a newer one, runs here."""

    reason = "ATTEMPT_NOT_NEWER"


class UnknownRequest(NotFound):
    """No such attempt runs here."""

    reason = "UNKNOWN_REQUEST"


class QueueFull(OutOfCapacity):
    """As many requests as this worker keeps."""

    reason = "QUEUE_FULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStart:
    """Where a choice stands when it comes here: tokens emitted elsewhere, and whether more are wanted."""

    output_ids: tuple[int, ...] = ()
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that must be told why it ends here."""

    request: RequestLedger
    error: MeshError


class DecodeCore:
    """The live requests of one worker.

    Invariant: at most one attempt of a request_id is live, from `open` to `close`; a live request of a gateway is known
    to `frames`, one without a gateway is not.
    """

    def __init__(self, *, frames: Frames, max_requests: int) -> None:
        self._frames = frames
        self._max_requests = max_requests
        self._live: dict[str, RequestLedger] = {}
        self.is_draining = False

    @property
    def live_count(self) -> int:
        """Requests from `open` to `close`."""
        return len(self._live)

    def open(
        self,
        *,
        request_id: str,
        attempt: int,
        gateway_id: str,
        choices: Iterable[ChoiceStart],
        first_number: int = 0,
    ) -> tuple[RequestLedger, Failure | None]:
        """Take a request in. Returns it, and the older attempt that must be aborted for it.

        Raises AttemptNotNewer, Draining, QueueFull, FramesNotOpen; then nothing has changed.
        """
        older = self._live.get(request_id)
        if older is not None and older.attempt >= attempt:
            raise AttemptNotNewer(
                f"attempt {older.attempt} of {request_id} runs here, got attempt {attempt}",
                request_id=request_id,
                running_attempt=older.attempt,
                attempt=attempt,
            )
        if self.is_draining:
            raise Draining("this worker leaves and takes no new requests")
        if older is None and len(self._live) >= self._max_requests:
            raise QueueFull(f"{len(self._live)} requests are here already", max_requests=self._max_requests)
        ledgers = [ChoiceLedger(first_index=len(one.output_ids), is_finished=one.is_finished) for one in choices]
        request = RequestLedger(
            request_id=request_id, attempt=attempt, gateway_id=gateway_id, choices=ledgers, first_number=first_number
        )
        if gateway_id:
            self._frames.add(request)
        superseded = None
        if older is not None:
            self._frames.remove(older)
            superseded = Failure(request=older, error=_superseded(older, attempt))
        self._live[request_id] = request
        return request, superseded

    def close(self, request: RequestLedger) -> None:
        """Forget a request, however it ended. Safe to repeat."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        self._frames.remove(request)

    def find(self, request_id: str, attempt: int) -> RequestLedger | None:
        """The live request, None if that attempt is not live here."""
        request = self._live.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def emit(self, request_id: str, attempt: int, entry: TokenEntry) -> RequestLedger | None:
        """Keep an entry for its reader. Returns the request, None if it is not live any more: the entry is dropped."""
        request = self.find(request_id, attempt)
        if request is not None:
            request.choices[entry.choice_index].emit(entry)
        return request

    def engine_ended(self, request_id: str, attempt: int, usage: RequestUsage) -> RequestLedger | None:
        """The engine finished a request and freed what it held. Returns the request if it is live."""
        request = self.find(request_id, attempt)
        if request is not None:
            assert all(choice.end is not None for choice in request.choices)
            request.usage = usage
        return request

    def finish(self, request_id: str, attempt: int, choice_index: int, end_index: int) -> RequestLedger:
        """The caller ends a choice and keeps the tokens below `end_index`. Idempotent.

        Raises UnknownRequest, and InvalidArgument for a choice or an index that the worker has not reached.
        """
        request = self.find(request_id, attempt)
        if request is None:
            raise UnknownRequest(
                f"attempt {attempt} of {request_id} does not run here", request_id=request_id, attempt=attempt
            )
        if choice_index >= len(request.choices):
            count = len(request.choices)
            raise wrong_field("finish.choice_index", f"{choice_index} of {count} choices", choice_count=count)
        choice = request.choices[choice_index]
        if end_index > choice.emitted:
            raise wrong_field(
                "finish.end_index",
                f"{end_index} is above the {choice.emitted} tokens emitted",
                reason="END_INDEX_AHEAD",
                emitted=choice.emitted,
            )
        # A caller on Frames decides from tokens it has; one without still has some on their way in its own stream.
        choice.end_at(end_index, is_taken_over=bool(request.gateway_id))
        return request

    def move_all(self) -> list[Failure]:
        """The failures by which every live request goes on at another worker."""
        return [Failure(request=request, error=moved(request)) for request in self._live.values()]


def moved(request: RequestLedger) -> Moved:
    """The error that sends a request elsewhere; says per choice at which output index to go on."""
    return _with_next_indices(Moved("the request must go on at another worker"), request)


def _superseded(request: RequestLedger, attempt: int) -> Superseded:
    return _with_next_indices(Superseded(f"attempt {attempt} of the request came here", attempt=attempt), request)


def _with_next_indices(error: E, request: RequestLedger) -> E:
    indices = {f"next_index.{choice}": str(index) for choice, index in enumerate(request.next_indices())}
    error.metadata = {**error.metadata, **indices}
    return error
