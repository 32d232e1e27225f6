"""Every kernel on the CUDA device at released sizes, against what the device can do at most.

    make bench-device                    all operations
    make bench-device ARGS="linear ..."  some of them: names of modules in bench.device_cases

Each line tells the time, the floor max(bytes / copy bandwidth, flops / bf16 rate) measured in the same run, and their
ratio; for products scaled every 32 of K also the ratio to the floor at the FP8 rate.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence

import bench.device_cases
import torch
from bench.device_case import Case
from bench.device_ceilings import Ceilings, measure_ceilings, seconds
from bench.harness import Bar, finish, table

_GRAPH_BELOW_S = 2e-3
_BUDGET_S = 0.15


def main(names: Sequence[str]) -> int:
    """Run the named case modules, or all. Returns 1 where a target is missed or a case fails."""
    if not torch.cuda.is_available():
        print("bench-device needs a CUDA device", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"bf16 {ceilings.bf16 / 1e12:.0f} TFLOP/s, fp8 {ceilings.fp8 / 1e12:.0f} TFLOP/s"
    )
    known = [module.name for module in pkgutil.iter_modules(bench.device_cases.__path__)]
    lines: list[dict[str, object]] = []
    bars: list[Bar] = []
    failed: list[str] = []
    status = 0
    for name in names or known:
        try:
            for case in _cases(name):
                line = {"module": name, **_measure(case, ceilings)}
                lines.append(line)
                print(_text(line), flush=True)
                if case.target is not None:
                    title = f"{case.kernel}: {case.workload}"
                    bars.append(
                        Bar(name=title, value=_fraction(line), want=case.target, sense="at least", unit="of the floor")
                    )
        except Exception:
            traceback.print_exc()
            failed.append(name)
        torch.cuda.empty_cache()
        with contextlib.redirect_stdout(io.StringIO()):
            status = _write(names or known, ceilings, lines, bars, failed)
    print(table(bars))
    return 1 if failed else status


def _write(
    names: Sequence[str],
    ceilings: Ceilings,
    lines: Sequence[dict[str, object]],
    bars: Sequence[Bar],
    failed: Sequence[str],
) -> int:
    """What is known so far: a kernel that hangs later takes nothing with it."""
    return finish(
        "device",
        workload={"modules": list(names), "timing": "median; CUDA graphs below 2 ms; inputs rotated"},
        bars=bars,
        figures={
            "ceilings": {"copy_bytes_s": ceilings.copy, "bf16_flop_s": ceilings.bf16, "fp8_flop_s": ceilings.fp8},
            "cases": list(lines),
            "failed": list(failed),
        },
        device=f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
    )


def _cases(name: str) -> Iterator[Case]:
    module = importlib.import_module(f"bench.device_cases.{name}")
    yield from module.cases()


def _measure(case: Case, ceilings: Ceilings) -> dict[str, object]:
    taken = _time(case.runs)
    floor = ceilings.floor_s(case.bytes, case.flops)
    line: dict[str, object] = {
        "kernel": case.kernel,
        "workload": case.workload,
        "us": round(taken * 1e6, 2),
        "bytes": case.bytes,
        "flops": case.flops,
        "bound": "bytes" if case.bytes / ceilings.copy >= case.flops / ceilings.bf16 else "flops",
        "tb_s": round(case.bytes / taken / 1e12, 3),
        "tflop_s": round(case.flops / taken / 1e12, 1),
        "fraction": round(floor / taken, 3),
        "target": case.target,
    }
    if case.scaled:
        line["fraction_fp8"] = round(ceilings.floor_s(case.bytes, case.flops, at_fp8=True) / taken, 3)
    if case.peers:
        line["peers_us"] = {name: round(_time([peer]) * 1e6, 2) for name, peer in case.peers.items()}
    return line


def _time(runs: Sequence[object]) -> float:
    calls = [run for run in runs if callable(run)]
    once = seconds(calls, repeats=3)
    repeats = max(5, min(200, int(_BUDGET_S / max(once, 1e-6))))
    return seconds(calls, repeats=repeats, use_graph=once < _GRAPH_BELOW_S)


def _fraction(line: dict[str, object]) -> float:
    value = line["fraction"]
    assert isinstance(value, float)
    return value


def _text(line: dict[str, object]) -> str:
    extra = f" fp8 {line['fraction_fp8']}" if "fraction_fp8" in line else ""
    peers = f" peers {line['peers_us']}" if "peers_us" in line else ""
    return (
        f"{line['kernel']} | {line['workload']} | {line['us']} us | {line['tb_s']} TB/s | {line['tflop_s']} TFLOP/s | "
        f"{line['fraction']} of floor ({line['bound']}), target {line['target']}{extra}{peers}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
