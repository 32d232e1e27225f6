"""Encoding and decoding of single cache records as numba helpers; the bytes of `formats`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal_kernels import formats
from shoal_kernels.arith_nb import ONE, amax_bits, e2m1_code, e4m3_magnitude, q4ue_scale_bits, q8_scale_bits
from shoal_kernels.jit import bits_of, float_of, inline
from shoal_kernels.row_formats import RecordKind

WINDOW, MAIN, INDEX = RecordKind.WINDOW.value, RecordKind.MAIN.value, RecordKind.INDEX.value
_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
E4M3 = formats.decode_e4m3(_BYTES).numpy()  # [256]
UE8M0 = formats.decode_ue8m0(_BYTES).numpy()  # [256]
E2M1 = formats.decode_e2m1(_BYTES[:, None]).numpy()  # [256, 2]
_E2M1_MAX, _Q4NV_FLOOR = np.float32(formats.E2M1_MAX), np.float32(formats.Q4NV_FLOOR)
_NORMAL, _SUBNORMAL_STEPS = np.float32(2.0**-6), np.float32(512.0)


@inline
def e4m3_byte(magnitude: Any) -> Any:
    """Byte of a non-negative float32 that is an e4m3 value."""
    if magnitude >= _NORMAL:
        return np.uint8((bits_of(magnitude) >> 20) - (120 << 3))
    return np.uint8(magnitude * _SUBNORMAL_STEPS)


@inline
def _encode_e2m1(values: Any, inverse: Any, data: Any) -> None:
    for i in range(data.shape[0]):
        low, high = values[2 * i] * inverse, values[2 * i + 1] * inverse
        low_code = e2m1_code(low) | ((bits_of(low) >> 28) & 8)
        high_code = e2m1_code(high) | ((bits_of(high) >> 28) & 8)
        data[i] = np.uint8(low_code | (high_code << 4))


@inline
def encode_record(values: Any, kind: Any, record: Any) -> None:
    """values float32 [dim] -> record uint8 [units]."""
    dim = values.shape[0]
    if kind == WINDOW:
        for group in range(dim // 32):
            source, target = values[group * 32 : group * 32 + 32], record[group * 32 : group * 32 + 32]
            scale = q8_scale_bits(amax_bits(source, 0, 32))
            inverse = ONE / float_of(scale)
            for i in range(32):
                y = source[i] * inverse
                target[i] = np.uint8(e4m3_byte(e4m3_magnitude(y)) | ((bits_of(y) >> 24) & 0x80))
            record[dim + group] = np.uint8(scale >> 23)
    elif kind == MAIN:
        for group in range(dim // 16):
            source = values[group * 16 : group * 16 + 16]
            amax = float_of(amax_bits(source, 0, 16))
            amax = amax if amax > _Q4NV_FLOOR else _Q4NV_FLOOR
            rounded = e4m3_magnitude(amax / _E2M1_MAX)
            _encode_e2m1(source, ONE / rounded, record[group * 8 : group * 8 + 8])
            record[dim // 2 + group] = e4m3_byte(rounded)
    else:
        for group in range(dim // 32):
            source = values[group * 32 : group * 32 + 32]
            scale = q4ue_scale_bits(amax_bits(source, 0, 32))
            _encode_e2m1(source, ONE / float_of(scale), record[group * 16 : group * 16 + 16])
            record[dim // 2 + group] = np.uint8(scale >> 23)


@inline
def find_record(layout: Any, slot: Any) -> Any:
    """Bounds (data, data end, scales, scales end) of a record inside its block; `layout` as PagedRows.layout."""
    offset, per_block, data_units, scale_units, split = layout[0], layout[1], layout[2], layout[3], layout[4]
    if split:
        data = offset + slot * data_units
        scales = offset + per_block * data_units + slot * scale_units
    else:
        data = offset + slot * (data_units + scale_units)
        scales = data + data_units
    return data, data + data_units, scales, scales + scale_units


@inline
def decode_window(data: Any, scales: Any, values: Any) -> None:
    """data uint8 [dim], scales uint8 [dim/32] -> values float32 [dim]."""
    for group in range(scales.shape[0]):
        scale = UE8M0[scales[group]]
        for i in range(group * 32, group * 32 + 32):
            values[i] = E4M3[data[i]] * scale


@inline
def decode_e2m1(data: Any, scale: Any, values: Any) -> None:
    """data uint8 [n] of one group, its scale -> values float32 [2n]."""
    for i in range(data.shape[0]):
        values[2 * i] = E2M1[data[i], 0] * scale
        values[2 * i + 1] = E2M1[data[i], 1] * scale


@inline
def decode_main(data: Any, scales: Any, values: Any) -> None:
    """data uint8 [dim/2], scales uint8 [dim/16] -> values float32 [dim]."""
    for group in range(scales.shape[0]):
        decode_e2m1(data[group * 8 : group * 8 + 8], E4M3[scales[group]], values[group * 16 : group * 16 + 16])


@inline
def decode_index(data: Any, scales: Any, values: Any) -> None:
    """data uint8 [dim/2], scales uint8 [dim/32] -> values float32 [dim]."""
    for group in range(scales.shape[0]):
        decode_e2m1(data[group * 16 : group * 16 + 16], UE8M0[scales[group]], values[group * 32 : group * 32 + 32])
