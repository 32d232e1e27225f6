"""Follows a keys file: what it says now, also after it was written anew or replaced by another of its name."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal_common.rhythm import until_next

from shoal_gateway.edge.key_table import read_table
from shoal_gateway.edge.keys import ApiKey, BadKeys

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024 * 1024
_PERIOD_S = 1.0
_SETTLED_S = 2.0
"""A file written so shortly before it was read may be written again without a newer time: it is read once more."""
_Signature = tuple[int, int, int, int]


class KeyFile:
    """Reads the file whenever it looks changed. What was good stays in force while it is not.

    use      gets every new set of keys; raises BadKeys where they do not go together with others
    report   told True or False for every change of the file: whether it was taken
    """

    def __init__(
        self, path: Path, *, use: Callable[[Sequence[ApiKey]], None], report: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._path, self._use, self._report = path, use, report
        self._signature: _Signature | None = None
        self._content: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read it for the first time. Raises BadKeys if it cannot be read or used."""
        self._signature, text = self._read()
        self._content = _digest(text)
        self._use(read_table(_decoded(text)))

    def start(self) -> None:
        """Look after it from now on."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """No longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Take what changed since the last look, if anything did. Never raises for what the file holds."""
        try:
            # In a thread: a share that hangs must not stop the gateway.
            keys = await asyncio.to_thread(self._changed)
            if keys is None:
                return
            self._use(keys)
        except BadKeys as error:
            logger.error(
                "keys file not taken, the keys before stay in force", extra={"error": f"{self._path}: {error}"}
            )
            self._report(False)
        else:
            logger.info("keys file taken", extra={"path": str(self._path)})
            self._report(True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(until_next(_PERIOD_S))
            await self.look()

    def _changed(self) -> list[ApiKey] | None:
        """Its keys, if it does not hold what was seen last. Raises BadKeys once for the same trouble."""
        if self._signature is not None and self._signature == _signature(self._path):
            return None
        try:
            self._signature, text = self._read()
        except BadKeys as error:
            unreadable = _digest(f"unreadable: {error}".encode())
            if unreadable == self._content:
                return None
            self._content, self._signature = unreadable, None
            raise
        if _digest(text) == self._content:
            return None
        self._content = _digest(text)
        return read_table(_decoded(text))

    def _read(self) -> tuple[_Signature | None, bytes]:
        try:
            with open(self._path, "rb") as file:
                stat = os.fstat(file.fileno())
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadKeys(f"cannot be read: {error.strerror or error}") from error
        if len(text) > MAX_FILE_BYTES:
            raise BadKeys(f"is over {MAX_FILE_BYTES} bytes")
        is_settled = abs(time.time() - stat.st_mtime) > _SETTLED_S
        return (_of_stat(stat) if is_settled else None), text


def _signature(path: Path) -> _Signature | None:
    try:
        return _of_stat(os.stat(path))
    except OSError:
        return None


def _of_stat(stat: os.stat_result) -> _Signature:
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadKeys(f"not valid UTF-8: {error}") from error
