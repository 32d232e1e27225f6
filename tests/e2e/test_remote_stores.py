"""Remote stores against real servers and folders: the same for each, then what is special."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from shoal_kv_cache.core.entries import Group, Key
from shoal_kv_cache.tiers.remote import Loaded, RemoteBusy, RemoteFull, RemoteStore, RemoteUnavailable, open_remote
from shoal_kv_cache.tiers.remote.names import Name
from support.redis_server import RedisServer
from support.ssd_items import GROUPS, item, items

TIMEOUT_S = 20.0
MAX_BYTES = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("cluster"), is_cluster=True)
    made.start()
    yield made
    made.stop()


@pytest.fixture(params=["redis", "socket", "cluster", "directory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RemoteStore]:
    """Each kind of store, empty."""
    url = f"dir://{tmp_path}"
    if request.param != "directory":
        server: RedisServer = request.getfixturevalue("cluster" if request.param == "cluster" else "server")
        server.client().flushall()
        urls = {"redis": server.url, "socket": f"unix://{server.socket}"}
        url = urls.get(request.param, f"redis+cluster://127.0.0.1:{server.port}")
    made = open_remote(url)
    yield made
    await made.close()


async def get(store: RemoteStore, group: Group, keys: list[Key]) -> list[bytes | str | None]:
    """Payloads; "damaged" where they are."""
    found = await store.get_many(group, keys, max_payload_bytes=MAX_BYTES, timeout_s=TIMEOUT_S)
    return [bytes(one.payload) if isinstance(one, Loaded) else None if one is None else "damaged" for one in found]


def file_of(root: Path, key: Key) -> Path:
    """Where a shared directory keeps it."""
    return next(root.glob(f"*/*/{Name(GROUPS[0], key).leaf}"))


def bytes_below(root: Path) -> int:
    """What all files have together."""
    return sum(path.stat().st_size for path in root.rglob("*-*") if path.is_file())


async def test_what_is_put_is_got(store: RemoteStore) -> None:
    made = items(range(30))
    await store.put_many(made, timeout_s=TIMEOUT_S)
    keys = [entry.key for entry, _ in made]
    assert await get(store, GROUPS[0], [*keys, item(77)[0].key]) == [*(payload for _, payload in made), None]
    found = await store.get_many(GROUPS[0], keys, max_payload_bytes=MAX_BYTES, timeout_s=TIMEOUT_S)
    assert [one.entry for one in found if isinstance(one, Loaded)] == [entry for entry, _ in made]
    assert store.stats().read_bytes == 2 * sum(len(payload) for _, payload in made)


async def test_putting_again_is_fine(store: RemoteStore) -> None:
    for _ in range(2):
        await store.put_many(items([1, 2]), timeout_s=TIMEOUT_S)
    assert await get(store, GROUPS[0], [item(1)[0].key]) == [item(1)[1]]


async def test_another_group_has_nothing(store: RemoteStore) -> None:
    await store.put_many(items([1]), timeout_s=TIMEOUT_S)
    key = item(1)[0].key
    for other in (
        Group("kv-other", "numerics", GROUPS[0].tenant_tag),
        Group(GROUPS[0].kv_id, "other", GROUPS[0].tenant_tag),
        Group(GROUPS[0].kv_id, "numerics", b"other"),
    ):
        assert await get(store, other, [key]) == [None]
        assert await store.exists_many(other, [key], timeout_s=TIMEOUT_S) == [False]


async def test_deleting_leaves_the_rest(store: RemoteStore) -> None:
    await store.put_many(items(range(6)), timeout_s=TIMEOUT_S)
    keys = [item(number)[0].key for number in range(6)]
    await store.delete_many(GROUPS[0], [keys[0], keys[3], item(90)[0].key], timeout_s=TIMEOUT_S)
    assert await store.exists_many(GROUPS[0], keys, timeout_s=TIMEOUT_S) == [False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("asked", "gone"),
    [
        ({"kv_id": "kv-one"}, {0}),
        ({"tenant_tag": b"b" * 32}, {1}),
        ({"kv_id": "kv-one", "tenant_tag": b"b" * 32}, set()),
        ({"kv_id": "kv-*"}, set()),
        ({"kv_id": "kv"}, set()),
        ({}, {0, 1}),
    ],
)
async def test_a_flush_deletes_what_it_names(store: RemoteStore, asked: dict[str, object], gone: set[int]) -> None:
    chains = (range(0, 20), range(40, 60))
    for chain in chains:
        await store.put_many(items(chain), timeout_s=TIMEOUT_S)
    deleted = await store.delete_groups(**asked, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    assert deleted == 20 * len(gone)
    for index, chain in enumerate(chains):
        keys = [item(number)[0].key for number in chain]
        there = await store.exists_many(GROUPS[index], keys, timeout_s=TIMEOUT_S)
        assert there == [index not in gone] * 20


async def test_more_than_may_be_under_way_is_refused(store: RemoteStore) -> None:
    async def put() -> None:
        await store.put_many(items(range(20)), timeout_s=TIMEOUT_S)

    store._max_bytes = 150_000  # type: ignore[attr-defined]
    results = await asyncio.gather(*(put() for _ in range(5)), return_exceptions=True)
    assert {type(result) for result in results} == {type(None), RemoteBusy}
    assert store.stats().refused_count > 0
    assert not store.stats().is_resting
    await put()


async def test_redis_values_that_are_damaged_are_told_and_deleted(server: RedisServer) -> None:
    store = open_remote(server.url)
    client = server.client()
    client.flushall()
    await store.put_many(items(range(6)), timeout_s=TIMEOUT_S)
    names = [Name(GROUPS[0], item(number)[0].key).text for number in range(6)]
    keys = [item(number)[0].key for number in range(6)]
    client.setrange(names[0], 3000, "x")
    client.set(names[1], "short")
    client.delete(names[2])
    client.rpush(names[2], "a list")
    client.set(names[3], client.get(names[4]) or b"")
    client.append(names[5], "more than there should be" * 2000)
    assert await get(store, GROUPS[0], keys) == ["damaged"] * 4 + [item(4)[1], "damaged"]
    assert store.stats().corrupt_count == 5
    assert await store.exists_many(GROUPS[0], keys, timeout_s=TIMEOUT_S) == [False] * 4 + [True, False]
    await store.close()


async def test_redis_values_end_by_themselves_where_that_is_wanted(server: RedisServer) -> None:
    store = open_remote(f"{server.url}?ttl_s=1000")
    await store.put_many(items([8]), timeout_s=TIMEOUT_S)
    assert 0 < int(server.client().ttl(Name(GROUPS[0], item(8)[0].key).text)) <= 1000
    await store.close()


async def test_redis_without_room_says_so_and_is_not_left_alone(server: RedisServer) -> None:
    store = open_remote(server.url)
    client = server.client()
    await store.put_many(items([1]), timeout_s=TIMEOUT_S)
    client.config_set("maxmemory", "1")
    try:
        for _ in range(5):
            with pytest.raises(RemoteFull):
                await store.put_many(items(range(10, 20)), timeout_s=TIMEOUT_S)
        assert await get(store, GROUPS[0], [item(1)[0].key]) == [item(1)[1]]
    finally:
        client.config_set("maxmemory", "0")
    await store.put_many(items(range(10, 20)), timeout_s=TIMEOUT_S)
    assert store.stats().failing_reason == ""
    await store.close()


async def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    store = open_remote(f"dir://{tmp_path}/not/mounted")
    with pytest.raises(RemoteUnavailable):
        await store.put_many(items([1]), timeout_s=TIMEOUT_S)
    with pytest.raises(RemoteUnavailable):
        await store.delete_groups(timeout_s=TIMEOUT_S)
    assert await get(store, GROUPS[0], [item(1)[0].key]) == [None]
    assert not os.listdir(tmp_path)
    await store.close()


async def test_files_that_are_damaged_are_told_and_deleted(tmp_path: Path) -> None:
    store = open_remote(f"dir://{tmp_path}")
    await store.put_many(items(range(5)), timeout_s=TIMEOUT_S)
    keys = [item(number)[0].key for number in range(5)]
    paths = [file_of(tmp_path, key) for key in keys]
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].write_bytes(os.urandom(100_000))
    paths[3].write_bytes(paths[4].read_bytes())
    assert await get(store, GROUPS[0], keys) == ["damaged"] * 4 + [item(4)[1]]
    assert await get(store, GROUPS[0], keys) == [None] * 4 + [item(4)[1]]
    await store.close()


async def test_a_folder_keeps_itself_below_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small folders fill slowly: as if there were few.
    monkeypatch.setattr("shoal_kv_cache.tiers.remote.directory_backend._FOLDERS", 16)
    monkeypatch.setattr("shoal_kv_cache.tiers.remote.directory_backend._digits", lambda digest: f"{digest[0] % 16:02x}")
    capacity_bytes = 16 * 40_000
    store = open_remote(f"dir://{tmp_path}?capacity_bytes={capacity_bytes}")
    for begin in range(0, 240, 40):
        await store.put_many(items(range(begin, begin + 40)), timeout_s=TIMEOUT_S)
        used_bytes = bytes_below(tmp_path)
        assert used_bytes <= capacity_bytes * 1.1
    assert used_bytes > capacity_bytes // 2
    newest = [item(number)[0].key for number in range(238, 240)]
    assert await store.exists_many(item(238)[0].group, newest, timeout_s=TIMEOUT_S) == [True] * 2
    await store.close()


async def test_what_a_dead_writer_left_is_swept_and_never_read(tmp_path: Path) -> None:
    store = open_remote(f"dir://{tmp_path}?capacity_bytes={256 * 20_000}")
    await store.put_many(items([1]), timeout_s=TIMEOUT_S)
    path = file_of(tmp_path, item(1)[0].key)
    for name, age_s in ((".new-old", 7200), (".new-young", 60)):
        left = path.parent / name
        left.write_bytes(b"half")
        at_s = path.stat().st_mtime - age_s
        os.utime(left, (at_s, at_s))
    await store.put_many(items([1]), timeout_s=TIMEOUT_S)
    assert sorted(left.name for left in path.parent.iterdir() if left.name.startswith(".")) == [".new-young"]
    assert await store.delete_groups(timeout_s=TIMEOUT_S) == 1
    await store.close()
