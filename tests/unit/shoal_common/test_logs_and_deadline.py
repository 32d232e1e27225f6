from __future__ import annotations

import contextvars
import io
import json
import logging

import pytest
from shoal_common import logs, telemetry
from shoal_common.deadline import Deadline
from shoal_common.errors import DeadlineExceeded
from shoal_common.request_scope import request_id


@pytest.fixture
def restored_logging() -> object:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield None
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("restored_logging")
def test_a_record_is_one_json_line_with_its_extras_and_ids() -> None:
    out = io.StringIO()
    logs.configure(service="pond", instance="pond-1", level="INFO", stream=out)
    token = request_id.set("r-1")
    try:
        logging.getLogger("x").info("preempted", extra={"blocks": 3})
        logging.getLogger("x").debug("below the level")
        try:
            raise RuntimeError("broken")
        except RuntimeError as error:
            logging.getLogger("x").error("failed", exc_info=error)
    finally:
        request_id.reset(token)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert {"service": "pond", "instance": "pond-1", "level": "INFO", "event": "preempted"}.items() <= first.items()
    assert (first["blocks"], first["request_id"]) == (3, "r-1")
    assert "RuntimeError: broken" in second["traceback"]


@pytest.mark.usefixtures("restored_logging")
def test_a_line_without_a_record_is_the_one_with_it() -> None:
    out = io.StringIO()
    logs.configure(service="pond", instance="pond-1", level="INFO", stream=out)
    token = request_id.set("r-1")
    try:
        logging.getLogger("x").info("usage", extra={"tokens": 3})
        logs.tell(logging.getLogger("x"), "usage", {"tokens": 3})
        logs.set_level("WARNING")
        logs.tell(logging.getLogger("x"), "below the level", {})
    finally:
        request_id.reset(token)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert list(first) == list(second)
    assert {**first, "time": ""} == {**second, "time": ""}
    assert len(first["time"]) == len(second["time"]) == len("2026-01-01T00:00:00.000Z")


@pytest.mark.usefixtures("restored_logging")
def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    out = io.StringIO()
    logs.configure(service="pond", instance="pond-1", level="INFO", stream=out)
    out.close()
    logging.getLogger("x").info("usage", extra={"tokens": 3})
    logs.tell(logging.getLogger("x"), "usage", {"tokens": 3})


def test_a_line_goes_to_other_handlers_as_a_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logs.tell(logging.getLogger("x"), "usage", {"tokens": 3})
    assert [(one.getMessage(), one.__dict__["tokens"]) for one in caplog.records] == [("usage", 3)]


def test_the_callers_trace_is_followed_and_none_is_made_up() -> None:
    def injected(headers: dict[str, str]) -> dict[str, str]:
        def run() -> dict[str, str]:
            telemetry.follow(headers)
            return telemetry.inject()

        return contextvars.copy_context().run(run)

    theirs = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01", "tracestate": "vendor=1"}
    assert injected(theirs) == theirs
    assert injected({}) == injected({"traceparent": "nonsense"}) == {}


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.set_level("LOUD")


def test_metrics_have_the_prefix_unless_they_are_aliases() -> None:
    metrics = telemetry.Metrics()
    metrics.counter("moves", "Moved requests").inc()
    metrics.gauge("vllm:num_requests_running", "Running").set(2)
    metrics.histogram("ttft_seconds", "Time to first token").observe(0.03)
    shown = metrics.render().decode()
    assert "shoal_moves_total 1.0" in shown
    assert "vllm:num_requests_running 2.0" in shown
    assert 'shoal_ttft_seconds_bucket{le="0.04"} 1.0' in shown
    assert 'shoal_ttft_seconds_bucket{le="0.02"} 0.0' in shown


def test_a_deadline_is_passed_on_with_a_margin_and_not_when_too_little_is_left() -> None:
    deadline = Deadline.after(1.0, now_s=10.0)
    assert deadline.remaining_s(10.25) == 0.75
    assert deadline.pass_on_s(10.25, margin_s=0.25) == 0.5
    assert deadline.pass_on_s(10.25, at_most_s=0.1) == 0.1
    assert deadline.remaining_s(12.0) == 0.0
    with pytest.raises(DeadlineExceeded):
        deadline.pass_on_s(10.99)


def test_a_deadline_that_never_comes_passes_on_the_limit_of_the_call() -> None:
    assert Deadline.never().pass_on_s(5.0, at_most_s=3.0) == 3.0
