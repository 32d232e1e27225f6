"""Number formats of the checkpoint and of the cache, to the byte, in plain torch.

e4m3 is float8_e4m3fn; ue8m0 byte b means 2^(b-127); e2m1 has magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the sign in bit
3, two codes per byte with the lower index in the low nibble. Casts work on contiguous groups of the last axis:

Q8    groups of 32, ue8m0 scale 2^ceil(log2(amax / 448)), amax at least 1e-4, e4m3 values
Q4ue  groups of 32, ue8m0 scale 2^ceil(log2(amax / 6)), amax at least 6 * 2^-126, e2m1 values
Q4nv  groups of 16, e4m3 scale min(amax / 6, 448), amax at least 6 * 2^-9, e2m1 values

Quotients are true float32 divisions; values are multiplied by the float32 reciprocal of the rounded scale. Inputs are
taken to float32 first. Source: section 4 of the model's specification.
"""

from __future__ import annotations

import torch
from torch import Tensor

Q8_GROUP, Q4UE_GROUP, Q4NV_GROUP = 32, 32, 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
Q8_FLOOR, Q4UE_FLOOR, Q4NV_FLOOR = 1e-4, 6.0 * 2.0**-126, 6.0 * 2.0**-9
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHT_BLOCK = 32


def decode_e4m3(data: Tensor) -> Tensor:
    """uint8 or float8_e4m3fn bytes -> float32 values, same shape."""
    return (data.view(torch.float8_e4m3fn) if data.dtype != torch.float8_e4m3fn else data).to(torch.float32)


def decode_ue8m0(data: Tensor) -> Tensor:
    """uint8 (or float8_e8m0fnu) bytes -> float32 powers of two, same shape; byte 0 is the subnormal 2^-127."""
    exponent = data.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.view(torch.float32)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 or int8 [..., n] with two codes each -> float32 [..., 2n], lower index from the low nibble."""
    data = packed.view(torch.uint8).to(torch.int64)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float32, device=packed.device)
    return table[codes]


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 [..., 2n] -> uint8 [..., n]: nearest, ties to the even code, saturating at 6; -0 keeps its sign."""
    m = x.abs()
    code = (m > 0.25).to(torch.uint8) + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)
    code = code + 8 * torch.signbit(x).to(torch.uint8)
    return code[..., 0::2] + 16 * code[..., 1::2]


def _power_of_two_scale(quotient: Tensor) -> tuple[Tensor, Tensor]:
    bits = (quotient.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return bits.view(torch.float32), (bits >> 23).to(torch.uint8)


def _split(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _groups(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"the last axis must be a multiple of {size}, got {x.shape[-1]}")
    return _split(x.to(torch.float32), size)


def encode_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> data uint8 [..., n] (e4m3), scales uint8 [..., n/32] (ue8m0). ValueError if n % 32."""
    groups = _groups(x, Q8_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(Q8_FLOOR)
    scale, scale_bytes = _power_of_two_scale(amax / E4M3_MAX)
    data = (groups * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return data.view(torch.uint8).flatten(-2), scale_bytes.squeeze(-1)


def decode_q8(data: Tensor, scale_bytes: Tensor) -> Tensor:
    """Inverse of encode_q8 -> float32 [..., n]; the values are exact in bfloat16."""
    return (_split(decode_e4m3(data), Q8_GROUP) * decode_ue8m0(scale_bytes).unsqueeze(-1)).flatten(-2)


def encode_q4ue(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> data uint8 [..., n/2] (e2m1 pairs), scales uint8 [..., n/32] (ue8m0). ValueError if n % 32."""
    groups = _groups(x, Q4UE_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(Q4UE_FLOOR)
    scale, scale_bytes = _power_of_two_scale(amax / E2M1_MAX)
    return encode_e2m1((groups * (1.0 / scale)).flatten(-2)), scale_bytes.squeeze(-1)


def decode_q4ue(data: Tensor, scale_bytes: Tensor) -> Tensor:
    """Inverse of encode_q4ue -> float32 [..., n]."""
    return (_split(decode_e2m1(data), Q4UE_GROUP) * decode_ue8m0(scale_bytes).unsqueeze(-1)).flatten(-2)


def encode_q4nv(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> data uint8 [..., n/2] (e2m1 pairs), scales uint8 [..., n/16] (e4m3). ValueError if n % 16."""
    groups = _groups(x, Q4NV_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(Q4NV_FLOOR)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    data = encode_e2m1((groups * (1.0 / scale.to(torch.float32))).flatten(-2))
    return data, scale.view(torch.uint8).squeeze(-1)


def decode_q4nv(data: Tensor, scale_bytes: Tensor) -> Tensor:
    """Inverse of encode_q4nv -> float32 [..., n]; the values are exact in bfloat16."""
    return (_split(decode_e2m1(data), Q4NV_GROUP) * decode_e4m3(scale_bytes).unsqueeze(-1)).flatten(-2)


def dequantise_fp8_weight(data: Tensor, scale_bytes: Tensor) -> Tensor:
    """FP8 weight [out, in] with one ue8m0 scale per 32x32 block [ceil(out/32), ceil(in/32)] -> float32 [out, in]."""
    check_fp8_scale(data, scale_bytes)
    rows, columns = data.shape
    scale = decode_ue8m0(scale_bytes)
    scale = scale.repeat_interleave(WEIGHT_BLOCK, 0)[:rows].repeat_interleave(WEIGHT_BLOCK, 1)[:, :columns]
    return decode_e4m3(data) * scale


def check_fp8_scale(data: Tensor, scale_bytes: Tensor) -> None:
    """Require one scale per 32x32 block of an FP8 weight [out, in]."""
    want = [-(-size // WEIGHT_BLOCK) for size in data.shape]
    if data.dim() != 2 or list(scale_bytes.shape) != want:
        raise ValueError(f"scale of an FP8 weight {list(data.shape)} must be {want}, got {list(scale_bytes.shape)}")


def check_fp4_scale(packed: Tensor, scale_bytes: Tensor) -> None:
    """Require one scale per 32 values of an FP4 weight [..., out, in/2]."""
    want = [*packed.shape[:-1], packed.shape[-1] * 2 // WEIGHT_BLOCK]
    if packed.shape[-1] * 2 % WEIGHT_BLOCK or list(scale_bytes.shape) != want:
        raise ValueError(f"scale of an FP4 weight {list(packed.shape)} must be {want}, got {list(scale_bytes.shape)}")


def dequantise_fp4_weight(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """FP4 expert weight [..., out, in/2] with ue8m0 scales [..., out, in/32] -> float32 [..., out, in]."""
    check_fp4_scale(packed, scale_bytes)
    return decode_q4ue(packed, scale_bytes)
