"""What steps cost: tables, what they refuse, what is learned from steps, what is kept on disk, and measuring."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.planner import FixedWidth, StepTimes
from shoal_engine.verify import CostModel, CostTable, FlatCosts, PlannedWidth
from shoal_engine.verify.profile import counts_up_to, measure_costs
from shoal_engine.verify.setup import Drafter, VerifySettings, open_planner
from shoal_engine.verify.store import CostStore
from support.toy_model import ToyModel

TABLE = CostTable(
    rows=(1, 4, 8, 16),
    step_s=(0.010, 0.012, 0.020, 0.040),
    choices=(1, 4),
    sampler_s=(0.001, 0.004),
    draft_s=(0.005, 0.008),
)


def test_costs_between_measured_sizes_are_interpolated_and_go_on_beyond_them() -> None:
    costs = TABLE.by_rows(32)
    assert costs[[1, 4, 6, 16]].tolist() == pytest.approx([0.010, 0.012, 0.016, 0.040])
    assert costs[31] - costs[16] == pytest.approx(15 * 0.002)


def test_a_staircase_costs_what_its_next_step_costs() -> None:
    costs = replace(TABLE, is_staircase=True).by_rows(16)
    assert costs[1:].tolist() == [0.010, *[0.012] * 3, *[0.020] * 4, *[0.040] * 8]


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=8), st.booleans())
def test_costs_never_fall(times: list[float], is_staircase: bool) -> None:
    times[-1] = 2.0
    rows = tuple(1 + 3 * i for i in range(len(times)))
    table = replace(TABLE, rows=rows, step_s=tuple(times), is_staircase=is_staircase)
    assert (np.diff(table.by_rows(40)) >= 0).all()


@pytest.mark.parametrize("times", [(0.01, 0.01, 0.01, 0.01), (0.01, 0.0101, 0.0102, 0.0103)])
def test_a_flat_table_is_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(FlatCosts, match="no rise"):
        replace(TABLE, step_s=times)


def test_a_table_of_one_size_is_refused() -> None:
    with pytest.raises(FlatCosts):
        CostTable(rows=(1,), step_s=(0.01,), choices=(1,), sampler_s=(0.0,), draft_s=(0.0,))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (2, 4, 8, 16)},
        {"rows": (1, 8, 4, 16)},
        {"step_s": (0.01, float("nan"), 0.02, 0.04)},
        {"draft_s": (1.0,)},
    ],
)
def test_broken_numbers_are_refused(change: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"wanted|ascend"):
        replace(TABLE, **change)  # type: ignore[arg-type]


def costs_of(model: CostModel, rows: int = 4, *, choices: int = 4, context: int = 0, drafted: int = 0) -> float:
    return float(model.costs(rows, 0, choices=choices, context=context, drafted=drafted)[0])


def test_a_step_costs_its_rows_its_choices_and_its_drafts() -> None:
    model = CostModel(TABLE, 16)
    assert costs_of(model) == pytest.approx(0.012 + 0.004)
    assert costs_of(model, drafted=4) == pytest.approx(0.012 + 0.004 + 0.008)
    assert model.draft_s(0) == 0.0


def steps(model: CostModel, count: int, *, slope: float = 0.0, extra: float = 0.0, draft_s: float = 0.008) -> None:
    """Steps whose cost is the table's, so much more per position of context, and so much more in all."""
    random = np.random.default_rng(1)
    for number in range(count):
        rows, context = (4, 8, 16)[number % 3], int(random.integers(100, 4000))
        step_s = float(TABLE.by_rows(16)[rows]) + 0.004 + extra + slope * context
        # One step in ten is disturbed: medians do not care.
        step_s += 0.5 if number % 10 == 0 else 0.0
        model.observe(
            StepTimes(rows=rows, choices=4, context=context, prompt_rows=0, drafted=4, step_s=step_s, draft_s=draft_s)
        )


def test_the_cost_of_context_is_learned_from_steps() -> None:
    model = CostModel(TABLE, 16)
    steps(model, 300, slope=2e-6)
    assert model.context_slope == pytest.approx(2e-6, rel=0.05)
    assert costs_of(model, 8, context=3000) == pytest.approx(0.020 + 0.004 + 0.006, rel=0.05)


def test_what_a_choice_and_a_draft_cost_is_learned_from_steps() -> None:
    model = CostModel(TABLE, 16)
    steps(model, 30, extra=0.010, draft_s=0.002)
    assert costs_of(model, 8) == pytest.approx(0.020 + 0.014, rel=0.2)
    assert model.draft_s(4) == pytest.approx(0.002)
    # For numbers of choices that were never seen, what all steps had in common.
    assert model.draft_s(1) == pytest.approx(0.0, abs=1e-3)


def test_faster_steps_never_make_the_context_pay() -> None:
    model = CostModel(TABLE, 16)
    steps(model, 300, extra=-0.003)
    assert model.context_slope == 0.0
    assert costs_of(model, 1) > 0.0


