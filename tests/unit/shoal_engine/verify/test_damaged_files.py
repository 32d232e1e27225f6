"""Whatever lies where step costs or a calibration are looked for: a worker starts, or says in one line why not."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal_engine.verify import Calibration, CalibrationError, CostModel, CostTable, ModeCalibration
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.setup import CALIBRATION_FILE, Drafter, VerifySettings, open_planner, read_calibration
from shoal_engine.verify.small_files import MOST_BYTES
from shoal_engine.verify.store import CostStore
from support.toy_model import ToyModel

TABLE = CostTable(rows=(1, 4, 8), step_s=(0.01, 0.02, 0.03), choices=(1, 4), sampler_s=(0.0, 0.1), draft_s=(0.1, 0.2))
CALIBRATION = Calibration(
    draft_id="d",
    width=2,
    modes={
        Mode.GREEDY: ModeCalibration.none(2),
        Mode.SAMPLED: ModeCalibration(
            temperatures=(1.0, 2.0), margin_weights=((0.1, 1.0, 0.5),) * 2, margin_temperatures=(1.0, 0.5), rounds=9
        ),
    },
)

HUGE = 10**400
NASTY = st.sampled_from([HUGE, -HUGE, 1 << 62, 1e308, -1e308, 5e-324, 1.5, "", "1", "NaN", True])
SCALARS = st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS, lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=3), one, max_size=3), max_leaves=6
)


def places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in an object or a list: what holds it, and where."""
    for key, inner in list(values.items() if isinstance(values, dict) else enumerate(values)):
        yield values, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@st.composite
def damaged(draw: st.DrawFn, whole: str) -> bytes:
    """A file in which one value is another one or absent, or any bytes are changed or cut off."""
    if draw(st.integers(0, 4)):
        values = json.loads(whole)
        at, key = draw(st.sampled_from(list(places(values))))
        if draw(st.booleans()):
            at[key] = draw(NASTY | VALUES)
        else:
            del at[key]
        return json.dumps(values).encode()
    data = bytearray(whole.encode())
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def stored(folder: Path) -> tuple[CostStore, Path]:
    store = CostStore(folder, ttl_s=100)
    store.save({"a": "b"}, TABLE, now_s=1000.0)
    (path,) = folder.iterdir()
    return store, path


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_cost_file_is_a_table_that_can_be_used_or_one_warning(tmp_path: Path, data: st.DataObject) -> None:
    store, path = stored(tmp_path)
    path.write_bytes(data.draw(damaged(path.read_text())))
    heard, log = _Warnings(), logging.getLogger("shoal_engine.verify.store")
    log.addHandler(heard)
    try:
        found = store.load({"a": "b"}, now_s=1050.0)
    finally:
        log.removeHandler(heard)
        path.unlink()
    assert heard.messages in ([], ["cost table ignored"])
    if found is None:
        return
    assert not heard.messages
    with np.errstate(all="raise", under="ignore"):
        costs = CostModel(found.table, 64).costs(4, 20, choices=4, context=0, drafted=4)
    assert np.isfinite(costs).all()
    assert costs[0] > 0
    assert (np.diff(costs) >= 0).all()


@settings(max_examples=100)
@given(st.data())
def test_any_calibration_is_one_that_can_be_applied_or_a_typed_error(data: st.DataObject) -> None:
    text = data.draw(damaged(CALIBRATION.to_json())).decode("utf-8", "replace")
    with contextlib.suppress(CalibrationError):
        found = Calibration.from_json(text)
        apply(found)


def apply(found: Calibration) -> None:
    logits = np.array([[0.0, -50.0, 50.0, 1.0]] * 2, dtype=np.float32).T[:, : found.width]
    for mode in Mode:
        with np.errstate(all="raise", under="ignore"):
            chances = found.of(mode).confidences(logits, np.full_like(logits, 1e9))
        assert ((chances >= 0) & (chances <= 1)).all()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "large": lambda path: path.write_text(" " * (MOST_BYTES + 1)),
    "a number too long": lambda path: path.write_text("1" * 5000),
    "a folder": lambda path: path.mkdir(),
    "a pipe": _fifo,
    "a link to itself": _loop,
}


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_measures_again_where_the_cost_file_is_damaged(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*_: object, **__: object) -> CostTable:
        measured.append(1)
        return TABLE

    monkeypatch.setattr("shoal_engine.verify.setup.measure_costs", measure)
    settings = VerifySettings(width=2, is_planned=True, cost_directory=tmp_path)
    head = Drafter(directory=tmp_path, draft_id="d", cost_key={})

    def start() -> bool:
        return open_planner(ToyModel(slot_count=4, block_count=16), head, settings, step_rows=64).stats().is_planned

    assert start()
    (path,) = tmp_path.glob("costs-*")
    put(path, kind)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert start()
    assert [record.message for record in caplog.records].count("cost table ignored") == 1
    assert len(measured) == 2
    assert start()
    # Only a folder cannot be replaced.
    assert len(measured) == (3 if kind == "a folder" else 2)


@pytest.mark.parametrize("now_s", ["NaN", "Infinity", "-1", '"1"', "1e300", "true"])
def test_a_table_measured_at_no_time_is_ignored(tmp_path: Path, now_s: str) -> None:
    store, path = stored(tmp_path)
    path.write_text(path.read_text().replace("1000.0", now_s))
    assert store.load({"a": "b"}, now_s=1050.0) is None


@pytest.mark.parametrize("kind", [*KINDS, "absent"])
def test_a_calibration_that_cannot_be_read_is_a_warning_beside_a_checkpoint_and_an_error_where_it_was_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / CALIBRATION_FILE
    if kind != "absent":
        put(path, kind)
    head = Drafter(directory=tmp_path, draft_id="d", cost_key={})
    with caplog.at_level(logging.WARNING):
        assert read_calibration(head, None, width=2) is None
    assert [record.message for record in caplog.records] == ([] if kind == "absent" else ["calibration refused"])
    with pytest.raises(CalibrationError) as caught:
        read_calibration(head, path, width=2)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)
