"""One instance as the scheduler sees it: what it announced, what it reported, and what was placed on it since."""

from __future__ import annotations

from shoal_common.load import LoadReport
from shoal_common.presence import Presence

from shoal_scheduler.core.bookings import Bookings
from shoal_scheduler.core.requests import Size

_UNBOUNDED = 1 << 62


class Instance:
    """A running process, most of all a worker.

    A report that came after an admission contains it, so of our bookings only the unreported count on top of a report,
    and those that have finished since count against it.
    Where there is no fresh report all of them count, against the whole capacity: silence never reads as saturation.
    The announced facts are attributes of their own, as each placement looks at those of every worker.

    blocks, slots, context_tokens   what it has at most; what it does not announce has no bound here, it judges itself
    full_until_s       it said that it has no room: takes nothing before, unless a report comes first
    leaving_until_s    it said that it leaves: takes nothing before; its presence will say so too
    cut_from_until_s   per stream: its gateway could not reach it and should not try before, unless a report comes first
    suspect_until_s    requests were lost here: sound workers are preferred until then
    others_in_flight   placements of other replicas that it has not admitted yet
    accept_length      accepted drafts per step in which drafts were verified, of late
    heard_at_s         when it last said something new or reported
    """

    def __init__(self, presence: Presence, *, stale_s: float) -> None:
        self.instance_id = presence.instance_id
        self.bookings = Bookings()
        self.load: LoadReport | None = None
        self.load_at_s = 0.0
        self.heard_at_s = 0.0
        self.full_until_s = 0.0
        self.leaving_until_s = 0.0
        self.cut_from_until_s: dict[str, float] = {}
        self.suspect_until_s = 0.0
        self.others_in_flight = 0
        self.accept_length = 0.0
        self._strike_count = 0
        self._stale_s = stale_s
        self.announce(presence)

    def announce(self, presence: Presence) -> None:
        """It says something new of itself."""
        self.presence = presence
        self.is_draining = presence.is_draining
        self.numerics_id = presence.numerics_id
        self.blocks = presence.capacity.get("blocks", _UNBOUNDED)
        self.slots = presence.capacity.get("slots", _UNBOUNDED)
        self.context_tokens = presence.capacity.get("max_context", _UNBOUNDED)

    def report(self, load: LoadReport, now_s: float) -> None:
        """Take a load report."""
        self.accept_length = _accept_length(self.load, load, self.accept_length)
        self.load, self.load_at_s, self.heard_at_s = load, now_s, now_s
        self.full_until_s = 0.0
        self.cut_from_until_s.clear()
        self.bookings.reported(now_s)

    def is_stale(self, now_s: float) -> bool:
        """It reported once and then fell silent."""
        return self.load is not None and now_s - self.load_at_s > self._stale_s

    def is_suspect(self, now_s: float) -> bool:
        """Requests were lost here lately."""
        return now_s < self.suspect_until_s

    def could_hold(self, size: Size) -> bool:
        """If it were empty it would take such a request to its end."""
        return (
            size.most.blocks <= self.blocks
            and size.most.slots <= self.slots
            and size.context_tokens <= self.context_tokens
        )

    def is_open(self, now_s: float) -> bool:
        """It may take something: not leaving, not on hold, a slot free."""
        return (
            not self.is_draining
            and now_s >= self.full_until_s
            and now_s >= self.leaving_until_s
            and self.free_slots(now_s) > 0
        )

    def free_blocks(self, now_s: float) -> int:
        """Blocks that are free by all we know."""
        load = self._fresh(now_s)
        if load is None:
            return self.blocks - self.bookings.held.blocks
        free = load.free_blocks if load.total_blocks else self.blocks
        return free + self.bookings.gone.blocks - self.bookings.unreported.blocks

    def free_slots(self, now_s: float) -> int:
        """Slots that are free by all we know; those in flight from other replicas count as one each."""
        load = self._fresh(now_s)
        if load is None:
            return self.slots - self.bookings.held.slots - self.others_in_flight
        free = load.free_slots if load.total_slots else self.slots
        return free + self.bookings.gone.slots - self.bookings.unreported.slots - self.others_in_flight

    def busy(self, now_s: float) -> int:
        """Requests it works on or will: reported, placed since, and placed by others."""
        load = self._fresh(now_s)
        if load is None:
            return self.bookings.held.count + self.others_in_flight
        reported = max(0, load.running + load.waiting - self.bookings.gone.count)
        return reported + self.bookings.unreported.count + self.others_in_flight

    def waiting_prefill_tokens(self, now_s: float) -> int:
        """Prompt tokens before a new one."""
        load = self._fresh(now_s)
        return self.bookings.held.tokens if load is None else load.waiting_tokens + self.bookings.unreported.tokens

    def _fresh(self, now_s: float) -> LoadReport | None:
        return self.load if now_s - self.load_at_s <= self._stale_s else None

    def strike(self, now_s: float, *, suspect_s: float, longest_s: float) -> None:
        """A request was lost here: suspect for a while, each time in a row twice as long."""
        # Losses of one breakage come together and are one strike.
        if self.is_suspect(now_s):
            return
        if now_s > self.suspect_until_s + longest_s:
            self._strike_count = 0
        self.suspect_until_s = now_s + min(suspect_s * 2**self._strike_count, longest_s)
        self._strike_count += 1


def _accept_length(before: LoadReport | None, now: LoadReport, known: float) -> float:
    """Accepted drafts per step: the width times the share accepted since the report before; as known if none ran."""
    drafted = now.draft_tokens - (before.draft_tokens if before is not None else 0)
    accepted = now.accepted_tokens - (before.accepted_tokens if before is not None else 0)
    return now.verify_width * accepted / drafted if drafted > 0 else known
