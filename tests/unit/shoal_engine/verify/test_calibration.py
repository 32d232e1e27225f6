"""From logged rounds to a calibration: what the fit finds, which files are refused, and that nano's is its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from shoal_engine.llm import model_directory
from shoal_engine.model_identity import identify
from shoal_engine.planner import VerifiedRound, WidthView
from shoal_engine.verify import Calibration, CalibrationError, ModeCalibration
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.drift import DriftWatch, expected_calibration_error
from shoal_engine.verify.fit import cumulative_errors, fit, fit_mode
from shoal_engine.verify.rounds import LoggedRounds, RoundLog, Rounds, read_rounds
from shoal_engine.verify.setup import CALIBRATION_FILE, Drafter, read_calibration

WIDTH = 5


def synthetic(count: int, *, seed: int = 1, has_margins: bool = True) -> Rounds:
    """Acceptance by 0.3 + 0.6 logit + 0.8 log margin; a head that says the logit."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.5, 1.5, (count, WIDTH))
    margins = random.gamma(1.5, 1.0, (count, WIDTH)) + 0.01
    chances = 1.0 / (1.0 + np.exp(-(0.3 + 0.6 * logits + 0.8 * np.log(margins))))
    accepted = np.cumprod(random.uniform(size=chances.shape) < chances, axis=1).sum(axis=1)
    shown = margins if has_margins else np.full_like(margins, np.nan)
    return Rounds(logits.astype(np.float32), shown.astype(np.float32), accepted)


def test_the_fit_finds_how_margins_and_the_head_decide() -> None:
    weights = np.array(fit_mode(synthetic(20_000)).margin_weights)
    # The first positions have the most rounds.
    assert weights[0].tolist() == pytest.approx([0.3, 0.6, 0.8], abs=0.1)
    assert weights[1].tolist() == pytest.approx([0.3, 0.6, 0.8], abs=0.15)


def test_a_calibrated_head_is_within_two_per_cent_on_fresh_rounds() -> None:
    one, fresh = fit_mode(synthetic(20_000)), synthetic(20_000, seed=2)
    raw = cumulative_errors(ModeCalibration.none(WIDTH).confidences(fresh.logits, fresh.margins), fresh.accepted)
    fitted = cumulative_errors(one.confidences(fresh.logits, fresh.margins), fresh.accepted)
    assert max(fitted) < 0.02 < max(raw)
    assert max(one.errors) < 0.02


def test_margins_tell_good_drafts_from_bad_ones_better_than_the_head_alone() -> None:
    rounds = synthetic(10_000)
    one = fit_mode(rounds)
    unknown = np.full_like(rounds.margins, np.nan)
    hits = rounds.accepted > 0

    def squared_error(margins: NDArray[np.float32]) -> float:
        return float(np.mean((one.confidences(rounds.logits, margins)[:, 0] - hits) ** 2))

    assert squared_error(rounds.margins) < 0.95 * squared_error(unknown)


def test_without_margins_only_temperatures_are_fitted() -> None:
    one = fit_mode(synthetic(2000, has_margins=False))
    assert one.margin_weights == ()
    assert len(one.temperatures) == WIDTH


def test_over_confident_logits_get_a_temperature_above_one() -> None:
    random = np.random.default_rng(3)
    true = random.normal(1.0, 1.0, (20_000, WIDTH))
    accepted = np.cumprod(random.uniform(size=true.shape) < 1 / (1 + np.exp(-true)), axis=1).sum(axis=1)
    one = fit_mode(Rounds((2.0 * true).astype(np.float32), np.full(true.shape, np.nan, dtype=np.float32), accepted))
    assert one.temperatures[0] == pytest.approx(2.0, rel=0.15)


def test_rounds_that_are_all_accepted_are_fitted_too() -> None:
    one = fit_mode(Rounds(np.ones((600, WIDTH), np.float32), np.ones((600, WIDTH), np.float32), np.full(600, WIDTH)))
    assert (one.confidences(np.ones((1, WIDTH), np.float32), np.ones((1, WIDTH), np.float32)) > 0.9).all()


def test_an_unknown_confidence_is_certain_and_extreme_margins_are_finite() -> None:
    one = fit_mode(synthetic(1000))
    nan = np.full((1, WIDTH), np.nan, dtype=np.float32)
    assert one.confidences(nan, nan).tolist() == [[1.0] * WIDTH]
    extreme = np.array([[0.0, np.inf, 1e-30, 1e30, 1.0]], dtype=np.float32)
    assert np.isfinite(one.confidences(np.zeros((1, WIDTH), np.float32), extreme)).all()


def test_the_error_is_that_of_the_bins() -> None:
    chances = np.array([0.1] * 10 + [0.9] * 10, dtype=np.float32)
    hits = np.array([True] * 1 + [False] * 9 + [True] * 5 + [False] * 5)
    assert expected_calibration_error(chances, hits) == pytest.approx(0.5 * 0.4, abs=1e-6)
    assert expected_calibration_error(chances[:0], hits[:0]) == 0.0


def test_the_watch_has_the_error_of_its_window_and_forgets_what_is_older() -> None:
    random = np.random.default_rng(5)
    watch = DriftWatch(window=1000, least=500)
    chances = random.uniform(size=5000).astype(np.float32)
    hits = random.uniform(size=5000) < chances
    for start in range(0, 5000, 70):
        watch.note(chances[start : start + 70], hits[start : start + 70])
    assert watch.error == pytest.approx(expected_calibration_error(chances[-1000:], hits[-1000:]), abs=1e-6)
    watch.note(np.ones(3000, dtype=np.float32), np.zeros(3000, dtype=np.bool_))
    assert watch.error == 1.0
    assert watch.is_alarmed


