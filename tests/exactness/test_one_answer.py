"""One answer: the tokens of a request are the same in every deployment shape, on the golden tiny model.

Each test runs all cases side by side in one engine, with drafts that are right up to random places and random verify
widths, and compares with what each case says alone: one prompt, one chunk, no drafts, nothing cached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shoal_engine.admission import Growth
from shoal_engine.logical_rows import HandoverRows, PrefixRows, RowKind
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart, PrefillRequest
from shoal_engine.served_model import ServedModel
from shoal_kernels.threads import get_num_threads, set_num_threads
from support.engine_driver import Driver, planned
from support.exactness import (
    BLOCKS,
    CASES,
    HIT_CASES,
    SLOTS,
    Case,
    alone,
    alone_choice,
    assert_same,
    driver,
    interrupted,
    noisy_drafts,
    stored_prefix,
)
from support.seldom import seldom
from support.tiny_model import REPLAY, tiny_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = get_num_threads()
    set_num_threads(2)
    yield
    set_num_threads(before)


def run_all(d: Driver, cases: tuple[Case, ...] = CASES) -> None:
    d.generate(*(case.request() for case in cases))
    assert_same(d, cases)


def test_in_a_mixed_batch() -> None:
    d = driver(CASES)
    run_all(d)
    usages = [usage for _, usage in d.sink.ended.values()]
    # The drafts of this suite are accepted often enough to matter, and rejected too.
    assert sum(u.accepted_draft_tokens for u in usages) > 40
    assert sum(u.draft_tokens - u.accepted_draft_tokens for u in usages) > 40


def test_on_two_threads(two_threads: None) -> None:
    run_all(driver(CASES, salt=1))


@pytest.mark.parametrize("chunk", [7, *seldom(1, 128)])
def test_with_prompts_cut_into_chunks(chunk: int) -> None:
    run_all(driver(CASES, salt=chunk, chunk=chunk))


def test_with_a_small_row_budget() -> None:
    run_all(driver(CASES, salt=3, rows=24, chunk=16))


@pytest.mark.parametrize("width", [0, 5, *seldom(1, 2, 3, 4)])
def test_at_every_verify_width(width: int) -> None:
    run_all(driver(CASES, salt=width, planner=FixedWidth(width)))


@pytest.mark.parametrize(
    "costs",
    [{"row_s": 5e-4, "is_delayed": True}, {"row_s": 2e-3, "draft_s": 0.1}, *seldom({"row_s": 1e-5})],
    ids=["delayed", "mostly-plain", "cheap-rows"],
)
def test_with_planned_widths(costs: dict[str, Any]) -> None:
    """The second one drafts in one step of four, where drafting does not pay."""
    planner = planned(**costs)
    run_all(driver(CASES, salt=7, planner=planner))
    assert planner.stats().is_drafting == ("draft_s" not in costs)


def test_with_the_model_s_own_drafts() -> None:
    run_all(driver(CASES, model=ServedModel(tiny_model(num_blocks=BLOCKS, num_slots=SLOTS))))


def test_with_draft_weights_replaced_by_noise() -> None:
    run_all(driver(CASES, model=noisy_drafts()))


@pytest.mark.parametrize(("has_snapshot", "chunk"), [(True, 7), (False, 128), *seldom((True, 128), (False, 7))])
def test_after_a_prefix_hit(has_snapshot: bool, chunk: int) -> None:
    d = driver(CASES, salt=chunk, chunk=chunk)
    for case in CASES:
        d.admit(case.request(export_chain=True))
        if case in HIT_CASES:
            prefix = stored_prefix(case)
            d.core.load_prefix(case.name, prefix if has_snapshot else replace(prefix, encoder_window=None))
        d.core.start(case.name)
    d.run()
    assert_same(d, CASES)
    for case in HIT_CASES:
        assert d.sink.ended[case.name][1].cached_tokens == stored_prefix(case).hit_tokens
        rebuilt = d.sink.snapshots.get((case.name, None, stored_prefix(case).hit_tokens))
        assert rebuilt == (None if has_snapshot else stored_prefix(case).encoder_window)


def test_after_a_hit_shorter_than_the_stored_prefix() -> None:
    cases = tuple(case for case in HIT_CASES if case.length >= 256 + REPLAY)
    d = driver(cases)
    for case in cases:
        d.admit(case.request(export_chain=True))
        blocks = stored_prefix(case).blocks[:1]
        d.core.load_prefix(case.name, PrefixRows(hit_tokens=128, blocks=blocks, encoder_window=None, branch_tokens=256))
        d.core.start(case.name)
    d.run()
    assert_same(d, cases)
    # The branch leaves its own snapshot, the same that a cold prefill stores.
    for case in cases:
        assert d.sink.snapshots[case.name, None, 256] == stored_prefix(case).encoder_window


def prefill_elsewhere(chunk: int, *, uses_hits: bool) -> Driver:
    """An engine that prefilled every case for another one."""
    d = driver(CASES, chunk=chunk)
    for case in CASES:
        d.admit(PrefillRequest(request_id=case.name, prompt_ids=np.array(case.prompt)))
        if uses_hits and case in HIT_CASES:
            d.core.load_prefix(case.name, stored_prefix(case))
        d.core.start(case.name)
    d.run()
    d.assert_at_baseline()
    return d


@pytest.mark.parametrize(
    ("uses_hits", "has_draft_windows"), [(True, True), (False, False), *seldom((True, False), (False, True))]
)
def test_prefilled_by_another_engine(uses_hits: bool, has_draft_windows: bool) -> None:
    source = prefill_elsewhere(60, uses_hits=uses_hits)
    d = driver(CASES, salt=5)
    for case in CASES:
        d.admit(case.request())
        if uses_hits and case in HIT_CASES:
            d.core.load_prefix(case.name, replace(stored_prefix(case), encoder_window=None))
        rows = [
            part for part in source.sink.rows[case.name] if has_draft_windows or part.kind is not RowKind.DRAFT_WINDOW
        ]
        hidden, _ = source.sink.prefilled[case.name]
        d.core.load_prompt(case.name, HandoverRows(rows=rows, hidden_row=hidden))
    d.run()
    assert_same(d, CASES)


@pytest.mark.parametrize("salt", [1, *seldom(2)])
def test_interrupted_and_continued_at_random_tokens(salt: int) -> None:
    cuts = random.Random(salt)
    d = driver(CASES, salt=salt, chunk=11)
    d.generate(*(interrupted(case, cuts.randint(1, case.output - 1)) for case in CASES))
    assert_same(d, CASES)


def test_continued_after_an_answer_longer_than_the_decoder_s_reach() -> None:
    # 4 decoder layers look back 4 x 15 positions: decoder rows of the first emitted tokens are skipped.
    case = Case(25, 31, 1.0, output=90)
    d = driver((case,), chunk=11)
    d.generate(interrupted(case, 82))
    assert_same(d, (case,))


def test_two_choices_of_one_prompt_each_as_if_alone() -> None:
    cases = tuple(replace(case, output=8) for case in CASES[::4])
    d = driver((), model=ServedModel(tiny_model(num_blocks=BLOCKS, num_slots=SLOTS)))
    d.submit(*(case.request(choices=[ChoiceStart()] * 2) for case in cases))
    d.run()
    for case in cases:
        said = [tuple(d.sink.tokens[case.name, choice]) for choice in range(2)]
        assert said == [alone_choice(case, choice) for choice in range(2)], case.name
    d.assert_at_baseline()


def test_one_choice_finished_and_the_other_interrupted() -> None:
    cases = tuple(replace(case, output=8) for case in CASES[1::3])
    d = driver((), model=ServedModel(tiny_model(num_blocks=BLOCKS, num_slots=SLOTS)), chunk=9)
    for i, case in enumerate(cases):
        first, second = alone_choice(case, 0), alone_choice(case, 1)
        so_far = [ChoiceStart(output_ids=first[:3], is_finished=True), ChoiceStart(output_ids=second[: 1 + i % 7])]
        d.submit(case.request(choices=so_far))
    d.run()
    for case in cases:
        assert tuple(d.sink.tokens[case.name, 0]) == alone_choice(case, 0)[:3]
        assert tuple(d.sink.tokens[case.name, 1]) == alone_choice(case, 1), case.name
    d.assert_at_baseline()


def test_preempted_in_a_tiny_pool_and_recovered_in_place() -> None:
    cases = tuple(Case(length, length, float(length % 2), output=40) for length in (97, 110, 116, 122, 125))
    d = driver(cases, growth=Growth(admitted_output=2, blocks=1), model=_small(cases))
    d.submit(*(c.request(recover_in_place=True, arrival=float(i)) for i, c in enumerate(cases)))
    most_waiting = 0
    while d.core.step():
        most_waiting = max(most_waiting, d.core.stats().waiting)
    assert most_waiting > 0
    assert_same(d, cases)


def _small(cases: tuple[Case, ...]) -> ServedModel:
    """A pool with one block for each case and two to spare: every case needs two in the end."""
    return ServedModel(tiny_model(num_blocks=1 + len(cases) + 2, num_slots=len(cases)))


def test_cases_differ_so_that_equality_means_something() -> None:
    answers = {alone(case) for case in CASES}
    assert len(answers) == len(CASES)
    assert all(len(set(answer)) > 3 for answer in answers)
