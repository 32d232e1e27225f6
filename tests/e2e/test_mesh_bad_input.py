"""Bad input of every kind, by HTTP and gRPC: a typed refusal, and the next good request is served as before."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal.decode.v1 import decode_service_pb2_grpc as decode_rpc
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as cache_rpc
from shoal.prefill.v1 import prefill_service_pb2 as prefill_pb
from shoal.prefill.v1 import prefill_service_pb2_grpc as prefill_rpc
from shoal_client import Client, ShoalError
from shoal_common.rpc import from_rpc_error
from support.asking import Question, ask
from support.mesh import Mesh
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(120)

HI = [{"role": "user", "content": "Hi"}]
# generation.text, whose three bytes are not UTF-8.
NO_UTF8 = b"\x0a\x05\x1a\x03\xff\xfe\xfd"
GOOD = Question(prompt=tuple(prompt_of(20)), max_tokens=4)


@pytest.fixture(scope="module")
def good_tokens(whole: Mesh) -> tuple[tuple[int, ...], ...]:
    """What the mesh answers before all tests here."""
    with Client(whole.grpc, timeout_s=60) as connected:
        return ask(connected, GOOD).tokens


@pytest.fixture
def served(client: Client, good_tokens: tuple[tuple[int, ...], ...]) -> Iterator[Client]:
    """A mesh that answers after the test as it did before."""
    yield client
    assert ask(client, GOOD).tokens == good_tokens


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "gpt-4"}, 404, "model_not_found"),
        ({"model": 7}, 400, "invalid_argument"),
        ({"messages": []}, 400, "invalid_argument"),
        ({"messages": None}, 400, "invalid_argument"),
        ({"messages": "Hi"}, 400, "invalid_argument"),
        ({"messages": [{"role": "nobody", "content": "Hi"}]}, 400, "invalid_argument"),
        ({"messages": [{"role": "user", "content": {"deep": [1]}}]}, 400, "invalid_argument"),
        ({"messages": [{"role": "user", "content": "the cat " * 4096}]}, 400, "context_length_exceeded"),
        ({"max_tokens": 0}, 400, "invalid_argument"),
        ({"max_tokens": -1}, 400, "invalid_argument"),
        ({"max_tokens": "many"}, 400, "invalid_argument"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded"),
        ({"max_tokens": 10**30}, 400, "invalid_argument"),
        ({"temperature": "hot"}, 400, "invalid_argument"),
        ({"temperature": 3}, 400, "invalid_argument"),
        ({"top_p": -0.1}, 400, "invalid_argument"),
        ({"n": 0}, 400, "invalid_argument"),
        ({"n": 9}, 400, "invalid_argument"),
        ({"seed": -1}, 400, "invalid_argument"),
        ({"seed": 2**64}, 400, "invalid_argument"),
        ({"stop": [""]}, 400, "invalid_argument"),
        ({"stop": 5}, 400, "invalid_argument"),
        ({"logit_bias": {"512": 1}}, 400, "invalid_argument"),
        ({"logit_bias": {"-1": 1}}, 400, "invalid_argument"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_argument"),
        ({"shoal": {"stop_token_ids": [-1]}}, 400, "token_out_of_range"),
        ({"shoal": {"stop_token_ids": [512]}}, 400, "token_out_of_range"),
        ({"shoal": {"stop_token_ids": [2**70]}}, 400, "token_out_of_range"),
        ({"shoal": {"unknown": 1}}, 400, "unknown_field"),
        ({"stream": "yes"}, 400, "invalid_argument"),
    ],
)
def test_a_wrong_field_of_a_chat_is_a_client_error_with_a_stable_code(
    whole: Mesh, served: Client, fields: dict[str, Any], status: int, code: str
) -> None:
    body = {"model": "deepseek-flash", "messages": HI, "max_tokens": 4, **fields}
    response = httpx.post(f"{whole.http}/v1/chat/completions", json=body, timeout=20)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": "deepseek-flash", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "deepseek-flash", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "deepseek-flash", "messages": NaN}',
        b"[" * 100_000,
    ],
    ids=["nothing", "cut off", "no object", "invalid utf-8", "half a surrogate pair", "not json", "too deep"],
)
def test_a_body_that_is_no_json_object_is_a_client_error(whole: Mesh, served: Client, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{whole.http}/v1/chat/completions", content=raw, headers=headers, timeout=20)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/detokenize", {"tokens": [-1]}, "token_out_of_range"),
        ("/detokenize", {"tokens": [512]}, "token_out_of_range"),
        ("/detokenize", {"tokens": ["a"]}, "invalid_argument"),
        ("/detokenize", {}, "invalid_argument"),
        ("/tokenize", {"prompt": 5}, "invalid_argument"),
    ],
)
def test_wrong_tokens_over_http_are_a_client_error(whole: Mesh, path: str, body: dict[str, Any], code: str) -> None:
    response = httpx.post(f"{whole.http}{path}", json=body, timeout=20)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


def generation(**fields: Any) -> generation_pb2.Generation:
    sampling = sampling_pb2.SamplingParams(max_tokens=4, **fields.pop("sampling", {}))
    prompt = fields if {"chat", "text", "tokens"} & fields.keys() else {"text": "Hi", **fields}
    return generation_pb2.Generation(sampling=sampling, **prompt)


@pytest.mark.parametrize(
    ("asked", "code", "reason"),
    [
        (generation_pb2.Generation(), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(model="gpt-4"), "NOT_FOUND", "MODEL_NOT_FOUND"),
        (generation(chat=chat_pb2.ChatPrompt()), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(tokens={"ids": []}), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(tokens={"ids": [512]}), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        (generation(tokens={"ids": [2**32 - 1]}), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        (generation(tokens={"ids": [5] * 4097}), "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
        (generation(tokens={"ids": [5] * 4093}), "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
        (generation(sampling={"temperature": -1.0}), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(sampling={"temperature": float("nan")}), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(sampling={"top_p": 0.0}), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(sampling={"min_tokens": 5}), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(sampling={"stop_token_ids": [512]}), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        (generation(n=0), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(n=9), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(stop=[""]), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(tokens={"ids": [5]}, stop=["a"]), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (generation(user_id="u" * 513), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
def test_a_wrong_generation_is_a_status_with_a_stable_reason(
    served: Client, asked: generation_pb2.Generation, code: str, reason: str
) -> None:
    with pytest.raises(ShoalError) as raised:
        served.generate(asked, timeout_s=20)
    assert (raised.value.code, raised.value.reason) == (code, reason), raised.value.message


@pytest.mark.parametrize("max_tokens", [0, 4096, 2**31, 2**32 - 1])
def test_max_tokens_of_nothing_or_more_than_the_context_is_refused(served: Client, max_tokens: int) -> None:
    asked = generation_pb2.Generation(text="Hi", sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens))
    with pytest.raises(ShoalError) as raised:
        served.generate(asked, timeout_s=20)
    assert raised.value.code == "INVALID_ARGUMENT"


def test_bytes_that_are_no_message_are_a_status_and_not_the_end(whole: Mesh, served: Client) -> None:
    with grpc.insecure_channel(whole.grpc) as channel:
        call: Any = channel.unary_unary(  # type: ignore[call-arg]
            "/shoal.inference.v1.InferenceService/Generate"
        )
        for raw in (b"\xff\xff\xff", NO_UTF8):
            with pytest.raises(grpc.RpcError) as raised:
                call(raw, timeout=10)
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


def direct(**fields: Any) -> decode_pb.GenerateRequest:
    params = sampling_pb2.SamplingParams(max_tokens=4, **fields.pop("params", {}))
    named = {"request_id": secrets.token_hex(8), "attempt": 1, "prompt_ids": [5, 6, 7], "params": params}
    return decode_pb.GenerateRequest(**{**named, **fields})


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (direct(request_id=""), "INVALID_ARGUMENT", ""),
        (direct(attempt=0), "INVALID_ARGUMENT", ""),
        (direct(prompt_ids=[]), "INVALID_ARGUMENT", ""),
        (direct(prompt_ids=[512]), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        (direct(prompt_ids=[5] * 4097), "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        (direct(choices=[{"output_ids": [512]}]), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        (direct(cache_root=b"short"), "INVALID_ARGUMENT", ""),
        (direct(params={"temperature": float("nan")}), "INVALID_ARGUMENT", ""),
        (direct(numerics_id="another"), "FAILED_PRECONDITION", "NUMERICS_MISMATCH"),
        (direct(gateway_id="stranger"), "FAILED_PRECONDITION", "FRAMES_NOT_OPEN"),
    ],
)
def test_a_wrong_call_of_a_decode_worker_is_a_status_with_a_reason(
    whole: Mesh, served: Client, request_: decode_pb.GenerateRequest, code: str, reason: str
) -> None:
    with grpc.insecure_channel(whole["decode_worker"].address) as channel, pytest.raises(grpc.RpcError) as raised:
        list(decode_rpc.DecodeServiceStub(channel).Generate(request_, timeout=20))
    error = from_rpc_error(raised.value)
    assert error.code == code, error.message
    assert error.reason == reason if reason else error.reason


def numerics_id(whole: Mesh) -> str:
    """The pair of the workers."""
    with grpc.insecure_channel(whole["decode_worker"].address) as channel:
        admitted, *_ = decode_rpc.DecodeServiceStub(channel).Generate(direct(), timeout=10)
        return admitted.admitted.numerics_id


def test_wrong_calls_of_prefill_worker_and_kv_cache_are_statuses_with_reasons(whole: Mesh, served: Client) -> None:
    with grpc.insecure_channel(whole["prefill_worker"].address) as channel:
        prefill = prefill_rpc.PrefillServiceStub(channel)
        for start, reason in (
            (prefill_pb.Start(request_id="r", prompt_ids=[5], numerics_id="another"), "NUMERICS_MISMATCH"),
            (prefill_pb.Start(request_id="r", prompt_ids=[512], numerics_id=numerics_id(whole)), "TOKEN_OUT_OF_RANGE"),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                list(prefill.Prefill(iter([prefill_pb.PrefillRequest(start=start)]), timeout=10))
            assert from_rpc_error(raised.value).reason == reason
    with grpc.insecure_channel(whole["kv_cache"].address) as channel:
        cache = cache_rpc.KvCacheServiceStub(channel)
        for request in (
            cache_pb.AcquireRequest(lease_id="l", block_hashes=[b"short"]),
            cache_pb.AcquireRequest(block_hashes=[bytes(32)]),
            cache_pb.AcquireRequest(lease_id="l", block_hashes=[bytes(32)], max_hit_tokens=1),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                cache.Acquire(request, timeout=10)
            assert from_rpc_error(raised.value).code == "INVALID_ARGUMENT"
