"""What the device at hand can do at most: copy bandwidth and matrix rates, measured with random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bench.harness import percentile

_COPY_BYTES = 4 << 30
_SIZE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bytes a second (read plus written), and floating-point operations a second."""

    copy: float
    bf16: float
    fp8: float

    def floor_s(self, num_bytes: int, flops: int, *, at_fp8: bool = False) -> float:
        """No kernel that moves and computes this much takes less."""
        return max(num_bytes / self.copy, flops / (self.fp8 if at_fp8 else self.bf16))


def measure_ceilings() -> Ceilings:
    """Measure on the current CUDA device; about a second."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = seconds([lambda: target.copy_(source)], repeats=10)
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    bf16_s = seconds([lambda: torch.mm(a, b, out=out)], repeats=20)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    fp8_s = seconds(
        [lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)], repeats=20
    )
    flops = 2 * _SIZE**3
    return Ceilings(copy=2 * _COPY_BYTES / copy_s, bf16=flops / bf16_s, fp8=flops / fp8_s)


def seconds(runs: Sequence[Callable[[], object]], *, repeats: int, use_graph: bool = False) -> float:
    """Median time of one run. The runs take turns, so that each finds the cache full of the others' data.

    use_graph   replay a captured graph of all runs and divide: leaves out what launching costs the host
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    if use_graph:
        return _graph_seconds(runs, repeats)
    times = []
    for i in range(max(repeats, len(runs))):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[i % len(runs)]()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return percentile([start.elapsed_time(stop) for start, stop in times], 0.5) / 1e3


def _graph_seconds(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    graph, inner = torch.cuda.CUDAGraph(), max(1, 8 // len(runs))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs:
            run()
    side.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            for run in runs:
                run()
    graph.replay()
    times = []
    for _ in range(max(3, repeats // (inner * len(runs)))):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    whole = percentile([start.elapsed_time(stop) for start, stop in times], 0.5) / 1e3
    return whole / (inner * len(runs))
