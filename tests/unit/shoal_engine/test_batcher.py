"""Which rows run next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.batcher import ChunkWork, StepBudget, next_stop, plan_chunks

works = st.lists(
    st.builds(
        lambda start, length, cuts, priority, arrival: ChunkWork(
            start, start + length, tuple(sorted(cuts)), priority, arrival
        ),
        st.integers(0, 300),
        st.integers(1, 300),
        st.sets(st.integers(0, 600), max_size=5),
        st.integers(-1, 1),
        st.floats(0, 5),
    ),
    max_size=8,
)
budgets = st.builds(StepBudget, rows=st.integers(1, 600), chunk=st.integers(1, 300), min_chunk=st.integers(1, 64))


@given(works, st.integers(0, 800), budgets)
def test_chunks_stop_at_cuts_and_stay_within_the_budget(
    works: list[ChunkWork], decode_rows: int, budget: StepBudget
) -> None:
    counts = plan_chunks(works, decode_rows, budget)
    assert sum(counts) <= max(budget.rows - decode_rows, budget.min_chunk)
    for work, count in zip(works, counts, strict=True):
        assert 0 <= count <= min(budget.chunk, work.end - work.start)
        assert not any(work.start < cut < work.start + count for cut in work.cuts)


@given(works.filter(bool), st.integers(0, 800), budgets)
def test_the_first_in_order_always_moves(works: list[ChunkWork], decode_rows: int, budget: StepBudget) -> None:
    counts = plan_chunks(works, decode_rows, budget)
    first = min(range(len(works)), key=lambda i: (-works[i].priority, works[i].arrival, i))
    assert counts[first] > 0


@given(works, budgets)
def test_a_later_work_runs_only_when_no_earlier_one_lacks_budget(works: list[ChunkWork], budget: StepBudget) -> None:
    counts = plan_chunks(works, 0, budget)
    order = sorted(range(len(works)), key=lambda i: (-works[i].priority, works[i].arrival, i))
    starved = False
    for i in order:
        full = min(budget.chunk, next_stop(works[i].start, works[i].end, works[i].cuts) - works[i].start)
        assert not (starved and counts[i])
        starved = starved or counts[i] < full


def test_a_prompt_reaches_its_end_through_every_cut() -> None:
    position, cuts, stops = 0, (128, 130, 256), []
    while position < 300:
        (count,) = plan_chunks(
            [ChunkWork(position, 300, cuts, 0, 0.0)], 0, StepBudget(rows=512, chunk=100, min_chunk=1)
        )
        position += count
        stops.append(position)
    assert set(cuts) <= set(stops)


def test_a_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        StepBudget(rows=0)
