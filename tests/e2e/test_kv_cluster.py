"""Three KV cache nodes as processes that find each other over NATS, with disks: deaths, restarts, the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_cli.main import main
from shoal_kv_cache.core.rendezvous import Ring
from support.kv_client import KvClient, TestChain, items_of
from support.kv_cluster import MESH, Cluster, client, kv_cluster
from support.service_process import ServiceProcess, service_process

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with kv_cluster(tmp_path_factory.mktemp("cluster"), NAMES) as started:
        yield started


def chains(count: int, name: str = "chain") -> list[TestChain]:
    return [TestChain(f"{name} {number}", 5) for number in range(count)]


async def put_all(node: ServiceProcess, wanted: list[TestChain]) -> None:
    async with client(node) as one:
        for chain in wanted:
            assert await one.put(items_of(chain, 0, 5, [4])) == 6


async def hits(node: ServiceProcess, wanted: list[TestChain]) -> set[str]:
    """Names of the chains that are found, each read back and compared."""
    found = set()
    async with client(node) as one:
        for chain in wanted:
            answer = await one.acquire(chain)
            if answer.hit_tokens:
                assert answer.hit_tokens == 640
                assert await one.read(answer) == [*chain.blocks(5), chain.snapshot(4)]
                found.add(chain.name)
    return found


def owned_by(name: str, wanted: list[TestChain], names: tuple[str, ...] = NAMES) -> set[str]:
    ring = Ring(names, copies=1)
    return {chain.name for chain in wanted if ring.owners(chain.hashes[0])[0] == name}


@pytest.mark.parametrize("kind", [pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_TCP, pb.TRANSPORT_KIND_GRPC])
async def test_every_way_out_of_a_node_gives_the_same_bytes(cluster: Cluster, kind: pb.TransportKind.ValueType) -> None:
    chain = TestChain("ways out", 70)
    async with client(cluster.nodes["a"]) as writer:
        await writer.put(items_of(chain, 0, 70, [69]))
    reader = KvClient(cluster.nodes["a"].address, kinds=[kind])
    try:
        found = await reader.acquire(chain)
        assert found.grant.kind == kind
        assert await reader.read(found) == [*chain.blocks(70), chain.snapshot(69)]
    finally:
        await reader.close()


def test_a_disk_in_use_stops_the_start(cluster: Cluster, tmp_path: Path) -> None:
    environment = {"SHOAL_KV_CACHE_SSD_DIRECTORY": str(cluster.folder / "disk-a")}
    with (
        pytest.raises(AssertionError, match="another process"),
        service_process("shoal_kv_cache", log=tmp_path / "second.log", environment=environment),
    ):
        pass


def test_the_command_line_sees_every_node_and_a_flush_leaves_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = chains(10)
    # What the tests before have left.
    assert main(["kv", "flush", "--everything", *(f"--node={one.address}" for one in cluster.nodes.values())]) == 0
    capsys.readouterr()
    asyncio.run(put_all(cluster.nodes["a"], wanted))
    cluster.wait_until_written()
    monkeypatch.setenv("SHOAL_NATS_URL", cluster.nats.url)
    monkeypatch.setenv("SHOAL_MESH", MESH)

    def kv(*arguments: str) -> object:
        assert main(["kv", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    stats = kv("stats")
    assert isinstance(stats, list)
    assert {one["node_id"] for one in stats} == set(NAMES)
    groups = kv("ls")
    assert isinstance(groups, list)
    assert {(one["kv_id"], one["numerics_id"]) for one in groups} == {("kv", "numerics")}
    verified = kv("verify")
    assert isinstance(verified, list)
    assert {(one["tier"], one["damaged"]) for one in verified} == {("memory", 0), ("disk", 0)}
    sent_on = len(wanted) - len(owned_by("a", wanted))
    assert sum(one["checked"] for one in verified) == 2 * 6 * (len(wanted) + sent_on)
    flushed = kv("flush", "--tenant-tag", (b"t" * 32).hex())
    assert isinstance(flushed, dict)
    assert flushed["block_count"] >= 50
    assert kv("ls") == []
    for name in NAMES:
        assert asyncio.run(hits(cluster.nodes[name], wanted)) == set()
    assert main(["kv", "stats"]) == 0
    assert "memory" in capsys.readouterr().out


def test_a_death_costs_its_share_and_a_restart_with_the_disk_brings_it_back(cluster: Cluster) -> None:
    wanted = chains(30)
    asyncio.run(put_all(cluster.nodes["a"], wanted))
    cluster.wait_until_written()
    assert asyncio.run(hits(cluster.nodes["b"], wanted[:5])) == {chain.name for chain in wanted[:5]}
    cluster.kill("a")
    cluster.kill("c")
    cluster.wait_for_peers()
    # What b owns, and the copies that it made when it read.
    left = owned_by("b", wanted) | {chain.name for chain in wanted[:5]}
    assert asyncio.run(hits(cluster.nodes["b"], wanted)) == left
    cluster.start("c")
    cluster.wait_for_peers()
    back = left | owned_by("c", wanted, ("b", "c")) & owned_by("c", wanted)
    assert asyncio.run(hits(cluster.nodes["b"], wanted)) == back


def test_a_node_that_was_away_during_a_flush_comes_back_without_what_was_flushed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "a" not in cluster.nodes:
        cluster.start("a")
    cluster.wait_for_peers()
    wanted = chains(10, "flushed while away")
    asyncio.run(put_all(cluster.nodes["c"], wanted))
    cluster.wait_until_written()
    monkeypatch.setenv("SHOAL_NATS_URL", cluster.nats.url)
    monkeypatch.setenv("SHOAL_MESH", MESH)
    address = cluster.nodes["c"].address
    cluster.kill("c")
    others = [f"--node={one.address}" for one in cluster.nodes.values()]
    assert main(["kv", "flush", "--kv-id", "kv", "--json", *others, "--node", address]) == 1
    flushed = json.loads(capsys.readouterr().out)
    assert flushed["nodes"] == 2
    assert [one["address"] for one in flushed["unreached"]] == [address]
    cluster.start("c")
    # At once, before the others have heard of it.
    assert asyncio.run(hits(cluster.nodes["c"], wanted)) == set()
    cluster.wait_for_peers()
    for node in cluster.nodes.values():
        assert asyncio.run(hits(node, wanted)) == set()
    assert main(["kv", "ls", "--json", *(f"--node={one.address}" for one in cluster.nodes.values())]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.long
def test_under_fsync_always_nothing_acknowledged_is_lost_to_a_kill(tmp_path: Path) -> None:
    environment = {
        "SHOAL_KV_CACHE_SSD_DIRECTORY": str(tmp_path / "disk"),
        "SHOAL_KV_CACHE_SSD_BYTES": str(64 << 20),
        "SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES": str(1 << 20),
        "SHOAL_KV_CACHE_SSD_FSYNC": "always",
        "SHOAL_KV_CACHE_MAX_ENTRIES": "10000",
        "SHOAL_KV_CACHE_RAM_BYTES": str(4 << 20),
    }
    wanted = chains(20)
    acknowledged: set[str] = set()

    async def put_until_killed(node: ServiceProcess) -> None:
        async with client(node) as one:
            for number, chain in enumerate(wanted):
                if number == 12:
                    node.popen.kill()
                try:
                    assert await one.put(items_of(chain, 0, 5, [4])) == 6
                except Exception:
                    return
                acknowledged.add(chain.name)

    with service_process("shoal_kv_cache", log=tmp_path / "first.log", environment=environment) as node:
        asyncio.run(put_until_killed(node))
    assert len(acknowledged) >= 12
    with service_process("shoal_kv_cache", log=tmp_path / "second.log", environment=environment) as node:
        assert asyncio.run(hits(node, wanted)) >= acknowledged
