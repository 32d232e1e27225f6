"""Row ranges cover every row once, and failures reach the caller."""

from __future__ import annotations

import pytest
from shoal_kernels import threads
from unit.shoal_kernels.parity import num_threads


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranges_partition_the_rows(rows: int, count: int) -> None:
    seen: list[tuple[int, int]] = []
    with num_threads(count):
        threads.for_row_ranges(rows, lambda first, last: seen.append((first, last)))
    covered = [row for first, last in sorted(seen) for row in range(first, last)]
    assert covered == list(range(rows))
    assert len(seen) <= count


def test_a_failure_in_any_range_is_raised() -> None:
    def body(first: int, last: int) -> None:
        if last == 64:
            raise RuntimeError("second half")

    with num_threads(2), pytest.raises(RuntimeError, match="second half"):
        threads.for_row_ranges(64, body)


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive, got 0"):
        threads.set_num_threads(0)
