"""A store outside of the mesh that lives in the test."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_common.errors import ChecksumMismatch, MeshError
from shoal_common.kv_transport import checksum_of
from shoal_common.kv_transport.buffers import Buffer
from shoal_kv_cache.core.entries import Entry, Group, Key
from shoal_kv_cache.tiers.remote import Loaded, RemoteStats


class MemoryRemote:
    """RemoteStore in a dict. `error` is raised by every call while it is set."""

    def __init__(self) -> None:
        self.held: dict[tuple[Group, Key], tuple[Entry, bytes]] = {}
        self.error: MeshError | None = None

    async def get_many(
        self, group: Group, keys: Sequence[Key], *, max_payload_bytes: int, timeout_s: float
    ) -> list[Loaded | ChecksumMismatch | None]:
        self._fail()
        return [self._get(group, key) for key in keys]

    async def put_many(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float) -> None:
        self._fail()
        for entry, data in items:
            self.held[entry.group, entry.key] = (entry, bytes(data))

    async def exists_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> list[bool]:
        self._fail()
        return [(group, key) in self.held for key in keys]

    async def delete_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> None:
        self._fail()
        for key in keys:
            self.held.pop((group, key), None)

    async def delete_groups(
        self, *, kv_id: str | None = None, tenant_tag: bytes | None = None, timeout_s: float
    ) -> int:
        self._fail()
        gone = [
            (group, key)
            for group, key in self.held
            if kv_id in (None, group.kv_id) and tenant_tag in (None, group.tenant_tag)
        ]
        for one in gone:
            del self.held[one]
        return len(gone)

    def stats(self) -> RemoteStats:
        return RemoteStats()

    async def close(self) -> None:
        return None

    def damage(self, key: Key) -> None:
        """One bit of every payload under this key."""
        for one in [one for one in self.held if one[1] == key]:
            entry, data = self.held[one]
            self.held[one] = (entry, bytes([data[0] ^ 1]) + data[1:])

    def _get(self, group: Group, key: Key) -> Loaded | ChecksumMismatch | None:
        found = self.held.get((group, key))
        if found is None:
            return None
        entry, data = found
        if checksum_of(data) != entry.checksum:
            del self.held[group, key]
            return ChecksumMismatch("damaged")
        return Loaded(entry, memoryview(data))

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
