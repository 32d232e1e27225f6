"""One request inside the edge, from its head to the end of its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError, QuotaExceeded

from shoal_gateway.edge.account import Account, Charge, Standings, Used
from shoal_gateway.edge.keys import ApiKey
from shoal_gateway.encode import Prepared

CANCELLED, OK = "cancelled", "ok"
Tell = Callable[[Standings], None]


class Followed(Protocol):
    """What an answer tells of itself; `Answer` does."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def is_admitted(self) -> bool:
        """A worker has taken it at least once."""

    @property
    def attempts(self) -> int:
        """Workers that it was given to, one after the other."""

    @property
    def outcome(self) -> str:
        """`ok`, `cancelled`, or the reason of the error that ended it; while it runs, what it would be now."""

    def usage(self) -> sampling_pb2.Usage:
        """What it used, up to what was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A request that was opened, at its end."""

    answer: Followed
    outcome: str
    duration_s: float
    usage: sampling_pb2.Usage


class Caller:
    """Whose request it is, and its booking.

    reservation   output tokens of a choice that are booked before they are used, at most
    tell          called with how the key's limits stand, whenever that changed; never for a key without limits
    """

    def __init__(
        self,
        key: ApiKey | None,
        account: Account,
        charge: Charge,
        *,
        reservation: int,
        clock: Callable[[], float],
        tell: Tell | None,
    ) -> None:
        self._key, self._account, self._charge = key, account, charge
        self._reservation, self._clock, self._tell = reservation, clock, tell
        self._answer: Followed | None = None
        self._failure: MeshError | None = None
        self.say_standings()

    @property
    def key_id(self) -> str:
        """Name of the key; empty where keys are off."""
        return self._key.key_id if self._key is not None else ""

    def admit(self, prepared: Prepared) -> Prepared:
        """As `admit_all`, of one."""
        return self.admit_all((prepared,))[0]

    def admit_all(self, requests: Sequence[Prepared]) -> list[Prepared]:
        """Book the tokens of all that one body asks for, and put the key's tenant and priority on them.

        Raises QuotaExceeded; then they count for nothing.
        """
        output = sum(one.choice_count * min(one.params.max_tokens, self._reservation) for one in requests)
        prompts = sum(len(one.prompt_ids) for one in requests)
        try:
            self._account.book(self._charge, input_tokens=prompts, output_tokens=output, now_s=self._clock())
        finally:
            self.say_standings()
        key = self._key
        if key is None:
            return list(requests)
        return [dataclasses.replace(one, tenant=key.tenant, priority=key.priority) for one in requests]

    def follow(self, answer: Followed) -> None:
        """The request was opened: what it uses counts from now on."""
        self._answer = answer
        self._charge.used = lambda: _used(answer.usage())

    def failed(self, error: MeshError) -> None:
        """What ended the answer, where the client was told and nobody hears of it any more."""
        self._failure = error

    def leave(self, error: BaseException | None) -> Departure | None:
        """The request is over, by `error` if there was one. None if it was never opened."""
        now_s = self._clock()
        error = self._failure or error
        answer = self._answer
        if answer is None:
            if isinstance(error, QuotaExceeded) or (isinstance(error, MeshError) and error.code == "UNAVAILABLE"):
                self._account.refuse(self._charge, now_s)
            else:
                self._account.end(self._charge, Used(), now_s)
            return None
        outcome = error.reason.lower() if isinstance(error, MeshError) else answer.outcome
        usage = answer.usage()
        if answer.is_admitted:
            self._account.end(self._charge, _used(usage), now_s)
        elif outcome == CANCELLED:
            self._account.end(self._charge, Used(), now_s)
        else:
            self._account.refuse(self._charge, now_s)
        return Departure(answer=answer, outcome=outcome, duration_s=now_s - self._charge.began_s, usage=usage)

    def say_standings(self) -> None:
        """Tell whoever wants to know how the limits stand."""
        if self._tell is not None and self._account.is_limited:
            self._tell(self._account.standings(self._clock()))


def _used(usage: sampling_pb2.Usage) -> Used:
    return Used(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens)