def test_few_drafts_raise_no_alarm() -> None:
    watch = DriftWatch()
    watch.note(np.ones(100, dtype=np.float32), np.zeros(100, dtype=np.bool_))
    assert watch.error == 1.0
    assert not watch.is_alarmed


def calibration() -> Calibration:
    return Calibration(
        draft_id="d",
        width=WIDTH,
        modes={Mode.GREEDY: fit_mode(synthetic(600)), Mode.SAMPLED: ModeCalibration.none(WIDTH)},
    )


def test_a_calibration_is_read_as_it_was_written() -> None:
    assert Calibration.from_json(calibration().to_json()) == calibration()


def test_a_calibration_of_no_mode_is_refused() -> None:
    empty = Calibration.from_json(Calibration(draft_id="d", width=WIDTH, modes={}).to_json())
    with pytest.raises(CalibrationError, match="has no mode"):
        empty.checked(draft_id="d", width=WIDTH)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "shoal draft calibration 1", "draft_id": "d", "width": 5, "modes": {"x": {}}}']
)
def test_something_else_is_no_calibration(text: str) -> None:
    with pytest.raises(CalibrationError, match="is no calibration"):
        Calibration.from_json(text)


@pytest.mark.parametrize(
    "change", [{"temperatures": [1, 1, 0, 1, 1]}, {"temperatures": [1.0]}, {"margin_weights": [[1]]}]
)
def test_numbers_that_cannot_be_applied_are_refused(change: dict[str, object]) -> None:
    values = json.loads(calibration().to_json())
    values["modes"]["greedy"] |= change
    with pytest.raises(CalibrationError):
        Calibration.from_json(json.dumps(values))


@pytest.mark.parametrize(("draft_id", "width"), [("other", WIDTH), ("d", 7)])
def test_a_calibration_of_another_draft_or_width_is_refused(tmp_path: Path, draft_id: str, width: int) -> None:
    """One that was named stops the start; one that lies beside the checkpoint is left alone."""
    path = tmp_path / CALIBRATION_FILE
    path.write_text(calibration().to_json())
    mine = Drafter(directory=tmp_path, draft_id=draft_id, cost_key={})
    with pytest.raises(CalibrationError, match="this model"):
        read_calibration(mine, path, width=width)
    assert read_calibration(mine, None, width=width) is None
    assert read_calibration(Drafter(directory=tmp_path, draft_id="d", cost_key={}), None, width=WIDTH) == calibration()


def log_some(path: Path, rounds: Rounds, **more: int) -> None:
    log = RoundLog(path, draft_id="d", width=WIDTH, **more)
    planner = LoggedRounds(WIDTH, log)
    views = [
        WidthView(WIDTH, tuple(map(float, z)), tuple(map(float, m)), is_greedy=i % 2 == 0)
        for i, (z, m) in enumerate(zip(rounds.logits, rounds.margins, strict=True))
    ]
    assert planner.widths(views) == [WIDTH] * len(views)
    planner.verified([VerifiedRound(i, WIDTH, int(a)) for i, a in enumerate(rounds.accepted)])


def test_logged_rounds_are_read_back_by_mode(tmp_path: Path) -> None:
    path, rounds = tmp_path / "rounds" / "log", synthetic(40)
    log_some(path, rounds)
    log_some(path, rounds)
    found = read_rounds(path)
    assert (found.draft_id, found.width) == ("d", WIDTH)
    greedy = found.modes[Mode.GREEDY]
    assert len(greedy) == 40
    assert greedy.accepted[:20].tolist() == rounds.accepted[::2].tolist()
    assert np.allclose(greedy.logits[:20], rounds.logits[::2], atol=1e-4)
    assert np.allclose(found.modes[Mode.SAMPLED].margins[20:], rounds.margins[1::2], atol=1e-4)


def test_rounds_of_less_than_the_full_width_are_left_out(tmp_path: Path) -> None:
    planner = LoggedRounds(WIDTH, RoundLog(tmp_path / "log", draft_id="d", width=WIDTH))
    planner.widths([WidthView(3, (1.0,) * WIDTH), WidthView(WIDTH, (1.0,) * WIDTH)])
    planner.verified([VerifiedRound(0, 3, 3), VerifiedRound(1, WIDTH, 2)])
    assert read_rounds(tmp_path / "log").modes[Mode.SAMPLED].accepted.tolist() == [2]


def test_a_log_stops_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_some(path, synthetic(1000), most_bytes=5000)
    assert path.stat().st_size < 5200
    assert len(read_rounds(path).modes[Mode.GREEDY]) > 10


def test_a_log_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_some(path, synthetic(10))
    path.write_text(path.read_text()[:-9])
    assert sum(map(len, read_rounds(path).modes.values())) == 9


def test_a_log_of_another_draft_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_some(path, synthetic(2))
    with pytest.raises(CalibrationError, match="another draft"):
        RoundLog(path, draft_id="e", width=WIDTH)


def test_too_few_rounds_are_not_fitted(tmp_path: Path) -> None:
    log_some(tmp_path / "log", synthetic(20))
    with pytest.raises(CalibrationError, match="500 rounds of a mode wanted, there are 10 greedy, 10 sampled"):
        fit(read_rounds(tmp_path / "log"))


def test_nano_comes_with_a_calibration_of_its_own_draft() -> None:
    directory = model_directory("nano")
    identity = identify(directory, name="", replay_length=140)
    mine = Drafter(directory=directory, draft_id=identity.draft_id, cost_key={})
    found = read_calibration(mine, directory / CALIBRATION_FILE, width=WIDTH)
    assert found is not None
    assert set(found.modes) == set(Mode)
    assert all(one.margin_weights and one.rounds > 5000 for one in found.modes.values())
