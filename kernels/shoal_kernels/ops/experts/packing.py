"""The layout in which accelerators hold expert weights: words that decode to bfloat16 with few instructions.

K is cut into blocks of 256, a block into 8 planes of 32 (the groups that share a scale). Two neighbouring elements of a
plane are one pair of bfloat16 bits in a 32-bit unit, the lower index in the lower half: sign at bit 15, the e2m1
magnitude at bits 8..6, the e4m3 magnitude at bits 10..4, so that the value is the bfloat16 of these bits times 2^126 or
2^120, subnormals included. A word holds the pairs of several planes, each moved so that one shift and one mask bring it
back:

FP4  2 words a block. A = p0 | rotl(p1, 6) | p2 >> 6 | C & 0x0C18, B = p3 | rotl(p4, 6) | p5 >> 6 | (C & 0x3060) >> 2
     with C = rotl(p6, 4) | p7 >> 2 (masks for each half); rotl turns all 32 bits
FP8  4 words a block, word w = p | rotl(q & 0x8780, 4) | (q & 0x0070) >> 4 with p, q = planes 2w, 2w + 1

words   int32 [E, K / 256, words of a block, N, 16]; K is padded with zeros. The 16-byte chunk t of a row holds columns
        t, t + 4, t + 8 and t + 12: what a lane of a tensor core's left operand takes of a row in two steps of K
scales  uint8 [E, K / 256, N, 8]: for every plane the exponent field of the bfloat16 multiplier, 2^(scale + 126 or 120)
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_kernels.formats import WEIGHT_BLOCK

K_BLOCK, PLANES = 256, 8
FP4_WORDS, FP8_WORDS = 2, 4
_FP4_EXPONENT, _FP8_EXPONENT = 126, 120
_SIGNED_HIGH, _LOW = 0x87808780 - (1 << 32), 0x00700070
_FROM_A, _FROM_B = 0x0C180C18, 0x30603060


def packed_depth(depth: int) -> int:
    """K with its padding."""
    return -(-depth // K_BLOCK) * K_BLOCK


def pack_fp4(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """data uint8 [N, K/2], scale uint8 [N, K/32] -> words [K/256, 2, N, 16], scales [K/256, N, 8].

    ValueError for a scale above 2^1, whose multiplier is not a finite bfloat16.
    """
    table = _fp4_pairs(data.device)
    planes = table[_planes(data.view(torch.uint8), 16).int()].unbind(1)
    rest = _rotl(planes[6], 4) | _shr(planes[7], 2)
    first = planes[0] | _rotl(planes[1], 6) | _shr(planes[2], 6) | (rest & _FROM_A)
    second = planes[3] | _rotl(planes[4], 6) | _shr(planes[5], 6) | _shr(rest & _FROM_B, 2)
    return _by_lane(torch.stack((first, second), 1)), _scales(scale, _FP4_EXPONENT)


def pack_fp8(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """data uint8 [N, K], scale uint8 [N/32, K/32] -> words [K/256, 4, N, 16], scales [K/256, N, 8].

    ValueError for a scale above 2^7, whose multiplier is not a finite bfloat16.
    """
    codes = _planes(data.view(torch.uint8), 32).int()
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 4)
    pairs = halves[..., 0::2] | (halves[..., 1::2] << 16)
    even, odd = pairs[:, 0::2], pairs[:, 1::2]
    words = even | _rotl(odd & _SIGNED_HIGH, 4) | _shr(odd & _LOW, 4)
    rows = scale.view(torch.uint8).repeat_interleave(WEIGHT_BLOCK, 0)[: data.shape[0]]
    return _by_lane(words), _scales(rows, _FP8_EXPONENT)


def _planes(data: Tensor, plane_bytes: int) -> Tensor:
    """uint8 [N, bytes] -> [blocks, 8, N, plane_bytes], padded with zeros."""
    rows, size = data.shape
    block = PLANES * plane_bytes
    padded = torch.nn.functional.pad(data, (0, -size % block))
    return padded.view(rows, -1, PLANES, plane_bytes).permute(1, 2, 0, 3)


def _by_lane(words: Tensor) -> Tensor:
    """words [..., N, 16] with the columns of every row moved to their chunks."""
    by_lane: Tensor = words.unflatten(-1, (4, 4)).mT.flatten(-2)
    return by_lane


def _scales(scale: Tensor, exponent: int) -> Tensor:
    """ue8m0 [N, K/32] -> the multipliers' exponent fields [blocks, N, 8]; padding is 1, its weights are zero."""
    rows, groups = scale.shape
    fields = scale.view(torch.uint8).to(torch.int16) + exponent
    largest = int(fields.max()) if fields.numel() else 0
    if largest > 254:
        raise ValueError(f"scale byte {largest - exponent} of an expert weight exceeds {254 - exponent}")
    padded = torch.nn.functional.pad(fields.to(torch.uint8), (0, -groups % PLANES), value=1)
    return padded.view(rows, -1, PLANES).transpose(0, 1).contiguous()


def _fp4_pairs(device: torch.device) -> Tensor:
    """int32 [256]: the pair of bfloat16 bits of every byte of two e2m1 codes."""
    code = torch.arange(16, dtype=torch.int64, device=device)
    half = ((code & 8) << 12) | ((code & 7) << 6)
    pair = half[None, :] | (half[:, None] << 16)
    return torch.where(pair >= 1 << 31, pair - (1 << 32), pair).to(torch.int32).flatten()


def _shr(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotl(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shr(x, 32 - bits)
