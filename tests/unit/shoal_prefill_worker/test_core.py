"""Attempts, bound and drain of a prefill worker."""

from __future__ import annotations

from array import array

import pytest
from shoal_common.errors import Draining
from shoal_prefill_worker.core import AttemptNotNewer, Jobs, PromptStart, QueueFull


def start(request_id: str = "r", attempt: int = 1) -> PromptStart:
    return PromptStart(
        request_id=request_id,
        attempt=attempt,
        numerics_id="n",
        draft_id="d",
        cache_root=None,
        tenant_tag=b"",
        prompt_ids=array("I", [1]),
        cache_points=(),
        priority=0,
    )


def test_a_newer_attempt_supersedes_and_an_equal_or_lower_one_is_refused() -> None:
    jobs = Jobs(4)
    first, _ = jobs.open(start(attempt=1))
    second, older = jobs.open(start(attempt=3))
    assert older is first
    assert first.superseded is not None
    for attempt in (2, 3):
        with pytest.raises(AttemptNotNewer):
            jobs.open(start(attempt=attempt))
    jobs.close(first)
    assert jobs.live_count == 1
    jobs.close(second)
    jobs.close(second)
    assert jobs.live_count == 0


def test_attempts_have_names_of_their_own_in_the_engine() -> None:
    jobs = Jobs(4)
    first, _ = jobs.open(start(attempt=1))
    second, _ = jobs.open(start(attempt=2))
    assert first.key != second.key


def test_the_bound_counts_requests_and_a_drain_refuses() -> None:
    jobs = Jobs(1)
    jobs.open(start("a"))
    with pytest.raises(QueueFull):
        jobs.open(start("b"))
    jobs.open(start("a", attempt=2))
    jobs.is_draining = True
    with pytest.raises(Draining):
        jobs.open(start("a", attempt=3))
