"""What goes into the disk tier and comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shoal_kv_cache.core.entries import Entry, Key


class Fsync(Enum):
    """When what is written becomes durable.

    ALWAYS    before `append` and `remove` return; appends that wait together share one call to the disk
    INTERVAL  about once a second: a power cut loses the last second, a killed process nothing
    NEVER     when the kernel likes
    """

    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


class Recovered(NamedTuple):
    """A record found when the tier starts."""

    entry: Entry
    location: int


@dataclass(frozen=True, slots=True)
class Read:
    """One payload to read.

    into    where the payload goes, its parts one after the other, size_bytes together; None: a new bytes object.
            It is written only after the checksum is right, and never after the call has returned
    """

    location: int
    size_bytes: int
    checksum: int
    into: Sequence[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """A record that compaction copied; None for a new location: it was damaged and is gone."""

    key: Key
    old_location: int
    new_location: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdStats:
    """Counts.

    capacity_bytes    what live payloads may take
    max_file_bytes    what all files together may take
    payload_bytes     live payloads, each rounded up to whole pages
    record_count      live payloads
    file_bytes        what all segment files take now: live, removed, and not yet retired
    file_count        segment files
    read_bytes        payload bytes read since the start
    written_bytes     bytes written to segment files since the start, compaction included
    failure_count     reads and writes that failed since the start, timeouts included
    busy_count        calls given up because the queue stayed full
    failing_reason    reason of the last failure; empty when the last read or write worked
    is_index_failing  the index cannot be written: the next start reads more of the files
    """

    capacity_bytes: int
    max_file_bytes: int
    payload_bytes: int
    record_count: int
    file_bytes: int
    file_count: int
    read_bytes: int
    written_bytes: int
    failure_count: int
    busy_count: int
    failing_reason: str
    is_index_failing: bool
