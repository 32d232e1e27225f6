"""A server, or a cluster of servers, of the Redis protocol.

Room is the server's to manage: set maxmemory and an eviction policy there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.tiers.remote.backend import Value
from shoal_kv_cache.tiers.remote.errors import RemoteFull, RemoteUnavailable
from shoal_kv_cache.tiers.remote.names import PREFIX, Name, Pattern

_CONNECTIONS = 8
_CONNECT_TIMEOUT_S = 5.0
_BATCH_BYTES = 16 << 20
_SCAN_COUNT = 1000

Client: TypeAlias = "Redis | RedisCluster"


def connect(url: str, *, is_cluster: bool) -> Client:
    """A client that retries nothing and waits for no answer longer than its caller."""
    settings: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": None,
        "max_connections": 2 * _CONNECTIONS,
    }
    if is_cluster:
        # Once: a slot may have moved.
        return RedisCluster.from_url(url, retry=Retry(NoBackoff(), 1), **settings)
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)


class RedisBackend:
    """Values as strings under Name.text."""

    def __init__(self, client: Client, *, ttl_s: int | None = None) -> None:
        """ttl_s: values end so long after they were stored; None: never by themselves."""
        self._client, self._ttl_s = client, ttl_s
        self._connections = asyncio.Semaphore(_CONNECTIONS)

    async def get(self, names: Sequence[Name], max_bytes: int) -> list[Buffer | None]:
        """See Backend. A range, so that whatever lies there the answer is bounded."""
        found: list[Buffer | None] = []
        step = max(1, _BATCH_BYTES // max_bytes)
        for begin in range(0, len(names), step):
            batch = names[begin : begin + step]
            answers = await self._all([("GETRANGE", name.text, 0, max_bytes - 1) for name in batch])
            found.extend(_value(answer) for answer in answers)
        return found

    async def put(self, values: Sequence[Value]) -> None:
        """See Backend."""
        for batch in _batches(values):
            end = () if self._ttl_s is None else ("EX", self._ttl_s)
            commands = [("SET", value.name.text, b"".join((value.header, value.payload)), *end) for value in batch]
            _raise_first(await self._all(commands))

    async def exists(self, names: Sequence[Name]) -> list[bool]:
        """See Backend."""
        answers = await self._all([("EXISTS", name.text) for name in names])
        _raise_first(answers)
        return [bool(answer) for answer in answers]

    async def delete(self, names: Sequence[Name]) -> None:
        """See Backend."""
        _raise_first(await self._all([("UNLINK", name.text) for name in names]))

    async def delete_matching(self, pattern: Pattern) -> int:
        """See Backend. SCAN returns whatever is there from its begin to its end."""
        kv_part, tag = pattern.parts
        glob = f"{PREFIX}:{kv_part or '*'}:*:{tag or '*'}:*"
        count = 0
        batch: list[bytes] = []
        async with self._errors():
            async for name in self._client.scan_iter(match=glob, count=_SCAN_COUNT):
                batch.append(name)
                if len(batch) >= _SCAN_COUNT:
                    count += await self._unlink(batch)
                    batch = []
        return count + await self._unlink(batch)

    async def close(self) -> None:
        """See Backend."""
        await self._client.aclose()

    async def _unlink(self, names: Sequence[bytes]) -> int:
        answers = await self._all([("UNLINK", name) for name in names])
        _raise_first(answers)
        return sum(answers)

    async def _all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers or ResponseErrors, in order."""
        if not commands:
            return []
        async with self._errors(), self._connections, self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, ResponseError):
                raise _typed(answer)
        return answers

    @staticmethod
    @asynccontextmanager
    async def _errors() -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            raise _typed(error) from error


def _batches(values: Sequence[Value]) -> Iterator[list[Value]]:
    batch: list[Value] = []
    size_bytes = 0
    for value in values:
        batch.append(value)
        size_bytes += len(value.payload)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _value(answer: object) -> Buffer | None:
    if isinstance(answer, ResponseError):
        if "WRONGTYPE" in str(answer):
            return b""
        raise _typed(answer) from answer
    assert isinstance(answer, bytes)
    return answer or None


def _raise_first(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise _typed(answer) from answer


def _typed(error: Exception) -> Exception:
    if isinstance(error, OutOfMemoryError) or str(error).startswith("OOM"):
        return RemoteFull(f"redis: {error}")
    return RemoteUnavailable(f"redis: {type(error).__name__}: {error}")
