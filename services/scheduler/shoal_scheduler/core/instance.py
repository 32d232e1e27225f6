"""One instance as the scheduler sees it: what it announced, what it reported, and what was placed on it since."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_common.load import LoadReport
from shoal_common.presence import Presence

from shoal_scheduler.core.requests import Need, RequestSpec

_UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Booking:
    need: Need
    prefill_tokens: int = 0
    is_passing: bool = False
    admitted_at_s: float | None = None
    is_reported: bool = False


@dataclass(slots=True)
class _Sums:
    blocks: int = 0
    slots: int = 0
    tokens: int = 0
    count: int = 0

    def add(self, booking: _Booking, sign: int) -> None:
        self.blocks += sign * booking.need.blocks
        self.slots += sign * booking.need.slots
        self.tokens += sign * booking.prefill_tokens
        self.count += sign


class Instance:
    """A running process, most of all a worker. Invariant: the sums below are those over its bookings.

    A report that came after an admission contains it, so of our bookings only the unreported count on top of a report.
    Where there is no fresh report all of them count, against the whole capacity: silence never reads as saturation.
    """

    def __init__(self, presence: Presence, *, stale_s: float) -> None:
        self.presence = presence
        self.load: LoadReport | None = None
        self.load_at_s = 0.0
        self.heard_at_s = 0.0
        """When it last said something new or reported."""
        self.full_until_s = 0.0
        """It said that it has no room: takes nothing before, unless a report comes first."""
        self.leaving_until_s = 0.0
        """It said that it leaves: takes nothing before; its presence will say so too."""
        self.cut_from_until_s: dict[str, float] = {}
        """Per stream: its gateway could not reach it and should not try before, unless a report comes first."""
        self.suspect_until_s = 0.0
        """Requests were lost here: sound workers are preferred until then."""
        self.accept_length = 0.0
        """Accepted drafts per step in which drafts were verified, of late."""
        self.strike_count = 0
        self.others_in_flight = 0
        """Placements of other replicas that it has not admitted yet."""
        self._stale_s = stale_s
        self._bookings: dict[str, _Booking] = {}
        self._held, self._unreported = _Sums(), _Sums()

    @property
    def instance_id(self) -> str:
        """Its id."""
        return self.presence.instance_id

    @property
    def booked_count(self) -> int:
        """Requests placed here that have not ended."""
        return len(self._bookings)

    @property
    def unadmitted_count(self) -> int:
        """Requests placed here that it has not admitted yet."""
        return sum(one.admitted_at_s is None for one in self._bookings.values())

    @property
    def sums(self) -> tuple[int, ...]:
        """Blocks, slots, prompt tokens and number of all bookings, then of the unreported ones."""
        return tuple(
            value for one in (self._held, self._unreported) for value in (one.blocks, one.slots, one.tokens, one.count)
        )

    def book(self, request_id: str, need: Need) -> None:
        """A request was placed here to stay until `release`. Safe to repeat: the newer need counts."""
        self._book(request_id, _Booking(need))

    def adopt(self, request_id: str, need: Need, now_s: float) -> None:
        """A request runs here already; the last report contains it."""
        is_reported = self.load is not None and not self.is_stale(now_s)
        self._book(request_id, _Booking(need, admitted_at_s=now_s, is_reported=is_reported))

    def book_prefill(self, request_id: str, prefill_tokens: int) -> None:
        """A prompt will be prefilled here; forgotten once a report contains it, as nobody tells us of its end."""
        self._book(request_id, _Booking(Need(0, 0), prefill_tokens, is_passing=True))

    def _book(self, request_id: str, booking: _Booking) -> None:
        self.release(request_id)
        self._bookings[request_id] = booking
        self._held.add(booking, 1)
        if not booking.is_reported:
            self._unreported.add(booking, 1)

    def admitted(self, request_id: str, now_s: float) -> None:
        """It holds the request; the next report will contain it."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.admitted_at_s is None:
            booking.admitted_at_s = now_s

    def release(self, request_id: str) -> None:
        """The request ended or went elsewhere. Safe to repeat."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._held.add(booking, -1)
            if not booking.is_reported:
                self._unreported.add(booking, -1)

    def report(self, load: LoadReport, now_s: float) -> None:
        """Take a load report."""
        self.accept_length = _accept_length(self.load, load, self.accept_length)
        self.load, self.load_at_s, self.heard_at_s = load, now_s, now_s
        self.full_until_s = 0.0
        self.cut_from_until_s.clear()
        for request_id, booking in list(self._bookings.items()):
            if booking.is_reported or booking.admitted_at_s is None or booking.admitted_at_s >= now_s:
                continue
            if booking.is_passing:
                self.release(request_id)
            else:
                booking.is_reported = True
                self._unreported.add(booking, -1)

    def is_stale(self, now_s: float) -> bool:
        """It reported once and then fell silent."""
        return self.load is not None and now_s - self.load_at_s > self._stale_s

    def is_open(self, now_s: float) -> bool:
        """It may take something: not leaving, not on hold, a slot free."""
        if self.presence.is_draining or now_s < self.full_until_s or now_s < self.leaving_until_s:
            return False
        return self.free(now_s).slots > 0

    def is_suspect(self, now_s: float) -> bool:
        """Requests were lost here lately."""
        return now_s < self.suspect_until_s

    def free(self, now_s: float) -> Need:
        """Blocks and slots that are free by all we know."""
        if self.load is None or self.is_stale(now_s):
            capacity = self.capacity
            return Need(capacity.blocks - self._held.blocks, capacity.slots - self._held.slots - self.others_in_flight)
        total, report = self.capacity, self.load
        blocks = report.free_blocks if report.total_blocks else total.blocks
        slots = report.free_slots if report.total_slots else total.slots
        return Need(blocks - self._unreported.blocks, slots - self._unreported.slots - self.others_in_flight)

    @property
    def capacity(self) -> Need:
        """Blocks and slots that it has; what it does not announce has no bound here, it judges itself."""
        announced = self.presence.capacity
        return Need(announced.get("blocks", _UNBOUNDED), announced.get("slots", _UNBOUNDED))

    def could_hold(self, spec: RequestSpec) -> bool:
        """An empty worker would take the request to its end."""
        most, capacity = spec.most(), self.capacity
        context = self.presence.capacity.get("max_context", _UNBOUNDED)
        return (
            most.blocks <= capacity.blocks
            and most.slots <= capacity.slots
            and spec.prompt_tokens + spec.max_tokens <= context
        )

    def has_room(self, need: Need, now_s: float) -> bool:
        """It would admit the request now."""
        free = self.free(now_s)
        return need.blocks <= free.blocks and need.slots <= free.slots

    def busy(self, now_s: float) -> int:
        """Requests it works on or will: reported, placed since, and placed by others."""
        if self.load is None or self.is_stale(now_s):
            return len(self._bookings) + self.others_in_flight
        return self.load.running + self.load.waiting + self._unreported.count + self.others_in_flight

    def waiting_prefill_tokens(self, now_s: float) -> int:
        """Prompt tokens before a new one."""
        if self.load is None or self.is_stale(now_s):
            return self._held.tokens
        return self.load.waiting_tokens + self._unreported.tokens

    def strike(self, now_s: float, *, suspect_s: float, longest_s: float) -> None:
        """A request was lost here: suspect for a while, each time in a row twice as long."""
        # Losses of one breakage come together and are one strike.
        if self.is_suspect(now_s):
            return
        if now_s > self.suspect_until_s + longest_s:
            self.strike_count = 0
        self.suspect_until_s = now_s + min(suspect_s * 2**self.strike_count, longest_s)
        self.strike_count += 1


def _accept_length(before: LoadReport | None, now: LoadReport, known: float) -> float:
    """Accepted drafts per step: the width times the share accepted since the report before; as known if none ran."""
    drafted = now.draft_tokens - (before.draft_tokens if before is not None else 0)
    accepted = now.accepted_tokens - (before.accepted_tokens if before is not None else 0)
    return now.verify_width * accepted / drafted if drafted > 0 else known
