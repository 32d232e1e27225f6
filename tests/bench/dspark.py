"""The planner of drafts: on synthetic costs, its own time, nano's acceptance and calibration, tokens per second here.

ARGS="--parts sim,time,nano,speed1,speed8,speed32" runs some of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from bench import dspark_loop, dspark_nano, dspark_sim
from bench.harness import Bar, finish
from shoal_engine.planner import WidthView
from shoal_engine.verify import (
    Calibration,
    CostModel,
    ModeCalibration,
    PlannedWidth,
    allocate,
    budget,
    survival,
)
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.fit import cumulative_errors
from shoal_engine.verify.setup import CALIBRATION_FILE

SEED = 20
LOADS, FLOOR_LOADS = (1, 64, 200, 512, 1024), (1, 4, 16, 64, 128, 200, 512, 1024)
FLOOR_PER_USER = 80.0
SIM_TOKENS = 24_000
PLANNER_REQUESTS, PLANNER_RUNS = 512, 300
STREAMS, RUNS, OUTPUT_TOKENS = (1, 8, 32), 5, 48
SLICES, SLICE_S = 16, 0.25
"""Of one way in one run."""

Report = tuple[list[Bar], dict[str, object]]


def simulated() -> Report:
    """The real planner on synthetic costs."""
    bars, figures = [], dict[str, object]()
    fitted = dspark_sim.calibration(SEED)
    for profile in dspark_sim.PROFILES:
        rows, least, by_policy = {}, dict[str, float](), dict[str, list[dspark_sim.Outcome]]()
        for requests in FLOOR_LOADS if profile.name == "linear" else LOADS:
            steps = int(np.clip(SIM_TOKENS / requests, 256, 1500))
            outcomes = {
                name: dspark_sim.run(profile, requests, make(), seed=SEED + requests, steps=steps)
                for name, make in dspark_sim.planners(profile, requests, fitted).items()
            }
            outcomes["one token"] = dspark_sim.run_one_token(profile, requests, seed=SEED + requests, steps=steps)
            none = outcomes["none"].rate
            rows[requests] = {name: round(one.rate / none, 3) for name, one in outcomes.items()} | {
                "none, tokens/s": round(none, 1),
                "rows per request, planned": round(outcomes["planned"].rows, 2),
            }
            for name, one in outcomes.items():
                by_policy.setdefault(name, []).append(one)
                least[name] = min(least.get(name, np.inf), one.rate / none)
        figures[profile.name] = rows
        for name in ("planned", "planned, delayed"):
            bars.append(
                Bar(name=f"{profile.name}: {name} over none", value=least[name], want=0.99, sense="at least", unit="x")
            )
        if profile.name == "linear":
            at_floor = {name: dspark_sim.rate_at_floor(one, FLOOR_PER_USER) for name, one in by_policy.items()}
            figures[f"tokens/s at {FLOOR_PER_USER:g} tokens/s per user"] = at_floor
            for name in ("planned", "planned, delayed"):
                gain = at_floor[name] / at_floor["one token"]
                label = f"{name} over one token at {FLOOR_PER_USER:g}/user"
                bars.append(Bar(name=label, value=gain, want=1.4, sense="at least", unit="x"))
    return bars, {"simulated, over none": figures}


def planner_time() -> Report:
    """Budget and allocation, and all that the engine calls before a step."""
    random = np.random.default_rng(SEED)
    count, width = PLANNER_REQUESTS, dspark_sim.WIDTH
    logits = random.normal(2.0, 2.0, (count, width)).astype(np.float32)
    confidences, caps = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32), np.full(count, width)
    costs = CostModel(dspark_sim.PROFILES[0].table(count), dspark_sim.MOST_ROWS)

    def plan() -> None:
        chances = survival(confidences, caps)
        drafts = int(np.count_nonzero(chances))
        steps = costs.costs(count, drafts, choices=count, context=0, drafted=count)
        allocate(chances, budget(chances, count, steps).drafts)

    one = ModeCalibration(
        temperatures=(1.2,) * width, margin_weights=((0.1, 0.9, 0.5),) * width, margin_temperatures=(1.1,) * width
    )
    planner = PlannedWidth(
        width, costs, calibration=Calibration(draft_id="", width=width, modes=dict.fromkeys(Mode, one))
    )
    views = [
        WidthView(width, tuple(row), tuple(abs(x) for x in row), slot=slot, generation=1)
        for slot, row in enumerate(logits.tolist())
    ]
    plan_ms, whole_ms = _median_ms(plan), _median_ms(lambda: planner.widths(views))
    bar = Bar(name="planner, 512 x 5 drafts", value=plan_ms, want=0.5, sense="at most", unit="ms")
    return [bar], {"planner_ms": {"budget and allocation": plan_ms, "widths() with views and calibration": whole_ms}}


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(PLANNER_RUNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def nano_rounds() -> Report:
    """Nano's drafts by position and domain, and the error of the calibration that comes with it."""
    path = dspark_nano.release_directory() / CALIBRATION_FILE
    shipped = Calibration.from_json(path.read_text(encoding="utf-8"))
    by_domain = dspark_nano.rounds_by_domain(dspark_nano.MEASURE_SEED, dspark_nano.MEASURE_TEXTS)
    bars, figures = [], dict[str, object]()
    for mode in Mode:
        mine = {domain: modes[mode] for domain, modes in by_domain.items() if mode in modes}
        whole = dspark_nano.joined(list(mine.values()))
        errors = cumulative_errors(shipped.of(mode).confidences(whole.logits, whole.margins), whole.accepted)
        raw = ModeCalibration.none(shipped.width).confidences(whole.logits, whole.margins)
        figures[mode.value] = {
            "rounds": {domain: len(rounds) for domain, rounds in mine.items()},
            "accept_length": {domain: round(float(rounds.accepted.mean()), 3) for domain, rounds in mine.items()},
            "accepted_by_position": {domain: dspark_nano.accepted_by_position(r) for domain, r in mine.items()},
            "calibration_error_by_position": errors,
            "calibration_error_uncalibrated": cumulative_errors(raw, whole.accepted),
        }
        name = f"calibration error, {mode.value}"
        bars.append(Bar(name=name, value=max(errors) * 100, want=3.0, sense="at most", unit="%"))
    return bars, {"nano": figures}


