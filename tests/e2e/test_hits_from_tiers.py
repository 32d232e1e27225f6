"""Whatever a hit comes from, and whatever happened to it there, it gives the tokens of a cold run: one node."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_engine import LLM
from support import damage
from support.kv_mesh import Asked, KvMesh, ask_offline, kv_mesh
from support.kv_visits import ALL, HIT_TOKENS, NONE, PROMPT_TOKENS, WAYS, ColdRuns, Visits
from support.redis_server import RedisServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BLOCK, SNAPSHOT = transport_pb.PAYLOAD_KIND_BLOCK, transport_pb.PAYLOAD_KIND_ENCODER_WINDOW


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvMesh]:
    workers = {"decode-1": "a", "decode-2": "a", "prefill-1": "a"}
    with kv_mesh(tmp_path_factory.mktemp("hits"), model="nano", workers=workers) as mesh:
        yield mesh


@pytest.fixture
def mesh(started: KvMesh) -> Iterator[KvMesh]:
    """Without a node; a test starts its own."""
    yield started
    started.stop_nodes()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cold_runs(nano: LLM, text: list[int]) -> ColdRuns:
    return ColdRuns.of(nano, text)


@pytest.fixture
def visits(mesh: KvMesh, cold_runs: ColdRuns) -> Visits:
    return cold_runs.visits(mesh)


def read_bytes(mesh: KvMesh, tier: pb.Tier.ValueType) -> int:
    return mesh.tier("a", tier).read_bytes


def payload(mesh: KvMesh, asked: Asked, kind: transport_pb.PayloadKind.ValueType, index: int) -> bytes:
    return damage.in_memory(mesh.acquire("a", asked), kind, index).read()


def leaf(kind: transport_pb.PayloadKind.ValueType, block_hash: bytes) -> str:
    """The last part of a payload's name in a store outside of the mesh."""
    return f"{'b' if kind == BLOCK else 's'}-{block_hash.hex()}"


def held_leaves(mesh: KvMesh) -> set[str]:
    """All that the node has, as the last parts of names."""
    blocks, snapshots = mesh.held("a")
    return {leaf(BLOCK, one) for one in blocks} | {leaf(SNAPSHOT, one) for one in snapshots}


