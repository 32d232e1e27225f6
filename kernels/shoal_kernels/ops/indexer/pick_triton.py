# mypy: ignore-errors
"""The k best of a list of scores, ties to the lower place, in ascending order; one program per row.

Scores are compared as sort keys. The k-th largest is found bit by bit: how many keys are at least a threshold is a
sum, so there are no atomics and no order to fix. Places come from prefix sums. A list that fits into the registers of
a program is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal_kernels.ops.indexer.sort_keys import COARSE, LARGEST_BF16_KEY, LAST_BLOCK_KEY, sort_key

COARSE_BLOCKS, BLOCKS, GATHERED, LISTED = 0, 1, 2, 3
"""Where the scores of a list are, and what its places stand for.

COARSE_BLOCKS  score p of the row, of coarse block p; the last visible one is looked up among its visible entries
BLOCKS         score p of the row, of block p: at most the largest finite one, the last visible block's above all
GATHERED       scores of the entries of listed blocks in a row of all entries; entries
LISTED         score p of the row, of entry p of the listed blocks; entries
"""
_LARGEST_LIST = 1 << 14
_COARSE = tl.constexpr(COARSE)


@triton.jit
def _load(scores, blocks, place, count, visible, last_key, SIZE: tl.constexpr, SOURCE: tl.constexpr):
    """Keys (int32, 0 where there is none) and ids of places of a list."""
    inside = place < count
    ids = place
    at = place
    if SOURCE >= 2:
        block = tl.load(blocks + place // SIZE, mask=inside, other=-1)
        ids = block * SIZE + place % SIZE
        inside = inside & (block >= 0) & (ids < visible)
        if SOURCE == 2:
            at = ids
    key = sort_key(tl.load(scores + at, mask=inside, other=0))
    if SOURCE == 1:
        key = tl.minimum(key, LARGEST_BF16_KEY)
    if SOURCE < 2:
        key = tl.where(place == count - 1, last_key, key)
    return tl.where(inside, key, 0), ids


@triton.jit
def _last_coarse_key(entries, visible):
    """Key of the last coarse block that has visible entries: what its score holds besides is not visible."""
    entry = (visible - 1) // _COARSE * _COARSE + tl.arange(0, _COARSE)
    inside = (entry >= 0) & (entry < visible)
    return tl.max(tl.where(inside, sort_key(tl.load(entries + entry, mask=inside, other=0)), 0), 0)


@triton.jit
def _store(out, key, ids, threshold, above, equal, needed, k):
    """Store the ids whose key is above the threshold, and the first `needed` of those at it, from a given place on."""
    is_above = (key > threshold) & (key > 0)
    is_equal = (key == threshold) & (key > 0)
    # Both counts in one prefix sum; a part of a list has fewer than 2^15 places.
    packed = is_above.to(tl.int32) * 65536 + is_equal.to(tl.int32)
    before = tl.cumsum(packed, 0) - packed
    num_above = above + (before >> 16)
    num_equal = equal + (before & 0xFFFF)
    place = num_above + tl.minimum(num_equal, needed)
    tl.store(out + place, ids, mask=is_above | (is_equal & (num_equal < needed)))
    total = tl.sum(packed, 0)
    return above + (total >> 16), equal + (total & 0xFFFF)


@triton.jit
def _pick(
    scores,
    entries,
    blocks,
    n_vis,
    out,
    k,
    stride,
    entries_stride,
    num_listed,
    bound,
    SIZE: tl.constexpr,
    SOURCE: tl.constexpr,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    KP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    blocks += row * num_listed
    out += row * k
    visible = tl.minimum(tl.load(n_vis + row), bound).to(tl.int32)
    last_key = LAST_BLOCK_KEY
    if SOURCE >= 2:
        count = num_listed * SIZE
    else:
        count = (visible + SIZE - 1) // SIZE
        if SOURCE == 0:
            last_key = _last_coarse_key(entries + row * entries_stride, visible)
    place = tl.arange(0, PART)
    key, ids = _load(scores, blocks, place, count, visible, last_key, SIZE, SOURCE)
    threshold = 0
    for i in range(16):
        trial = threshold | (32768 >> i)
        reached = tl.sum((key >= trial).to(tl.int32), 0)
        if not IS_WHOLE:
            for base in range(PART, count, PART):
                more, _ = _load(scores, blocks, base + place, count, visible, last_key, SIZE, SOURCE)
                reached += tl.sum((more >= trial).to(tl.int32), 0)
        threshold = tl.where(reached >= k, trial, threshold)
    num_above = tl.sum((key > threshold).to(tl.int32), 0)
    if not IS_WHOLE:
        for base in range(PART, count, PART):
            more, _ = _load(scores, blocks, base + place, count, visible, last_key, SIZE, SOURCE)
            num_above += tl.sum((more > threshold).to(tl.int32), 0)
    above, equal = _store(out, key, ids, threshold, 0, 0, k - num_above, k)
    if not IS_WHOLE:
        for base in range(PART, count, PART):
            more, more_ids = _load(scores, blocks, base + place, count, visible, last_key, SIZE, SOURCE)
            above, equal = _store(out, more, more_ids, threshold, above, equal, k - num_above, k)
    rest = tl.arange(0, KP)
    tl.store(out + rest, tl.full((KP,), -1, tl.int32), mask=(rest >= above + equal) & (rest < k))


@triton.jit
def _block_scores(scores, n_vis, out, stride, count, bound, size, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    visible = tl.minimum(tl.load(n_vis + row), bound).to(tl.int32)
    best = tl.full((PART,), float("-inf"), tl.float32)
    for base in range(0, tl.minimum(size, visible - block * size), PART):
        offset = base + tl.arange(0, PART)
        entry = block * size + offset
        inside = (offset < size) & (entry < visible)
        score = tl.load(scores + row * stride + entry, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.where(score > best, score, best)
    tl.store(out + row * count + block, tl.max(best, 0).to(tl.bfloat16))


def pick(source, scores, out, n_vis, places, bound, *, size, entries=None, blocks=None):
    """The out.shape[1] best of each row's list into out int32 [R, k]: ascending ids, -1 padded at the end.

    scores   bfloat16 [R, ...], rows with a stride
    n_vis    int64 [R]: visible entries, at most `bound`
    places   most places of a list
    size     entries of a block
    entries  bfloat16 [R, ...]: scores of entries, for COARSE_BLOCKS
    blocks   int32 [R, C], ascending, -1 padded: listed blocks
    """
    rows, k = out.shape
    if rows == 0:
        return
    part = min(triton.next_power_of_2(max(places, 16)), _LARGEST_LIST)
    entries = scores if entries is None else entries
    _pick[(rows,)](
        scores.view(torch.int16),
        entries.view(torch.int16),
        out if blocks is None else blocks,
        n_vis,
        out,
        k,
        scores.stride(0),
        entries.stride(0),
        0 if blocks is None else blocks.shape[1],
        bound,
        SIZE=size,
        SOURCE=source,
        PART=part,
        IS_WHOLE=places <= part,
        KP=triton.next_power_of_2(k),
        num_warps=16 if part >= 8192 else 8 if part >= 2048 else 4,
    )


def block_scores(scores, n_vis, count, bound, size):
    """The largest visible score of each of `count` blocks of `size` entries -> bfloat16 [R, count]."""
    out = scores.new_empty(scores.shape[0], count)
    if out.numel():
        part = min(triton.next_power_of_2(size), 1024)
        grid = out.shape[0], count
        _block_scores[grid](scores, n_vis, out, scores.stride(0), count, bound, size, PART=part, num_warps=1)
    return out
