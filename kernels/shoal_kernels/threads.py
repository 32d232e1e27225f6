"""Row-parallel execution of compiled kernels. Rows are independent, so the number of threads never changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Below this many rows a thread costs more to wake than its share of the work.
_ROWS_PER_THREAD = 16

_pool: ThreadPoolExecutor | None = None
_num_threads = 1


def set_num_threads(count: int) -> None:
    """Threads that one operation may use, the caller's included; at first 1. Not to be called during an operation."""
    global _pool, _num_threads
    if count < 1:
        raise ValueError(f"the number of threads must be positive, got {count}")
    if count == _num_threads:
        return
    if _pool is not None:
        _pool.shutdown()
    _pool = ThreadPoolExecutor(count - 1, thread_name_prefix="shoal-kernel") if count > 1 else None
    _num_threads = count


def get_num_threads() -> int:
    """Threads that one operation may use."""
    return _num_threads


def for_row_ranges(rows: int, body: Callable[[int, int], None], rows_per_thread: int = _ROWS_PER_THREAD) -> None:
    """Call body(first, last) for contiguous ranges that together cover range(rows); return when all are done."""
    parts = min(_num_threads, rows // rows_per_thread)
    if _pool is None or parts < 2:
        if rows:
            body(0, rows)
        return
    bounds = [rows * part // parts for part in range(parts + 1)]
    futures = [_pool.submit(body, bounds[part], bounds[part + 1]) for part in range(1, parts)]
    body(bounds[0], bounds[1])
    for future in futures:
        future.result()
