"""Drafts counted by step are those counted by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shoal_common.draft_counts import DraftCounts

numbers = st.integers(0, 5)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=12), st.lists(numbers, max_size=3))
def test_each_position_counts_the_steps_that_reached_it(steps: list[tuple[int, int, int]], first: list[int]) -> None:
    counts = DraftCounts(first, first, first)
    for step in steps:
        counts.add(*step)
    for kind, told in enumerate((counts.drafted, counts.verified, counts.accepted)):
        most = max([step[kind] for step in steps], default=0)
        want = [sum(step[kind] > position for step in steps) for position in range(most)]
        want += [0] * (len(first) - most)
        assert told == [one + (first[position] if position < len(first) else 0) for position, one in enumerate(want)]
    assert counts == DraftCounts(counts.drafted, counts.verified, counts.accepted)
    assert counts != DraftCounts([*counts.drafted, 1], counts.verified, counts.accepted)
