"""Traffic over a disk that is full, read-only or hangs: typed, counted, and the tokens of a cold run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_engine import LLM
from support.kv_mesh import KvMesh, kv_mesh
from support.kv_visits import ALL, NONE, ColdRuns, Visits
from support.mesh import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NAMESPACE = ("unshare", "--map-root-user", "--mount")
FULL_BYTES = 1 << 20
ROUNDS = 5
"""Four visits each: together several times FULL_BYTES."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvMesh]:
    workers = {"decode-1": "a", "prefill-1": "a"}
    with kv_mesh(tmp_path_factory.mktemp("disks"), model="nano", workers=workers) as mesh:
        yield mesh


@pytest.fixture
def mesh(started: KvMesh) -> Iterator[KvMesh]:
    """Without a node; a test starts its own."""
    yield started
    started.stop_nodes()


@pytest.fixture(scope="module")
def cold_runs(nano: LLM, text: list[int]) -> ColdRuns:
    return ColdRuns.of(nano, text)


def in_namespace(*commands: str) -> list[str]:
    """A node after these commands, in a mount namespace of its own."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace for this user")
    return [*NAMESPACE, "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def disk_of(mesh: KvMesh) -> pb.TierStats:
    return mesh.tier("a", pb.TIER_SSD)


def cached(mesh: KvMesh, visits: Visits) -> list[int]:
    """As `Visits.cached`, and what waits for the disk may wait."""
    tokens = [told.cached for told in visits.each()]
    mesh.wait_put()
    return tokens


def fill(mesh: KvMesh, cold_runs: ColdRuns) -> list[Visits]:
    """Visits that hit from memory while the disk becomes full."""
    rounds = [cold_runs.visits(mesh) for _ in range(ROUNDS)]
    for visits in rounds:
        assert cached(mesh, visits) == NONE
    wait_for(lambda: disk_of(mesh).failing_reason == "SSD_FULL", what=lambda: str(disk_of(mesh)), timeout_s=30)
    for visits in rounds:
        assert cached(mesh, visits) == ALL
    assert disk_of(mesh).failure_count > 0
    assert disk_of(mesh).written_bytes > 0
    return rounds


@pytest.mark.parametrize("fsync", ["interval", "always"])
def test_a_file_system_that_becomes_full(mesh: KvMesh, cold_runs: ColdRuns, tmp_path: Path, fsync: str) -> None:
    # LMDB's map has a size of its own: what is full is the files.
    wrapper = in_namespace(f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {tmp_path}")
    mesh.start_node("a", disk=tmp_path, wrapper=wrapper, ssd_fsync=fsync)
    fill(mesh, cold_runs)


def test_a_disk_that_was_full_is_filled_again_once_it_has_room(
    mesh: KvMesh, cold_runs: ColdRuns, tmp_path: Path
) -> None:
    node = mesh.start_node("a", disk=tmp_path)
    resource.prlimit(node.popen.pid, resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
    rounds = fill(mesh, cold_runs)
    mesh.kill_node("a")
    mesh.start_node("a", disk=tmp_path)
    # What it had was given up to make room, as far as that was needed.
    for visits in rounds:
        cached(mesh, visits)
    mesh.wait_written()
    assert disk_of(mesh).failing_reason == ""
    mesh.kill_node("a")
    mesh.start_node("a", disk=tmp_path)
    for visits in rounds:
        assert visits.cached() == ALL
    assert disk_of(mesh).read_bytes > 0


def test_a_disk_that_is_mounted_read_only_gives_its_hits(mesh: KvMesh, cold_runs: ColdRuns, tmp_path: Path) -> None:
    old, new = cold_runs.visits(mesh), cold_runs.visits(mesh)
    mesh.start_node("a", disk=tmp_path)
    assert old.cached() == NONE
    mesh.kill_node("a")
    wrapper = in_namespace(f"mount --bind {tmp_path} {tmp_path}", f"mount -o remount,bind,ro {tmp_path}")
    mesh.start_node("a", disk=tmp_path, wrapper=wrapper)
    assert cached(mesh, old) == ALL
    assert disk_of(mesh).read_bytes > 0
    assert cached(mesh, new) == NONE
    wait_for(lambda: disk_of(mesh).failing_reason == "SSD_READ_ONLY", what=lambda: str(disk_of(mesh)))
    assert cached(mesh, new) == ALL
    assert cached(mesh, old) == ALL


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    path = tmp_path / "fault"
    path.write_text("")
    return path


def start_faulty(mesh: KvMesh, tmp_path: Path, fault: Path, **settings: str) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {"DISK_FAULT": str(fault), "PYTHONPATH": path}
    disk = tmp_path / "disk"
    mesh.start_node("a", disk=disk, module="support.faulty_disk_node", environment=environment, **settings)


def test_a_disk_that_turns_read_only_and_back(mesh: KvMesh, cold_runs: ColdRuns, tmp_path: Path, fault: Path) -> None:
    old, new = cold_runs.visits(mesh), cold_runs.visits(mesh)
    start_faulty(mesh, tmp_path, fault)
    assert old.cached() == NONE
    fault.write_text("read-only")
    assert cached(mesh, new) == NONE
    wait_for(lambda: disk_of(mesh).failing_reason == "SSD_READ_ONLY", what=lambda: str(disk_of(mesh)))
    assert cached(mesh, new) == ALL
    fault.write_text("")
    mesh.wait_written()
    assert cold_runs.visits(mesh).cached() == NONE
    assert disk_of(mesh).failing_reason == ""
    mesh.kill_node("a")
    start_faulty(mesh, tmp_path, fault)
    assert cached(mesh, old) == ALL
    assert disk_of(mesh).read_bytes > 0


def test_a_disk_that_hangs_costs_one_timeout(mesh: KvMesh, cold_runs: ColdRuns, tmp_path: Path, fault: Path) -> None:
    visits = cold_runs.visits(mesh)
    start_faulty(mesh, tmp_path, fault)
    assert visits.cached() == NONE
    mesh.kill_node("a")
    start_faulty(mesh, tmp_path, fault, load_timeout_s="1")
    fault.write_text("hang")
    began_s = time.monotonic()
    assert cached(mesh, visits) == NONE
    # One second for the first; then the disk rests. The others are cold prompts.
    assert time.monotonic() - began_s < 10
    assert disk_of(mesh).read_bytes == 0
    assert cached(mesh, visits) == ALL, "from memory"
    fault.write_text("")
    other = cold_runs.visits(mesh)
    assert cached(mesh, other) == NONE
    assert cached(mesh, other) == ALL