def speed(streams: int) -> Report:
    """Tokens per second of so many streams on this machine, planner against fixed widths, runs interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        loops = dspark_loop.loops(streams, Path(folder), seed=dspark_nano.MEASURE_SEED, output_tokens=OUTPUT_TOKENS)
    rates: dict[str, list[float]] = {name: [] for name in loops}
    cpu_rates: dict[str, list[float]] = {name: [] for name in loops}
    for run in range(RUNS + 1):
        for loop in loops.values():
            loop.begin()
        # In slices in turn, so that whatever else the machine does meets all alike. The first run warms up.
        for _ in range(SLICES if run else SLICES // 4):
            for loop in loops.values():
                loop.advance(SLICE_S)
        for name, loop in loops.items():
            loop.end()
            if run:
                rates[name].append(loop.tokens / loop.wall_s)
                cpu_rates[name].append(loop.tokens / loop.cpu_s)
    middle = _medians(rates)
    share = middle["planned"] / max(middle["fixed 5"], middle["none"])
    bar = Bar(name=f"{streams} streams, planned over best fixed", value=share, want=0.95, sense="at least", unit="x")
    figures = {"median": middle, "all": rates, "per second of the processor, median": _medians(cpu_rates)}
    return [bar], {f"tokens_per_s, {streams} streams": figures}


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(some) for name, some in values.items()}


PARTS: dict[str, Callable[[], Report]] = {
    "sim": simulated,
    "time": planner_time,
    "nano": nano_rounds,
    **{f"speed{streams}": partial(speed, streams) for streams in STREAMS},
}


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    chosen = parser.parse_args().parts.split(",")
    if not set(chosen) <= set(PARTS):
        parser.error(f"--parts takes some of {','.join(PARTS)}")
    bars, figures = list[Bar](), dict[str, object]()
    for part in chosen:
        more_bars, more_figures = PARTS[part]()
        bars += more_bars
        figures |= more_figures
    workload = {
        "parts": chosen,
        "simulated": {"loads": LOADS, "seed": SEED, "profiles": [repr(profile) for profile in dspark_sim.PROFILES]},
        "planner": {"requests": PLANNER_REQUESTS, "drafts": dspark_sim.WIDTH, "runs": PLANNER_RUNS},
        "nano": {"seed": dspark_nano.MEASURE_SEED, "items": dspark_nano.ITEMS, "texts": dspark_nano.MEASURE_TEXTS},
        "speed": {
            "streams": STREAMS,
            "runs": RUNS,
            "seconds": SLICES * SLICE_S,
            "output_tokens": OUTPUT_TOKENS,
            "temperature": "0 and 1, half each",
        },
    }
    return finish("dspark", workload=workload, bars=bars, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
