# mypy: ignore-errors
"""Bias, penalties, mask and temperature of all rows in one kernel, with the bits of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal_kernels.ops.sampling.reference import repetition_factor
from shoal_kernels.triton_lib import EXACT_OPTIONS

if TYPE_CHECKING:
    from shoal_kernels.ops.sampling import RowSampling

_BLOCK = 2048


@triton.jit
def _edited(x, row, ids, inside, numbers, places, counts, seen, allowed, vocab):
    """x of token ids after penalties, mask and temperature; places: rows of counts, seen and allowed, or -1.

    `allowed` has (vocab + 31) // 32 words a row.
    """
    penalty, frequency = tl.load(numbers + row * 4), tl.load(numbers + row * 4 + 1)
    presence, inverse = tl.load(numbers + row * 4 + 2), tl.load(numbers + row * 4 + 3)
    count_at, seen_at, allowed_at = (
        tl.load(places + row * 3),
        tl.load(places + row * 3 + 1),
        tl.load(places + row * 3 + 2),
    )
    count = tl.load(counts + count_at * vocab + ids, mask=inside & (count_at >= 0), other=0)
    known = tl.load(seen + seen_at * vocab + ids, mask=inside & (seen_at >= 0), other=0) != 0
    penalised = tl.where(x > 0.0, tl.math.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
    # Where a penalty is off or a row has no counts, these steps give x itself.
    x = tl.where(known, penalised, x)
    x = x - count.to(tl.float32) * frequency
    x = x - (count > 0).to(tl.float32) * presence
    word = tl.load(allowed + allowed_at * ((vocab + 31) // 32) + ids // 32, mask=inside & (allowed_at >= 0), other=-1)
    may = ((word >> (ids % 32)) & 1) != 0
    return tl.where(may, x, float("-inf")) * inverse


@triton.jit
def _edit_rows(logits, stride, out, numbers, places, counts, seen, allowed, vocab, BLOCK: tl.constexpr):
    row, ids = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
    x = _edited(x, row, ids, inside, numbers, places, counts, seen, allowed, vocab)
    tl.store(out + row * vocab + ids, x, mask=inside)


@triton.jit
def _edit_biased(
    logits, stride, out, biased, ids, bias, total, numbers, places, counts, seen, allowed, vocab, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row, token = tl.load(biased + at, mask=inside, other=0), tl.load(ids + at, mask=inside, other=0)
    x = tl.load(logits + row * stride + token, mask=inside, other=0.0) + tl.load(bias + at, mask=inside, other=0.0)
    x = _edited(x, row, token, inside, numbers, places, counts, seen, allowed, vocab)
    tl.store(out + row * vocab + token, x, mask=inside)


def edit_logits(
    logits: Tensor, rows: Sequence[RowSampling], inverse_temperature: Tensor, in_place: bool = False
) -> Tensor:
    """logits [R, V] -> a new [R, V]. Parameters go to the device in one copy per kind, without waiting for it.

    The input stays: biased tokens are computed once more from it.
    """
    count, vocab = logits.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    numbers = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(count, 1)
    numbers[:, 3] = inverse_temperature
    places = torch.full((count, 3), -1, dtype=torch.int64)
    edited = [index for index, row in enumerate(rows) if row.is_edited]
    penalties, kept_at = [], []
    counted: list[tuple[Tensor, Tensor]] = []
    known: list[tuple[Tensor, None]] = []
    masks: list[Tensor] = []
    for index in edited:
        row = rows[index]
        penalties.append((repetition_factor(row.repetition_penalty), row.frequency_penalty, row.presence_penalty))
        kept_at.append([-1, -1, -1])
        if row.output_ids is not None and (row.frequency_penalty != 0.0 or row.presence_penalty != 0.0):
            kept_at[-1][0] = len(counted)
            counted.append((row.output_ids, row.output_counts))
        if row.seen_ids is not None and row.repetition_penalty != 1.0:
            kept_at[-1][1] = len(known)
            known.append((row.seen_ids, None))
        if row.allowed is not None:
            kept_at[-1][2] = len(masks)
            masks.append(row.allowed)
    if edited:
        numbers[edited, :3] = torch.tensor(penalties, dtype=torch.float32)
        places[edited] = torch.tensor(kept_at)
    counts, seen = _table(counted, vocab, torch.int32, device), _table(known, vocab, torch.int8, device)
    allowed = (
        torch.stack(masks).to(device, non_blocking=True) if masks else torch.empty(0, dtype=torch.int32, device=device)
    )
    out = torch.empty(count, vocab, device=device)
    common = (
        numbers.to(device, non_blocking=True),
        places.to(device, non_blocking=True),
        counts,
        seen,
        allowed.to(device, non_blocking=True),
        vocab,
    )
    if not count:
        return out
    _edit_rows[(triton.cdiv(vocab, _BLOCK), count)](
        logits, logits.stride(0), out, *common, BLOCK=_BLOCK, **EXACT_OPTIONS
    )
    biased = [(index, row) for index, row in enumerate(rows) if row.bias_ids is not None and row.bias_ids.numel()]
    if biased:
        sizes = torch.tensor([row.bias_ids.numel() for _, row in biased])
        at = torch.repeat_interleave(torch.tensor([index for index, _ in biased]), sizes).to(device, non_blocking=True)
        ids = torch.cat([row.bias_ids for _, row in biased]).to(device, non_blocking=True)
        bias = torch.cat([row.bias for _, row in biased]).to(device, non_blocking=True)
        _edit_biased[(triton.cdiv(at.numel(), 128),)](
            logits, logits.stride(0), out, at, ids, bias, at.numel(), *common, BLOCK=128, **EXACT_OPTIONS
        )
    return out


def _table(
    kept: Sequence[tuple[Tensor, Tensor | None]], vocab: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[len(kept), V]: zero but at the ids of each row, where its values stand, or 1."""
    table = torch.zeros(len(kept), vocab, dtype=dtype, device=device)
    if kept:
        at = torch.cat([ids + place * vocab for place, (ids, _) in enumerate(kept)])
        values = [ids.new_ones(ids.shape) if values is None else values for ids, values in kept]
        values = torch.cat([one.to(dtype) for one in values]).to(device, non_blocking=True)
        table.view(-1).index_copy_(0, at.to(device, non_blocking=True), values)
    return table
