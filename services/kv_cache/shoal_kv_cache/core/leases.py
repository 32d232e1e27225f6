"""Who holds which entries, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_common.errors import ResourceExhausted


class TooManyLeases(ResourceExhausted):
    """The bound on open leases is reached."""

    reason = "TOO_MANY_LEASES"


@dataclass(frozen=True, slots=True)
class Lease:
    """Pins of one acquire. `number` grows with each opened lease; `rows` are the index's."""

    lease_id: str
    owner_id: str
    number: int
    rows: tuple[int, ...]
    ends_at_s: float


class Leases:
    """Open leases. Invariant: a row's pin count is the number of open leases that name it."""

    def __init__(self, *, max_leases: int) -> None:
        self._max_leases = max_leases
        self._open: dict[str, Lease] = {}
        self._by_end: list[tuple[float, str]] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, lease_id: str) -> Lease | None:
        """An open lease."""
        return self._open.get(lease_id)

    def check_room(self) -> None:
        """Raises TooManyLeases when no more can be opened."""
        if len(self._open) >= self._max_leases:
            raise TooManyLeases(f"{len(self._open)} leases are open", max_leases=self._max_leases)
