"""Routed experts of one rank's share at released sizes: 6 of 384 experts, and the 128 of a draft block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16
from shoal_kernels.ops.experts import ExpertWeights, Stored, experts, moe
from torch import Tensor

_DIM, _INNER, _LOCAL, _DRAFT, _LIMIT = 5120, 2304, 6, 128, 10.0
_MACS = 3 * _DIM * _INNER
_FP4_BYTES, _FP8_BYTES = _MACS // 2 + _MACS // 32, _MACS + _MACS // 1024
_SETS = 2


@dataclass(frozen=True, slots=True)
class _Layer:
    routed: ExpertWeights
    shared: ExpertWeights


def cases() -> Iterator[Case]:
    """Every row chose all 6 local experts, so that the rows per expert are known; then drawn routing; then drafts."""
    layers = [_layer(_LOCAL, seed) for seed in range(_SETS)]
    for rows, target in ((1536, 0.6), (360, 0.55), (48, 0.6)):
        inputs = [_inputs(rows, _LOCAL, _LOCAL, seed) for seed in range(_SETS)]
        peers = {"torch bf16 bmm": _peer(rows)}
        yield Case(
            kernel="experts",
            workload=f"6 experts, {rows} rows each",
            runs=[_routed(layer.routed, *given) for layer, given in zip(layers, inputs, strict=True)],
            bytes=_LOCAL * _FP4_BYTES + rows * _DIM * (2 + 4),
            flops=2 * _MACS * rows * _LOCAL,
            scaled=True,
            target=target,
            peers=peers,
        )
        yield Case(
            kernel="experts and shared",
            workload=f"6 experts, {rows} rows each",
            runs=[_whole(layer, *given) for layer, given in zip(layers, inputs, strict=True)],
            bytes=_LOCAL * _FP4_BYTES + _FP8_BYTES + rows * _DIM * (2 + 2),
            flops=2 * _MACS * rows * (_LOCAL + 1),
            scaled=True,
        )
    for rows in (1536, 360, 48):
        pairs = rows * _LOCAL
        inputs = [_inputs(pairs, 1, _LOCAL, seed) for seed in range(_SETS)]
        yield Case(
            kernel="experts, drawn routing",
            workload=f"6 experts, {rows} rows each on average",
            runs=[_routed(layer.routed, *given) for layer, given in zip(layers, inputs, strict=True)],
            bytes=_LOCAL * _FP4_BYTES + pairs * _DIM * (2 + 4),
            flops=2 * _MACS * pairs,
            scaled=True,
        )
    del layers
    draft = _layer(_DRAFT, _SETS)
    for rows in (8, 48, 360):
        x, ids, weights = _inputs(rows, 3, _DRAFT, rows)
        used = int(ids.unique().numel())
        yield Case(
            kernel="experts of a draft block",
            workload=f"128 experts, {rows} rows, top 3: {used} experts read",
            runs=[_whole(draft, x, ids, weights)],
            bytes=used * _FP4_BYTES + _FP8_BYTES + rows * _DIM * (2 + 2),
            flops=2 * _MACS * rows * 4,
            scaled=True,
        )


def _routed(weights: ExpertWeights, x: Tensor, ids: Tensor, w: Tensor) -> Callable[[], object]:
    return lambda: experts(x, ids, w, weights, _LIMIT, precision=SERVED_BF16)


def _whole(layer: _Layer, x: Tensor, ids: Tensor, w: Tensor) -> Callable[[], object]:
    return lambda: moe(x, ids, w, layer.routed, layer.shared, _LIMIT, precision=SERVED_BF16)


def _layer(count: int, seed: int) -> _Layer:
    generator = torch.Generator("cuda").manual_seed(seed)

    def stored(high: int, rows: int, columns: int, scale: tuple[int, int]) -> Stored:
        data = torch.randint(0, high, (rows, columns), generator=generator, device="cuda", dtype=torch.uint8)
        return data, torch.randint(118, 122, scale, generator=generator, device="cuda", dtype=torch.uint8)

    def fp4(out: int, size: int) -> list[Stored]:
        return [stored(256, out, size // 2, (out, size // 32)) for _ in range(count)]

    def fp8(out: int, size: int) -> Stored:
        # Codes below 0x60 of e4m3: magnitudes up to 30, no NaN.
        return stored(0x60, out, size, (out // 32, size // 32))

    w1, w3, w2 = fp4(_INNER, _DIM), fp4(_INNER, _DIM), fp4(_DIM, _INNER)
    shared = fp8(_INNER, _DIM), fp8(_INNER, _DIM), fp8(_DIM, _INNER)
    return _Layer(ExpertWeights.from_fp4(w1, w3, w2, keep_bytes=True), ExpertWeights.from_fp8(*shared, keep_bytes=True))


def _inputs(rows: int, top_k: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, _DIM, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(rows, count, generator=generator, device="cuda").argsort(1)[:, :top_k].to(torch.int32)
    return x, ids.contiguous(), torch.rand(rows, top_k, generator=generator, device="cuda")


def _peer(rows: int) -> Callable[[], object]:
    """The two products as batches on bfloat16 weights with a plain activation: no cast, no gather, no sum."""
    gate_up = torch.randn(_LOCAL, 2 * _INNER, _DIM, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(_LOCAL, _DIM, _INNER, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(_LOCAL, rows, _DIM, device="cuda", dtype=torch.bfloat16)

    def run() -> object:
        gate, up = torch.bmm(x, gate_up.mT).chunk(2, dim=2)
        return torch.bmm(torch.nn.functional.silu(gate) * up, down.mT)

    return run
