"""What steps cost on this machine, measured on the loaded model before it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.empty_steps import context_of, run_choices, run_draft, run_rows
from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.requests import SamplingSpec
from shoal_engine.verify.cost import CostTable

logger = logging.getLogger(__name__)

_MOST_RUNS = 7
_SPEC = SamplingSpec(temperature=1.0)


def counts_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... and `most`: powers of two and the middles between them."""
    found, power = {1, most}, 2
    while power <= most:
        found |= {count for count in (power, power * 3 // 2) if count <= most}
        power *= 2
    return tuple(sorted(found))


def measure_costs(
    model: StepModel[Hidden],
    *,
    width: int,
    step_rows: int,
    limit_s: float,
    now: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Run steps and drafts of every class of sizes on empty slots, several times over; the median of each counts.

    width     drafts made and verified per choice
    step_rows rows of one step at most
    limit_s   no further round is begun after it; the first one always ends
    raises    FlatCosts: what was measured says nothing; what the model raises

    A step of n rows is one sequence's; what a choice costs beyond its rows is the difference to n sequences of a row.
    """
    shape = model.shape
    most = min(max(shape.slot_count * (1 + width), 2), step_rows, shape.block_count * BLOCK_TOKENS, shape.max_context)
    row_counts, choice_counts = counts_up_to(most), counts_up_to(shape.slot_count)
    found: dict[tuple[str, int], list[float]] = {}
    begin = now()
    for run in range(1 + _MOST_RUNS):
        # The first round warms up: caches, memory, compilers of single functions.
        for key, work in _work(model, row_counts, choice_counts, width):
            started = now()
            work()
            if run:
                found.setdefault(key, []).append(now() - started)
        if run and now() - begin > limit_s:
            break
    times = {key: median(values) for key, values in found.items()}
    alone = [times["rows", count] for count in row_counts]
    table = CostTable(
        rows=row_counts,
        step_s=tuple(alone),
        choices=choice_counts,
        sampler_s=tuple(
            max(0.0, times["choices", count] - times["rows", count]) if ("rows", count) in times else 0.0
            for count in choice_counts
        ),
        draft_s=tuple(times["draft", count] for count in choice_counts),
    )
    logger.info(
        "measured what steps cost",
        extra={
            "rows": most,
            "first_ms": round(alone[0] * 1e3, 3),
            "last_ms": round(alone[-1] * 1e3, 3),
            "draft_ms": round(table.draft_s[-1] * 1e3, 3),
            "seconds": round(now() - begin, 1),
        },
    )
    return table


def _work(
    model: StepModel[Hidden], row_counts: tuple[int, ...], choice_counts: tuple[int, ...], width: int
) -> Iterator[tuple[tuple[str, int], Callable[[], object]]]:
    for count in row_counts:
        yield ("rows", count), partial(_step, model, run_rows, count)
    for count in choice_counts:
        yield ("choices", count), partial(_step, model, run_choices, count)
        yield ("draft", count), partial(run_draft, model, [_SPEC] * count, width)


def _step(model: StepModel[Hidden], run: Callable[[StepModel[Hidden], int], Hidden], count: int) -> None:
    hidden = run(model, count)
    model.sample(hidden, range(count), [context_of(_SPEC)] * count)
