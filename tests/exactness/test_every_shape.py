"""One answer in the full cross product of deployment shapes, on the golden tiny model. Run by make test-long."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from shoal_engine.logical_rows import HandoverRows
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.requests import PrefillRequest
from shoal_kernels.threads import get_num_threads, set_num_threads
from support.engine_driver import Driver, RandomWidths, planned
from support.exactness import CASES, HIT_CASES, Case, assert_same, driver, interrupted, stored_prefix

ORIGINS = ("cold", "snapshot", "warm replay", "remote", "remote after a hit")
CHUNKS = (1, 7, 128, 512)
WIDTHS = (0, 1, 2, 3, 4, 5, None, "planned")  # None: a random width for every choice and step


@cache
def prefilled(uses_hits: bool) -> Driver:
    """An engine that prefilled every case for another one."""
    d = driver(CASES, chunk=60)
    for case in CASES:
        d.admit(PrefillRequest(request_id=case.name, prompt_ids=np.array(case.prompt)))
        if uses_hits and case in HIT_CASES:
            d.core.load_prefix(case.name, stored_prefix(case))
        d.core.start(case.name)
    d.run()
    return d


def planner_of(width: int | str | None, salt: int) -> WidthPlanner:
    """The planner of a width."""
    if width == "planned":
        return planned(row_s=2e-4, is_delayed=bool(salt % 2))
    return FixedWidth(width) if isinstance(width, int) else RandomWidths(salt)


def begin(d: Driver, case: Case, origin: str, cut: int | None) -> None:
    """Bring one case into the engine, its prompt from `origin`, going on after `cut` tokens."""
    d.admit(case.request() if cut is None else interrupted(case, cut))
    has_hit = case in HIT_CASES and origin not in ("cold", "remote")
    if has_hit:
        prefix = stored_prefix(case)
        d.core.load_prefix(case.name, prefix if origin == "snapshot" else replace(prefix, encoder_window=None))
    if not origin.startswith("remote"):
        d.core.start(case.name)
        return
    source = prefilled(has_hit).sink
    hidden_row, _ = source.prefilled[case.name]
    d.core.load_prompt(case.name, HandoverRows(rows=source.rows[case.name], hidden_row=hidden_row))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("origin", ORIGINS)
def test_the_answer_is_the_same(origin: str, chunk: int, threads: int) -> None:
    before = get_num_threads()
    set_num_threads(threads)
    try:
        for salt, (width, is_interrupted) in enumerate(itertools.product(WIDTHS, (False, True))):
            cuts = random.Random(f"{origin} {chunk} {salt}")
            d = driver(CASES, salt=salt, chunk=chunk, planner=planner_of(width, salt))
            for case in CASES:
                begin(d, case, origin, cuts.randint(1, case.output - 1) if is_interrupted else None)
            d.run()
            assert_same(d, CASES)
    finally:
        set_num_threads(before)
