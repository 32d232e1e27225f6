"""Where a process spends its time: samples the stacks of all threads, without stopping any."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType

MAX_SECONDS = 30.0
_INTERVAL_S = 0.005
_MAX_STACKS = 200
_MAX_DEPTH = 40


def sample(seconds: float) -> str:
    """Sample for `seconds`, blocking; the most frequent stacks as lines `outer;...;inner count`, most frequent first.

    The format is what flame graph tools read. Raises ValueError unless 0 < seconds <= 30. The sampling thread itself is
    left out.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"seconds must be in (0, {MAX_SECONDS:g}], got {seconds}")
    counts: Counter[str] = Counter()
    me, end_s = threading.get_ident(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != me:
                counts[f"{names.get(ident, ident)};{_stack(frame)}"] += 1
        time.sleep(_INTERVAL_S)
    return "\n".join(f"{stack} {count}" for stack, count in counts.most_common(_MAX_STACKS))


def _stack(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < _MAX_DEPTH:
        names.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return ";".join(reversed(names))
