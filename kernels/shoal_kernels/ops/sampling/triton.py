# mypy: ignore-errors
"""Coupled arg-max, filters, edits and log-probabilities in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.ops.sampling.edit_triton import edit_logits
from shoal_kernels.ops.sampling.filter_triton import filter_logits, logprobs
from shoal_kernels.ops.sampling.noise_triton import best_of_tile
from shoal_kernels.triton_lib import EXACT_OPTIONS

__all__ = ["best_of_parts", "coupled_argmax", "edit_logits", "filter_logits", "logprobs"]

_NO_ID = tl.constexpr(0x7FFFFFFF)
_COLUMNS = 4096


@triton.jit
def _best_of_part(z, stride, seeds, positions, is_greedy, values, tokens, vocab, COLUMNS: tl.constexpr):
    row, part = tl.program_id(1), tl.program_id(0)
    ids = part * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(z + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    one = tl.arange(0, 1)
    seed, position = tl.load(seeds + row + one), tl.load(positions + row + one)
    value, token = best_of_tile(
        x[None, :],
        part * COLUMNS,
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        tl.load(is_greedy + row + one) != 0,
        COLUMNS,
        True,
    )
    at = row * tl.num_programs(0) + part + one
    tl.store(values + at, value)
    tl.store(tokens + at, token)


@triton.jit
def _best_of_row(values, tokens, out, out_stride, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    best, token = tl.full([PARTS], float("-inf"), tl.float32), tl.full([PARTS], _NO_ID, tl.int32)
    for start in range(0, parts, PARTS):
        at = start + tl.arange(0, PARTS)
        value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
        other = tl.load(tokens + row * parts + at, mask=at < parts, other=_NO_ID)
        better = (value > best) | ((value == best) & (other < token))
        best, token = tl.where(better, value, best), tl.where(better, other, token)
    winners = tl.where(best == tl.max(best, 0), token, _NO_ID)
    tl.store(out + row * out_stride, tl.min(winners, 0).to(tl.int64))


def best_of_parts(values: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """The token (int32 [R, parts]) of every row's best value (float32 [R, parts]) as int64 [R]; ties to the lower."""
    rows, parts = values.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        _best_of_row[(rows,)](
            values, tokens, out, out.stride(0), parts, PARTS=min(512, triton.next_power_of_2(parts)), num_warps=4
        )
    return out


def coupled_argmax(z: Tensor, seeds: Tensor, positions: Tensor, is_greedy: Tensor) -> Tensor:
    """z [R, V] -> int64 [R]."""
    rows, vocab = z.shape
    columns = min(_COLUMNS, max(32, triton.next_power_of_2(vocab)))
    parts = triton.cdiv(vocab, columns)
    values = torch.empty(rows, parts, dtype=torch.float32, device=z.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=z.device)
    z = z if z.stride(1) == 1 else z.contiguous()
    if rows:
        _best_of_part[(parts, rows)](
            z,
            z.stride(0),
            seeds,
            positions,
            is_greedy,
            values,
            tokens,
            vocab,
            COLUMNS=columns,
            num_warps=8,
            **EXACT_OPTIONS,
        )
    return best_of_parts(values, tokens)
