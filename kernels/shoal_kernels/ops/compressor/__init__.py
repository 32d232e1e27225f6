"""Compressed KV: pooling of token pairs, and main entries and index keys on their way into the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows, check_values, check_wide
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def pool_pairs(score: Tensor, value: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """bf16(sum over the pair of softmax(score) * value), channel by channel.

    score, value  [2, R, d] in the precision's wide dtype: first and second member of R pairs
    returns       [R, d] in the precision's dtype
    raises        ValueError for shape or dtype
    exact         all implementations agree bit for bit
    source        specification of the model, section 7.3
    """
    check_wide("score", score, 2, None, None, precision=precision)
    check_wide("value", value, *score.shape, precision=precision)
    result: Tensor = resolve("pool_pairs", score.device.type, precision, backend)(score, value, precision)
    return result


def store_main(
    raw: Tensor,
    ring: Tensor,
    members: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    *,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """From projections to stored main entries in one pass: pool, norm, RoPE, encode, store.

    raw        [rows, ratio * d] in the wide dtype: score, then value (ratio 2), or the value (ratio 1) of every row;
               may be a column slice
    ring       [P, ratio, d] wide: rows of earlier steps whose group is open; P = 0 where there are none
    members    int64 [ratio, n]: the rows of each group that closes; m < P is ring[m], P + r is raw[r]
    weight     float32 [d], with eps the norm of the pooled row
    positions  int64 [n], RoPE positions of the entries
    pages      main records; entry i goes to (block_ids[i], slots[i]), int64 [n] each, every place at most once
    returns    [n, d] in the precision's dtype: the latent before RoPE, of which index keys are made
    raises     ValueError for shape, dtype, a position outside the table or a place outside the storage
    exact      on the host the bits of pool_pairs, rms_norm, rope and PagedRows.write. On an accelerator the entry of a
               group depends on that group only; the latent's relative error against the host is below 1e-2
    source     specification of the model, section 7.3
    """
    if members.dim() != 2 or members.shape[0] not in (1, 2):
        raise ValueError(f"members must be [1, n] or [2, n], got {list(members.shape)}")
    ratio, count = members.shape
    dim = weight.shape[0]
    check_rows("members", members, ratio, count, dtype=torch.int64)
    check_wide("raw", raw, None, ratio * dim, precision=precision)
    check_wide("ring", ring, None, ratio, dim, precision=precision)
    check_rows("weight", weight, dim, dtype=torch.float32)
    check_index("members", members, 0, ring.shape[0] + raw.shape[0])
    cos_sin = _check_places(count, dim, positions, table, pages, block_ids, slots, precision)
    latent: Tensor = resolve("store_main", raw.device.type, precision, backend)(
        raw, ring, members, weight, eps, positions, cos_sin, pages, block_ids, slots, precision
    )
    return latent


def store_key(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    *,
    precision: Precision,
    backend: str | None = None,
) -> None:
    """Norm, rotate, encode and store rows, such as index keys, in one pass.

    x       [n, d] in the precision's dtype; may be a column slice
    pages   records of d values; the others as in `store_main`
    raises  ValueError for shape, dtype, a position outside the table or a place outside the storage
    exact   on the host the bits of rms_norm_rope and PagedRows.write; on an accelerator as `store_main`
    source  specification of the model, section 7.4
    """
    check_values("x", x, None, weight.shape[0], precision=precision)
    check_rows("weight", weight, None, dtype=torch.float32)
    cos_sin = _check_places(x.shape[0], x.shape[1], positions, table, pages, block_ids, slots, precision)
    resolve("store_key", x.device.type, precision, backend)(
        x, weight, eps, positions, cos_sin, pages, block_ids, slots, precision
    )


def _check_places(
    count: int,
    dim: int,
    positions: Tensor,
    table: RopeTable,
    pages: PagedRows,
    block_ids: Tensor,
    slots: Tensor,
    precision: Precision,
) -> Tensor:
    """The rotary table for `positions`, after the checks of where entries go."""
    if pages.format.dim != dim or pages.format.precision != precision:
        raise ValueError(f"rows of {dim} values in {precision.name} do not fit records {pages.format}")
    if dim < 2 * table.num_frequencies:
        raise ValueError(f"rows must have at least {2 * table.num_frequencies} dims, got {dim}")
    check_rows("positions", positions, count, dtype=torch.int64)
    check_rows("block_ids", block_ids, count, dtype=torch.int64)
    check_rows("slots", slots, count, dtype=torch.int64)
    check_index("block_ids", block_ids, 0, pages.storage.shape[0])
    check_index("slots", slots, 0, pages.entries_per_block)
    return table.cos_sin(positions, precision.wide)
