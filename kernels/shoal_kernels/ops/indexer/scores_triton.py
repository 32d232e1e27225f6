# mypy: ignore-errors
"""Index scores: FP4 keys decoded once per tile for the rows of a group, in plain Triton.

Both products of a key byte's two codes are taken apart (even and odd dimensions), so codes need no interleaving. The
order of every sum is fixed by the shapes of one row and one key: neither the group nor the tile moves it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal_kernels.ops.indexer.row_groups import UnitedCandidates, find_group, find_listed
from shoal_kernels.ops.indexer.sort_keys import COARSE
from shoal_kernels.triton_lib import IS_INTERPRETED, decode_ue8m0, dot, round_bf16

TILE = 64
_COARSE = tl.constexpr(COARSE)


@triton.jit
def _decode_e2m1(code):
    """4-bit code (int32) -> float32."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude > 1, normal, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _load_query(query, weights, start, stop, HEADS: tl.constexpr, HP: tl.constexpr, DIM: tl.constexpr):
    """Two rows: even and odd dimensions bf16 [DIM / 2, 2 * HP], weights float32 [2 * HP]; 0 where there is none."""
    column = tl.arange(0, 2 * HP)
    row = start + column // HP
    head = column % HP
    inside = (row < stop) & (head < HEADS)
    at = row.to(tl.int64) * HEADS + head
    pair = tl.arange(0, DIM // 2)
    address = query + at[None, :] * DIM + 2 * pair[:, None]
    even = tl.load(address, mask=inside[None, :], other=0.0)
    odd = tl.load(address + 1, mask=inside[None, :], other=0.0)
    return even, odd, tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_keys(
    storage,
    block,
    slot,
    inside,
    block_units,
    section,
    per_block,
    DIM: tl.constexpr,
    PAGE_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Even and odd dimensions of the keys as bf16 [TILE, DIM / 2]; a power of two times a code is exact."""
    HALF: tl.constexpr = DIM // 2
    GROUPS: tl.constexpr = DIM // 32
    base = storage + block * block_units + section
    byte = tl.arange(0, HALF)
    if PAGE_SPLIT:
        data, scales = base + slot * HALF, base + per_block * HALF + slot * GROUPS
    else:
        data, scales = base + slot * (HALF + GROUPS), base + slot * (HALF + GROUPS) + HALF
    codes = tl.load(data[:, None] + byte[None, :], mask=inside[:, None], other=0).to(tl.int32)
    scale = decode_ue8m0(tl.load(scales[:, None] + (byte // 16)[None, :], mask=inside[:, None], other=0))
    return (_decode_e2m1(codes & 15) * scale).to(tl.bfloat16), (_decode_e2m1(codes >> 4) * scale).to(tl.bfloat16)


@triton.jit
def _score_pair(even, odd, q_even, q_odd, w, HP: tl.constexpr, TILE: tl.constexpr):
    """Scores float32 [TILE, 2] of two rows."""
    acc = tl.zeros((TILE, 2 * HP), tl.float32)
    acc = dot(even, q_even, acc)
    acc = dot(odd, q_odd, acc)
    weighted = tl.maximum(acc, 0.0) * w[None, :]
    return tl.sum(tl.reshape(weighted, (TILE, 2, HP)), 2)


@triton.jit
def _store_pair(
    scores,
    out,
    coarse,
    places,
    first,
    start,
    stop,
    entry,
    place,
    is_entry,
    width,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Transposed into the rows' lists; of all entries also the largest score of each coarse block."""
    row = start + tl.arange(0, 2)
    inside = row < stop
    own = out + row.to(tl.int64)[None, :] * width
    if LISTED:
        to_store = is_entry[:, None] & inside[None, :]
        own_place = tl.load(places + place[:, None] // SIZE * 8 + (row - first)[None, :], mask=to_store, other=-1)
        at = own + own_place.to(tl.int32) * SIZE + (place % SIZE)[:, None]
        tl.store(at, round_bf16(scores), mask=to_store & (own_place >= 0))
        return
    tl.store(own + entry[:, None], round_bf16(scores), mask=inside[None, :])
    best = tl.max(tl.reshape(scores, (TILE // _COARSE, _COARSE, 2)), 1)
    block = tl.min(entry, 0) // _COARSE + tl.arange(0, TILE // _COARSE)
    at = coarse + row.to(tl.int64)[None, :] * (width // _COARSE) + block[:, None]
    tl.store(at, round_bf16(best), mask=inside[None, :])


@triton.jit
def _score_groups(
    query,
    weights,
    storage,
    table,
    row_seq,
    starts,
    tiles,
    count,
    out,
    coarse,
    listed,
    places,
    lengths,
    stops,
    block_units,
    section,
    per_block,
    table_width,
    width,
    list_width,
    rows,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    HP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    bound = table_width * per_block
    if LISTED:
        tile, end, group, first_tile = find_listed(
            lengths, rows, tl.program_id(0), tl.num_programs(0), SIZE, TILE, CHUNK
        )
    else:
        total = tl.load(tiles + tl.load(count)).to(tl.int64)
        tile = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
        end = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
        group = find_group(tiles, tl.load(count), tile)
        first_tile = tl.load(tiles + group)
    while tile < end:
        length = 0
        if LISTED:
            start = group
            stop = tl.load(stops + group)
            length = tl.load(lengths + group)
            next_tile = first_tile + (length * SIZE + TILE - 1) // TILE
        else:
            start = tl.load(starts + group)
            stop = tl.load(starts + group + 1)
            next_tile = tl.load(tiles + group + 1)
        segment_end = tl.minimum(end, next_tile)
        sequence = tl.load(row_seq + start).to(tl.int64)
        even0, odd0, w0 = _load_query(query, weights, start, stop, HEADS, HP, DIM)
        even1, odd1, w1 = _load_query(query, weights, start + 2, stop, HEADS, HP, DIM)
        even2, odd2, w2 = _load_query(query, weights, start + 4, stop, HEADS, HP, DIM)
        own_places = places + group.to(tl.int64) * list_width * 8
        for t in range(tile, segment_end):
            place = (t - first_tile) * TILE + tl.arange(0, TILE)
            if LISTED:
                is_listed = place // SIZE < length
                chosen = tl.load(listed + group.to(tl.int64) * list_width + place // SIZE, mask=is_listed, other=0)
                entry = chosen * SIZE + place % SIZE
                inside = is_listed & (entry < bound)
            else:
                entry = place
                inside = entry < bound
            is_entry = inside
            block = tl.load(table + sequence * table_width + entry // per_block, mask=inside, other=-1)
            inside = inside & (block >= 0)
            even, odd = _load_keys(
                storage,
                block.to(tl.int64),
                entry % per_block,
                inside,
                block_units,
                section,
                per_block,
                DIM,
                PAGE_SPLIT,
                TILE,
            )
            scores = _score_pair(even, odd, even0, odd0, w0, HP, TILE)
            _store_pair(
                scores, out, coarse, own_places, start, start, stop, entry, place, is_entry, width, SIZE, LISTED, TILE
            )
            if stop > start + 2:
                scores = _score_pair(even, odd, even1, odd1, w1, HP, TILE)
                _store_pair(
                    scores,
                    out,
                    coarse,
                    own_places,
                    start,
                    start + 2,
                    stop,
                    entry,
                    place,
                    is_entry,
                    width,
                    SIZE,
                    LISTED,
                    TILE,
                )
            if stop > start + 4:
                scores = _score_pair(even, odd, even2, odd2, w2, HP, TILE)
                _store_pair(
                    scores,
                    out,
                    coarse,
                    own_places,
                    start,
                    start + 4,
                    stop,
                    entry,
                    place,
                    is_entry,
                    width,
                    SIZE,
                    LISTED,
                    TILE,
                )
        tile = segment_end
        first_tile = next_tile
        group = stop if LISTED else group + 1


def _shape(query, keys):
    heads, dim = query.shape[1:]
    # Two rows make the columns of a product, which has at least 16.
    return {
        "HEADS": heads,
        "HP": max(8, triton.next_power_of_2(heads)),
        "DIM": dim,
        "PAGE_SPLIT": keys.page_split,
        "TILE": TILE,
    }


def score_groups(query, weights, keys, block_table, row_seq, groups, out, coarse, programs, size=1):
    """Scores of entries into out bfloat16 [R, width], the largest of each coarse block into coarse [R, width / 8].

    groups  `RowGroups`: scores of all entries, written up to the end of the last tile that a row of the group sees;
            what a row does not see there means nothing. Or `UnitedCandidates` in blocks of `size` entries: only their
            scores, each row's in the places of its own list, and nothing of `coarse`
    """
    _score_groups[(2 if IS_INTERPRETED else 2 * programs,)](
        query,
        weights,
        keys.storage,
        block_table,
        row_seq,
        *group_arguments(groups, out, coarse),
        keys.storage.shape[1],
        keys.offset,
        keys.entries_per_block,
        block_table.shape[1],
        out.shape[1],
        groups.blocks.shape[1] if isinstance(groups, UnitedCandidates) else 0,
        query.shape[0],
        SIZE=size,
        LISTED=isinstance(groups, UnitedCandidates),
        CHUNK=min(1024, triton.next_power_of_2(query.shape[0])),
        **_shape(query, keys),
        num_warps=4,
    )


def group_arguments(groups, out, coarse):
    """starts, tiles, count, out, coarse, listed, places, lengths, stops of a kernel; what it does not read is any."""
    if isinstance(groups, UnitedCandidates):
        ends = groups.lengths, groups.stops
        return groups.stops, groups.stops, groups.stops, out, coarse, groups.blocks, groups.places, *ends
    return groups.starts, groups.tiles, groups.count, out, coarse, *(groups.starts,) * 4