def victim_of(asked: Asked, kind: transport_pb.PayloadKind.ValueType) -> tuple[int, str]:
    """Which of its kind in a hit is damaged, and its name: the second block, or the one snapshot."""
    index = 1 if kind == BLOCK else 0
    return index, leaf(kind, asked.hashes[1 if kind == BLOCK else HIT_TOKENS // 128 - 1])


def test_a_hit_from_disk_after_a_kill(mesh: KvMesh, visits: Visits, tmp_path: Path) -> None:
    mesh.start_node("a", disk=tmp_path)
    assert visits.cached() == NONE
    mesh.kill_node("a")
    mesh.start_node("a", disk=tmp_path)
    assert read_bytes(mesh, pb.TIER_RAM) == 0
    before = 0
    for told in visits.each():
        assert told.cached == HIT_TOKENS
        now = read_bytes(mesh, pb.TIER_SSD)
        assert now > before
        before = now
    assert visits.cached() == ALL
    assert read_bytes(mesh, pb.TIER_SSD) == before, "the second time it comes from memory"


@pytest.fixture(params=["redis", "directory"])
def remote_url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    if request.param == "redis":
        redis_server.client().flushall()
        return redis_server.url
    folder = tmp_path / "shared"
    folder.mkdir()
    return f"dir://{folder}"


def test_a_hit_from_the_remote_store_when_the_node_has_lost_all(
    mesh: KvMesh, visits: Visits, tmp_path: Path, remote_url: str
) -> None:
    mesh.start_node("a", disk=tmp_path / "disk", remote_url=remote_url)
    assert visits.cached() == NONE
    mesh.kill_node("a")
    shutil.rmtree(tmp_path / "disk")
    mesh.start_node("a", disk=tmp_path / "disk", remote_url=remote_url)
    assert mesh.held("a") == (set(), set())
    assert visits.cached() == ALL
    assert read_bytes(mesh, pb.TIER_REMOTE) > 0
    assert read_bytes(mesh, pb.TIER_SSD) == 0


@pytest.mark.parametrize("seen_by", ["recovery", "reader"])
@pytest.mark.parametrize("kind", [BLOCK, SNAPSHOT], ids=["block", "snapshot"])
def test_damage_on_disk_is_computed_again(
    mesh: KvMesh, visits: Visits, tmp_path: Path, kind: transport_pb.PayloadKind.ValueType, seen_by: str
) -> None:
    mesh.start_node("a", disk=tmp_path)
    assert visits.cached() == NONE
    payloads = [payload(mesh, one, kind, victim_of(one, kind)[0]) for one in visits.asked]
    names = {victim_of(one, kind)[1] for one in visits.asked}
    mesh.kill_node("a")
    if seen_by == "reader":
        mesh.start_node("a", disk=tmp_path)
    for one in payloads:
        damage.on_disk(tmp_path, one).flip()
    if seen_by == "recovery":
        mesh.start_node("a", disk=tmp_path)
        # What was written last is read whole after a kill.
        assert not names & held_leaves(mesh)
    # Blocks that are in memory once the snapshot turns out to be damaged are replayed.
    is_replayed = seen_by == "reader" and kind == SNAPSHOT
    assert all((tokens == HIT_TOKENS) == is_replayed for tokens in visits.cached())
    assert mesh.stats("a").corrupt_count == (len(WAYS) if seen_by == "reader" else 0)
    assert visits.cached() == ALL
    mesh.kill_node("a")
    mesh.start_node("a", disk=tmp_path)
    assert visits.cached() == ALL, "what was computed again is on disk, too"
    assert read_bytes(mesh, pb.TIER_SSD) > 0
    assert mesh.stats("a").corrupt_count == 0


@pytest.mark.parametrize("copies", ["memory", "memory, disk and remote"])
@pytest.mark.parametrize("kind", [BLOCK, SNAPSHOT], ids=["block", "snapshot"])
def test_damage_in_memory_is_dropped(
    mesh: KvMesh, visits: Visits, tmp_path: Path, kind: transport_pb.PayloadKind.ValueType, copies: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    if copies == "memory":
        mesh.start_node("a")
    else:
        mesh.start_node("a", disk=tmp_path / "disk", remote_url=f"dir://{shared}")
    assert visits.cached() == NONE
    places = [damage.in_memory(mesh.acquire("a", one), kind, victim_of(one, kind)[0]) for one in visits.asked]
    whole = [one.read() for one in places]
    for one in places:
        one.flip()
    tokens = visits.cached()
    if copies == "memory":
        assert all((one == HIT_TOKENS) == (kind == SNAPSHOT) for one in tokens)
    assert mesh.stats("a").corrupt_count == len(WAYS)
    assert visits.cached() == ALL
    assert mesh.stats("a").corrupt_count == len(WAYS), "no other copy was damaged, and none came back"
    assert [payload(mesh, one, kind, victim_of(one, kind)[0]) for one in visits.asked] == whole


@pytest.mark.parametrize("kind", [BLOCK, SNAPSHOT], ids=["block", "snapshot"])
def test_damage_in_the_remote_store_is_computed_again(
    mesh: KvMesh, visits: Visits, redis_server: RedisServer, kind: transport_pb.PayloadKind.ValueType
) -> None:
    client = redis_server.client()
    client.flushall()
    mesh.start_node("a", remote_url=redis_server.url)
    assert visits.cached() == NONE
    names = [victim_of(one, kind)[1] for one in visits.asked]

    def values() -> list[bytes]:
        return [damage.in_redis(client, name)[1] for name in names]

    whole = values()
    mesh.kill_node("a")
    for name in names:
        damage.flip_in_redis(client, name)
    mesh.start_node("a", remote_url=redis_server.url)
    assert all((tokens == HIT_TOKENS) == (kind == SNAPSHOT) for tokens in visits.cached())
    assert mesh.tier("a", pb.TIER_REMOTE).failure_count == len(WAYS)
    assert values() == whole
    assert visits.cached() == ALL


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_prefix_without_its_snapshot_is_replayed_and_stores_it(
    mesh: KvMesh, nano: LLM, text: list[int], tmp_path: Path, place: str
) -> None:
    # Longer than the E * W positions that a replay runs again: where it saves nothing, nothing is read from disk.
    visits = ColdRuns.of(nano, text, 1200).visits(mesh)
    ends = [one.hashes[1024 // 128 - 1] for one in visits.asked]
    mesh.start_node("a", disk=tmp_path if place == "disk" else None)
    assert visits.cached() == NONE
    snapshots = [damage.in_memory(mesh.acquire("a", one), SNAPSHOT) for one in visits.asked]
    if place == "disk":
        payloads = [one.read() for one in snapshots]
        mesh.kill_node("a")
        for one in payloads:
            damage.on_disk(tmp_path, one).flip()
        mesh.start_node("a", disk=tmp_path)
    else:
        for snapshot in snapshots:
            snapshot.flip()
    # Also on disk: what a checkpoint covers, one every 5 s, is not read again at the start.
    for end in ends:
        mesh.report("a", SNAPSHOT, end)
    assert not set(ends) & mesh.held("a")[1]
    hits_before = mesh.stats("a").hit_count
    read_before = read_bytes(mesh, pb.TIER_SSD) if place == "disk" else 0
    assert visits.cached() == [1024] * len(WAYS)
    assert mesh.stats("a").hit_count == hits_before, "no usable prefix was found: all was replayed"
    if place == "disk":
        assert read_bytes(mesh, pb.TIER_SSD) > read_before
    assert set(ends) <= mesh.held("a")[1]
    assert visits.cached() == [1024] * len(WAYS)
    assert mesh.stats("a").hit_count >= hits_before + len(WAYS)


@pytest.mark.parametrize("prefill", ["", "prefill-1"], ids=["local", "remote"])
def test_the_third_visitor_of_a_system_prompt_on_disk_computes_none_of_it(
    mesh: KvMesh, nano: LLM, text: list[int], tmp_path: Path, prefill: str
) -> None:
    root = secrets.token_bytes(32)
    asked = [
        Asked(prompt=(*text[:300], *text[800 + 7 * visitor : 1100 + 7 * visitor]), root=root, seed=visitor)
        for visitor in range(3)
    ]
    cached = []
    for one, cold in zip(asked, ask_offline(nano, asked), strict=True):
        # Nothing of it is in memory: to replay it saves nothing, since it is shorter than what a replay runs.
        mesh.start_node("a", disk=tmp_path)
        told = mesh.ask("decode-1", one, prefill=prefill)
        assert told.said == cold
        cached.append(told.cached)
        mesh.wait_written()
        mesh.kill_node("a")
    assert cached[2] == 256


def test_what_decode_wrote_back_hits_at_another_worker_and_after_a_kill(
    mesh: KvMesh, nano: LLM, text: list[int], tmp_path: Path
) -> None:
    mesh.start_node("a", disk=tmp_path)
    first = Asked(prompt=tuple(text[:250]), temperature=1.0, max_tokens=200)
    told = mesh.ask("decode-1", first)
    assert told.said == ask_offline(nano, [first])[0]
    mesh.wait_written()
    second = Asked(prompt=(*first.prompt, *told.said.tokens, *text[600:660]), temperature=1.0, root=first.root)
    (cold,) = ask_offline(nano, [second])
    # S(450) is 256: the second block, and the snapshot at its end, were written by decode.
    for prefill in ("", "prefill-1"):
        mesh.kill_node("a")
        mesh.start_node("a", disk=tmp_path)
        again = mesh.ask("decode-2", second, prefill=prefill)
        assert again.said == cold
        assert again.cached >= 256
        mesh.wait_written()


@pytest.mark.parametrize("is_everything", [False, True], ids=["tenant", "everything"])
def test_after_a_flush_all_is_computed_again(mesh: KvMesh, visits: Visits, tmp_path: Path, is_everything: bool) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    mesh.start_node("a", disk=tmp_path / "disk", remote_url=f"dir://{shared}")
    assert visits.cached() == NONE
    request = pb.FlushRequest(everything=True) if is_everything else pb.FlushRequest(tenant_tag=visits.asked[0].tenant)
    mesh.stub("a").Flush(request, timeout=20)
    assert mesh.held("a") == (set(), set())
    assert [path for path in shared.rglob("*") if path.is_file()] == []
    mesh.kill_node("a")
    mesh.start_node("a", disk=tmp_path / "disk", remote_url=f"dir://{shared}")
    assert visits.cached() == NONE
    assert visits.cached() == ALL


def test_flushes_under_traffic_change_no_token(mesh: KvMesh, visits: Visits, tmp_path: Path) -> None:
    mesh.start_node("a", disk=tmp_path)
    stub, is_over = mesh.stub("a"), threading.Event()
    flushed = []

    def flush_all_the_time() -> None:
        while not is_over.wait(0.02):
            flushed.append(stub.Flush(pb.FlushRequest(everything=True), timeout=20).block_count)

    flushing = threading.Thread(target=flush_all_the_time)
    flushing.start()
    try:
        for _ in range(3):
            visits.cached()
    finally:
        is_over.set()
        flushing.join()
    assert sum(flushed) > 0
    mesh.stub("a").Flush(pb.FlushRequest(everything=True), timeout=20)
    assert visits.cached() == NONE
    assert visits.cached() == ALL


def test_a_tenant_finds_nothing_of_anothers_even_under_the_same_root(
    mesh: KvMesh, visits: Visits, text: list[int], tmp_path: Path
) -> None:
    mesh.start_node("a", disk=tmp_path)
    assert visits.cached() == NONE
    other = visits.of(b"o" * 32)
    unknown = Asked(prompt=tuple(text[50 : 50 + PROMPT_TOKENS]))
    assert shape_of(mesh.acquire("a", other.asked[0])) == shape_of(mesh.acquire("a", unknown))
    assert other.cached() == NONE
    assert visits.cached() == ALL, "the first tenant's stay"


def shape_of(answer: pb.AcquireResponse) -> Sequence[object]:
    """All of an answer but its times."""
    for one in answer.tier_hits:
        one.load_s = 0
    return [answer.SerializeToString(deterministic=True)]
