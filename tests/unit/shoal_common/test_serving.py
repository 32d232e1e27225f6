"""One service process from its ready line to its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal_common.errors import MeshError
from shoal_common.rpc import Readiness
from support.nats_server import NatsServer

TESTS = Path(__file__).resolve().parents[2]


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "support.tiny_service", *flags]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS), "SHOAL_NATS_URL": "off", **more}


@contextmanager
def tiny(*flags: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        command(*flags), env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def get(address: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def wait_for_status(address: str, path: str, status: int) -> None:
    give_up = time.monotonic() + 10
    while get(address, path)[0] != status:
        assert time.monotonic() < give_up, f"{path} did not become {status}"
        time.sleep(0.02)


def test_the_ready_line_names_open_ports_and_the_admin_pages_answer() -> None:
    with tiny() as (_, ready):
        assert (ready["event"], ready["service"]) == ("ready", "tiny")
        assert get(ready["admin"], "/healthz")[0] == 200
        assert get(ready["admin"], "/readyz")[0] == 200
        page = get(ready["admin"], "/metrics")[1]
        assert b"shoal_config_info" in page
        assert b"shoal_bus_slow_consumer_total 0.0" in page
        assert get(ready["admin"], "/nothing")[0] == 404
        with grpc.insecure_channel(ready["address"]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_sigterm_drains_within_the_grace_and_ends_with_status_0() -> None:
    with tiny("--drain-takes-s", "0.2") as (process, ready):
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "drain begun\n"
        status, page = get(ready["admin"], "/readyz")
        assert (status, json.loads(page)["missing"]) == (503, ["not draining"])
        assert process.wait(10) == 0
        assert process.stdout.read() == "drain done\n"


def test_a_drain_that_outlasts_the_grace_is_cut_off() -> None:
    with tiny("--drain-takes-s", "60", "--drain-grace-s", "0.2") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "drain begun\n"


@pytest.mark.parametrize("flag", ["--listen-address", "--admin-address"])
def test_an_occupied_port_is_one_line_and_status_2(flag: str) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        ended = subprocess.run(
            command(flag, address),
            env=environment(SHOAL_LOG_LEVEL="ERROR"),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert [line for line in ended.stderr.splitlines() if line.startswith("shoal tiny: cannot listen")]


def test_a_service_without_nats_is_alive_but_not_ready_and_joins_when_it_comes(nats_server: NatsServer) -> None:
    nats_server.stop()
    with tiny(SHOAL_NATS_URL=nats_server.url) as (_, ready):
        assert get(ready["admin"], "/healthz")[0] == 200
        status, page = get(ready["admin"], "/readyz")
        assert (status, json.loads(page)["missing"]) == (503, ["nats"])
        nats_server.start()
        wait_for_status(ready["admin"], "/readyz", 200)
        nats_server.stop()
        assert get(ready["admin"], "/readyz")[0] == 200


def test_readiness_needs_every_condition_and_ends_with_the_drain() -> None:
    heard: list[bool] = []
    readiness = Readiness("model", "nats")
    readiness.listen(heard.append)
    readiness.set("model")
    readiness.set("nats")
    readiness.set("nats")
    readiness.begin_drain()
    readiness.end_drain()
    assert heard == [False, True, False, True]
    with pytest.raises(KeyError):
        readiness.set("weather")


def test_errors_carry_their_metadata_as_text() -> None:
    assert dict(MeshError("no", wanted=3).metadata) == {"wanted": "3"}
