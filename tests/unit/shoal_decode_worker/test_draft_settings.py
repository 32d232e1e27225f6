"""Files of drafts that are named in the settings: checked before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal_decode_worker.config import DecodeWorkerConfig
from shoal_decode_worker.model import check
from shoal_engine.llm import model_directory
from shoal_engine.verify.rounds import RoundLog
from shoal_engine.verify.setup import CALIBRATION_FILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("bad", "is no calibration"),
        ('{"format": "shoal draft calibration 1", "draft_id": "x", "width": 5, "modes": {}}', "is of draft x"),
    ],
)
def test_a_calibration_that_cannot_be_used_stops_the_start_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "calibration"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        check(DecodeWorkerConfig(calibration=str(path)))
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)
    # What is not used is not asked for.
    check(DecodeWorkerConfig(calibration=str(path), verify="fixed"))


def test_a_log_of_another_draft_stops_the_start_and_a_new_one_is_not_begun_by_the_check(tmp_path: Path) -> None:
    RoundLog(tmp_path / "other", draft_id="x", width=5)
    with pytest.raises(ValueError, match="is of another draft"):
        check(DecodeWorkerConfig(round_log=str(tmp_path / "other")))
    check(DecodeWorkerConfig(round_log=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


def test_the_calibration_that_comes_with_a_model_can_be_named(tmp_path: Path) -> None:
    check(DecodeWorkerConfig(calibration=str(model_directory("nano") / CALIBRATION_FILE)))
