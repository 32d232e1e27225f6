"""Words between the scheduler and gateways."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class DenialReason(StrEnum):
    """Why a request will not be placed."""

    NO_CAPACITY = "NO_CAPACITY"
    QUEUE_FULL = "QUEUE_FULL"
    NO_WORKERS = "NO_WORKERS"
    EXCEEDS_CAPACITY = "EXCEEDS_CAPACITY"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    DEADLINE = "DEADLINE"
    TOO_MANY_ATTEMPTS = "TOO_MANY_ATTEMPTS"


class LossCause(Enum):
    """Why a running attempt is gone. `counts`: it tells against the worker."""

    BROKEN = "broken"
    NO_PROGRESS = "no_progress"
    MOVED = "moved"
    DRAINED = "drained"

    @property
    def counts(self) -> bool:
        """It tells against the worker."""
        return self in (LossCause.BROKEN, LossCause.NO_PROGRESS)


@dataclass(frozen=True, slots=True)
class Target:
    """An instance to call."""

    instance_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where to run, and how many prompt tokens the index expects in the cache."""

    placement_id: str
    decode: Target
    prefill: tuple[Target, ...]
    kv_id: str
    numerics_id: str
    constraint_id: str
    expected_hit_tokens: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits behind `position` others."""

    position: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The request will not be placed; None: trying again makes no sense."""

    reason: DenialReason
    retry_after_s: float | None


Answer = Queued | Placement | Denied


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An answer, the stream it goes to and the request it is about."""

    stream_id: str
    request_id: str
    answer: Answer
