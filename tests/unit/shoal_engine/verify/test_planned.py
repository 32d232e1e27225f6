"""The planner as the engine sees it: caps, unknown confidences, the gate, old confidences, ranks, drift."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.planner import VerifiedRound, WidthView
from shoal_engine.verify import (
    Calibration,
    CostModel,
    CostTable,
    DraftGate,
    ModeCalibration,
    OneRank,
    PlannedWidth,
    StepIntent,
)
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.planned import BUDGET_AGE
from shoal_engine.verify.relay import UNTOLD, ConfidenceRelay

WIDTH = 5
SURE, DOUBTFUL = 6.0, -1.5


def table(base_s: float = 0.014, row_s: float = 30e-6, draft_s: float = 1e-3) -> CostTable:
    return CostTable(
        rows=(1, 4096),
        step_s=(base_s + row_s, base_s + 4096 * row_s),
        choices=(1, 4096),
        sampler_s=(0.0, 0.0),
        draft_s=(draft_s, draft_s),
    )


def planner(costs: CostTable | None = None, **more: object) -> PlannedWidth:
    return PlannedWidth(WIDTH, CostModel(costs or table(), 8192), **more)  # type: ignore[arg-type]


def view(logit: float, *, cap: int = WIDTH, slot: int = 0, generation: int = 0, drafts: int = WIDTH) -> WidthView:
    return WidthView(cap, (logit,) * drafts, slot=slot, generation=generation)


def test_likely_drafts_are_verified_and_unlikely_ones_are_not() -> None:
    costly = planner(table(base_s=0.001, row_s=1e-3))
    assert costly.widths([view(SURE), view(DOUBTFUL), view(SURE)]) == [WIDTH, 0, WIDTH]


@given(st.lists(st.tuples(st.integers(0, WIDTH), st.floats(-8, 8), st.integers(0, WIDTH)), max_size=20))
def test_widths_are_within_caps_for_any_confidences(choices: list[tuple[int, float, int]]) -> None:
    views = [view(logit, cap=min(cap, drafts), drafts=drafts) for cap, logit, drafts in choices]
    widths = planner().widths(views)
    assert len(widths) == len(views)
    assert all(0 <= width <= one.cap for width, one in zip(widths, views, strict=True))


def test_a_draft_without_a_confidence_counts_as_certain() -> None:
    assert planner().widths([WidthView(3, ())]) == [3]


def test_without_choices_nothing_is_planned_and_drafts_are_still_made() -> None:
    p = planner()
    assert p.widths([]) == []
    assert p.draft_width == WIDTH


def test_the_gate_closes_where_drafting_does_not_pay_and_probes_one_step_in_64() -> None:
    p = planner(table(base_s=0.001, row_s=1e-3, draft_s=0.1))
    drafted = []
    for _ in range(200):
        made = p.draft_width
        p.widths([view(SURE, cap=made) for _ in range(8)])
        drafted.append(p.draft_width)
    assert drafted[:1] == [0]
    assert drafted.count(WIDTH) == 3
    assert drafted[63 - 1 : 64].count(WIDTH) == 1
    assert not p.stats().is_drafting
    assert p.stats().gain < 1


def test_a_gate_closed_over_requests_that_are_gone_opens_for_the_next_ones() -> None:
    p = planner(table(base_s=0.001, row_s=1e-3, draft_s=0.1))

    def step(*generations: int) -> bool:
        p.widths([view(SURE, slot=slot, generation=generation) for slot, generation in enumerate(generations)])
        return p.draft_width > 0

    assert not step(1, 1)
    assert not step(2, 1)
    # One that the gate was closed over is still there, in the second slot.
    assert not step(3, 1)
    assert step(3, 2)
    # Over these it closes for itself.
    assert [step(3, 2) for _ in range(3)] == [False] * 3


def test_the_gate_opens_again_when_a_probe_pays() -> None:
    gate = DraftGate(probe_steps=4)
    gate.note(0.9, 1.0, 1000)
    assert [gate.take_step() for _ in range(4)] == [False, False, False, True]
    gate.note(3.0, 1.0, 1000)
    assert [gate.take_step() for _ in range(4)] == [True] * 4


def test_a_gate_that_forgets_drafts_once_and_waits_for_what_that_shows() -> None:
    gate = DraftGate(probe_steps=4)
    for _ in range(9):
        gate.note(0.5, 1.0, 1000)
    assert not gate.take_step()
    gate.forget()
    assert [gate.take_step() for _ in range(4)] == [True, False, False, False]
    gate.note(1.1, 1.0, 1000)
    assert gate.is_open
    assert gate.gain == pytest.approx(1.1, abs=0.01)


def test_one_choice_moves_the_gate_less_than_many_do() -> None:
    """One confident round of one choice says little of the next; that of hundreds says it all."""

    def gain(choices: int, is_forgotten: bool) -> float:
        gate = DraftGate()
        gate.note(0.8, 1.0, choices)
        if is_forgotten:
            gate.forget()
        gate.note(1.5, 1.0, choices)
        return gate.gain

    assert gain(1, False) == gain(1, True) == pytest.approx(0.94)
    assert gain(500, False) == pytest.approx(1.01)
    assert gain(500, True) == pytest.approx(1.5, abs=0.01)


def test_a_delayed_budget_follows_the_confidences_of_the_step_before_last() -> None:
    gate = DraftGate()
    gate.note(1000.0, 1.0, 1000)
    p = planner(table(base_s=0.001, row_s=1e-3), is_delayed=True, gate=gate)

    def step(logit: float) -> int:
        return sum(p.widths([view(logit, slot=slot, generation=1) for slot in range(4)]))

    # Nothing is known of two steps ago: by what is taken for usual, one draft each pays.
    assert step(DOUBTFUL) == 4
    assert step(SURE) == 4
    assert step(SURE) == 0
    assert step(DOUBTFUL) == 4 * WIDTH


def test_a_delayed_budget_goes_to_the_drafts_that_are_likely_now() -> None:
    p = planner(table(base_s=0.001, row_s=1e-3), is_delayed=True)
    for _ in range(2):
        p.widths([view(SURE, slot=0), view(DOUBTFUL, slot=1)])
    assert p.widths([view(DOUBTFUL, slot=0), view(SURE, slot=1)]) == [0, WIDTH]


def test_a_probe_of_a_delayed_budget_verifies_nothing_and_leaves_the_gate_closed() -> None:
    p = planner(table(base_s=0.001, row_s=1e-3, draft_s=0.1), is_delayed=True)
    verified, made = [], [WIDTH]
    for _ in range(200):
        views = [view(SURE, cap=made[-1], drafts=made[-1], slot=slot, generation=1) for slot in range(8)]
        verified.append(sum(p.widths(views)))
        made.append(p.draft_width)
    assert sum(verified[BUDGET_AGE + 1 :]) == 0
    assert made[BUDGET_AGE + 2 :].count(WIDTH) == 3
    assert not p.stats().is_drafting


def test_whoever_takes_over_a_slot_inherits_no_confidence_and_counts_as_the_others_do() -> None:
    relay = ConfidenceRelay(1)
    slots = np.array([0, 3])
    relay.note(slots, np.array([1, 1]), np.array([[0.5], [0.25]], dtype=np.float32))
    found = relay.oldest(np.array([3, 0, 7, 8]), np.array([1, 2, 1, 1]), 1)
    assert found.tolist() == [[0.25], [0.25], [0.5], [0.25]]


def test_a_step_without_drafts_leaves_what_is_expected_of_new_choices() -> None:
    relay, none = ConfidenceRelay(1), np.zeros(0, dtype=np.int64)
    relay.note(np.array([0]), np.array([1]), np.array([[0.5]], dtype=np.float32))
    relay.note(none, none, np.zeros((0, 1), dtype=np.float32))
    assert relay.oldest(np.array([0, 1]), np.array([1, 1]), 1).tolist() == [[0.5], [0.5]]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0, 1, width=32)), max_size=6),
        min_size=3,
        max_size=8,
    )
)
def test_the_relay_gives_what_was_noted_for_the_same_holder(steps: list[list[tuple[int, int, float]]]) -> None:
    relay = ConfidenceRelay(2)
    others = [np.float32(UNTOLD)]
    for number, raw in enumerate(steps):
        holders = {slot: (generation, value) for slot, generation, value in raw}
        slots = np.array(list(holders), dtype=np.int64)
        generations = np.array([g for g, _ in holders.values()], dtype=np.int64)
        found = relay.oldest(slots, generations, 1)
        old = {slot: (generation, value) for slot, generation, value in steps[number - 2]} if number > 1 else {}
        others = [np.float32(value) for _, value in old.values()] or others
        for slot, (generation, _), value in zip(holders, holders.values(), found[:, 0], strict=True):
            if slot in old and old[slot][0] == generation:
                assert value == np.float32(old[slot][1])
            else:
                assert value in others
        relay.note(slots, generations, np.array([[v] for _, v in holders.values()], np.float32).reshape(-1, 1))


def test_new_choices_do_not_make_a_delayed_budget_larger() -> None:
    """A load of short requests: some of them are always new, and no likelier than the others."""

    def verified(turnover: int) -> int:
        p = planner(table(base_s=0.001, row_s=1e-3, draft_s=1e-4), is_delayed=True)
        generations = [0] * 16
        found = 0
        for number in range(24):
            for new in range(turnover):
                generations[(number * turnover + new) % 16] += 1
            views = [view(0.7, slot=slot, generation=generation) for slot, generation in enumerate(generations)]
            found += sum(p.widths(views))
        return found

    assert verified(turnover=0) == verified(turnover=4) == verified(turnover=16)


class ThreadRanks:
    """Ranks of one process, a thread each: everyone waits for everyone, as a collective does."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._intents: list[StepIntent | None] = [None] * count

    def of(self, rank: int) -> _Rank:
        return _Rank(self, rank)

    def join(self, rank: int, intent: StepIntent) -> StepIntent:
        self._intents[rank] = intent
        self._barrier.wait()
        joined = intent
        for other in self._intents:
            assert other is not None
            joined = joined.joined(other)
        self._barrier.wait()
        return joined


