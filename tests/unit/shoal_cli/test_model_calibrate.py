"""`shoal model calibrate` as a user sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shoal_cli.main import main
from shoal_engine.verify.calibration import Calibration, Mode
from shoal_engine.verify.rounds import RoundLog


def write_rounds(path: Path, counts: dict[Mode, int]) -> None:
    random = np.random.default_rng(1)
    log = RoundLog(path, draft_id="abc", width=3)
    for mode, count in counts.items():
        for _ in range(count):
            logits = random.normal(1.0, 1.0, 3)
            right = np.cumprod(random.uniform(size=3) < 1 / (1 + np.exp(-logits))).sum()
            log.write(mode, int(right), logits.tolist(), random.gamma(2.0, 1.0, 3).tolist())
    log.flush()


def test_modes_with_enough_rounds_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rounds(tmp_path / "rounds", {Mode.GREEDY: 300, Mode.SAMPLED: 20})
    out = tmp_path / "calibration.json"
    assert main(["model", "calibrate", str(tmp_path / "rounds"), "--out", str(out), "--least-rounds", "100"]) == 0
    found = Calibration.from_json(out.read_text())
    assert (found.draft_id, found.width, set(found.modes)) == ("abc", 3, {Mode.GREEDY})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: draft abc, 3 draft positions"
    assert lines[1] == "greedy: 300 rounds, calibration error by position, before and after (held out)"
    assert lines[2].count("->") == 3
    assert lines[3] == "sampled: only 20 rounds, not fitted"


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file or directory"), ("nonsense\n", "is no log of draft rounds")],
)
def test_a_log_that_cannot_be_read_is_one_line_and_status_2(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "rounds").write_text(text)
    assert main(["model", "calibrate", str(tmp_path / "rounds"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_too_few_rounds_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rounds(tmp_path / "rounds", {Mode.GREEDY: 30})
    assert main(["model", "calibrate", str(tmp_path / "rounds"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "shoal model calibrate: 500 rounds of a mode wanted, there are 30 greedy\n"


def test_fitting_needs_no_torch() -> None:
    script = "import sys, shoal_engine.verify.fit; print([m for m in ('torch', 'grpc', 'nats') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
