"""Works on a disk tier until it is killed: the process that crash tests kill.

Reads one JSON object a line, forks a child for each that does as told, and answers with what the child said and
`{"ended": signal or 0}`. Nothing here reads the environment; the fault comes with the request.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal_common.errors import MeshError
from shoal_kv_cache.tiers.ssd import Fsync, SsdTier
from shoal_kv_cache.tiers.ssd.disk import Disk
from support.ssd_items import item, number_by_key, opened


class KillingDisk(Disk):
    """Kills the process when a point is reached for the n-th time, or in the middle of the n-th write ("torn")."""

    def __init__(self, point: str, nth: int, rng: random.Random) -> None:
        self._point, self._left, self._rng = point, nth, rng

    def reached(self, point: str) -> None:
        """Dies here, or (in "index") at some moment of the checkpoint that begins here."""
        if self._point == "index" and point == "checkpoint.begun" and self._is_time():
            delay_s = self._rng.random() * 0.003
            threading.Timer(delay_s, _die).start()
        elif point == self._point and self._is_time():
            _die()

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        """Writes, or a part of it."""
        if self._point == "torn" and self._is_time():
            data = b"".join(parts)
            cut = self._rng.randrange(0, len(data) // 512 + 1) * 512
            super().write(descriptor, [_aligned(data[:cut])], offset)
            _die()
        super().write(descriptor, parts, offset)

    def _is_time(self) -> bool:
        self._left -= 1
        return self._left == 0


def work(directory: Path, *, seed: int, fsync: str, point: str, nth: int, operations: int, first: int) -> None:
    """Random operations; says what it begins and what is done. Numbers from `first` on are new."""
    rng = random.Random(seed)
    # A tick every few milliseconds, so that checkpoints fall among everything else.
    disk = KillingDisk(point, nth, rng)
    # Neither a full tier nor a slow machine is the subject here.
    bounds = {"capacity_bytes": 1 << 30, "timeout_s": 100.0}
    tier, found = opened(directory, fsync=Fsync(fsync), fsync_interval_s=0.004, disk=disk, **bounds)
    numbers = number_by_key(first)
    held = {numbers[key]: location for key, location in found.items()}
    following = first
    for _ in range(operations):
        dice = rng.random()
        try:
            if dice < 0.6 or not held:
                chosen = list(range(following, following + rng.randrange(1, 8)))
                following += len(chosen)
                say("put", chosen)
                locations = tier.append([item(number) for number in chosen])
                held.update(zip(chosen, locations, strict=True))
                say("is_put", chosen)
            elif dice < 0.85:
                chosen = rng.sample(sorted(held), min(len(held), rng.randrange(1, 10)))
                say("remove", chosen)
                tier.remove([(item(number)[0].key, held.pop(number)) for number in chosen])
                say("is_removed", chosen)
            elif dice < 0.95:
                compact(tier, held)
            else:
                tier.sync()
        except MeshError as error:
            say("failed", error.reason)
    tier.close()


def compact(tier: SsdTier, held: dict[int, int]) -> None:
    """One round of it."""
    by_location = {location: number for number, location in held.items()}
    for moved in tier.compact(256 << 10):
        assert moved.new_location is not None
        held[by_location[moved.old_location]] = moved.new_location
    tier.retire()


def say(word: str, content: object) -> None:
    """To the one who asked, at once."""
    os.write(1, (json.dumps({word: content}) + "\n").encode())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def _aligned(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, max(4096, len(data))))[: len(data)]
    view[:] = data
    return view


def main() -> None:
    """Serve rounds until the end of the input."""
    for line in sys.stdin:
        request = json.loads(line)
        kill_after_s = request.pop("kill_after_s", None)
        child = os.fork()
        if child == 0:
            try:
                work(Path(request.pop("directory")), **request)
                os._exit(0)
            except BaseException as error:
                say("bug", repr(error))
                os._exit(1)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        say("ended", status)


if __name__ == "__main__":
    main()
