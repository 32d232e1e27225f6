from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from shoal_common import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PondConfig:
    listen_address: str = "127.0.0.1:0"
    block_count: int = 1024
    drain_grace_s: float = 5.0
    is_deep: bool = False
    mode: Literal["exact", "served"] = "exact"
    peers: tuple[str, ...] = ()
    limit: int | None = None
    password: str = field(default="", metadata=settings.SECRET)

    def __post_init__(self) -> None:
        if self.block_count < 1:
            raise ValueError(f"SHOAL_POND_BLOCK_COUNT must be positive, got {self.block_count}")


def load(environ: dict[str, str] | None = None, *argv: str) -> settings.Loaded[PondConfig]:
    return settings.load(PondConfig, service="pond", environ=environ or {}, argv=argv)


def test_defaults_hold_where_nothing_is_set() -> None:
    assert load().service == PondConfig()


def test_a_flag_beats_the_environment_which_beats_the_default() -> None:
    environ = {"SHOAL_POND_BLOCK_COUNT": "7", "SHOAL_POND_DRAIN_GRACE_S": "1.5"}
    config = load(environ, "--block-count", "8").service
    assert (config.block_count, config.drain_grace_s, config.mode) == (8, 1.5, "exact")


def test_values_are_read_in_the_type_of_their_field() -> None:
    environ = {
        "SHOAL_POND_IS_DEEP": "yes",
        "SHOAL_POND_MODE": "served",
        "SHOAL_POND_PEERS": "a, b",
        "SHOAL_POND_LIMIT": "3",
    }
    config = load(environ).service
    assert (config.is_deep, config.mode, config.peers, config.limit) == (True, "served", ("a", "b"), 3)


def test_an_empty_variable_unsets_an_optional_setting() -> None:
    assert load({"SHOAL_POND_LIMIT": ""}).service.limit is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_POND_BLOCK_COUNT", "many"),
        ("SHOAL_POND_BLOCK_COUNT", "0"),
        ("SHOAL_POND_MODE", "fast"),
        ("SHOAL_POND_IS_DEEP", "perhaps"),
        ("SHOAL_POND_BLOK_COUNT", "1"),
        ("SHOAL_MESH", "My Mesh"),
        ("SHOAL_NATS_URL", "localhost"),
        ("SHOAL_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_or_unknown_setting_is_named_in_full(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        load({name: value})


def test_settings_of_other_services_are_not_ours_to_judge() -> None:
    load({"SHOAL_LAKE_ANYTHING": "1"})


def test_shared_settings_have_flags_and_variables_too() -> None:
    loaded = load({"SHOAL_MESH": "blue", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, "--nats-url", "off")
    assert (loaded.shared.mesh, loaded.shared.nats_url) == ("blue", "off")
    assert loaded.shared.otlp_endpoint == "http://127.0.0.1:4317"


def test_a_secret_is_never_shown_and_has_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load({"SHOAL_POND_PASSWORD": "hunter2", "SHOAL_CACHE_SECRET": "k3y"})
    shown = json.dumps(dict(loaded.effective))
    assert "hunter2" not in shown
    assert "k3y" not in shown
    with pytest.raises(SystemExit):
        load(None, "--password", "hunter2")


def test_credentials_in_a_url_are_not_shown() -> None:
    loaded = load({"SHOAL_NATS_URL": "nats://joe:hunter2@bus:4222"})
    assert loaded.shared.nats_url == "nats://joe:hunter2@bus:4222"
    assert loaded.effective["SHOAL_NATS_URL"] == "nats://***@bus:4222"


def test_the_hash_differs_when_a_setting_does_and_only_then() -> None:
    assert load().config_hash == load({"SHOAL_POND_BLOCK_COUNT": "1024"}).config_hash
    assert load().config_hash != load({"SHOAL_POND_BLOCK_COUNT": "1025"}).config_hash


def test_check_config_prints_the_settings_in_force_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        settings.load_or_exit(PondConfig, service="pond", environ={"SHOAL_POND_LIMIT": "4"}, argv=["--check-config"])
    assert left.value.code == 0
    assert json.loads(capsys.readouterr().out)["settings"]["SHOAL_POND_LIMIT"] == "4"


def test_a_bad_setting_ends_the_start_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        settings.load_or_exit(PondConfig, service="pond", environ={"SHOAL_POND_LIMIT": "x"}, argv=[])
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
