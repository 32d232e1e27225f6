"""Which tokens go to which gateway, and when a gateway is gone. Pure: time is an argument, streams are numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from shoal_common.errors import FailedPrecondition, OutOfCapacity

from shoal_decode_worker.entries import TokenEntry
from shoal_decode_worker.ledger import ChoiceLedger, RequestLedger

RequestKey = tuple[str, int]
"""request_id and attempt."""


class FramesNotOpen(FailedPrecondition):
    """A gateway must open Frames before its first Generate."""

    reason = "FRAMES_NOT_OPEN"


class TooManyGateways(OutOfCapacity):
    """More gateways than this worker keeps streams for."""

    reason = "TOO_MANY_GATEWAYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextIndex:
    """The next output index that a gateway wants of one choice."""

    request_id: str
    attempt: int
    choice_index: int
    next_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The engine may emit output indices below `limit` of a choice."""

    request_id: str
    attempt: int
    choice_index: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """What belonged to gateways that are gone."""

    stream_ids: tuple[int, ...]
    requests: tuple[RequestLedger, ...]


class _Gateway:
    def __init__(self, now_s: float) -> None:
        self.stream_id: int | None = None
        self.last_heard_s = now_s
        self.requests: dict[RequestKey, RequestLedger] = {}
        self.unsent: dict[RequestKey, RequestLedger] = {}  # in the order in which they got something to send


class Frames:
    """Requests of all gateways and the stream that each gateway listens on.

    Invariant: a request belongs to exactly one gateway from `add` to `remove`; a gateway has at most one stream; every
    request with unsent entries is in its gateway's unsent list, each at most once. A gateway is forgotten when it has
    neither a stream nor requests, so the state is bounded by both.
    """

    def __init__(self, *, expiry_s: float, max_gateways: int, step_tokens: int) -> None:
        self._expiry_s = expiry_s
        self._max_gateways = max_gateways
        self._step_tokens = step_tokens
        self._gateways: dict[str, _Gateway] = {}

    def open_stream(
        self, gateway_id: str, stream_id: int, next_indices: Iterable[NextIndex], now_s: float
    ) -> tuple[int | None, list[Grant]]:
        """Send to `stream_id` from now on, from the indices wanted. Returns the stream replaced, if any, and grants.

        Choices that the list does not name are sent again from where they were acknowledged; names unknown here are
        ignored. Raises TooManyGateways.
        """
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            if len(self._gateways) >= self._max_gateways:
                raise TooManyGateways(f"{len(self._gateways)} gateways have streams", max_gateways=self._max_gateways)
            gateway = self._gateways[gateway_id] = _Gateway(now_s)
        replaced, gateway.stream_id = gateway.stream_id, stream_id
        gateway.last_heard_s = now_s
        grants = self._acknowledge(gateway, next_indices)
        for request in gateway.requests.values():
            for choice in request.choices:
                choice.rewind()
        gateway.unsent = {key: request for key, request in gateway.requests.items() if request.has_unsent}
        return replaced, grants

    def close_stream(self, gateway_id: str, stream_id: int) -> None:
        """The stream is over; the requests wait for the next one. A stream replaced before changes nothing."""
        gateway = self._gateways.get(gateway_id)
        if gateway is not None and gateway.stream_id == stream_id:
            gateway.stream_id = None
            self._forget_if_idle(gateway_id, gateway)

    def heard(self, gateway_id: str, now_s: float) -> None:
        """Any message came from the gateway."""
        if gateway_id in self._gateways:
            self._gateways[gateway_id].last_heard_s = now_s

    def add(self, request: RequestLedger) -> None:
        """Route the tokens of a request to its gateway. Raises FramesNotOpen if that never opened a stream."""
        gateway = self._gateways.get(request.gateway_id)
        if gateway is None:
            raise FramesNotOpen(
                f"gateway {request.gateway_id} has no Frames stream here; open it first", gateway_id=request.gateway_id
            )
        gateway.requests[request.key] = request

    def remove(self, request: RequestLedger) -> None:
        """Forget a request and what was kept for it. Safe to repeat."""
        gateway = self._gateways.get(request.gateway_id)
        if gateway is not None:
            gateway.requests.pop(request.key, None)
            gateway.unsent.pop(request.key, None)
            self._forget_if_idle(request.gateway_id, gateway)

    def emitted(self, request: RequestLedger) -> int | None:
        """A choice of the request got entries. Returns the stream to wake, None while the gateway has none."""
        gateway = self._gateways[request.gateway_id]
        gateway.unsent[request.key] = request
        return gateway.stream_id

    def acknowledge(self, gateway_id: str, next_indices: Iterable[NextIndex]) -> list[Grant]:
        """Let go of what the gateway has. Returns the new limits of the choices that moved."""
        gateway = self._gateways.get(gateway_id)
        return [] if gateway is None else self._acknowledge(gateway, next_indices)

    def take(self, gateway_id: str, stream_id: int, max_tokens: int) -> list[tuple[RequestLedger, TokenEntry]]:
        """The next entries for a stream, about `max_tokens` tokens; empty if there are none or it was replaced."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None or gateway.stream_id != stream_id:
            return []
        taken: list[tuple[RequestLedger, TokenEntry]] = []
        left = max_tokens
        for count, request in enumerate(gateway.unsent.values()):
            for entry in request.take(left):
                taken.append((request, entry))
                left -= len(entry.token_ids)
            if left <= 0:
                # The last one may have more.
                for key in list(islice(gateway.unsent, count + (not request.has_unsent))):
                    del gateway.unsent[key]
                return taken
        gateway.unsent.clear()
        return taken

    def runnable_count(self, gateway_id: str) -> int:
        """Requests of the gateway that the next step could run."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            return 0
        return sum(request.is_runnable(self._step_tokens) for request in gateway.requests.values())

    def expired(self, now_s: float) -> Expired:
        """Gateways from which nothing came for too long: their streams end here, their requests must be aborted."""
        gone = {name: one for name, one in self._gateways.items() if now_s - one.last_heard_s >= self._expiry_s}
        streams = tuple(one.stream_id for one in gone.values() if one.stream_id is not None)
        requests = tuple(request for one in gone.values() for request in one.requests.values())
        for gateway_id, gateway in gone.items():
            gateway.stream_id = None
            self._forget_if_idle(gateway_id, gateway)
        return Expired(stream_ids=streams, requests=requests)

    def _acknowledge(self, gateway: _Gateway, next_indices: Iterable[NextIndex]) -> list[Grant]:
        grants = []
        for one in next_indices:
            choice = _choice(gateway.requests.get((one.request_id, one.attempt)), one.choice_index)
            if choice is not None and choice.acknowledge(one.next_index):
                grants.append(
                    Grant(
                        request_id=one.request_id,
                        attempt=one.attempt,
                        choice_index=one.choice_index,
                        limit=choice.limit,
                    )
                )
        return grants

    def _forget_if_idle(self, gateway_id: str, gateway: _Gateway) -> None:
        if gateway.stream_id is None and not gateway.requests:
            self._gateways.pop(gateway_id, None)


def _choice(request: RequestLedger | None, choice_index: int) -> ChoiceLedger | None:
    if request is None or choice_index >= len(request.choices):
        return None
    return request.choices[choice_index]
