"""Hyper-connections: mix, and the pass over a row between a sub-layer's output and the next one's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16
from shoal_kernels.ops.hyper_connections import MixWeight, collapse_norm_cast, expand_norm, mix
from torch import Tensor

STREAMS, HIDDEN = 4, 5120
OUTPUTS = (2 + STREAMS) * STREAMS
LAYERS = 8  # weights of so many mixes take turns
WORKLOADS = (
    (1536, "256 requests x 6 rows"),
    (360, "60 requests x 6 rows"),
    (48, "8 requests x 6 rows"),
    (8192, "prefill, 8192 rows"),
)
ROTATED_BYTES, MOST_SETS = 400_000_000, 32
TARGET, LEAST_FLOOR_US = 0.75, 10.0
COPY_BYTES_PER_US = 4.2e6
"""Only to tell which workloads are long enough to be judged."""


def cases() -> Iterator[Case]:
    """Cases on the device."""
    norm = torch.ones(HIDDEN, device="cuda")
    weights = [_weight() for _ in range(LAYERS)]
    for rows, words in WORKLOADS:
        row = HIDDEN * 2
        coefficients = (2 * STREAMS + STREAMS * STREAMS) * 4
        stored = weights[0].fn.numel() * weights[0].fn.element_size()
        moved = {
            "mHC mix": rows * (STREAMS * row + coefficients) + stored,
            "mHC expand + norm + cast": rows * ((1 + 2 * STREAMS + 2) * row + coefficients),
            "mHC collapse + norm + cast": rows * ((STREAMS + 2) * row + STREAMS * 4),
        }
        inputs = [_inputs(rows) for _ in range(max(2, min(MOST_SETS, ROTATED_BYTES // (rows * 11 * row) + 1)))]
        runs: dict[str, list[Callable[[], object]]] = {name: [] for name in moved}
        for i, (y, streams, pre, post, comb) in enumerate(inputs):
            on: dict[str, Any] = {"precision": SERVED_BF16}
            runs["mHC mix"].append(
                partial(mix, streams, weights[i % LAYERS], iterations=20, eps=1e-6, rms_eps=1e-20, **on)
            )
            runs["mHC expand + norm + cast"].append(
                partial(expand_norm, y, streams, post, comb, pre, norm, 1e-20, cast=True, **on)
            )
            runs["mHC collapse + norm + cast"].append(partial(collapse_norm_cast, streams, pre, norm, 1e-20, **on))
        for name, size in moved.items():
            yield Case(
                kernel=name,
                workload=words,
                runs=runs[name],
                bytes=size,
                flops=2 * rows * STREAMS * HIDDEN * OUTPUTS if name == "mHC mix" else 0,
                target=TARGET if size > LEAST_FLOOR_US * COPY_BYTES_PER_US else None,
            )


def _weight() -> MixWeight:
    size = STREAMS * HIDDEN
    fn = torch.randn(OUTPUTS, size, device="cuda") * size**-0.5
    return MixWeight.prepare(fn, torch.randn(3, device="cuda"), torch.randn(OUTPUTS, device="cuda"), keep_bytes=True)


def _inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, device="cuda")

    y, streams = bf16(rows, HIDDEN), bf16(rows, STREAMS, HIDDEN)
    return y, streams, positive(rows, STREAMS), positive(rows, STREAMS), positive(rows, STREAMS, STREAMS)
