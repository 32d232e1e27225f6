"""Works on a disk tier in a small file system of its own that becomes full and then read-only.

Run it in a mount namespace (`unshare --map-root-user --mount`); it ends with a failed assertion or says "survived".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal_common.errors import MeshError
from shoal_kv_cache.tiers.ssd import Fsync, SsdFull, SsdReadOnly
from support.ssd_items import item, items, number_by_key, opened, readable

SIZE_BYTES = 3 << 20


def main(folder: Path) -> None:
    """All of it."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    tier, _ = opened(folder, capacity_bytes=64 << 20, fsync=Fsync.ALWAYS)
    held: dict[int, int] = {}
    failures: list[MeshError] = []
    for begin in range(0, 600, 6):
        try:
            held.update(zip(range(begin, begin + 6), tier.append(items(range(begin, begin + 6))), strict=True))
        except SsdFull as error:
            failures.append(error)
    assert failures, "it never was full"
    assert held, "nothing was stored"
    assert tier.stats().failing_reason == "SSD_FULL"
    check = {item(number)[0].key: location for number, location in held.items()}
    numbers = number_by_key(600)
    assert readable(tier, check, numbers) == set(held), "what was stored before can be read"
    # Room is made without room: whole files go.
    gone = sorted(held)[: len(held) // 2]
    try:
        tier.remove([(item(number)[0].key, held.pop(number)) for number in gone])
    except SsdFull:
        for number in gone:
            held.pop(number, None)
    tier.compact(0)
    assert tier.retire() > 0
    held.update(zip(range(900, 906), tier.append(items(range(900, 906))), strict=True))
    tier.close()
    tier, found = opened(folder, capacity_bytes=64 << 20, fsync=Fsync.ALWAYS)
    assert readable(tier, found, number_by_key(1000)) >= set(held)
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    tier, found = opened(folder, capacity_bytes=64 << 20, fsync=Fsync.ALWAYS)
    assert readable(tier, found, number_by_key(1000)) >= set(held)
    for work in (
        lambda: tier.append(items([950])),
        lambda: tier.remove([(next(iter(found)), next(iter(found.values())))]),
    ):
        try:
            work()
        except SsdReadOnly:
            continue
        raise AssertionError("a write to a read-only disk")
    assert tier.stats().failing_reason == "SSD_READ_ONLY"
    tier.close()
    print("survived")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
