"""The Mooncake store against its own master, where the extra is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from shoal_common.errors import Unimplemented
from shoal_kv_cache.core.entries import Group, Key
from shoal_kv_cache.tiers.remote import Loaded, RemoteStore, RemoteUnavailable, open_remote
from shoal_kv_cache.tiers.remote.mooncake_backend import load_store_class
from support.nats_server import free_port
from support.ssd_items import GROUPS, item, items

TIMEOUT_S = 30.0


class Master:
    """A mooncake_master of this test's own."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        binary = Path(spec.origin).parent / "mooncake_master"
        self.port = free_port()
        self._log = (folder / "master.log").open("wb")
        command = [str(binary), f"--rpc_port={self.port}", f"--metrics_port={free_port()}", "--rpc_address=127.0.0.1"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    try:
        load_store_class()
    except Unimplemented as error:
        pytest.skip(error.message)
    made = Master(tmp_path)
    yield made
    made.stop()


@pytest.fixture
async def store(master: Master) -> AsyncIterator[RemoteStore]:
    made = open_remote(f"mooncake://127.0.0.1:{master.port}?segment_bytes={64 << 20}&buffer_bytes={64 << 20}")
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            await made.exists_many(GROUPS[0], [item(0)[0].key], timeout_s=TIMEOUT_S)
            break
        except RemoteUnavailable:
            assert time.monotonic() < give_up_s
    yield made
    await made.close()


async def get(store: RemoteStore, group: Group, keys: list[Key]) -> list[bytes | None]:
    found = await store.get_many(group, keys, max_payload_bytes=20_000, timeout_s=TIMEOUT_S)
    return [bytes(one.payload) if isinstance(one, Loaded) else None for one in found]


async def test_what_is_put_is_got_and_flushed_by_group(store: RemoteStore) -> None:
    chains = (range(0, 20), range(40, 60))
    for chain in chains:
        await store.put_many(items(chain), timeout_s=TIMEOUT_S)
        await store.put_many(items(chain), timeout_s=TIMEOUT_S)
    keys = [[item(number)[0].key for number in chain] for chain in chains]
    payloads = [[item(number)[1] for number in chain] for chain in chains]
    assert await get(store, GROUPS[0], [*keys[0], item(77)[0].key]) == [*payloads[0], None]
    assert await get(store, GROUPS[1], keys[0]) == [None] * 20
    await store.delete_many(GROUPS[0], [keys[0][3], item(77)[0].key], timeout_s=TIMEOUT_S)
    assert await store.exists_many(GROUPS[0], keys[0][:5], timeout_s=TIMEOUT_S) == [True, True, True, False, True]
    assert await store.delete_groups(kv_id="kv-one", timeout_s=TIMEOUT_S) == 19
    assert await get(store, GROUPS[0], keys[0]) == [None] * 20
    assert await get(store, GROUPS[1], keys[1]) == payloads[1]
    assert await store.delete_groups(tenant_tag=b"b" * 32, timeout_s=TIMEOUT_S) == 20


@pytest.mark.long
async def test_a_master_that_is_gone_is_a_typed_failure(master: Master, store: RemoteStore) -> None:
    await store.put_many(items(range(5)), timeout_s=TIMEOUT_S)
    master.stop()
    with pytest.raises(RemoteUnavailable):
        await get(store, GROUPS[0], [item(0)[0].key])
    with pytest.raises(RemoteUnavailable):
        await store.put_many(items(range(9)), timeout_s=TIMEOUT_S)


def test_without_the_extra_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_kv_cache.tiers.remote.mooncake_backend._load_cuda_runtime", _missing)
    with pytest.raises(Unimplemented) as refused:
        open_remote("mooncake://127.0.0.1:1")
    assert refused.value.reason == "MOONCAKE_MISSING"


def _missing() -> None:
    raise ImportError("libcudart.so.12: cannot open shared object file")
