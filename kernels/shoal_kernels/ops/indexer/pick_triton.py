# mypy: ignore-errors
"""The k best of a list of sort keys, ties to the lower place, in ascending order; one program per row.

The k-th largest key is found bit by bit: how many keys are at least a threshold is a sum, so there are no atomics and
no order to fix. Places come from prefix sums. A list that fits into the registers of a program is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal_kernels.ops.indexer.sort_keys import LARGEST_BF16_KEY, LAST_BLOCK_KEY

DENSE, BLOCKS, GATHERED, LISTED = 0, 1, 2, 3
"""Where the keys of a list are, and what its places stand for.

DENSE     key p of the row; place p
BLOCKS    as DENSE, keys of entry blocks: at most the largest finite one, the last block's above all
GATHERED  keys of the entries of listed blocks; entries
LISTED    key p of the row, of the entries of listed blocks in their order; entries
"""
_LARGEST_LIST = 1 << 14


@triton.jit
def _load(keys, blocks, place, count, SIZE: tl.constexpr, SOURCE: tl.constexpr):
    """Keys (int32, 0 where there is none) and ids of places of a list."""
    inside = place < count
    ids = place
    at = place
    if SOURCE >= 2:
        block = tl.load(blocks + place // SIZE, mask=inside, other=-1)
        ids = block * SIZE + place % SIZE
        inside = inside & (block >= 0)
        if SOURCE == 2:
            at = ids
    key = tl.load(keys + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if SOURCE == 1:
        key = tl.minimum(key, LARGEST_BF16_KEY)
        key = tl.where(place == count - 1, LAST_BLOCK_KEY, key)
        key = tl.where(inside, key, 0)
    return key, ids


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
    keys,
    blocks,
    n_vis,
    out,
    k,
    stride,
    num_listed,
    bound,
    SIZE: tl.constexpr,
    SOURCE: tl.constexpr,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    KP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    keys += row * stride
    blocks += row * num_listed
    out += row * k
    if SOURCE >= 2:
        count = num_listed * SIZE
    else:
        visible = tl.minimum(tl.load(n_vis + row), bound).to(tl.int32)
        count = (visible + SIZE - 1) // SIZE
    place = tl.arange(0, PART)
    key, ids = _load(keys, blocks, place, count, SIZE, SOURCE)
    threshold = 0
    for i in range(16):
        trial = threshold | (32768 >> i)
        reached = tl.sum((key >= trial).to(tl.int32), 0)
        if not IS_WHOLE:
            for base in range(PART, count, PART):
                more, _ = _load(keys, blocks, base + place, count, SIZE, SOURCE)
                reached += tl.sum((more >= trial).to(tl.int32), 0)
        threshold = tl.where(reached >= k, trial, threshold)
    num_above = tl.sum((key > threshold).to(tl.int32), 0)
    if not IS_WHOLE:
        for base in range(PART, count, PART):
            more, _ = _load(keys, blocks, base + place, count, SIZE, SOURCE)
            num_above += tl.sum((more > threshold).to(tl.int32), 0)
    above, equal = _store(out, key, ids, threshold, 0, 0, k - num_above, k)
    if not IS_WHOLE:
        for base in range(PART, count, PART):
            more, more_ids = _load(keys, blocks, base + place, count, SIZE, SOURCE)
            above, equal = _store(out, more, more_ids, threshold, above, equal, k - num_above, k)
    rest = tl.arange(0, KP)
    tl.store(out + rest, tl.full((KP,), -1, tl.int32), mask=(rest >= above + equal) & (rest < k))


@triton.jit
def _block_keys(keys, n_vis, out, stride, count, bound, size, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    visible = tl.minimum(tl.load(n_vis + row), bound).to(tl.int32)
    best = tl.zeros((PART,), tl.int32)
    for base in range(0, tl.minimum(size, visible - block * size), PART):
        offset = base + tl.arange(0, PART)
        entry = block * size + offset
        key = tl.load(keys + row * stride + entry, mask=(offset < size) & (entry < visible), other=0)
        best = tl.maximum(best, key.to(tl.int32) & 0xFFFF)
    tl.store(out + row * count + block, tl.max(best, 0).to(tl.int16))


def pick(source, keys, out, bound, *, size=1, n_vis=None, blocks=None):
    """The out.shape[1] best of each row's list into out int32 [R, k]: ascending ids, -1 padded at the end.

    keys    int16 [R, stride] sort keys
    bound   most places of a list
    size    entries of a block: of the listed ones (`blocks` int32 [R, C], ascending, -1 padded), or of those that are
            the places of the list. Without `blocks` row r has ceil(min(n_vis[r], bound * size) / size) places
    """
    rows, k = out.shape
    if rows == 0:
        return
    part = min(triton.next_power_of_2(max(bound, 16)), _LARGEST_LIST)
    _pick[(rows,)](
        keys,
        out if blocks is None else blocks,
        out if n_vis is None else n_vis,
        out,
        k,
        keys.stride(0),
        0 if blocks is None else blocks.shape[1],
        bound * size,
        SIZE=size,
        SOURCE=source,
        PART=part,
        IS_WHOLE=bound <= part,
        KP=triton.next_power_of_2(k),
        num_warps=16 if part >= 8192 else 8 if part >= 2048 else 4,
    )


def block_keys(keys, n_vis, count, bound, size):
    """The largest visible key of each of `count` blocks of `size` entries -> int16 [R, count]; 0 where none is."""
    out = keys.new_empty(keys.shape[0], count)
    if out.numel():
        part = min(triton.next_power_of_2(size), 1024)
        _block_keys[(out.shape[0], count)](keys, n_vis, out, keys.stride(0), count, bound, size, PART=part, num_warps=1)
    return out
