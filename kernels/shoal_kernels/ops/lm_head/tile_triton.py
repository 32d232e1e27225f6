# mypy: ignore-errors
"""What the Triton kernels of head and Markov loop share: their tiles, and the best token of each row of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.ops.linear.segments import segment_count
from shoal_kernels.ops.sampling.noise_triton import best_of_tile


@triton.jit
def keep_best(
    z,
    first,
    row,
    rows,
    vocab,
    inverse_temperature,
    seeds,
    positions,
    ahead,
    is_greedy,
    values,
    tokens,
    part,
    parts,
    SLICE: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Store the best token of every row of z [rows, tokens], logits of the ids from `first` on.

    Not FUSED: store the processed logits, float32 [rows, vocab], as `values`.
    """
    column = first + tl.arange(0, z.shape[1])
    inside = row < rows
    greedy = tl.load(is_greedy + row, mask=inside, other=1) != 0
    inverse = tl.load(inverse_temperature + row, mask=inside, other=1.0)
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0) + ahead
    z = tl.where(greedy[:, None], z, z * inverse[:, None])
    if not FUSED:
        at = row.to(tl.int64)[:, None] * vocab + column[None, :]
        tl.store(values + at, z, mask=inside[:, None] & (column[None, :] < vocab))
        return
    z = tl.where(column[None, :] < vocab, z, float("-inf"))
    value, token = best_of_tile(
        z,
        first,
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        greedy,
        SLICE,
        False,
    )
    tl.store(values + row.to(tl.int64) * parts + part, value, mask=inside)
    tl.store(tokens + row.to(tl.int64) * parts + part, token, mask=inside)


def tiles(rows: int, vocab: int, depth: int) -> tuple[int, int, int, int, int]:
    """Rows, tokens and K of a tile, warps and stages. None of them changes the order of a sum over K."""
    block_k = min(64, max(16, triton.next_power_of_2(depth)))
    block_v = min(128, max(16, triton.next_power_of_2(vocab)))
    return (64, block_v, block_k, 4, 4) if rows <= 64 else (128, block_v, block_k, 8, 4)


def is_cut(head: LinearWeight) -> bool:
    """Whether `linear` adds a logit up from segments of K: then the logits have to come from it."""
    return segment_count(head.out_features, head.in_features) > 1


def is_fused(device: torch.device) -> bool:
    """Whether the arg-max is taken in the product's kernel. Triton's layout pass for Blackwell's tensor memory fails on
    it, so there the processed logits are stored and a second kernel reads them.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10
