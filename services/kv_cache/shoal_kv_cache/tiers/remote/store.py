"""One protocol for every store outside of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal_common.errors import ChecksumMismatch
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry, Group, Key


class Loaded(NamedTuple):
    """A payload that was found and is what its description says."""

    entry: Entry
    payload: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """Counts since the start; failing_reason is of the last call and empty if that worked."""

    read_bytes: int = 0
    written_bytes: int = 0
    failure_count: int = 0
    corrupt_count: int = 0
    refused_count: int = 0
    is_resting: bool = False
    failing_reason: str = ""


class RemoteStore(Protocol):
    """Payloads by group and key. On one event loop; every call ends within its timeout.

    Calls raise RemoteUnavailable, RemoteTimeout, RemoteFull (puts), RemoteBusy (too many bytes on their way) or, when
    the store failed several times in a row, RemoteResting at once.
    """

    async def get_many(
        self, group: Group, keys: Sequence[Key], *, max_payload_bytes: int, timeout_s: float
    ) -> list[Loaded | ChecksumMismatch | None]:
        """Each payload, verified; None where there is none; ChecksumMismatch where it was damaged, and is deleted."""
        ...

    async def put_many(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float) -> None:
        """Stores payloads; of a call that raises, some may be stored."""
        ...

    async def exists_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> list[bool]:
        """Whether there is something under each key; it may still turn out damaged."""
        ...

    async def delete_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> None:
        """Deletes payloads; missing ones are fine."""
        ...

    async def delete_groups(
        self, *, kv_id: str | None = None, tenant_tag: bytes | None = None, timeout_s: float
    ) -> int:
        """Deletes every group that matches what is given; everything of ours if nothing is. Returns how many payloads.

        Complete for what was stored before the call, or it raises.
        """
        ...

    def stats(self) -> RemoteStats:
        """Counts."""
        ...

    async def close(self) -> None:
        """Ends connections and threads."""
        ...
