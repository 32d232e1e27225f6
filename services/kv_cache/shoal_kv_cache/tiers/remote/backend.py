"""What a store outside of the mesh must be able to do: bytes by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.tiers.remote.names import Name, Pattern


class Value(NamedTuple):
    """Bytes to store, in two parts."""

    name: Name
    header: bytes
    payload: Buffer


class Backend(Protocol):
    """Bytes by name. On one event loop; may be cancelled at any await, and works on after that.

    Raises RemoteUnavailable, RemoteFull or RemoteBusy; timeouts, limits and checks are the caller's.
    """

    async def get(self, names: Sequence[Name], max_bytes: int) -> list[Buffer | None]:
        """What is under each name, None for nothing; of what is longer than max_bytes, no more than that or b""."""
        ...

    async def put(self, values: Sequence[Value]) -> None:
        """Stores each whole or not at all."""
        ...

    async def exists(self, names: Sequence[Name]) -> list[bool]:
        """Whether there is something."""
        ...

    async def delete(self, names: Sequence[Name]) -> None:
        """Deletes; what is missing is fine."""
        ...

    async def delete_matching(self, pattern: Pattern) -> int:
        """Deletes everything whose group matches; returns how many."""
        ...

    async def close(self) -> None:
        """Ends connections and threads."""
        ...
