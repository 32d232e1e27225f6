"""The gateway's bench where nothing streams fast: time to the first token, idle streams, readers that never read."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from bench.gateway_load import request_bytes
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from support.mesh import Mesh

IDLE_STREAMS = 1000
NEVER_READ = 500
TURNS = 60
WARM_UP_TURNS = 15


def resident_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def first_event_s(address: str, body: dict[str, Any]) -> Callable[[int], float]:
    """Seconds from a request to the first event, over one connection; the turn makes each prompt another one."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(turn: int) -> float:
        data = json.dumps({**body, "messages": [{"role": "user", "content": f"{turn} {PROMPT}"}]})
        began_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        line = answer.readline()
        took_s = time.perf_counter() - began_s
        if not line.startswith(b"data: {"):
            raise RuntimeError(f"no event came: {line!r} {answer.read()!r}")
        answer.read()
        return took_s

    return ask


PROMPT = "The cat sat on the mat, and the dog saw the cat. " * 6


def direct_first_token_s(mesh: Mesh, prompt_tokens: int) -> tuple[Callable[[int], float], contextlib.ExitStack]:
    """Seconds from `Generate` at the decode worker, which prefills itself, to its first tokens."""
    stack = contextlib.ExitStack()
    channel = stack.enter_context(grpc.insecure_channel(mesh["decode_worker"].address))
    stub: Any = rpc.DecodeServiceStub(channel)

    def ask(turn: int) -> float:
        prompt = [0, *((turn * 7 + index * 13) % 200 + 20 for index in range(prompt_tokens - 1))]
        params = sampling_pb2.SamplingParams(max_tokens=2, seed=turn, ignore_eos=True)
        request = pb.GenerateRequest(request_id=f"bench-{turn}", attempt=1, prompt_ids=prompt, params=params)
        took_s = 0.0
        began_s = time.perf_counter()
        for event in stub.Generate(request, timeout=30):
            if event.HasField("entries") and not took_s:
                took_s = time.perf_counter() - began_s
        return took_s

    return ask, stack


def count_prompt(address: str) -> int:
    """Tokens of the prompt that `first_event_s` sends."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    data = json.dumps({"messages": [{"role": "user", "content": f"10 {PROMPT}"}]})
    connection.request("POST", "/v1/tokenize", data, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["count"])


def added_ms(through: Callable[[int], float], base: Callable[[int], float]) -> tuple[float, float, float]:
    """Medians, turn by turn: the difference, through the gateway, without it; milliseconds."""
    taken: list[tuple[float, float]] = []
    for turn in range(WARM_UP_TURNS + TURNS):
        taken.append((through(turn), base(turn)))
    kept = taken[WARM_UP_TURNS:]
    with_s, without_s = median(one[0] for one in kept), median(one[1] for one in kept)
    return 1e3 * (with_s - without_s), 1e3 * with_s, 1e3 * without_s


def _connect(address: str, count: int, body: dict[str, Any]) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    request = request_bytes(address, body)
    sockets = []
    for _ in range(count):
        one = socket.socket()
        # Small windows and segments, or the kernel would take megabytes of each off the gateway's hands.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        one.settimeout(30)
        one.connect((host, int(port)))
        one.sendall(request)
        sockets.append(one)
    return sockets


def _in_flight(address: str) -> float:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("shoal_in_flight_requests ")))


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise RuntimeError("it did not come true in time")
        time.sleep(0.1)


@contextlib.contextmanager
def many_files(count: int) -> Iterator[None]:
    """Room for so many sockets in this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def idle_streams_mb(address: str, admin: str, pid: int, body: dict[str, Any]) -> float:
    """What streams that have begun and say next to nothing cost above the gateway without them, MB."""
    _warm_up(address, admin, body)
    before_mb = resident_mb(pid)
    sockets = _connect(address, IDLE_STREAMS, body)
    _until(lambda: _in_flight(admin) >= IDLE_STREAMS, 60)
    for one in sockets:
        # Its first event: the stream is open, not only queued.
        if not one.recv(100).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("a stream did not begin")
    during_mb = resident_mb(pid)
    for one in sockets:
        one.close()
    _until(lambda: _in_flight(admin) == 0, 60)
    return during_mb - before_mb


def never_read_mb(address: str, admin: str, pid: int, body: dict[str, Any]) -> dict[str, float]:
    """Memory of the gateway, MB: before, while nobody reads, after all are cut, and after a second such round."""
    _warm_up(address, admin, body)
    found = {"before": resident_mb(pid)}
    peak = most = 0.0
    for name in ("after_first_round", "after_second_round"):
        sockets = _connect(address, NEVER_READ, body)
        give_up = time.monotonic() + 180
        while (in_flight := _in_flight(admin)) > 0:
            most = max(most, in_flight)
            peak = max(peak, resident_mb(pid))
            if time.monotonic() > give_up:
                raise RuntimeError("readers that never read are not cut")
            time.sleep(0.1)
        if not most:
            raise RuntimeError("nothing was in flight: the requests were refused")
        found[name] = resident_mb(pid)
        for one in sockets:
            one.close()
    return {**found, "peak": peak, "in_flight_at_most": most}


def _warm_up(address: str, admin: str, body: dict[str, Any]) -> None:
    for one in _connect(address, 32, {**body, "max_tokens": 4}):
        while b"[DONE]" not in one.recv(65536):
            pass
        one.close()
    _until(lambda: _in_flight(admin) == 0, 30)
