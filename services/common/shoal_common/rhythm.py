"""When periodic work is due: at the same moments in all processes of a host.

Waking up costs more than most such work, for the process, for the NATS server that a heartbeat wakes, and for every
reader of it. Where the instances of a host beat together, each of these wakes once and not once per instance. The
moments are multiples of the period on the monotonic clock, which the processes of a host share and hosts do not.
"""

from __future__ import annotations

import time

_LEAST = 0.1
"""Of a period. A timer may come a little early, and what it ran is not due again at once."""


def until_next(period_s: float, now_s: float | None = None) -> float:
    """Seconds to the next moment: a tenth of the period at least, 1.1 periods at most. `now_s` as time.monotonic."""
    left_s = period_s - (time.monotonic() if now_s is None else now_s) % period_s
    return left_s if left_s >= _LEAST * period_s else left_s + period_s
