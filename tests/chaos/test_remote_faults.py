"""Remote stores that are gone, slow, cut short or confused: a typed outcome in bounded time, then a rest for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shoal_common.errors import MeshError
from shoal_common.kv_transport.buffers import Buffer
from shoal_kv_cache.tiers.remote import Loaded, RemoteBusy, RemoteResting, RemoteTimeout, RemoteUnavailable, open_remote
from shoal_kv_cache.tiers.remote.circuit import Circuit
from shoal_kv_cache.tiers.remote.directory_backend import DirectoryBackend
from shoal_kv_cache.tiers.remote.guarded import GuardedStore
from shoal_kv_cache.tiers.remote.names import Name
from shoal_kv_cache.tiers.remote.redis_backend import RedisBackend, connect
from shoal_kv_cache.tiers.remote.store import RemoteStore
from shoal_kv_cache.tiers.remote.values import encode_header
from support.nats_server import free_port
from support.redis_server import RedisServer
from support.ssd_items import GROUPS, item, items

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
KEYS = [item(number)[0].key for number in range(3)]


class Clock:
    """Time that tests let pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def redis_store(port: int, clock: Clock | None = None) -> GuardedStore:
    backend = RedisBackend(connect(f"redis://127.0.0.1:{port}/0", is_cluster=False))
    return GuardedStore(
        backend, max_bytes_in_flight=1 << 30, clock=clock if clock is not None else time.monotonic, circuit=Circuit()
    )


