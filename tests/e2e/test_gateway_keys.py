"""API keys at a real gateway: who is let in, what it may use, and what is on record."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal.inference.v1 import generation_pb2
from shoal.inference.v1 import inference_service_pb2 as pb
from shoal.inference.v1 import inference_service_pb2_grpc as rpc
from shoal_common import identity
from shoal_common.api_keys import hash_of
from support.gateway_mesh import MODEL_DIR, GatewayMesh, gateway_mesh
from support.service_process import service_process

PLAIN: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Hello"}],
    "thinking": {"type": "disabled"},
    "max_tokens": 12,
    "seed": 5,
    "ignore_eos": True,
}
MESSAGES = {
    "model": "deepseek-flash",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hello"}],
    "metadata": {"user_id": "ann"},
}
CHAT = "/v1/chat/completions"
SECRETS = {
    name: f"sk-of-{name}-long-enough-to-be-one" for name in ("free", "slot", "rate", "words", "new", "shared", "claude")
}
KEYS = """
[keys.free]
hash = "{free}"
tenant = "team"
priority = 7
[keys.slot]
hash = "{slot}"
max_concurrency = 1
[keys.rate]
hash = "{rate}"
requests_per_minute = 2
[keys.words]
hash = "{words}"
output_tokens_per_minute = 1200
input_tokens_per_minute = 100
[keys.claude]
hash = "{claude}"
requests_per_minute = 1
[keys.shared]
hash = "{shared}"
requests_per_minute = 4
"""


def keys_text(more: str = "") -> str:
    return (KEYS + more).format(**{name: hash_of(secret) for name, secret in SECRETS.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text(keys_text())
    return path


@pytest.fixture(scope="module")
def mesh(folder: Path, keys_file: Path) -> Iterator[GatewayMesh]:
    settings = {"SHOAL_GATEWAY_API_KEYS_FILE": str(keys_file), "SHOAL_CACHE_SECRET": "s"}
    with gateway_mesh(folder, gateway=settings, rank={"SHOAL_MOCK_RANK_MS_PER_TOKEN": "2"}) as made:
        yield made


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


@pytest.fixture
def http(mesh: GatewayMesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{mesh.http}", timeout=20) as client:
        yield client


def wait_for(condition: Any, what: str, timeout_s: float = 10.0) -> Any:
    give_up = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what} did not come true"
        time.sleep(0.01)
    return found


def log_lines(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "gateway.log").read_text().splitlines()
    made = [json.loads(one) for one in lines if one.startswith("{")]
    return [one for one in made if one.get("event") == event]


def metric(mesh: GatewayMesh, name: str) -> float:
    shown = urllib.request.urlopen(f"http://{mesh.gateway.ready['admin']}/metrics", timeout=5).read().decode()
    found = [one for one in shown.splitlines() if one.startswith(name + " ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic " + SECRETS["free"]}],
)
def test_strangers_get_a_401_that_says_nothing_of_keys(http: httpx.Client, headers: dict[str, str]) -> None:
    for path in (CHAT, "/tokenize"):
        answer = http.post(path, json=PLAIN, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert http.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/anthropic/v1/messages", "/v1/messages/count_tokens"])
def test_a_path_of_anthropic_refuses_in_its_form(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=MESSAGES, headers={"x-api-key": "wrong"})
    body = answer.json()
    assert (answer.status_code, body["type"]) == (401, "error")
    assert (body["error"]["type"], body["error"]["code"]) == ("authentication_error", "invalid_api_key")


def test_limits_are_told_to_anthropics_clients_in_their_headers_and_counting_counts_for_nothing(
    http: httpx.Client,
) -> None:
    def ask(path: str) -> httpx.Response:
        return http.post(path, json=MESSAGES, headers={"x-api-key": SECRETS["claude"]})

    assert ask("/v1/messages/count_tokens").status_code == 200
    answer = ask("/v1/messages")
    assert answer.status_code == 200
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert ask("/v1/messages/count_tokens").status_code == 200
    refused = ask("/v1/messages")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.json()["error"]["code"] == "requests_per_minute"
    assert 55 <= int(refused.headers["retry-after"]) <= 60


@pytest.mark.parametrize("path", ["/health", "/healthz", "/live", "/ready", "/readyz"])
def test_probes_need_no_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_the_admin_address_needs_no_key(mesh: GatewayMesh) -> None:
    for path in ("metrics", "healthz", "readyz"):
        assert urllib.request.urlopen(f"http://{mesh.gateway.ready['admin']}/{path}", timeout=5).status == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_comes_by_either_header(http: httpx.Client, header: str) -> None:
    shown = bearer("free") if header == "authorization" else {header: SECRETS["free"]}
    answer = http.post(CHAT, json=PLAIN, headers=shown)
    assert answer.status_code == 200
    assert not [one for one in answer.headers if "ratelimit" in one]


def test_priority_tenant_and_user_travel_with_the_request(mesh: GatewayMesh, http: httpx.Client) -> None:
    def submitted(name: str, user_id: str) -> Any:
        before = len(mesh.scheduler.told("submit"))
        # What a client says of itself by headers is nobody's business.
        said = {"x-shoal-priority": "99", "x-shoal-tenant": "boss", "baggage": "tenant=boss,priority=99"}
        prompt = [{"role": "user", "content": "Hello " * 300}]
        body = {**PLAIN, "messages": prompt, "user_id": user_id, "max_tokens": 1}
        assert http.post(CHAT, json=body, headers={**bearer(name), **said}).status_code == 200
        return mesh.scheduler.told("submit")[before].submit

    mine, other = submitted("free", "ann"), submitted("slot", "ann")
    assert (mine.priority, other.priority) == (7, 0)
    assert mine.tenant == identity.tenant_tag("s", tenant="team").hex()[:16]
    assert other.tenant != mine.tenant
    assert mine.user == identity.tenant_tag("s", tenant="ann").hex()[:16]
    chains = [
        one.chains[0].block_hashes[0] for one in (mine, submitted("free", "bob"), submitted("free", "ann"), other)
    ]
    assert chains[0] == chains[2]
    assert len(set(chains)) == 3


def test_a_slot_is_held_from_the_head_to_the_end_of_an_answer(http: httpx.Client, mesh: GatewayMesh) -> None:
    body = {**PLAIN, "max_tokens": 2000, "stream": True}
    with http.stream("POST", CHAT, json=body, headers=bearer("slot")) as first:
        assert first.status_code == 200
        # Kept: where the iterator goes, the connection goes.
        lines = first.iter_lines()
        next(lines)
        second = http.post(CHAT, json=PLAIN, headers=bearer("slot"))
        assert (second.status_code, second.json()["error"]["code"]) == (429, "concurrency_exceeded")
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert int(second.headers["retry-after"]) >= 1
    wait_for(
        lambda: http.post(CHAT, json=PLAIN, headers=bearer("slot")).status_code == 200, "a slot of an aborted answer"
    )


def test_requests_per_minute_are_counted_down_in_headers_and_refused_at_the_end(mesh: GatewayMesh) -> None:
    client = openai.OpenAI(base_url=mesh.url, api_key=SECRETS["rate"], max_retries=0, timeout=20)
    body = {key: value for key, value in PLAIN.items() if key not in ("thinking", "ignore_eos")}
    for remaining in ("1", "0"):
        raw = client.chat.completions.with_raw_response.create(**body)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == remaining
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**body)
    assert refused.value.code == "requests_per_minute"
    headers = refused.value.response.headers
    assert 25 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_are_reserved_and_what_was_not_used_comes_back(http: httpx.Client) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return http.post(CHAT, json={**PLAIN, **fields}, headers=bearer("words"))

    first = ask(max_tokens=12)
    assert first.status_code == 200
    used = first.json()["usage"]["completion_tokens"]
    # 20 tokens come in a second.
    refused = ask(max_tokens=1200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "output_tokens_per_minute")
    assert 1 <= int(refused.headers["retry-after"]) <= math.ceil(used / 20)
    assert ask(max_tokens=1200 - used, stop=["e"]).status_code == 200
    long = ask(messages=[{"role": "user", "content": "word " * 200}])
    assert (long.status_code, long.json()["error"]["code"]) == (429, "input_tokens_per_minute")
    assert "retry-after" not in long.headers
    assert long.headers["x-should-retry"] == "false"


def test_every_request_is_on_record_with_its_exact_usage(mesh: GatewayMesh, http: httpx.Client, folder: Path) -> None:
    whole = http.post(CHAT, json=PLAIN, headers=bearer("free"))
    request_id, usage = whole.headers["x-request-id"], whole.json()["usage"]
    line = wait_for(lambda: [one for one in log_lines(folder, "usage") if one["request_id"] == request_id], "a line")[0]
    assert (line["key"], line["api"], line["outcome"], line["attempts"]) == ("free", "/chat/completions", "ok", 1)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    before = metric(mesh, 'shoal_key_tokens_total{key="free",kind="output"}')
    with http.stream("POST", CHAT, json={**PLAIN, "max_tokens": 3000, "stream": True}, headers=bearer("free")) as cut:
        request_id = cut.headers["x-request-id"]
        next(cut.iter_lines())
    line = wait_for(lambda: [one for one in log_lines(folder, "usage") if one["request_id"] == request_id], "a line")[0]
    assert line["outcome"] == "cancelled"
    assert 0 < line["completion_tokens"] < 3000
    assert metric(mesh, 'shoal_key_tokens_total{key="free",kind="output"}') - before == line["completion_tokens"]


def test_keys_are_asked_for_by_grpc_too(mesh: GatewayMesh) -> None:
    request = pb.GenerateRequest(generation=generation_pb2.Generation(text="Hello"))
    request.generation.sampling.max_tokens = 3
    with grpc.insecure_channel(mesh.grpc) as channel:
        stub = rpc.InferenceServiceStub(channel)
        calls: list[Any] = [
            lambda metadata: stub.Generate(request, metadata=metadata, timeout=10),
            lambda metadata: list(
                stub.GenerateStream(
                    pb.GenerateStreamRequest(generation=request.generation), metadata=metadata, timeout=10
                )
            ),
            lambda metadata: stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=10),
        ]
        for call in calls:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    call(metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            call((("authorization", f"Bearer {SECRETS['free']}"),))
        call = calls[0]
        # Whether the two of a minute are used up already depends on which tests ran before.
        with pytest.raises(grpc.RpcError) as over:
            [call((("x-api-key", SECRETS["rate"]),)) for _ in range(3)]
        assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = over.value.trailing_metadata()
        assert b"type.googleapis.com/google.rpc.QuotaFailure" in dict(trailing)["grpc-status-details-bin"]


def test_a_key_that_was_added_opens_without_a_restart_and_a_spoiled_file_takes_none_away(
    mesh: GatewayMesh, http: httpx.Client, folder: Path, keys_file: Path
) -> None:
    def replace(text: str) -> None:
        other = keys_file.with_suffix(".new")
        other.write_text(text)
        os.replace(other, keys_file)

    def status() -> int:
        return http.get("/v1/models", headers=bearer("new")).status_code

    assert status() == 401
    replace(keys_text('[keys.new]\nhash = "{new}"\n'))
    wait_for(lambda: status() == 200, "the new key")
    replace("[keys")
    wait_for(lambda: log_lines(folder, "keys file not taken, the keys before stay in force"), "a line")
    assert metric(mesh, 'shoal_api_key_reloads_total{outcome="refused"}') == 1
    assert status() == 200
    replace(keys_text())
    wait_for(lambda: status() == 401, "the key's end")


def test_two_gateways_share_a_limit_and_the_rest_of_one_has_it_whole(
    mesh: GatewayMesh, http: httpx.Client, keys_file: Path, tmp_path: Path
) -> None:
    environment = {
        "SHOAL_NATS_URL": mesh.nats.url,
        "SHOAL_MESH": "test",
        "SHOAL_GATEWAY_HTTP_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_LISTEN_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_MODEL": str(MODEL_DIR),
        "SHOAL_GATEWAY_API_KEYS_FILE": str(keys_file),
        "SHOAL_CACHE_SECRET": "s",
        "SHOAL_GATEWAY_DRAIN_GRACE_S": "1",
    }

    def ask(base: str) -> int:
        return httpx.post(f"http://{base}{CHAT}", json=PLAIN, headers=bearer("shared"), timeout=20).status_code

    assert ask(mesh.http) == 200
    with service_process("shoal_gateway", log=tmp_path / "other.log", environment=environment) as other:
        base = str(other.ready["http"])
        wait_for(lambda: httpx.get(f"http://{base}/readyz").status_code == 200, "the other gateway")
        # Here 3 of 4 are left, and half of it since the other came; there a share of 2.
        assert [ask(base) for _ in range(3)] == [200, 200, 429]
        assert [ask(mesh.http) for _ in range(2)] == [200, 429]


@pytest.mark.long
def test_a_gateway_told_to_serve_anyone_says_so_and_lets_no_stranger_drain_it(tmp_path: Path) -> None:
    environment = {
        "SHOAL_GATEWAY_AUTH": "off",
        "SHOAL_GATEWAY_HTTP_ADDRESS": "0.0.0.0:0",
        "SHOAL_GATEWAY_LISTEN_ADDRESS": "0.0.0.0:0",
        "SHOAL_GATEWAY_MODEL": str(MODEL_DIR),
    }
    with service_process("shoal_gateway", log=tmp_path / "gateway.log", environment=environment) as gateway:
        port = gateway.address.rpartition(":")[2]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = admin_rpc.AdminServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Drain(admin.DrainRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    (line,) = log_lines(tmp_path, "anyone who reaches this gateway is served: SHOAL_GATEWAY_AUTH is off")
    assert line["level"] == "WARNING"
