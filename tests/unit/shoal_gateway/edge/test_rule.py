"""Whether a gateway asks for keys, by where it listens and what it has."""

from __future__ import annotations

import pytest
from shoal_common import settings
from shoal_common.telemetry import Metrics
from shoal_gateway.config import GatewayConfig
from shoal_gateway.edge.keys import BadKeys
from shoal_gateway.edge.opening import OpenEdge
from shoal_gateway.edge.rule import is_loopback

HASH = "sha256:" + "0" * 64


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"])
def test_only_this_machine_reaches_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "gateway:1", "localhost.example.com:1"])
def test_others_may_reach_any_other_address(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("name", ["http_address", "listen_address"])
def test_a_gateway_that_others_reach_does_not_start_without_keys(name: str) -> None:
    with pytest.raises(ValueError, match=f"SHOAL_GATEWAY_{name.upper()} is 0.0.0.0:80, which others can reach"):
        GatewayConfig(**{name: "0.0.0.0:80"})  # type: ignore[arg-type]
    assert GatewayConfig(**{name: "0.0.0.0:80"}, api_keys_file="f").asks_for_keys  # type: ignore[arg-type]
    assert not GatewayConfig(**{name: "0.0.0.0:80"}, auth="off").asks_for_keys  # type: ignore[arg-type]


def test_on_loopback_keys_are_asked_for_where_there_are_some_or_where_it_is_told() -> None:
    assert not GatewayConfig().asks_for_keys
    assert GatewayConfig(api_keys=(f"a={HASH}",)).asks_for_keys
    with pytest.raises(ValueError, match="SHOAL_GATEWAY_AUTH is required, but there are no API keys"):
        GatewayConfig(auth="required")


def test_keys_that_are_not_asked_for_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="SHOAL_GATEWAY_AUTH is off, but there are API keys"):
        GatewayConfig(auth="off", api_keys_file="f")


def test_keys_need_the_secret_that_keeps_caches_apart() -> None:
    config = GatewayConfig(api_keys=(f"a={HASH}",))
    with pytest.raises(BadKeys, match="SHOAL_CACHE_SECRET must be set"):
        OpenEdge(config, instance_id="g", cache_secret="", metrics=Metrics())
    OpenEdge(config, instance_id="g", cache_secret="s", metrics=Metrics())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GatewayConfig(api_keys=("a=b",)), "SHOAL_GATEWAY_API_KEYS: a: the hash must be sha256:"),
        (GatewayConfig(api_keys_file="/nowhere/k"), "SHOAL_GATEWAY_API_KEYS_FILE /nowhere/k: cannot be read"),
        (GatewayConfig(api_keys=(f"a={HASH}", f"a={HASH}")), "SHOAL_GATEWAY_API_KEYS: keys.a: there are two"),
    ],
)
def test_keys_that_cannot_be_used_are_named_by_their_setting(config: GatewayConfig, said: str) -> None:
    with pytest.raises(BadKeys, match=said):
        OpenEdge(config, instance_id="g", cache_secret="s", metrics=Metrics())


def test_a_start_that_would_let_strangers_in_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"SHOAL_GATEWAY_HTTP_ADDRESS": "0.0.0.0:8000"}
    with pytest.raises(SystemExit) as refused:
        settings.load_or_exit(GatewayConfig, service="gateway", environ=environ, argv=[])
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal gateway: SHOAL_GATEWAY_HTTP_ADDRESS is 0.0.0.0:8000, which others can reach")
    assert "SHOAL_GATEWAY_API_KEYS_FILE" in line


def test_keys_have_no_flag_and_are_not_shown() -> None:
    environ = {"SHOAL_GATEWAY_API_KEYS": f"a={HASH}, b={HASH[:-1]}1"}
    loaded = settings.load(GatewayConfig, service="gateway", environ=environ, argv=[])
    assert loaded.service.api_keys == (f"a={HASH}", f"b={HASH[:-1]}1")
    assert loaded.effective["SHOAL_GATEWAY_API_KEYS"] == "***"
    with pytest.raises(SystemExit):
        settings.load(GatewayConfig, service="gateway", environ={}, argv=["--api-keys", "a=b"])
