"""Hits that come from another node, from one that dies, stops or has damaged memory: the tokens of a cold run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_engine import LLM
from support import damage
from support.kv_mesh import KvMesh, kv_mesh
from support.kv_visits import ALL, HIT_TOKENS, NONE, WAYS, ColdRuns, Visits
from support.mesh import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NODES = ("a", "b", "c")
BLOCK, SNAPSHOT = transport_pb.PAYLOAD_KIND_BLOCK, transport_pb.PAYLOAD_KIND_ENCODER_WINDOW


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvMesh]:
    workers = {"decode-1": "a", "decode-2": "b", "prefill-1": "a"}
    with kv_mesh(tmp_path_factory.mktemp("peers"), model="nano", workers=workers) as mesh:
        yield mesh


@pytest.fixture
def mesh(started: KvMesh) -> Iterator[KvMesh]:
    """Without a node; a test starts its own."""
    yield started
    started.stop_nodes()


@pytest.fixture(scope="module")
def cold_runs(nano: LLM, text: list[int]) -> ColdRuns:
    return ColdRuns.of(nano, text)


@pytest.fixture
def visits(mesh: KvMesh, cold_runs: ColdRuns) -> Visits:
    return cold_runs.visits(mesh)


def start(mesh: KvMesh, *names: str, copies: int = 1) -> None:
    for name in names:
        mesh.start_node(name, copies=str(copies))
    mesh.wait_for_peers()


def forget(mesh: KvMesh, name: str, *, copies: int = 1) -> None:
    """The node comes back with nothing, and knows its peers."""
    mesh.kill_node(name)
    start(mesh, name, copies=copies)


def from_peers(mesh: KvMesh, name: str) -> pb.TierStats:
    return mesh.tier(name, pb.TIER_PEERS)


def test_a_hit_from_the_owner_of_the_blocks(mesh: KvMesh, visits: Visits) -> None:
    start(mesh, *NODES)
    visits = visits.owned_by(["b"], NODES)
    assert visits.cached() == NONE
    forget(mesh, "a")
    before = 0
    for told in visits.each():
        assert told.cached == HIT_TOKENS
        assert from_peers(mesh, "a").read_bytes > before
        before = from_peers(mesh, "a").read_bytes
    mesh.kill_node("b")
    assert visits.cached() == ALL, "the local node keeps copies of what it fetched"
    assert from_peers(mesh, "a").read_bytes == before


def test_a_worker_at_the_owner_hits_what_a_worker_at_another_node_stored(mesh: KvMesh, visits: Visits) -> None:
    start(mesh, *NODES)
    visits = visits.owned_by(["b"], NODES)
    assert visits.cached("decode-1") == NONE
    for told, (_, prefill) in zip(visits.each("decode-2"), WAYS, strict=True):
        assert told.cached == HIT_TOKENS
        assert from_peers(mesh, "b").read_bytes == 0, prefill


def test_an_owner_that_is_dead_is_a_miss(mesh: KvMesh, visits: Visits) -> None:
    start(mesh, *NODES)
    visits = visits.owned_by(["b"], NODES)
    assert visits.cached() == NONE
    forget(mesh, "a")
    mesh.kill_node("b")
    # Its peers have not missed it yet: they call it, and hear that nobody is there.
    assert visits.cached() == NONE
    assert from_peers(mesh, "a").failure_count > 0
    mesh.wait_for_peers()
    forget(mesh, "a")
    # It has no segments any more. What was kept for it went to their new owner, unless that was killed too soon.
    assert all(have in (0, whole) for have, whole in zip(visits.cached(), ALL, strict=True))
    assert visits.cached() == ALL


def test_the_second_copy_serves_when_the_first_owner_is_dead(mesh: KvMesh, visits: Visits) -> None:
    start(mesh, *NODES, copies=2)
    visits = visits.owned_by(["b", "c"], NODES)
    assert visits.cached() == NONE
    forget(mesh, "a", copies=2)
    mesh.kill_node("b")
    assert visits.cached() == ALL
    assert from_peers(mesh, "a").read_bytes > 0
    mesh.wait_for_peers()
    forget(mesh, "a", copies=2)
    assert visits.cached() == ALL, "also when its death is known"


def test_an_owner_that_stands_still_costs_its_timeout(mesh: KvMesh, visits: Visits) -> None:
    start(mesh, *NODES)
    visits = visits.owned_by(["b"], NODES)
    assert visits.cached() == NONE
    forget(mesh, "a")
    owner = mesh.nodes["b"].popen
    owner.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert [told.cached for told in visits.each()] == NONE
        # One second, once; the rest is four cold prompts.
        assert time.monotonic() - began_s < 10
    finally:
        owner.send_signal(signal.SIGCONT)
    mesh.wait_written()
    assert visits.cached() == ALL


@pytest.mark.parametrize("kind", [BLOCK, SNAPSHOT], ids=["block", "snapshot"])
def test_damage_in_the_owners_memory_is_dropped_there_and_computed_again(
    mesh: KvMesh, visits: Visits, kind: transport_pb.PayloadKind.ValueType
) -> None:
    start(mesh, *NODES)
    visits = visits.owned_by(["b"], NODES)
    assert visits.cached() == NONE
    forget(mesh, "a")
    index = 1 if kind == BLOCK else 0
    whole = []
    for one in visits.asked:
        place = damage.in_memory(mesh.acquire("b", one), kind, index)
        whole.append(place.read())
        place.flip()
    assert all(tokens < HIT_TOKENS or kind == SNAPSHOT for tokens in visits.cached())
    assert mesh.stats("b").corrupt_count == len(WAYS)
    healed = [damage.in_memory(mesh.acquire("b", one), kind, index).read() for one in visits.asked]
    assert healed == whole
    forget(mesh, "a")
    assert visits.cached() == ALL
    assert mesh.stats("b").corrupt_count == len(WAYS)


def test_owners_that_die_and_come_back_under_traffic_change_no_token(mesh: KvMesh, cold_runs: ColdRuns) -> None:
    start(mesh, *NODES)
    is_over = threading.Event()
    failures: list[BaseException] = []
    hits: list[int] = []

    def has_told(count: int) -> bool:
        return len(hits) > count or bool(failures)

    def visit(worker: str) -> None:
        try:
            while not is_over.is_set():
                visits = cold_runs.visits(mesh)
                hits.extend(told.cached for _ in range(2) for told in visits.each(worker))
        except BaseException as error:
            failures.append(error)

    visiting = threading.Thread(target=visit, args=("decode-1",))
    visiting.start()
    try:
        for number, name in enumerate(("b", "c", "a", "b", "c"), start=1):
            # In the middle of the second round.
            wait_for(partial(has_told, 6 * number), what=lambda: "answers", timeout_s=60)
            mesh.kill_node(name)
            mesh.start_node(name)
            mesh.wait_for_peers()
    finally:
        is_over.set()
        visiting.join()
    assert not failures
    assert HIT_TOKENS in hits