async def get(store: RemoteStore, timeout_s: float = 10.0) -> list[bytes | None]:
    found = await store.get_many(GROUPS[0], KEYS, max_payload_bytes=20_000, timeout_s=timeout_s)
    return [bytes(one.payload) if isinstance(one, Loaded) else None for one in found]


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[int]:
    """A server that treats each connection as told; its port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def test_a_server_that_is_gone_is_told_at_once_then_rested_then_found_again(tmp_path: Path) -> None:
    server, clock = RedisServer(tmp_path), Clock()
    server.start()
    store = redis_store(server.port, clock)
    await store.put_many(items(range(3)), timeout_s=10)
    server.stop()
    for _ in range(3):
        with pytest.raises(RemoteUnavailable):
            await get(store)
    assert store.stats().is_resting
    assert store.stats().failing_reason == "REMOTE_UNAVAILABLE"
    with pytest.raises(RemoteResting):
        await get(store)
    server.start()
    with pytest.raises(RemoteResting):
        await store.put_many(items(range(3)), timeout_s=10)
    clock.now_s += 1.1
    assert await get(store) == [None] * 3
    assert not store.stats().is_resting
    await store.put_many(items(range(3)), timeout_s=10)
    assert await get(store) == [item(number)[1] for number in range(3)]
    await store.close()
    server.stop()


async def test_a_server_that_nobody_started_is_told_at_once() -> None:
    store = redis_store(free_port())
    for call in (
        get(store),
        store.put_many(items([1]), timeout_s=10),
        store.exists_many(GROUPS[0], KEYS, timeout_s=10),
    ):
        with pytest.raises(RemoteUnavailable):
            await call
    await store.close()


async def test_a_server_that_hangs_costs_the_timeout_and_answers_of_then_are_not_taken_later(tmp_path: Path) -> None:
    server, clock = RedisServer(tmp_path), Clock()
    server.start()
    store = redis_store(server.port, clock)
    await store.put_many(items(range(3)), timeout_s=10)
    server.pause()
    started_s = time.monotonic()
    with pytest.raises(RemoteTimeout):
        await get(store, timeout_s=0.1)
    with pytest.raises(RemoteTimeout):
        await store.put_many(items(range(50, 60)), timeout_s=0.1)
    assert time.monotonic() - started_s < 5
    server.go_on()
    for _ in range(5):
        assert await store.exists_many(GROUPS[0], KEYS, timeout_s=10) == [True] * 3
        assert await get(store) == [item(number)[1] for number in range(3)]
    await store.close()
    server.stop()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"$50",
        b"$5000\r\nhalf a val",
        b"$-7\r\n",
        b"!what is this\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"-ERR unknown command\r\n" * 9,
        b"-LOADING Redis is loading the dataset in memory\r\n" * 9,
        b"-NOAUTH Authentication required.\r\n" * 9,
        b"*3\r\n:1\r\n:2\r\n:3\r\n" * 9,
        b":1\r\n" * 9,
    ],
)
async def test_a_connection_that_is_cut_or_confused_is_a_typed_failure(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(said)
        await writer.drain()
        writer.close()

    async with scripted(answer) as port:
        store = redis_store(port)
        with pytest.raises(RemoteUnavailable):
            await get(store)
        with pytest.raises(RemoteUnavailable):
            await store.put_many(items([1]), timeout_s=10)
        assert store.stats().failure_count == 2
        await store.close()


async def test_a_connection_that_is_cut_in_mid_value_gives_no_part_of_it() -> None:
    entry, payload = item(0)
    value = encode_header(entry) + payload

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        whole = b"$%d\r\n%b\r\n" % (len(value), value)
        # One whole value, then a part of the second.
        writer.write(whole + whole[:3000])
        await writer.drain()
        writer.close()

    async with scripted(answer) as port:
        store = redis_store(port)
        with pytest.raises(RemoteUnavailable):
            await get(store)
        await store.close()


async def test_a_caller_that_goes_away_leaves_the_store_working(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    store = redis_store(server.port)
    await store.put_many(items(range(3)), timeout_s=10)
    for delay in range(20):
        task = asyncio.create_task(get(store))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await get(store) == [item(number)[1] for number in range(3)]
    assert store._bytes_in_flight == 0
    assert not store.stats().is_resting
    await store.close()
    server.stop()


async def test_a_shared_directory_that_hangs_is_bounded_in_time_and_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    class HangingBackend(DirectoryBackend):
        is_hanging = False

        def _read(self, name: Name, max_bytes: int) -> Buffer | None:
            if self.is_hanging:
                goes_on.wait(60)
            return super()._read(name, max_bytes)

    backend = HangingBackend(tmp_path)
    store = GuardedStore(backend, max_bytes_in_flight=1 << 30, circuit=Circuit(failures=1000))
    await store.put_many(items(range(3)), timeout_s=10)
    backend.is_hanging = True
    results: Sequence[BaseException | list[bytes | None]] = await asyncio.gather(
        *(get(store, timeout_s=0.2) for _ in range(100)), return_exceptions=True
    )
    assert {type(result) for result in results} == {RemoteTimeout, RemoteBusy}
    backend.is_hanging = False
    goes_on.set()
    while True:
        try:
            assert await get(store) == [item(number)[1] for number in range(3)]
            break
        except RemoteBusy:
            await asyncio.sleep(0.001)
    await store.close()


async def test_a_put_to_a_shared_directory_that_was_given_up_does_not_outlive_a_flush(tmp_path: Path) -> None:
    goes_on, is_writing = threading.Event(), threading.Event()

    class SlowBackend(DirectoryBackend):
        def _create(self, path: Path) -> int:
            is_writing.set()
            goes_on.wait(60)
            return super()._create(path)

    store = GuardedStore(SlowBackend(tmp_path), max_bytes_in_flight=1 << 30, circuit=Circuit(failures=1000))
    with pytest.raises(RemoteTimeout):
        await store.put_many(items(range(3)), timeout_s=0.2)
    assert is_writing.is_set()
    await store.delete_groups(timeout_s=10)
    goes_on.set()
    await store.put_many(items(range(3, 4)), timeout_s=10)
    # The threads take their work in order: that of before has ended when eight more have.
    await asyncio.gather(*(get(store) for _ in range(16)))
    assert await get(store) == [None, None, None]
    await store.put_many(items(range(3)), timeout_s=10)
    assert await get(store) == [item(number)[1] for number in range(3)]
    await store.close()


async def test_a_shared_directory_with_errors_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_remote(f"dir://{tmp_path}")
    await store.put_many(items(range(3)), timeout_s=10)
    for number, reason in ((5, "REMOTE_UNAVAILABLE"), (28, "REMOTE_FULL"), (30, "REMOTE_UNAVAILABLE")):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, "injected")

        monkeypatch.setattr(DirectoryBackend, "_create", fail)
        with pytest.raises(MeshError) as failed:
            await store.put_many(items([1]), timeout_s=10)
        assert failed.value.reason == reason
    monkeypatch.undo()
    assert await get(store) == [item(number)[1] for number in range(3)]
    await store.close()
