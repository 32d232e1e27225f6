# mypy: ignore-errors
"""Pieces of the Hopper kernel of index scores, in Gluon, for one warpgroup.

Products are e4m3. An e2m1 code times a power of two down to 2^-12 of the largest scale of its key (or query row and
head) is exact there; the largest scale is left out of the product and multiplied in afterwards, which the ramp between
does not notice. What is smaller would not reach the bits that the tensor core keeps of a sum.

A thread reads 16 bytes of a key, which are one group of 32 dimensions, and decodes them in registers as the left
operand of wgmma: so dimensions are permuted, in queries alike. Keys are rows of the product, (row, head) its columns,
arranged so that a thread holds all heads of a query row for two neighbouring keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_DECODE = gl.constexpr(
    """
{
.reg .b32 i, j, s;
"""
    + "".join(
        f"""
and.b32 i, ${8 + word}, 0x77777777;
shr.b32 j, ${8 + word}, 1;
and.b32 j, j, 0x44444444;
prmt.b32 s, 0, 0x80808080, j;
prmt.b32 ${2 * word}, ${12 + word}, ${16 + word}, i;
or.b32 ${2 * word}, ${2 * word}, s;
shr.b32 i, i, 16;
shr.b32 j, j, 16;
prmt.b32 s, 0, 0x80808080, j;
prmt.b32 ${2 * word + 1}, ${12 + word}, ${16 + word}, i;
or.b32 ${2 * word + 1}, ${2 * word + 1}, s;
"""
        for word in range(4)
    )
    + "}"
)


@gluon.jit
def decode(words, low, high, LA: gl.constexpr):
    """Codes int32 [64, 4, 4] (row, group, word) and tables of e4m3 bytes -> e4m3 [64, 128], the left operand.

    Column 32 * J + 16 * h + 4 * c + b of the result is dimension 32 * c + 8 * J + 4 * h + b.
    """
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _DECODE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, high],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    x = gl.join(gl.join(gl.join(o0, o4), gl.join(o2, o6)), gl.join(gl.join(o1, o5), gl.join(o3, o7)))
    # row, c, b, then the bits of 2 * J + h
    x = gl.reshape(x, (64, 4, 4, 2, 2, 2))
    x = gl.permute(x, (0, 3, 4, 5, 1, 2))
    return gl.convert_layout(gl.reshape(x, (64, 128)), LA, assert_trivial=True)


@gluon.jit
def tables(exponent, top):
    """e4m3 bytes of the magnitudes 0 .. 1.5 and 2 .. 6 of groups 2^(top - exponent) below the largest of their key.

    The largest gets a scale of 64, so all to 2^-12 of it are exact; the products of smaller ones are below the bits
    that the tensor core keeps.
    """
    below = top - exponent
    low = 0x6C686000 - below * 0x08080800
    low = gl.where(below == 12, 0x0C080400, low)
    high = 0x7C787470 - below * 0x08080808
    return gl.where(below > 12, 0, low), gl.where(below > 12, 0, high)


@gluon.jit
def rows_of(n, ROWS: gl.constexpr):
    """Row and head of column n of a product for 4 or 2 rows.

    A thread holds columns 8 j + 2 c + b of its keys, with a c of its own: so c is the row, or half the heads of one.
    """
    if ROWS == 4:
        row = n // 2 % 4
        head = n // 8 * 2 + n % 2
    else:
        row = n // 4 % 2
        head = n // 2 % 2 * 16 + n // 8 * 2 + n % 2
    return row, head


@gluon.jit
def stage_rows(
    query,
    weights,
    shared,
    scales,
    start,
    stop,
    AT: gl.constexpr,
    ROWS: gl.constexpr,
    L: gl.constexpr,
):
    """ROWS rows from `start` on as columns AT .. of shared [256, 128] (permuted dimensions), weights float32 [256]."""
    for part in gl.static_range(ROWS // 2):
        n = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        row, head = rows_of(n, ROWS)
        row += start
        at = row.to(gl.int64) * 32 + head
        q = gl.load(query + at[:, None] * 128 + k[None, :], mask=(row < stop)[:, None], other=0.0).to(gl.float32)
        w = gl.load(weights + at, mask=row < stop, other=0.0).to(gl.float32)
        largest = gl.max(gl.maximum(q, -q), 1)
        # 2^(8 - exponent) takes the largest to 256 or 384; a row of zeros stays one.
        exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 16)
        up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
        down = ((exponent - 8) << 23).to(gl.float32, bitcast=True)
        q = (q * up[:, None]).to(gl.float8e4nv)
        q = gl.permute(gl.reshape(q, (64, 4, 4, 2, 4)), (0, 2, 3, 1, 4))
        w = w * (0.5 * down)
        shared.slice(AT + part * 64, 64).store(gl.reshape(q, (64, 128)))
        scales.slice(AT + part * 64, 64).store(w)


@gluon.jit
def _heads_last(x, ROWS: gl.constexpr):
    """[64, 32 * ROWS] in the order of fragments and columns -> [64, ROWS, 2, 2, 2, 2, 2]: keys, rows, heads by bits."""
    if ROWS == 4:
        x = gl.reshape(x, (4, 2, 8, 16, 4, 2))  # warp, e, g, j, row, b
        x = gl.permute(x, (0, 2, 1, 4, 3, 5))
    else:
        x = gl.reshape(x, (4, 2, 8, 8, 2, 2, 2))  # warp, e, g, j, row, half, b
        x = gl.permute(x, (0, 2, 1, 4, 5, 3, 6))
    return gl.reshape(x, (64, ROWS, 2, 2, 2, 2, 2))


@gluon.jit
def _sum_heads(x, w):
    """Sums over 8 heads by chained multiply-adds, then of the four sums in pairs: one order for every row."""
    x0, x1 = gl.split(x)
    w0, w1 = gl.split(w)
    x00, x01 = gl.split(x0)
    x10, x11 = gl.split(x1)
    w00, w01 = gl.split(w0)
    w10, w11 = gl.split(w1)
    x000, x001 = gl.split(x00)
    x010, x011 = gl.split(x01)
    x100, x101 = gl.split(x10)
    x110, x111 = gl.split(x11)
    w000, w001 = gl.split(w00)
    w010, w011 = gl.split(w01)
    w100, w101 = gl.split(w10)
    w110, w111 = gl.split(w11)
    total = x000 * w000
    total = gl.fma(x001, w001, total)
    total = gl.fma(x010, w010, total)
    total = gl.fma(x011, w011, total)
    total = gl.fma(x100, w100, total)
    total = gl.fma(x101, w101, total)
    total = gl.fma(x110, w110, total)
    total = gl.fma(x111, w111, total)
    return gl.sum(gl.sum(total, 3), 2)


@gluon.jit
def finish(
    acc,
    scales,
    scale,
    out,
    coarse,
    place,
    rows,
    entry,
    width,
    AT: gl.constexpr,
    FIRST: gl.constexpr,
    ROWS: gl.constexpr,
    LISTED: gl.constexpr,
    LC: gl.constexpr,
):
    """Weighted head sums of ROWS rows, stored where `find_places` says; of all entries also the largest of each 8."""
    w = scales.slice(AT, ROWS * 32).load(gl.SliceLayout(0, LC))
    # x + |x| is twice the ramp, in the pipe that the decoding of codes leaves free; weights are halved for it.
    asm: gl.constexpr = "{.reg .f32 t; abs.f32 t, $1; add.f32 $0, $1, t;}"
    x = gl.inline_asm_elementwise(asm, "=f,f", [acc], dtype=gl.float32, is_pure=True, pack=1)
    x, w = gl.broadcast(x, w[None, :])
    total = _sum_heads(_heads_last(x, ROWS), _heads_last(w, ROWS))  # [64, ROWS]
    LS: gl.constexpr = total.type.layout
    scale = gl.reshape(gl.permute(gl.reshape(scale, (4, 2, 8)), (0, 2, 1)), (64,))
    total = total * gl.convert_layout(scale, gl.SliceLayout(1, LS), assert_trivial=True)[:, None]
    row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LS))
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    if LISTED:
        place = gl.convert_layout(place, LS, assert_trivial=True)
        at = (row * width)[None, :] + place * 8 + (key % 8)[:, None]
        gl.store(out + at, total.to(gl.bfloat16), mask=place >= 0)
    else:
        at = (row * width)[None, :] + key[:, None]
        gl.store(out + entry + at, total.to(gl.bfloat16), mask=(row < rows)[None, :])
        best = gl.max(gl.reshape(total, (8, 8, ROWS)), 1)
        LB: gl.constexpr = best.type.layout
        row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LB))
        at = (row * (width // 8))[None, :] + gl.arange(0, 8, layout=gl.SliceLayout(1, LB))[:, None]
        gl.store(coarse + entry // 8 + at, best.to(gl.bfloat16), mask=(row < rows)[None, :])


@gluon.jit
def find_places(places, length, entry, rows, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Where the rows list the blocks of 64 keys, int32 [64, ROWS], -1 for nowhere; held as `finish` holds its sums."""
    lanes: gl.constexpr = [[0, 1], [0, 2]] if ROWS == 4 else [[0, 0], [0, 1]]
    L: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0]],
        lane_bases=[lanes[0], lanes[1], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, ROWS],
    )
    row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    at = entry + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    inside = (row < rows)[None, :] & (at < length * 8)[:, None]
    return gl.load(places + (at // 8 * 8)[:, None] + row[None, :], mask=inside, other=-1).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_listed(lengths, rows, part, parts):
    """As `row_groups.find_listed`, for blocks of 8 entries and tiles of 64."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    lane = gl.arange(0, 1024, layout=L)
    total = 0
    for base in range(0, rows, 1024):
        total += gl.sum((gl.load(lengths + base + lane, mask=base + lane < rows, other=0) + 7) // 8, 0)
    tile = (part * total.to(gl.int64) // parts).to(gl.int32)
    end = ((part + 1) * total.to(gl.int64) // parts).to(gl.int32)
    group = 0
    first_tile = 0
    before = 0
    for base in range(0, rows, 1024):
        own = (gl.load(lengths + base + lane, mask=base + lane < rows, other=0) + 7) // 8
        through = before + gl.associative_scan(own, 0, _add)
        is_past = (through <= tile) & (base + lane < rows)
        group += gl.sum(is_past.to(gl.int32), 0)
        first_tile = gl.maximum(first_tile, gl.max(gl.where(is_past, through, 0), 0))
        before += gl.sum(own, 0)
    return tile, end, group, first_tile


@gluon.jit
def find_tile(table_row, listed, length, entry, bound, LISTED: gl.constexpr, PER_BLOCK: gl.constexpr, LW: gl.constexpr):
    """Block and slot of the keys from place `entry` on: of the first, or LISTED of each; any where there is none."""
    if LISTED:
        m = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
        key = (m & 48) | ((m & 7) << 1) | ((m >> 3) & 1)
        chosen = gl.load(listed + gl.minimum((entry + key) // 8, length - 1))
        at = gl.minimum(chosen * 8, bound - 8) + key % 8
    else:
        at = gl.minimum(entry, bound - 64)
    return gl.maximum(gl.load(table_row + at // PER_BLOCK), 0), at % PER_BLOCK


@gluon.jit
def load_tile(words, scales, block, slot, block_units, LISTED: gl.constexpr, PER_BLOCK: gl.constexpr, LW: gl.constexpr):
    """Codes int32 [64, 4, 4] and scale bytes [64, 4] of 64 keys, rows in the order of fragments."""
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    key = (m & 48) | ((m & 7) << 1) | ((m >> 3) & 1)
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    base = block.to(gl.int64) * block_units
    if LISTED:
        word = words + (base // 4 + slot * 16)
        offset = gl.expand_dims(gl.expand_dims(c * 4, 0), 2) + gl.expand_dims(gl.expand_dims(i, 0), 1)
        found = gl.load(gl.expand_dims(word[:, None], 2) + offset)
        exponent = gl.load((scales + (base + PER_BLOCK * 64 + slot * 4))[:, None] + c[None, :])
    else:
        offset = gl.expand_dims(key[:, None] * 16 + c[None, :] * 4, 2) + gl.expand_dims(gl.expand_dims(i, 0), 1)
        found = gl.load(words + (base // 4 + slot * 16) + offset)
        exponent = gl.load(scales + (base + PER_BLOCK * 64 + slot * 4) + (key[:, None] * 4 + c[None, :]))
    return found, exponent
