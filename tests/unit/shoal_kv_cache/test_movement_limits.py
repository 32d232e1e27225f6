"""Bounds on what moves between tiers, and which flush reaches what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shoal_kv_cache.core.flush_epochs import Filter, FlushEpochs
from shoal_kv_cache.core.load_rate import LoadRate
from shoal_kv_cache.core.token_bucket import TokenBucket
from shoal_kv_cache.core.write_queue import WriteQueue

RATE, BURST = 100.0, 50.0


@given(st.lists(st.tuples(st.integers(1, 120), st.floats(0, 2)), min_size=1, max_size=40))
def test_no_window_of_time_moves_more_than_burst_and_rate(pieces: list[tuple[int, float]]) -> None:
    bucket, now_s = TokenBucket(RATE, burst_bytes=BURST, now_s=0.0), 0.0
    begun: list[tuple[float, int]] = []
    for size, pause_s in pieces:
        now_s += pause_s
        now_s += bucket.take(size, now_s)
        begun.append((now_s, size))
    largest = max(BURST, *(size for _, size in begun))
    for first, (start_s, _) in enumerate(begun):
        moved = 0
        for at_s, size in begun[first:]:
            moved += size
            assert moved <= largest + RATE * (at_s - start_s) + 1e-6


@given(st.lists(st.floats(-5, 5), max_size=20))
def test_a_clock_that_jumps_back_gives_nothing_away(jumps: list[float]) -> None:
    bucket = TokenBucket(RATE, burst_bytes=BURST, now_s=0.0)
    furthest_s, now_s, moved = 0.0, 0.0, 0
    for jump_s in jumps:
        now_s += jump_s
        furthest_s = max(furthest_s, now_s)
        if bucket.take(10, now_s) == 0.0:
            moved += 10
            assert moved <= BURST + RATE * furthest_s + 1e-6


def test_without_a_limit_nothing_waits() -> None:
    bucket = TokenBucket(0, burst_bytes=1, now_s=0.0)
    assert [bucket.take(1 << 40, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.sampled_from("oot"), st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_the_queue_keeps_order_and_its_bound_and_loses_only_what_it_counts(steps: list[tuple[str, int, int]]) -> None:
    queue: WriteQueue[int] = WriteQueue(100)
    waiting: list[tuple[int, int]] = []
    dropped = 0
    for what, item, size in steps:
        if what == "o":
            taken = queue.offer(item, size)
            if item not in [one for one, _ in waiting]:
                assert taken == (sum(bytes_ for _, bytes_ in waiting) + size <= 100)
                dropped += not taken
                if taken:
                    waiting.append((item, size))
        else:
            batch = queue.take(size, 3)
            assert batch == [one for one, _ in waiting[: len(batch)]]
            assert len(batch) <= 3
            assert bool(batch) == bool(waiting)
            assert len(batch) <= 1 or sum(bytes_ for _, bytes_ in waiting[: len(batch)]) <= size
            waiting = waiting[len(batch) :]
        assert queue.queued_bytes == sum(bytes_ for _, bytes_ in waiting) <= 100
        assert len(queue) == len(waiting)
        assert queue.dropped_count == dropped


KV_IDS, TENANTS = ("a", "b"), (b"1", b"2")
FILTERS = st.builds(Filter, kv_id=st.sampled_from([None, *KV_IDS]), tenant_tag=st.sampled_from([None, *TENANTS]))


@given(st.lists(FILTERS, max_size=30), st.integers(0, 30), st.sampled_from(KV_IDS), st.sampled_from(TENANTS))
def test_work_is_stale_exactly_if_a_later_flush_means_it(
    flushes: list[Filter], begun: int, kv_id: str, tenant_tag: bytes
) -> None:
    epochs = FlushEpochs()
    for one in flushes:
        epochs.flush(one)
    stale = any(one.matches(kv_id, tenant_tag) for one in flushes[begun:])
    assert epochs.is_stale(begun, kv_id, tenant_tag) == stale


@given(st.lists(FILTERS, max_size=30), st.integers(0, 30), st.sampled_from(KV_IDS), st.sampled_from(TENANTS))
def test_with_few_filters_remembered_nothing_stale_is_kept(
    flushes: list[Filter], begun: int, kv_id: str, tenant_tag: bytes
) -> None:
    few, all_of_them = FlushEpochs(max_filters=2), FlushEpochs()
    for one in flushes:
        few.flush(one)
        all_of_them.flush(one)
    if all_of_them.is_stale(begun, kv_id, tenant_tag):
        assert few.is_stale(begun, kv_id, tenant_tag)


def test_the_rate_follows_what_large_loads_took() -> None:
    rate = LoadRate(bytes_per_s=1e9, latency_s=0.001)
    for _ in range(20):
        rate.observed(100, 0.0011)
        rate.observed(10_000_000, 0.101)
    assert 0.9e8 < rate.bytes_per_s < 1.2e8
    assert rate.estimate_s(0) == 0.0
    assert 0.08 < rate.estimate_s(10_000_000) < 0.12
