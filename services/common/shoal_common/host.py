"""Telling whether two processes can map the same memory."""

from __future__ import annotations

import functools
import os
from pathlib import Path

ARENA_DIRECTORY = Path("/dev/shm")
"""Where shared arenas live; a file system in memory on every Linux."""


@functools.cache
def host_id() -> str:
    """Identity of this host as far as shared memory goes: the kernel's boot id and the mounted shared-memory device.

    Two containers on one machine differ in the device unless they share /dev/shm. Empty where there is none: then
    nothing is shared with anyone.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{os.stat(ARENA_DIRECTORY).st_dev}"
    except OSError:
        return ""


def host_of(address: str) -> str:
    """The host of host:port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")
