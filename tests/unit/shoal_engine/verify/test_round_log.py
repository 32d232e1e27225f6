"""The log of draft rounds: cut off, damaged, full, shared; what is read back is what was written whole."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal_engine.verify import CalibrationError
from shoal_engine.verify.calibration import LARGEST_MARGIN, Mode
from shoal_engine.verify.fit import fit_mode
from shoal_engine.verify.rounds import LARGEST_LOGIT, RoundFile, RoundLog, Rounds, read_rounds

WIDTH = 2


def log(path: Path, count: int, *, first: int = 0, **more: int) -> None:
    """Rounds whose first logit is their number."""
    writer = RoundLog(path, draft_id="d", width=WIDTH, **more)
    for number in range(first, first + count):
        writer.write(Mode.GREEDY, 1, (float(number), 0.5), (1.0, 2.0))
    writer.flush()


def numbers_in(path: Path) -> list[int]:
    found = read_rounds(path).modes.get(Mode.GREEDY)
    return [] if found is None else [int(x) for x in found.logits[:, 0]]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_wherever_a_log_is_cut_off_the_next_writer_loses_nothing(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    log(path, 4)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = max(whole[:cut].count(b"\n") - 1, 0)
    # A round that lacks its end alone gets it.
    kept += whole[cut : cut + 1] == b"\n" and b"\n" in whole[:cut]
    log(path, 3, first=10)
    assert numbers_in(path) == [*range(kept), 10, 11, 12]
    # What was cut off is one line, unless the cut was between two.
    assert read_rounds(path).skipped <= 1


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_log_is_read_or_refused_by_its_first_line(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    log(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    nasty = st.sampled_from(
        [b"NaN", b"Infinity", b"1e999", b'"1"', b"null", b"true", b"1" * 5000, b"[" * 9000, b"{}", b"\0", b"1.5", b"-1"]
    )
    at = data.draw(st.integers(0, len(lines) - 1))
    line = lines[at]
    start = data.draw(st.integers(0, len(line) - 1))
    end = data.draw(st.integers(start, len(line)))
    lines[at] = line[:start] + data.draw(nasty | st.binary(max_size=4)) + line[end:]
    path.write_bytes(b"".join(lines))
    try:
        found = read_rounds(path)
    except CalibrationError:
        # Only the first line decides whether it is a log.
        assert at == 0
        return
    _check(found)


def _check(found: RoundFile) -> None:
    assert sum(map(len, found.modes.values())) + found.skipped >= 3
    for rounds in found.modes.values():
        assert rounds.logits.shape == rounds.margins.shape == (len(rounds), found.width)
        assert (np.abs(rounds.logits) <= LARGEST_LOGIT).all()
        assert ((rounds.accepted >= 0) & (rounds.accepted <= found.width)).all()


def test_extreme_rounds_are_fitted() -> None:
    logits = np.array([[LARGEST_LOGIT, -LARGEST_LOGIT], [-LARGEST_LOGIT, 0.0]] * 25, dtype=np.float32)
    margins = np.array([[0.0, LARGEST_MARGIN], [float("nan"), 1.0]] * 25, dtype=np.float32)
    for accepted in (np.zeros(50, np.int64), np.full(50, WIDTH), np.arange(50) % (WIDTH + 1)):
        with np.errstate(invalid="raise", divide="raise", over="raise"):
            one = fit_mode(Rounds(logits, margins, accepted))
        assert np.isfinite(one.confidences(logits, margins)).all()


@pytest.mark.parametrize("header", ['{"format": "shoal draft rounds 1", "draft_id": "d"', "x\n", "\n"])
def test_only_a_header_that_was_cut_off_is_written_over(tmp_path: Path, header: str) -> None:
    path = tmp_path / "log"
    path.write_text(header)
    if header.endswith("\n"):
        with pytest.raises(CalibrationError, match="is no log"):
            RoundLog(path, draft_id="d", width=WIDTH)
        assert path.read_text() == header
    else:
        log(path, 2)
        assert numbers_in(path) == [0, 1]


def test_a_log_never_grows_beyond_its_size_whoever_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, most = tmp_path / "log", 600
    writers = [RoundLog(path, draft_id="d", width=WIDTH, most_bytes=most) for _ in range(2)]
    with caplog.at_level(logging.INFO):
        for number in range(100):
            writers[number % 2].write(Mode.GREEDY, 1, (float(number), 0.5), (1.0, 2.0))
            writers[number % 2].flush()
    assert most - 60 < path.stat().st_size <= most
    assert numbers_in(path) == list(range(len(numbers_in(path))))
    assert [record.message for record in caplog.records] == ["the log of draft rounds is full"] * 2
    # One that is full already stays as it is.
    before = path.read_bytes()
    log(path, 5, most_bytes=most)
    assert path.read_bytes() == before


def test_a_full_disk_ends_the_log_and_not_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RoundLog(tmp_path / "log", draft_id="d", width=WIDTH)
    assert writer._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    os.close(full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.write(Mode.GREEDY, 1, (1.0, 0.5), (1.0, 2.0))
            writer.flush()
    assert [record.message for record in caplog.records] == ["the log of draft rounds cannot be written"]


def test_rounds_whose_logits_are_no_numbers_are_not_logged_and_odd_margins_are_unknown(tmp_path: Path) -> None:
    writer = RoundLog(tmp_path / "log", draft_id="d", width=WIDTH)
    nan, inf = float("nan"), float("inf")
    writer.write(Mode.GREEDY, 0, (nan, 1.0), (1.0, 1.0))
    writer.write(Mode.GREEDY, 0, (1.0, inf), ())
    writer.write(Mode.GREEDY, 0, (7.0, 1.0), (nan, 1.0))
    writer.write(Mode.GREEDY, 0, (8.0, 1.0), (inf, 0.0))
    writer.flush()
    found = read_rounds(tmp_path / "log")
    assert numbers_in(tmp_path / "log") == [7, 8]
    assert found.skipped == 0
    margins = found.modes[Mode.GREEDY].margins
    assert np.isnan(margins[0]).all()
    assert margins[1].tolist() == [LARGEST_MARGIN, 0.0]


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_folder, _device])
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "log"
    make(path)
    for use in (read_rounds, lambda path: RoundLog(path, draft_id="d", width=WIDTH)):
        with pytest.raises(CalibrationError, match="is no file"):
            use(path)


def test_a_line_without_an_end_is_read_in_bounded_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log(path, 1)
    with path.open("ab") as file:
        file.write(b"[" * 1_000_000 + b"\n" + json.dumps(["greedy", 1, [9.0, 1.0], []]).encode() + b"\n")
    assert numbers_in(path) == [0, 9]
