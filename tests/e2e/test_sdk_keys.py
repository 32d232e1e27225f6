"""How keys and limits look to the `openai` and `anthropic` packages: their own classes of errors, and their retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from shoal_common.api_keys import hash_of
from support.gateway_mesh import GatewayMesh, gateway_mesh

pytestmark = pytest.mark.long

SECRETS = {name: f"sk-of-{name}-long-enough-to-be-one" for name in ("open", "slot", "rate", "claude")}
LIMITS = {
    "open": "",
    "slot": "max_concurrency = 1",
    "rate": "requests_per_minute = 60",
    "claude": "max_concurrency = 1",
}
TALK = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "deepseek-flash", "messages": TALK, "max_tokens": 5}
MESSAGE: dict[str, Any] = {"model": "claude-of-no-year", "messages": TALK, "max_tokens": 5}
ENDLESS: dict[str, Any] = {"max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    keys = folder / "keys.toml"
    keys.write_text(
        "\n".join(f'[keys.{name}]\nhash = "{hash_of(SECRETS[name])}"\n{limit}' for name, limit in LIMITS.items())
    )
    settings = {"SHOAL_GATEWAY_API_KEYS_FILE": str(keys), "SHOAL_CACHE_SECRET": "s"}
    with gateway_mesh(folder, gateway=settings, rank={"SHOAL_MOCK_RANK_MS_PER_TOKEN": "2"}) as made:
        yield made


def openai_of(mesh: GatewayMesh, key: str, **settings: Any) -> Any:
    return openai.OpenAI(base_url=mesh.url, api_key=key, **{"timeout": 20, "max_retries": 0, **settings})


def anthropic_of(mesh: GatewayMesh, **settings: Any) -> Any:
    return anthropic.Anthropic(base_url=f"http://{mesh.http}", timeout=20, max_retries=0, **settings)


def test_a_stranger_is_an_authentication_error_in_both_packages(mesh: GatewayMesh) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai_of(mesh, "sk-nobody").chat.completions.create(**CHAT)
    with pytest.raises(openai.AuthenticationError):
        openai_of(mesh, "sk-nobody").models.list()
    for how in ("api_key", "auth_token"):
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_of(mesh, **{how: "sk-nobody"}).messages.create(**MESSAGE)


def test_a_key_opens_however_its_package_sends_it(mesh: GatewayMesh) -> None:
    assert openai_of(mesh, SECRETS["open"]).chat.completions.create(**CHAT).usage.completion_tokens <= 5
    for how in ("api_key", "auth_token"):
        assert anthropic_of(mesh, **{how: SECRETS["open"]}).messages.create(**MESSAGE).usage.output_tokens <= 5


def test_a_used_up_limit_is_a_rate_limit_error_and_ends_with_the_stream_that_held_it(mesh: GatewayMesh) -> None:
    client = openai_of(mesh, SECRETS["slot"])
    with client.chat.completions.create(**{**CHAT, **ENDLESS}) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT)
        assert refused.value.type == "rate_limit_error"
        assert refused.value.code
    served = openai_of(mesh, SECRETS["slot"], max_retries=3).chat.completions.create(**CHAT)
    assert served.usage.completion_tokens <= 5

    claude = anthropic_of(mesh, api_key=SECRETS["claude"])
    with claude.messages.create(**{**MESSAGE, **ENDLESS}) as stream:
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError) as limited:
            claude.messages.create(**MESSAGE)
    assert limited.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]


def test_the_wait_that_is_told_is_enough_for_the_packages_own_retry(mesh: GatewayMesh) -> None:
    statuses: list[int] = []
    hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    began_s = time.monotonic()
    with httpx.Client(event_hooks=hooks) as http:
        # Sixty a minute at once, then one a second.
        client = openai_of(mesh, SECRETS["rate"], max_retries=1, http_client=http)
        while 429 not in statuses:
            client.chat.completions.create(**{**CHAT, "max_tokens": 1})
            assert time.monotonic() - began_s < 20
    assert statuses[-2:] == [429, 200]
