"""Linears of the released sizes: 256, 60 and 8 requests x 6 rows, and a prefill chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16
from shoal_kernels.ops.linear import LinearWeight, linear

# name, outputs in all groups, inputs of a group, groups
FP8 = (
    ("wq_a + wkv", 1792, 5120, 1),
    ("wq_b", 32768, 1280, 1),
    ("wo_a", 8192, 4096, 8),
    ("wo_b", 5120, 8192, 1),
    ("shared expert up", 4608, 5120, 1),
    ("shared expert down", 5120, 2304, 1),
    ("engram wkv", 25600, 6144, 1),
    ("draft main_proj", 5120, 15360, 1),
)
BF16 = (("gate", 384, 5120), ("compressor + index", 1056, 5120), ("lm head", 129280, 5120))
ROWS = (
    ("8 requests x 6 rows", 48),
    ("60 requests x 6 rows", 360),
    ("256 requests x 6 rows", 1536),
    ("prefill chunk", 8192),
)
_DEVICE = "cuda"
_L2_BYTES, _MOST_SETS = 64 << 20, 16
# A prefill chunk is told for the larger weights.
_PREFILL_FROM = 40_000_000


def cases() -> Iterator[Case]:
    """Every weight at every number of rows, the input already cast."""
    for name, columns, depth, groups in FP8:
        weights = [_fp8(columns, depth, groups) for _ in range(_sets(columns * depth))]
        # A library's product of the same operands in bfloat16, its weight dequantised beforehand (twice the bytes).
        dense = [torch.randn(columns, depth, dtype=torch.bfloat16, device=_DEVICE) for _ in range(2)]
        for workload, rows in ROWS if columns * depth > _PREFILL_FROM else ROWS[:-1]:
            x = torch.randn(rows, groups * depth, dtype=torch.bfloat16, device=_DEVICE)
            yield Case(
                kernel="fp8 linear",
                workload=f"{name} {columns} x {depth}, {workload}",
                runs=[partial(_run, x, weight, "bf16") for weight in weights],
                bytes=columns * depth + columns * depth // 1024 + 2 * rows * (groups * depth + columns),
                flops=2 * rows * columns * depth,
                scaled=True,
                target=0.7,
                peers=_peers(x, dense, columns, depth, groups),
            )
    for name, columns, depth in BF16:
        weights = [
            LinearWeight.from_bf16(torch.randn(columns, depth, dtype=torch.bfloat16, device=_DEVICE), keep_bytes=True)
            for _ in range(_sets(2 * columns * depth))
        ]
        for workload, rows in ROWS[:-1]:
            x = torch.randn(rows, depth, dtype=torch.bfloat16, device=_DEVICE)
            yield Case(
                kernel="bf16 linear",
                workload=f"{name} {columns} x {depth}, {workload}",
                runs=[partial(_run, x, weight, "f32") for weight in weights],
                bytes=2 * columns * depth + rows * (2 * depth + 4 * columns),
                flops=2 * rows * columns * depth,
                peers={"torch bf16": partial(torch.nn.functional.linear, x, weights[0].data)},
            )


def _run(x: torch.Tensor, weight: LinearWeight, out: Literal["bf16", "f32"]) -> torch.Tensor:
    return linear(x, weight, out=out, cast=False, precision=SERVED_BF16)


def _sets(size: int) -> int:
    return max(2, min(_MOST_SETS, -(-2 * _L2_BYTES // size)))


def _fp8(columns: int, depth: int, groups: int) -> LinearWeight:
    data = torch.randn(columns, depth, device=_DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(112, 122, (columns // 32, depth // 32), dtype=torch.uint8, device=_DEVICE)
    return LinearWeight.from_fp8(data, scale, groups=groups, keep_bytes=True)


def _peers(
    x: torch.Tensor, dense: list[torch.Tensor], columns: int, depth: int, groups: int
) -> dict[str, Callable[[], object]]:
    if groups > 1:
        batched = x.view(x.shape[0], groups, depth).transpose(0, 1)
        weight = dense[0].view(groups, columns // groups, depth).transpose(1, 2)
        return {"torch bf16 bmm": partial(torch.bmm, batched, weight)}
    peers: dict[str, Callable[[], object]] = {"torch bf16": partial(torch.nn.functional.linear, x, dense[0])}
    if x.shape[0] % 16:
        return peers
    left, right = x.to(torch.float8_e4m3fn), dense[0].to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=_DEVICE)
    # One scale for the whole tensor: less work than blocks of 32, told for its rate only.
    peers["torch fp8, one scale"] = partial(torch._scaled_mm, left, right, one, one, out_dtype=torch.bfloat16)
    return peers
