"""What was placed on one worker, and how much of it the worker's own reports contain."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_scheduler.core.requests import Need


@dataclass(slots=True)
class _Booking:
    need: Need
    prefill_tokens: int = 0
    is_passing: bool = False
    admitted_at_s: float | None = None
    is_reported: bool = False


@dataclass(slots=True)
class Sums:
    """Blocks, slots, prompt tokens to prefill, and number of some bookings."""

    blocks: int = 0
    slots: int = 0
    tokens: int = 0
    count: int = 0

    def add(self, booking: _Booking, sign: int) -> None:
        """Add or subtract one."""
        self.blocks += sign * booking.need.blocks
        self.slots += sign * booking.need.slots
        self.tokens += sign * booking.prefill_tokens
        self.count += sign


_UNSURE_S = 0.05
"""A report that came so shortly before may contain the end of a request already."""


class Bookings:
    """Requests placed on one worker. Invariant: `held` sums over all of them, `unreported` over those not reported,
    `gone` over those that the last report contained and that have finished since.
    """

    def __init__(self) -> None:
        self.held, self.unreported, self.gone = Sums(), Sums(), Sums()
        self._reported_at_s = 0.0
        self._bookings: dict[str, _Booking] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    @property
    def unadmitted_count(self) -> int:
        """Requests that the worker has not admitted yet."""
        return sum(one.admitted_at_s is None for one in self._bookings.values())

    def book(self, request_id: str, need: Need) -> None:
        """A request was placed here to stay until `release`. Safe to repeat: the newer need counts."""
        self._book(request_id, _Booking(need))

    def adopt(self, request_id: str, need: Need, now_s: float, *, is_reported: bool) -> None:
        """A request runs here already."""
        self._book(request_id, _Booking(need, admitted_at_s=now_s, is_reported=is_reported))

    def book_prefill(self, request_id: str, prefill_tokens: int) -> None:
        """A prompt will be prefilled here; forgotten once a report contains it, as nobody tells us of its end."""
        self._book(request_id, _Booking(Need(0, 0), prefill_tokens, is_passing=True))

    def admitted(self, request_id: str, now_s: float) -> None:
        """The worker holds the request; its next report will contain it."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.admitted_at_s is None:
            booking.admitted_at_s = now_s

    def release(self, request_id: str) -> None:
        """The request ended or went elsewhere. Safe to repeat."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self.held.add(booking, -1)
            if not booking.is_reported:
                self.unreported.add(booking, -1)

    def finished(self, request_id: str, now_s: float) -> None:
        """The worker has let go of the request, which only its next report will say. Safe to repeat."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.is_reported and now_s - self._reported_at_s > _UNSURE_S:
            self.gone.add(booking, 1)
        self.release(request_id)

    def reported(self, now_s: float) -> None:
        """A report came: it contains what was admitted before."""
        self._reported_at_s, self.gone = now_s, Sums()
        if not self.unreported.count:
            return
        for request_id, booking in list(self._bookings.items()):
            if booking.is_reported or booking.admitted_at_s is None or booking.admitted_at_s >= now_s:
                continue
            if booking.is_passing:
                self.release(request_id)
            else:
                booking.is_reported = True
                self.unreported.add(booking, -1)

    def _book(self, request_id: str, booking: _Booking) -> None:
        self.release(request_id)
        self._bookings[request_id] = booking
        self.held.add(booking, 1)
        if not booking.is_reported:
            self.unreported.add(booking, 1)
