from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from shoal_common.control_commands import standard_commands
from shoal_common.errors import InvalidArgument
from shoal_common.rpc import Readiness


@pytest.fixture
def busy_thread() -> Iterator[None]:
    stop = threading.Event()

    def spin_for_the_profiler() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin_for_the_profiler, name="busy")
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture
def kept_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


async def test_drain_and_resume_go_through_the_readiness() -> None:
    readiness = Readiness()
    commands = standard_commands(readiness)
    assert await commands["drain"]({}) == {"is_draining": "true"}
    assert not readiness.is_ready
    assert await commands["resume"]({}) == {"is_draining": "false"}
    assert readiness.is_ready


@pytest.mark.usefixtures("kept_level")
async def test_the_log_level_changes_and_a_wrong_one_is_refused() -> None:
    command = standard_commands(Readiness())["log_level"]
    await command({"level": "ERROR"})
    assert await command({"level": "DEBUG"}) == {"level": "DEBUG", "was": "ERROR"}
    with pytest.raises(InvalidArgument, match="LOUD"):
        await command({"level": "LOUD"})


@pytest.mark.usefixtures("busy_thread")
async def test_a_profile_shows_where_a_thread_spends_its_time() -> None:
    command = standard_commands(Readiness())["profile"]
    stacks = (await command({"seconds": "0.2"}))["stacks"].splitlines()
    assert any(line.startswith("busy;") and "spin_for_the_profiler" in line for line in stacks)


@pytest.mark.parametrize("seconds", ["0", "31", "nan", "soon"])
async def test_a_profile_of_no_sensible_length_is_refused(seconds: str) -> None:
    with pytest.raises(InvalidArgument, match="seconds"):
        await standard_commands(Readiness())["profile"]({"seconds": seconds})
