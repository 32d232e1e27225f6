from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import harness
from bench.harness import Bar, finish, percentile


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path


def test_a_bench_writes_device_versions_workload_and_bars(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bars = [
        Bar(name="rate", value=50, want=40, sense="at least", unit="tokens/s"),
        Bar(name="ttft", value=400, want=300, sense="at most", unit="ms"),
    ]
    assert finish("nano", workload={"streams": 1}, bars=bars) == 1
    written = json.loads((results / "nano.json").read_text())
    assert written["bars"] == [
        {"name": "rate", "value": 50, "want": "at least 40 tokens/s", "ok": True},
        {"name": "ttft", "value": 400, "want": "at most 300 ms", "ok": False},
    ]
    assert written["workload"] == {"streams": 1}
    assert {"cpu", "cores"} <= written["device"].keys()
    assert "python" in written["versions"]
    assert "MISSED" in capsys.readouterr().out


def test_a_bench_that_meets_all_bars_ends_with_status_0() -> None:
    assert finish("x", workload={}, bars=[Bar(name="a", value=1, want=1, sense="at least", unit="")]) == 0


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([1], 0.99) == 1
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
