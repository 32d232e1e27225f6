"""Any backend as a store: verified, bounded in time and bytes, rested when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from shoal_common.errors import ChecksumMismatch, MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.entries import Entry, Group, Key
from shoal_kv_cache.tiers.remote.backend import Backend, Value
from shoal_kv_cache.tiers.remote.circuit import Circuit
from shoal_kv_cache.tiers.remote.errors import RemoteBusy, RemoteTimeout, RemoteUnavailable
from shoal_kv_cache.tiers.remote.names import Name, Pattern
from shoal_kv_cache.tiers.remote.store import Loaded, RemoteStats
from shoal_kv_cache.tiers.remote.values import MAX_HEADER_BYTES, decode, encode_header

logger = logging.getLogger(__name__)


class GuardedStore:
    """A RemoteStore on a Backend. Invariant: bytes under way are at most max_bytes_in_flight, or of one call."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_bytes_in_flight: int,
        circuit: Circuit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._max_bytes, self._clock = backend, max_bytes_in_flight, clock
        self._circuit = circuit if circuit is not None else Circuit()
        self._bytes_in_flight = 0
        self._stats = RemoteStats()

    async def get_many(
        self, group: Group, keys: Sequence[Key], *, max_payload_bytes: int, timeout_s: float
    ) -> list[Loaded | ChecksumMismatch | None]:
        """See RemoteStore."""
        names = [Name(group, key) for key in keys]
        max_bytes = max_payload_bytes + MAX_HEADER_BYTES
        async with self._call(len(keys) * max_bytes, timeout_s):
            values = await self._backend.get(names, max_bytes)
        found = [_loaded(name, value) for name, value in zip(names, values, strict=True)]
        damaged = [name for name, result in zip(names, found, strict=True) if isinstance(result, ChecksumMismatch)]
        read_bytes = sum(len(result.payload) for result in found if isinstance(result, Loaded))
        self._count(read_bytes=read_bytes, corrupt_count=len(damaged))
        if damaged:
            await self._drop(damaged, timeout_s)
        return found

    async def put_many(self, items: Sequence[tuple[Entry, Buffer]], *, timeout_s: float) -> None:
        """See RemoteStore."""
        values = [Value(Name(entry.group, entry.key), encode_header(entry), payload) for entry, payload in items]
        size_bytes = sum(len(value.header) + entry.size_bytes for value, (entry, _) in zip(values, items, strict=True))
        async with self._call(size_bytes, timeout_s):
            await self._backend.put(values)
        self._count(written_bytes=size_bytes)

    async def exists_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> list[bool]:
        """See RemoteStore."""
        async with self._call(0, timeout_s):
            return await self._backend.exists([Name(group, key) for key in keys])

    async def delete_many(self, group: Group, keys: Sequence[Key], *, timeout_s: float) -> None:
        """See RemoteStore."""
        async with self._call(0, timeout_s):
            await self._backend.delete([Name(group, key) for key in keys])

    async def delete_groups(
        self, *, kv_id: str | None = None, tenant_tag: bytes | None = None, timeout_s: float
    ) -> int:
        """See RemoteStore."""
        async with self._call(0, timeout_s):
            return await self._backend.delete_matching(Pattern(kv_id, tenant_tag))

    def stats(self) -> RemoteStats:
        """See RemoteStore."""
        return replace(self._stats, is_resting=self._circuit.is_resting)

    async def close(self) -> None:
        """See RemoteStore."""
        await self._backend.close()

    @asynccontextmanager
    async def _call(self, size_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        if self._bytes_in_flight and self._bytes_in_flight + size_bytes > self._max_bytes:
            self._count(refused_count=1)
            raise RemoteBusy(
                f"{self._bytes_in_flight} bytes are under way, {size_bytes} more wanted",
                in_flight_bytes=self._bytes_in_flight,
                wanted_bytes=size_bytes,
            )
        try:
            self._circuit.enter(self._clock())
        except MeshError:
            self._count(refused_count=1)
            raise
        self._bytes_in_flight += size_bytes
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            self._failed(RemoteTimeout(f"no answer in {timeout_s} s", timeout_s=timeout_s), error)
        except MeshError as error:
            self._failed(error, None)
        else:
            self._circuit.succeeded()
            self._stats = replace(self._stats, failing_reason="")
        finally:
            self._bytes_in_flight -= size_bytes

    def _failed(self, error: MeshError, cause: Exception | None) -> None:
        if isinstance(error, RemoteUnavailable | RemoteTimeout):
            self._circuit.failed(self._clock())
        self._count(failure_count=1)
        self._stats = replace(self._stats, failing_reason=error.reason)
        raise error from cause

    async def _drop(self, names: Sequence[Name], timeout_s: float) -> None:
        try:
            async with self._call(0, timeout_s):
                await self._backend.delete(names)
        except MeshError as error:
            logger.info("damaged values stay in the remote store", extra={"reason": error.reason})

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})


def _loaded(name: Name, value: Buffer | None) -> Loaded | ChecksumMismatch | None:
    if value is None:
        return None
    try:
        return decode(name, value)
    except ChecksumMismatch as error:
        return error
