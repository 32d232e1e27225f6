"""A kv_cache node whose disk does what a file says: run as a module in place of `shoal_kv_cache`.

The file is named by DISK_FAULT in the environment, and read at every call: "read-only", "hang", or nothing.
"""

from __future__ import annotations

import errno
import os
import runpy
import time
from collections.abc import Sequence
from pathlib import Path

from shoal_kv_cache.tiers.ssd.disk import Disk

FAULT = Path(os.environ["DISK_FAULT"])
_PERIOD_S = 0.01
_read, _write = Disk.read, Disk.write


def _wait_while_hanging() -> None:
    while FAULT.read_text() == "hang":
        time.sleep(_PERIOD_S)


def _faulty_read(self: Disk, descriptor: int, into: memoryview, offset: int) -> int:
    _wait_while_hanging()
    return _read(self, descriptor, into, offset)


def _faulty_write(self: Disk, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    _wait_while_hanging()
    if FAULT.read_text() == "read-only":
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    _write(self, descriptor, parts, offset)


if __name__ == "__main__":
    Disk.read, Disk.write = _faulty_read, _faulty_write  # type: ignore[method-assign]
    runpy.run_module("shoal_kv_cache", run_name="__main__", alter_sys=True)
