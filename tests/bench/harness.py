"""What every bench ends with: build/bench/NAME.json and a table of its bars."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).resolve().parents[2] / "build" / "bench"
_VERSIONS = ("shoal", "torch", "numpy", "numba", "triton", "tilelang", "grpcio", "protobuf", "nats-py", "uvloop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One number with what is wanted of it: at most or at least `want`, in `unit`."""

    name: str
    value: float
    want: float
    sense: Literal["at least", "at most"]
    unit: str

    @property
    def ok(self) -> bool:
        """Whether the number is as wanted."""
        return self.value >= self.want if self.sense == "at least" else self.value <= self.want


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie (nearest rank). Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def finish(
    name: str,
    *,
    workload: Mapping[str, object],
    bars: Sequence[Bar],
    figures: Mapping[str, object] | None = None,
    device: str | None = None,
) -> int:
    """Write build/bench/NAME.json and print the bars. Returns the exit status: 1 if a bar is missed.

    workload   what was run, enough to run it again
    figures    other numbers worth keeping, without a bar
    device     the accelerator, if one was used; the CPU is always told
    """
    result = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": {"cpu": _cpu(), "cores": os.cpu_count(), "accelerator": device, "load": os.getloadavg()[0]},
        "versions": _versions(),
        "workload": dict(workload),
        "figures": dict(figures or {}),
        "bars": [
            {"name": bar.name, "value": bar.value, "want": f"{bar.sense} {bar.want:g} {bar.unit}".strip(), "ok": bar.ok}
            for bar in bars
        ],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"{name}.json"
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(bars))
    print(f"{target}")
    return 0 if all(bar.ok for bar in bars) else 1


def table(bars: Sequence[Bar]) -> str:
    """The bars for people."""
    rows = [("bar", "value", "want", "")]
    rows += [
        (bar.name, f"{bar.value:.4g} {bar.unit}", f"{bar.sense} {bar.want:g} {bar.unit}", "ok" if bar.ok else "MISSED")
        for bar in bars
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
