"""Samples the Python stacks of this process, as folded stacks: what flame graph tools read."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType

_INTERVAL_S = 0.01
_MAX_DEPTH = 64
_MAX_STACKS = 10_000


def sample(duration_s: float) -> str:
    """Sample all threads but this one 100 times a second; blocking. Lines "frame;frame count", outermost first."""
    me, stop_at_s = threading.get_ident(), time.monotonic() + duration_s
    counts: Counter[str] = Counter()
    while True:
        for thread_id, frame in sys._current_frames().items():
            stack = "" if thread_id == me else _folded(frame)
            if stack and (stack in counts or len(counts) < _MAX_STACKS):
                counts[stack] += 1
        left_s = stop_at_s - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(_INTERVAL_S, left_s))
    return "\n".join(f"{stack} {count}" for stack, count in counts.most_common())


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < _MAX_DEPTH:
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return ";".join(reversed(names))
