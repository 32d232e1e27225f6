"""What clients see of a gateway when something breaks: themselves, the worker, NATS, or the gateway's own end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal.inference.v1.inference_service_pb2 import GenerateStreamRequest
from shoal.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from shoal_client import Client, OutputForm, SamplingParams, generation
from shoal_common.rpc import from_rpc_error
from support.gateway_mesh import MODEL_DIR, GatewayMesh, gateway_mesh
from support.seldom import seldom
from support.service_process import ServiceProcess, service_process

BODY: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Hello"}],
    "thinking": {"type": "disabled"},
    "seed": 5,
    "ignore_eos": True,
    "stream": True,
}
GATEWAY = {
    "SHOAL_GATEWAY_KEEP_ALIVE_S": "0.1",
    "SHOAL_GATEWAY_ADMISSION_S": "0.1",
    "SHOAL_GATEWAY_WRITE_TIMEOUT_S": "1",
}


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not come true"
        time.sleep(0.01)


def numbers(service: ServiceProcess) -> dict[str, float]:
    with grpc.insecure_channel(service.address) as channel:
        stub: Any = admin_rpc.AdminServiceStub(channel)
        return dict(stub.GetStatus(admin.GetStatusRequest(), timeout=5).numbers)


def is_idle(rank: ServiceProcess) -> bool:
    state = numbers(rank)
    return state["open_requests"] == 0 and state["free_slots"] == 256


def said(text: str) -> str:
    """The content of a stream that came to its regular end."""
    events = [one.removeprefix("data: ") for one in text.split("\n\n") if one.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in events[:-1])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    """A rank that takes 5 ms a token."""
    with gateway_mesh(
        tmp_path_factory.mktemp("slow"), rank={"SHOAL_MOCK_RANK_MS_PER_TOKEN": "5"}, gateway=GATEWAY
    ) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_rank_at_once(slow: GatewayMesh, stream: bool) -> None:
    told = len(slow.scheduler.told("cancelled"))
    host, _, port = slow.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        body = json.dumps({**BODY, "stream": stream, "max_tokens": 3000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_for(lambda: not is_idle(slow.ranks[0]), "the rank's beginning")
        left_s = time.monotonic()
    wait_for(lambda: is_idle(slow.ranks[0]), "the rank's end")
    assert time.monotonic() - left_s < 2.0
    wait_for(lambda: len(slow.scheduler.told("cancelled")) == told + 1, "the scheduler's last word")


def test_a_grpc_client_that_leaves_frees_the_rank_at_once(slow: GatewayMesh) -> None:
    with Client(slow.grpc) as client:
        events = client.stream(generation([5, 6], sampling=SamplingParams(max_tokens=3000, ignore_eos=True)))
        assert next(events).HasField("head")
        assert next(events).HasField("delta")
        assert not is_idle(slow.ranks[0])
        events.close()  # type: ignore[attr-defined]
    wait_for(lambda: is_idle(slow.ranks[0]), "the rank's end")


def first_tokens_timed(mesh: GatewayMesh) -> float:
    with urllib.request.urlopen(f"http://{mesh.gateway.admin}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("shoal_ttft_seconds_count"))


def test_a_silence_is_filled_with_comments(slow: GatewayMesh) -> None:
    timed = first_tokens_timed(slow)
    slow.ranks[0].popen.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.8, slow.ranks[0].popen.send_signal, [signal.SIGCONT])
    timer.start()
    try:
        answer = httpx.post(f"{slow.url}/chat/completions", json={**BODY, "max_tokens": 3}, timeout=20)
    finally:
        timer.join()
    comments = answer.text.count(": keep-alive\n\n")
    assert 4 <= comments <= 9
    assert answer.text.startswith(": keep-alive")
    assert said(answer.text)
    assert first_tokens_timed(slow) == timed + 1


def test_a_silence_before_a_whole_answer_is_filled_with_blank_lines(slow: GatewayMesh) -> None:
    slow.ranks[0].popen.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.8, slow.ranks[0].popen.send_signal, [signal.SIGCONT])
    timer.start()
    try:
        body = {**BODY, "max_tokens": 3, "stream": False}
        answer = httpx.post(f"{slow.url}/chat/completions", json=body, timeout=20)
    finally:
        timer.join()
    blank = len(answer.text) - len(answer.text.lstrip("\n"))
    assert 4 <= blank <= 9
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["message"]["content"]


def test_a_silence_of_a_grpc_stream_is_filled_with_progress(slow: GatewayMesh) -> None:
    asked = generation([5, 6], sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    slow.ranks[0].popen.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.8, slow.ranks[0].popen.send_signal, [signal.SIGCONT])
    timer.start()
    try:
        with grpc.insecure_channel(slow.grpc) as channel:
            stub: Any = InferenceServiceStub(channel)
            read = list(stub.GenerateStream(GenerateStreamRequest(generation=asked), timeout=20))
    finally:
        timer.join()
    kinds = [event.WhichOneof("event") for event in read]
    assert 4 <= kinds.count("progress") <= 9
    assert kinds[:5] == ["head"] + ["progress"] * 4
    assert (kinds[-2], kinds[-1]) == ("finish", "tail")


def test_a_status_waits_for_the_rank_to_admit_the_request(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, gateway={**GATEWAY, "SHOAL_GATEWAY_ADMISSION_S": "5"}) as mesh:
        mesh.ranks[0].popen.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        timer = threading.Timer(0.5, mesh.ranks[0].popen.send_signal, [signal.SIGCONT])
        timer.start()
        try:
            with httpx.stream(
                "POST", f"{mesh.url}/chat/completions", json={**BODY, "max_tokens": 3}, timeout=20
            ) as answer:
                waited_s = time.monotonic() - began_s
                text = answer.read().decode()
        finally:
            timer.join()
    assert waited_s >= 0.5
    assert text.startswith("data: ")
    assert said(text)


def test_many_streams_begin_in_a_silence(slow: GatewayMesh) -> None:
    slow.ranks[0].popen.send_signal(signal.SIGSTOP)
    timer = threading.Timer(1.5, slow.ranks[0].popen.send_signal, [signal.SIGCONT])
    timer.start()

    def status(_: int) -> int:
        return httpx.post(f"{slow.url}/chat/completions", json={**BODY, "max_tokens": 3}, timeout=20).status_code

    try:
        with ThreadPoolExecutor(48) as clients:
            statuses = set(clients.map(status, range(48)))
    finally:
        timer.join()
    assert statuses == {200}


def test_a_draining_gateway_ends_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    rank = {"SHOAL_MOCK_RANK_MS_PER_TOKEN": "5"}
    with gateway_mesh(tmp_path, rank=rank, gateway=GATEWAY) as mesh:
        with httpx.stream(
            "POST", f"{mesh.url}/chat/completions", json={**BODY, "max_tokens": 200}, timeout=20
        ) as answer:
            lines = answer.iter_text()
            text = next(lines)
            mesh.gateway.popen.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"http://{mesh.http}/readyz").status_code == 503, "not ready")
            refused = httpx.post(f"{mesh.url}/chat/completions", json=BODY, timeout=20)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
            text += "".join(lines)
        assert said(text)
        assert mesh.gateway.popen.wait(15) == 0


def test_a_reader_that_never_reads_is_paused_then_cut(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, gateway=GATEWAY) as mesh:
        host, _, port = mesh.http.rpartition(":")
        before = resident_mb(mesh)
        readers = []
        body = json.dumps({**BODY, "n": 8, "max_tokens": 3900}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        for _ in range(8):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            raw.sendall(head.encode() + body)
            readers.append(raw)
        wait_for(lambda: numbers(mesh.ranks[0])["open_requests"] >= 8, "all requests at the rank")
        wait_for(lambda: is_idle(mesh.ranks[0]), "the cut")
        for raw in readers:
            raw.close()
        assert resident_mb(mesh) - before < 40
        assert httpx.post(f"{mesh.url}/chat/completions", json={**BODY, "max_tokens": 3}, timeout=20).status_code == 200


@pytest.mark.long
def test_a_slow_reader_pauses_its_own_request_only_and_gets_all_of_it(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, gateway={**GATEWAY, "SHOAL_GATEWAY_WRITE_TIMEOUT_S": "30"}) as mesh:
        body = {**BODY, "n": 8, "max_tokens": 3900}
        whole = httpx.post(f"{mesh.url}/chat/completions", json={**body, "stream": False}, timeout=60).json()
        before = resident_mb(mesh)
        host, _, port = mesh.http.rpartition(":")
        raw = socket.socket()
        # More than both sides' buffers hold is on its way: the gateway has to wait.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        connection = http.client.HTTPConnection(host, int(port))
        connection.sock = raw
        connection.request("POST", "/v1/chat/completions", body=json.dumps(body))
        answer = connection.getresponse()
        parts = [answer.read1(4096)]
        for _ in range(10):
            parts.append(answer.read1(4096))
            fast = httpx.post(f"{mesh.url}/chat/completions", json={**BODY, "max_tokens": 200}, timeout=20)
            assert said(fast.text)
            wait_for(lambda: numbers(mesh.ranks[0])["open_requests"] == 1, "the end of the fast one alone")
        assert resident_mb(mesh) - before < 20
        parts.append(answer.read())
        connection.close()
        events = [one.removeprefix("data: ") for one in b"".join(parts).decode().split("\n\n") if "data: " in one]
        assert events[-1] == "[DONE]"
        texts = dict.fromkeys(range(8), "")
        for choice in (json.loads(one)["choices"][0] for one in events[:-1]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == {one["index"]: one["message"]["content"] for one in whole["choices"]}
        wait_for(lambda: is_idle(mesh.ranks[0]), "the rank's end")


def test_a_grpc_reader_that_never_reads_is_cut_with_a_reason(tmp_path: Path) -> None:
    # Else the client's side takes megabytes before anybody asks for them.
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with gateway_mesh(tmp_path, gateway=GATEWAY) as mesh, grpc.insecure_channel(mesh.grpc, small_window) as channel:
        stub: Any = InferenceServiceStub(channel)
        params = SamplingParams(max_tokens=3900, ignore_eos=True)
        wanted = generation([5, 6], sampling=params, n=8, output_form=OutputForm.OUTPUT_FORM_TEXT_AND_TOKENS)
        events = stub.GenerateStream(GenerateStreamRequest(generation=wanted), timeout=60)
        assert next(events).HasField("head")
        wait_for(lambda: not is_idle(mesh.ranks[0]), "the rank's beginning")
        wait_for(lambda: is_idle(mesh.ranks[0]), "the cut")
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        assert from_rpc_error(caught.value).reason == "SLOW_READER"


def resident_mb(mesh: GatewayMesh) -> float:
    status = Path(f"/proc/{mesh.gateway.popen.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.parametrize("how", [signal.SIGSTOP, *seldom(signal.SIGKILL)])
def test_a_worker_that_dies_or_stops_costs_a_pause_and_no_token(tmp_path: Path, how: signal.Signals) -> None:
    rank = {"SHOAL_MOCK_RANK_MS_PER_TOKEN": "5"}
    gateway = {**GATEWAY, "SHOAL_GATEWAY_WORKER_SILENCE_S": "1.5"}
    with gateway_mesh(tmp_path, rank=rank, gateway=gateway, rank_count=2) as mesh:
        body = {**BODY, "max_tokens": 200, "n": 2, "stop": ["no such text"]}
        want = httpx.post(f"{mesh.url}/chat/completions", json={**body, "stream": False}, timeout=30).json()
        text = {0: "", 1: ""}
        with httpx.stream("POST", f"{mesh.url}/chat/completions", json=body, timeout=30) as answer:
            count = 0
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                text[choice["index"]] += choice["delta"].get("content") or ""
                count += 1
                if count == 50:
                    mesh.ranks[0].popen.send_signal(how)
        assert text == {one["index"]: one["message"]["content"] for one in want["choices"]}
        assert len(mesh.scheduler.told("lost")) == 1
        wait_for(lambda: is_idle(mesh.ranks[1]), "the second rank's end")
        # A stopped process would not hear that it shall end.
        mesh.ranks[0].popen.send_signal(signal.SIGCONT)


def test_without_nats_a_gateway_is_alive_and_not_ready(tmp_path: Path) -> None:
    environment = {
        "SHOAL_NATS_URL": "nats://127.0.0.1:1",
        "SHOAL_GATEWAY_HTTP_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_LISTEN_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_MODEL": str(MODEL_DIR),
    }
    with service_process("shoal_gateway", log=tmp_path / "log", environment=environment) as gateway:
        base = f"http://{gateway.ready['http']}"
        assert httpx.get(f"{base}/healthz").status_code == 200
        ready = httpx.get(f"{base}/readyz")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["nats", "scheduler", "decode worker"])
