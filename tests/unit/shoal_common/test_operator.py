"""What an operator can ask of a process, by gRPC or by the bus."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from shoal_common.admin import Operator, Stopping, Work
from shoal_common.errors import InvalidArgument
from shoal_common.rpc.readiness import Readiness


def operator(readiness: Readiness | None = None, work: Work | None = None) -> Operator:
    return Operator(instance_id="a", role="gateway", readiness=readiness or Readiness(), work=work or Work())


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


async def test_drain_and_resume_reach_the_readiness_and_the_work_until_the_process_stops() -> None:
    readiness, told = Readiness(), list[bool]()
    one = operator(readiness, Work(running_count=lambda: 3, set_draining=told.append))
    commands = one.commands()
    assert await commands["drain"]({}) == {"running_count": "3"}
    assert not readiness.is_ready
    assert await commands["resume"]({}) == {}
    assert readiness.is_ready
    one.stopping()
    with pytest.raises(Stopping):
        await commands["resume"]({})
    assert told == [True, False, True]


@pytest.mark.usefixtures("kept_level")
async def test_the_log_level_changes_and_a_wrong_one_is_refused() -> None:
    command = operator().commands()["log_level"]
    await command({"level": "DEBUG"})
    assert logging.getLogger().level == logging.DEBUG
    with pytest.raises(InvalidArgument, match="LOUD"):
        await command({"level": "LOUD"})


@pytest.mark.usefixtures("busy_thread")
async def test_a_profile_shows_where_a_thread_spends_its_time() -> None:
    answer = await operator().commands()["profile"]({"duration_s": "0.2"})
    assert "spin_for_the_profiler" in answer["folded_stacks"]


@pytest.mark.parametrize("seconds", ["0", "61", "nan", "soon"])
async def test_a_profile_of_no_sensible_length_is_refused(seconds: str) -> None:
    with pytest.raises(InvalidArgument, match="duration"):
        await operator().commands()["profile"]({"duration_s": seconds})
