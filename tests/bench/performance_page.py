"""Renders build/bench/device.json, from standard input, as the tables of docs/performance.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def page(result: Mapping[str, Any]) -> str:
    """Markdown: what was measured on, the ceilings, and one table per kernel."""
    ceilings, device = result["figures"]["ceilings"], result["device"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"Device: {device['accelerator']}; host {device['cpu']}, {device['cores']} cores. {versions}.",
        f"{result['time']}.",
        "",
        f"Ceilings in the same run: copy {ceilings['copy_bytes_s'] / 1e12:.2f} TB/s (read + write), "
        f"bf16 {ceilings['bf16_flop_s'] / 1e12:.0f} TFLOP/s, FP8 {ceilings['fp8_flop_s'] / 1e12:.0f} TFLOP/s.",
    ]
    modules: dict[str, list[Mapping[str, Any]]] = {}
    for case in result["figures"]["cases"]:
        modules.setdefault(case["module"], []).append(case)
    for module, cases in modules.items():
        lines += ["", f"### {module.replace('_', ' ')}", "", *_table(cases)]
    return "\n".join(lines) + "\n"


def _table(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["kernel", "workload", "µs", "TB/s", "TFLOP/s", "bound", "of floor", "target"]
    has_fp8 = any("fraction_fp8" in case for case in cases)
    has_peers = any("peers_us" in case for case in cases)
    head += ["of the FP8 floor"] * has_fp8 + ["others: time / ours"] * has_peers
    rows = []
    for case in cases:
        target = "" if case["target"] is None else f"{case['target']:g}"
        rate = f"{case['tflop_s']:g}" if case["flops"] else ""
        row = [case["kernel"], case["workload"], f"{case['us']:g}", f"{case['tb_s']:g}", rate, case["bound"]]
        row += [f"{case['fraction']:.2f}", target]
        if has_fp8:
            row.append(f"{case['fraction_fp8']:.2f}" if "fraction_fp8" in case else "")
        if has_peers:
            peers = case.get("peers_us", {})
            row.append(", ".join(f"{name} {us / case['us']:.2f}" for name, us in peers.items()))
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


if __name__ == "__main__":
    sys.stdout.write(page(json.load(sys.stdin)))
