"""When a worker counts as stopped or hung."""

from __future__ import annotations

from shoal_gateway.pulse import SILENCE_S, STANDSTILL_S, Pulse


def test_nothing_is_judged_before_the_first_beat() -> None:
    assert Pulse().verdict(1e9) is None


def test_silence_is_a_stop() -> None:
    pulse = Pulse()
    pulse.beat(1, 0, 10.0)
    assert pulse.verdict(10.0 + SILENCE_S) is None
    assert "no beat" in (pulse.verdict(10.1 + SILENCE_S) or "")


def test_anything_heard_is_a_sign_of_life() -> None:
    pulse = Pulse()
    pulse.beat(1, 0, 10.0)
    pulse.heard(13.0)
    assert pulse.verdict(16.0) is None


def test_a_step_count_that_stands_under_work_is_a_hang() -> None:
    pulse = Pulse()
    for second in range(100):
        pulse.beat(7, 1, float(second))
        if second <= STANDSTILL_S:
            assert pulse.verdict(float(second)) is None
    assert "no step" in (pulse.verdict(99.0) or "")


def test_an_idle_worker_may_stand_for_ever_and_gets_the_whole_time_for_new_work() -> None:
    pulse = Pulse()
    for second in range(300):
        pulse.beat(7, 0, float(second))
    pulse.beat(7, 2, 300.0)
    assert pulse.verdict(300.0) is None
    for second in range(301, 359):
        pulse.beat(7, 2, float(second))
    assert pulse.verdict(358.0) is None


def test_a_listener_that_slept_excuses_the_worker() -> None:
    pulse = Pulse()
    pulse.beat(1, 0, 10.0)
    pulse.excuse(100.0)
    assert pulse.verdict(101.0) is None
    assert pulse.verdict(105.0) is not None
