"""Completions, prefixes and token endpoints of a real gateway, asked as their users ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.gateway_mesh import GatewayMesh, gateway_mesh

MODEL = "deepseek-flash"
PLAIN: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon",
    "max_tokens": 12,
    "seed": 5,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    with gateway_mesh(tmp_path_factory.mktemp("mesh"), gateway={"SHOAL_GATEWAY_MAX_IN_FLIGHT": "4"}) as made:
        yield made


@pytest.fixture(scope="module")
def http(mesh: GatewayMesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{mesh.http}", timeout=20) as client:
        yield client


def client(mesh: GatewayMesh, base: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{mesh.http}{base}", api_key="none", max_retries=0, timeout=20)


def ask(mesh: GatewayMesh, base: str = "/v1", **fields: Any) -> Any:
    return client(mesh, base).completions.create(**{**PLAIN, **fields})


@pytest.mark.parametrize("base", ["", "/v1", "/beta", "/beta/v1"])
def test_a_completion_has_the_shape_that_the_openai_package_reads(mesh: GatewayMesh, base: str) -> None:
    answer = ask(mesh, base)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.finish_reason, choice.logprobs) == (
        "text_completion",
        MODEL,
        "length",
        None,
    )
    assert choice.text
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, answer.usage.prompt_tokens + 12)
    assert answer.shoal["seed"] == 5


def test_streamed_and_whole_completions_are_the_same(mesh: GatewayMesh) -> None:
    fields: dict[str, Any] = {"n": 2, "echo": True, "logprobs": 1}
    whole = ask(mesh, **fields)
    said: dict[int, str] = {0: "", 1: ""}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    usages = []
    for chunk in ask(mesh, **fields, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            said[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
    assert said == {choice.index: choice.text for choice in whole.choices}
    assert tokens == {choice.index: choice.logprobs.tokens for choice in whole.choices}
    assert all(text.startswith("Once upon") for text in said.values())
    assert usages[-1].model_dump(exclude={"shoal"}) == whole.usage.model_dump(exclude={"shoal"})
    assert set(usages[:-1]) == {None}


def test_prompts_of_one_body_are_answered_as_if_they_were_alone(mesh: GatewayMesh) -> None:
    prompts = ["Once upon", "a time", "Once upon"]
    together = ask(mesh, prompt=prompts, n=2)
    alone = [choice.text for prompt in prompts for choice in ask(mesh, prompt=prompt, n=2).choices]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.completion_tokens == 72
    said = [""] * 6
    for chunk in ask(mesh, prompt=prompts, n=2, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
    assert said == alone


def test_more_prompts_than_the_gateway_holds_are_refused_whole(mesh: GatewayMesh, http: httpx.Client) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(mesh, prompt=["a"] * 5)
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
    assert ask(mesh, prompt=["a"] * 4).usage.completion_tokens == 48


def test_an_error_of_one_prompt_is_the_answer_to_all(mesh: GatewayMesh) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(mesh, prompt=["a", "b" * 5000])
    assert caught.value.code == "context_length_exceeded"


def test_token_ids_and_their_text_get_the_same_answer(mesh: GatewayMesh, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "Once upon"}).json()["tokens"]
    assert ask(mesh, prompt=ids).choices[0].text == ask(mesh).choices[0].text


def test_a_suffix_is_refused_where_the_model_has_no_tokens_for_it(mesh: GatewayMesh) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(mesh, "/beta", suffix="the end")
    assert (caught.value.code, caught.value.param) == ("suffix_unsupported", "suffix")


@pytest.mark.parametrize("base", ["/beta", "/v1"])
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_prefix_is_continued_as_content(mesh: GatewayMesh, base: str, thinking: str) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure: ", "prefix": True}]
    answer = client(mesh, base).chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=8,
        seed=5,
        extra_body={"ignore_eos": True, "thinking": {"type": thinking}},
    )
    message = answer.choices[0].message
    assert message.content
    assert not getattr(message, "reasoning_content", None)
    assert not message.content.startswith("Sure")


def test_a_prefix_of_reasoning_is_continued_as_reasoning(http: httpx.Client) -> None:
    prefix = {"role": "assistant", "content": "", "reasoning_content": "Let me", "prefix": True}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}, prefix],
        "max_tokens": 8,
        "ignore_eos": True,
    }
    message = http.post("/beta/chat/completions", json=body).json()["choices"][0]["message"]
    assert (bool(message["reasoning_content"]), bool(message["content"])) == (True, False)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "x", "prefix": True}, {"role": "user", "content": "y"}],
        [{"role": "user", "content": "y"}, {"role": "assistant", "content": "x", "prefix": "yes"}],
    ],
)
def test_a_wrong_prefix_is_a_bad_request(http: httpx.Client, messages: list[Any]) -> None:
    answer = http.post("/beta/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400


def test_models_are_listed_on_every_base(mesh: GatewayMesh) -> None:
    listed = [[one.id for one in client(mesh, base).models.list()] for base in ("", "/v1", "/beta")]
    assert MODEL in listed[0]
    assert listed == [listed[0]] * 3
    assert client(mesh, "/beta").models.retrieve(MODEL).id == MODEL


def test_tokens_come_back_as_the_text_they_were(http: httpx.Client) -> None:
    text = "naïve 🙂 <｜User｜> 日本 " * 200
    told = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert 3 in told["tokens"]
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_tokenised_as_it_would_be_asked(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    told = http.post("/v1/tokenize", json=chat).json()
    usage = http.post("/v1/chat/completions", json={**chat, "max_tokens": 1}).json()["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert told["token_strs"] is None


def test_a_conversation_that_fits_no_context_is_still_counted(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "word;" * 5000}]}
    told = http.post("/tokenize", json=chat).json()
    assert told["count"] > told["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
def test_what_is_no_text_or_token_is_named(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, content=json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
