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


def test_bad_options_and_places_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "rounds", tmp_path / "out"
    write_rounds(log, {Mode.GREEDY: 60})
    before = log.read_bytes()
    few = ["--least-rounds", "50"]
    for arguments, message in (
        ([str(log), "--out", str(out), "--least-rounds", "4"], "--least-rounds must be at least 50, got 4"),
        ([str(log), "--out", str(log), *few], "is the log itself"),
        ([str(log), "--out", str(tmp_path / "no" / "out"), *few], "No such file or directory"),
        ([str(log), "--out", str(tmp_path), *few], "Is a directory"),
        ([str(tmp_path), "--out", str(out)], "is no file"),
        (["/dev/zero", "--out", str(out)], "is no file"),
    ):
        assert main(["model", "calibrate", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("shoal model calibrate: ")
        assert message in error
        assert error.count("\n") == 1
    assert log.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rounds"]


def test_a_log_without_rounds_and_lines_that_are_none_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "rounds", tmp_path / "out"
    write_rounds(log, {})
    assert main(["model", "calibrate", str(log), "--out", str(out)]) == 2
    assert capsys.readouterr().err == "shoal model calibrate: 500 rounds of a mode wanted, there are none\n"
    write_rounds(log, {Mode.GREEDY: 60})
    with log.open("a") as file:
        file.write('["greedy",1,[NaN,1.0,1.0],[]]\n["greedy",2,[1.')
    assert main(["model", "calibrate", str(log), "--out", str(out), "--least-rounds", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 lines that are no rounds were skipped" in lines
    assert lines[-1] == "sampled: no rounds, not fitted"


def test_too_few_rounds_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rounds(tmp_path / "rounds", {Mode.GREEDY: 30})
    assert main(["model", "calibrate", str(tmp_path / "rounds"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "shoal model calibrate: 500 rounds of a mode wanted, there are 30 greedy\n"


def test_fitting_needs_no_torch() -> None:
    script = "import sys, shoal_engine.verify.fit; print([m for m in ('torch', 'grpc', 'nats') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