def test_steps_with_rows_of_prompts_say_nothing_about_decoding() -> None:
    model = CostModel(TABLE, 16)
    before = costs_of(model)
    for _ in range(100):
        model.observe(StepTimes(rows=16, choices=4, context=9, prompt_rows=8, drafted=0, step_s=9.0, draft_s=0.0))
    assert costs_of(model) == before


def test_a_kept_table_is_found_under_its_key_only(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "deep" / "costs", ttl_s=100)
    store.save({"device": "a"}, TABLE, now_s=1000.0)
    found = store.load({"device": "a"}, now_s=1050.0)
    assert found is not None
    assert (found.table, found.measured_at_s) == (TABLE, 1000.0)
    assert store.load({"device": "b"}, now_s=1050.0) is None
    assert [path.suffix for path in (tmp_path / "deep" / "costs").iterdir()] == [".json"]


@pytest.mark.parametrize("now_s", [1101.0, 999.0])
def test_a_table_that_is_too_old_or_from_the_future_is_measured_again(tmp_path: Path, now_s: float) -> None:
    store = CostStore(tmp_path, ttl_s=100)
    store.save({}, TABLE, now_s=1000.0)
    assert store.load({}, now_s=now_s) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": "other"}', "flat"])
def test_a_damaged_or_flat_file_is_ignored_with_a_line_in_the_log(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CostStore(tmp_path, ttl_s=100)
    store.save({}, TABLE, now_s=1000.0)
    (path,) = tmp_path.iterdir()
    if damage == "flat":
        values = json.loads(path.read_text())
        values["table"]["step_s"] = [0.01] * 4
        damage = json.dumps(values)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert store.load({}, now_s=1000.0) is None
    assert [record.message for record in caplog.records] == ["cost table ignored"]


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        CostStore(tmp_path / "file", ttl_s=100).save({}, TABLE, now_s=0.0)
    assert [record.message for record in caplog.records] == ["cost table not kept"]


class SlowToy(ToyModel):
    """A toy whose steps take a known time on a clock of its own."""

    row_s, draft_each_s = 0.001, 0.002

    def __init__(self) -> None:
        super().__init__(slot_count=4, block_count=16)
        self.now_s = 0.0

    def forward(self, segments):  # type: ignore[no-untyped-def]
        self.now_s += 0.01 + self.row_s * sum(len(one.token_ids) for one in segments) + 0.003 * (len(segments) - 1)
        return super().forward(segments)

    def draft(self, starts, width):  # type: ignore[no-untyped-def]
        self.now_s += self.draft_each_s * len(starts)
        return []


def test_measuring_gives_what_steps_choices_and_drafts_cost() -> None:
    toy = SlowToy()
    table = measure_costs(toy, width=5, step_rows=64, limit_s=1.0, now=lambda: toy.now_s)
    assert table.rows == counts_up_to(24)
    assert table.step_s == pytest.approx([0.01 + 0.001 * n for n in table.rows])
    assert table.choices == (1, 2, 3, 4)
    assert table.sampler_s == pytest.approx([0.003 * (n - 1) for n in table.choices])
    assert table.draft_s == pytest.approx([0.002 * n for n in table.choices])


def test_sizes_between_powers_of_two_are_measured_too() -> None:
    assert counts_up_to(24) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert counts_up_to(1) == (1,)


def drafter(folder: Path) -> Drafter:
    return Drafter(directory=folder, draft_id="d", cost_key={"machine": "toy"})


def test_flat_costs_fall_back_to_fixed_widths_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_engine.verify.setup.measure_costs", lambda *_, **__: replace(TABLE, step_s=(0.01,) * 4))
    settings = VerifySettings(width=5, is_planned=True, cost_directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        planner = open_planner(SlowToy(), drafter(tmp_path), settings, step_rows=64)
    assert isinstance(planner, FixedWidth)
    assert planner.max_width == 5
    assert planner.stats().is_fallback
    assert "step costs are flat: all drafts are verified" in [record.message for record in caplog.records]
    assert not list(tmp_path.glob("costs-*"))


def test_measured_costs_are_kept_and_found_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(*_: object, **__: object) -> CostTable:
        measured.append(1)
        return TABLE

    monkeypatch.setattr("shoal_engine.verify.setup.measure_costs", measure)
    settings = VerifySettings(width=5, is_planned=True, cost_directory=tmp_path)
    for _ in range(2):
        planner = open_planner(SlowToy(), drafter(tmp_path), settings, step_rows=64)
        assert isinstance(planner, PlannedWidth)
        assert planner.stats().costs_measured_at_s is not None
    assert len(measured) == 1
    open_planner(SlowToy(), drafter(tmp_path), replace(settings, width=3), step_rows=64)
    assert len(measured) == 2


def test_without_drafts_nothing_is_measured(tmp_path: Path) -> None:
    for settings in (VerifySettings(width=0, is_planned=True), VerifySettings(width=5)):
        assert isinstance(open_planner(SlowToy(), drafter(tmp_path), settings, step_rows=64), FixedWidth)
