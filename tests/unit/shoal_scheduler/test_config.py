from __future__ import annotations

import dataclasses

import pytest
from shoal_common import settings
from shoal_scheduler.config import SchedulerConfig
from shoal_scheduler.core.limits import Limits


@pytest.mark.parametrize(
    ("name", "value"),
    [("MAX_QUEUED", "0"), ("REMOTE_PREFILL_TOKENS", "-1"), ("STALE_S", "0"), ("BUSY_TOKENS", "-1"), ("QUEUE", "1")],
)
def test_a_bad_setting_is_named_in_full(name: str, value: str) -> None:
    environ = {f"SHOAL_SCHEDULER_{name}": value}
    with pytest.raises(ValueError, match=f"SHOAL_SCHEDULER_{name}"):
        settings.load(SchedulerConfig, service="scheduler", environ=environ, argv=[])


def test_the_defaults_of_the_core_are_those_of_the_settings() -> None:
    assert SchedulerConfig().limits() == Limits()


def test_every_bound_of_the_core_is_a_setting() -> None:
    assert {field.name for field in dataclasses.fields(Limits)} <= {
        field.name for field in dataclasses.fields(SchedulerConfig)
    }