class _Rank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.agreed: list[StepIntent] = []

    def agree(self, intent: StepIntent) -> StepIntent:
        self.agreed.append(self._ranks.join(self._rank, intent))
        return self.agreed[-1]


def test_ranks_of_different_loads_step_with_the_same_rows_and_the_same_decision_to_draft() -> None:
    ranks = ThreadRanks(3)
    members = [ranks.of(rank) for rank in range(3)]
    costly = table(base_s=0.001, row_s=1e-3)
    planners = [planner(costly, agreement=member) for member in members]
    loads: list[list[list[WidthView]]] = [
        [[view(SURE)] * 4, [view(SURE)] * 4, [view(DOUBTFUL)]],
        [[view(DOUBTFUL)] * 12, [], [view(DOUBTFUL)] * 2],
        [[], [view(DOUBTFUL)] * 3, []],
    ]
    rows: list[list[int]] = [[], [], []]

    def run(rank: int) -> None:
        for views in loads[rank]:
            rows[rank].append(len(views) + sum(planners[rank].widths(views)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert members[0].agreed == members[1].agreed == members[2].agreed
    for step, intent in enumerate(members[0].agreed):
        assert intent.rows == max(len(loads[rank][step]) for rank in range(3)) or intent.rows == max(
            rows[rank][step] for rank in range(3)
        )
        assert all(rows[rank][step] <= intent.rows for rank in range(3))
    # A rank that wanted none fills the rows that it would pad anyway.
    assert rows[1][0] == 4 * (1 + WIDTH)


INTENTS = st.builds(StepIntent, st.integers(0, 99), st.integers(0, WIDTH))


@given(INTENTS, INTENTS, INTENTS)
def test_ranks_join_their_intents_in_any_order_and_lose_none(a: StepIntent, b: StepIntent, c: StepIntent) -> None:
    assert a.joined(b).joined(c) == c.joined(b.joined(a))
    assert a.joined(a) == a
    assert a.joined(b).rows >= a.rows
    assert a.joined(b).draft_width >= a.draft_width


def test_a_rank_whose_own_drafts_do_not_pay_makes_them_where_another_does() -> None:
    ranks = ThreadRanks(2)
    # The draft pass of the second costs more than it can bring.
    tables = table(base_s=0.001, row_s=1e-3), table(base_s=0.001, row_s=1e-3, draft_s=1.0)
    planners = [planner(costs, agreement=ranks.of(rank)) for rank, costs in enumerate(tables)]
    made: list[list[int]] = [[], []]

    def run(rank: int) -> None:
        for _ in range(3):
            planners[rank].widths([view(SURE)] * 4)
            made[rank].append(planners[rank].draft_width)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [[WIDTH] * 3] * 2
    assert planners[0].stats().is_drafting
    assert not planners[1].stats().is_drafting


def test_one_rank_agrees_with_itself() -> None:
    assert OneRank().agree(StepIntent(7, 5)) == StepIntent(7, 5)


def test_texts_on_which_confidences_promise_too_much_get_fewer_drafts() -> None:
    p = planner(table(base_s=0.005, row_s=1e-3))
    views = [view(1.0, slot=slot) for slot in range(8)]
    before = sum(p.widths(views))
    for _ in range(50):
        widths = p.widths(views)
        p.verified([VerifiedRound(i, width, 0) for i, width in enumerate(widths)])
    assert sum(p.widths(views)) < before / 2


def run_rounds(p: PlannedWidth, count: int, accepted: Sequence[int]) -> None:
    views = [view(2.0, slot=slot) for slot in range(len(accepted))]
    for _ in range(count):
        widths = p.widths(views)
        p.verified([VerifiedRound(i, w, min(w, a)) for i, (w, a) in enumerate(zip(widths, accepted, strict=True))])


def test_confidences_that_come_true_raise_no_alarm_and_others_do(caplog: pytest.LogCaptureFixture) -> None:
    chance = 1 / (1 + np.exp(-2.0))
    random = np.random.default_rng(1)
    right = planner()
    run_rounds(right, 128, np.minimum(random.geometric(1 - chance, 64) - 1, WIDTH).tolist())
    error = right.stats().calibration_errors[Mode.SAMPLED.value]
    assert error < 0.08
    wrong = planner()
    with caplog.at_level(logging.WARNING):
        for _ in range(64):
            wrong.widths([view(2.0, slot=slot) for slot in range(64)])
            wrong.verified([VerifiedRound(slot, WIDTH, 0) for slot in range(64)])
    assert wrong.stats().has_drifted
    assert wrong.stats().calibration_errors[Mode.SAMPLED.value] > 0.3
    assert wrong.stats().calibration_errors[Mode.GREEDY.value] == 0.0
    assert [record.message for record in caplog.records] == ["draft confidences have drifted from what is accepted"]


def test_the_calibration_of_the_mode_is_applied() -> None:
    modes = {
        Mode.GREEDY: ModeCalibration(temperatures=(1.0,) * WIDTH),
        Mode.SAMPLED: ModeCalibration(
            temperatures=(1.0,) * WIDTH,
            margin_weights=((-20.0, 0.0, 0.0),) * WIDTH,
            margin_temperatures=(1.0,) * WIDTH,
        ),
    }
    p = planner(table(base_s=0.001, row_s=1e-3), calibration=Calibration(draft_id="d", width=WIDTH, modes=modes))
    sure = (SURE,) * WIDTH
    margins = (1.0,) * WIDTH
    greedy, sampled = WidthView(WIDTH, sure, margins, is_greedy=True), WidthView(WIDTH, sure, margins)
    assert p.widths([greedy, sampled]) == [WIDTH, 0]
    assert p.widths([sampled]) == [0]
    # Without margins the head's word counts.
    assert p.widths([greedy, WidthView(WIDTH, sure)]) == [WIDTH, WIDTH]
