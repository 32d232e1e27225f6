"""The books: every request of every gateway, from Submit or Adopt to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shoal_scheduler.core.messages import Placement
from shoal_scheduler.core.requests import Need, RequestSpec


class State(Enum):
    """Where a request stands."""

    QUEUED = "queued"
    PLACED = "placed"
    RUNNING = "running"


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One request. What holds resources on a worker is the gateway's call there; this is bookkeeping.

    arrival_s        when it began to wait, here or at another replica; kept over moves
    closed_attempt   the newest attempt that was refused or lost
    not_before_s     per worker that refused it: ask no sooner
    never            per worker that can never run it, why
    began_with       pair of the tokens so far
    """

    request_id: str
    stream_id: str
    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    state: State = State.QUEUED
    placement: Placement | None = None
    worker_id: str = ""
    prefill_id: str = ""
    closed_attempt: int = 0
    output_counts: tuple[int, ...] = ()
    refusal_count: int = 0
    loss_count: int = 0
    not_before_s: dict[str, float] = field(default_factory=dict)
    never: dict[str, str] = field(default_factory=dict)
    began_with: str | None = None
    homeless_since_s: float | None = None
    is_judged: bool = False
    position: int | None = None

    @property
    def need(self) -> Need:
        """What it holds from admission on."""
        return self.spec.need(self.output_counts)

    @property
    def was_placed(self) -> bool:
        """It had a place before, and goes ahead of those that did not."""
        return self.placement is not None or bool(self.worker_id)


class Leases:
    """All leases, and the streams they came by. Invariant: a lease belongs to one stream that is known.

    A stream that broke is known for `grace_s` longer, so that the gateway can take its requests to a new one.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._leases: dict[str, Lease] = {}
        self._of_stream: dict[str, set[str]] = {}
        self._drop_at_s: dict[str, float] = {}
        self.chain_length = 0
        """Hashes kept for all requests together."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def get(self, request_id: str) -> Lease | None:
        """One lease."""
        return self._leases.get(request_id)

    def of_stream(self, stream_id: str) -> Sequence[Lease]:
        """The leases of one stream."""
        return [self._leases[key] for key in self._of_stream.get(stream_id, ())]

    def is_open(self, stream_id: str) -> bool:
        """A stream takes messages."""
        return stream_id in self._of_stream and stream_id not in self._drop_at_s

    def open_stream(self, stream_id: str) -> None:
        """A gateway is here."""
        self._of_stream.setdefault(stream_id, set())

    def break_stream(self, stream_id: str, now_s: float) -> None:
        """The stream ended, for whatever reason. Safe to repeat."""
        if stream_id in self._of_stream:
            self._drop_at_s.setdefault(stream_id, now_s + self._grace_s)

    def add(self, lease: Lease) -> None:
        """Keep a new lease. Its stream is open and its request_id unknown."""
        assert lease.request_id not in self._leases
        assert self.is_open(lease.stream_id)
        self._leases[lease.request_id] = lease
        self._of_stream[lease.stream_id].add(lease.request_id)
        self.chain_length += lease.spec.chain_length

    def remove(self, lease: Lease) -> None:
        """Forget a lease. Safe to repeat."""
        if self._leases.get(lease.request_id) is lease:
            del self._leases[lease.request_id]
            self._of_stream[lease.stream_id].discard(lease.request_id)
            self.chain_length -= lease.spec.chain_length

    def orphans(self, now_s: float) -> Sequence[Lease]:
        """Leases of streams that broke more than the grace ago; the caller removes them. Forgets those streams."""
        ended = [stream_id for stream_id, at_s in self._drop_at_s.items() if now_s >= at_s]
        orphans = [self._leases[key] for stream_id in ended for key in self._of_stream[stream_id]]
        for lease in orphans:
            self.remove(lease)
        for stream_id in ended:
            del self._of_stream[stream_id], self._drop_at_s[stream_id]
        return orphans
