"""Payloads on disk: append-only segment files that describe themselves, and an index that only saves time at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal_common.errors import MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry, Key
from shoal_kv_cache.tiers.ssd.values import Fsync, Moved, Read, Recovered, SsdStats


class SsdTier:
    """Keeps payloads by location: a number below 2**64 that is never given out twice, over restarts too.

    Blocking and safe to call from several threads. Every call is bounded in time: it raises SsdTimeout where the disk
    does not answer, SsdBusy where the queue to it is full. Errors of the disk never end the service.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        segment_file_bytes: int = 256 << 20,
        fsync: Fsync = Fsync.INTERVAL,
        fsync_interval_s: float = 1.0,
        read_threads: int = 4,
        queue_bytes: int = 64 << 20,
        timeout_s: float = 10.0,
    ) -> None:
        """Opens the folder, made if missing; another process in it: SsdUnavailable (reason SSD_IN_USE).

        A folder that cannot be written is opened for reading: `append` and `remove` raise SsdReadOnly.
        timeout_s: for calls that give none. queue_bytes: reads or writes that may wait at a time, each.
        """
        raise NotImplementedError

    def recover(self) -> Iterator[Recovered]:
        """Finds what is there, once and before anything else; cuts a torn end off, drops what the files do not have.

        Every record once, parents before children as far as both are there. Of what lies beyond the index's last
        checkpoint the payloads are verified; of the rest when they are read.
        """
        raise NotImplementedError

    def append(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float | None = None) -> list[int]:
        """Writes payloads and returns their locations; durable on return under Fsync.ALWAYS. Copies before it waits.

        Raises SsdFull, SsdReadOnly, SsdUnavailable, SsdTimeout, SsdBusy; then no location is held, and after a restart
        the payloads of the call may at most be found whole.
        """
        raise NotImplementedError

    def read(
        self,
        location: int,
        size_bytes: int,
        checksum: int,
        into: memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes | memoryview:
        """One payload, verified. Raises NotFound, ChecksumMismatch, SsdUnavailable, SsdTimeout, SsdBusy."""
        raise NotImplementedError

    def read_many(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> list[bytes | None | MeshError]:
        """Several at once, faster: neighbours on disk are read together. Best sorted by location.

        For each the bytes, None if they are in `into`, or what went wrong with it. Raises nothing.
        """
        raise NotImplementedError

    def remove(self, keys: Sequence[tuple[Key, int]], *, timeout_s: float | None = None) -> None:
        """Forgets payloads by key and location; unknown ones are fine. A location moved by `compact` stands for both.

        In effect at once for this process, whatever is raised. Durable on return under Fsync.ALWAYS, unless it raises
        (as append): then a start without the index's next checkpoint would find them again.
        """
        raise NotImplementedError

    def compact(self, max_bytes: int, *, timeout_s: float | None = None) -> list[Moved]:
        """Copies the live records of the files that have the most waste, until about max_bytes are copied.

        Whole files: at least one, if any has enough waste to be worth it, and only when the last result is retired.
        Old locations can be read until `retire`. Raises as append; then nothing has moved.
        """
        raise NotImplementedError

    def retire(self) -> int:
        """Deletes the files that the last `compact` emptied, once the copies are durable; returns the bytes freed.

        Call it when the new locations are in use. Raises as append; then it can be repeated.
        """
        raise NotImplementedError

    @property
    def wants_compaction(self) -> bool:
        """Whether waste takes so much room that `compact` should be called, again and again until this is False."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes durable what was appended and removed, and writes the index's checkpoint. Raises as append."""
        raise NotImplementedError

    def stats(self) -> SsdStats:
        """Counts."""
        raise NotImplementedError

    def close(self) -> None:
        """Syncs and ends, within a few seconds even when the disk hangs."""
        raise NotImplementedError
