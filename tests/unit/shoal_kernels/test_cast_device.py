"""Casts on a device: the bits of the host."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.cast import cast_q4ue, cast_q8
from support.on_device import DEVICE, HAS_DEVICE, assert_equal_bits, assert_rows_independent, needs_device
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import values


@pytest.mark.parametrize("cast", [cast_q8, cast_q4ue])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (7, 96), (5, 3, 64)])
def test_cast_has_the_bits_of_the_host(cast: object, shape: tuple[int, ...]) -> None:
    _compare(cast, shape)


@needs_device
@pytest.mark.parametrize("cast", [cast_q8, cast_q4ue])
@pytest.mark.parametrize("shape", [(1537, 5120), (361, 32, 128), (3000, 2304)])
def test_cast_of_released_sizes_has_the_bits_of_the_host(cast: object, shape: tuple[int, ...]) -> None:
    _compare(cast, shape)


@pytest.mark.parametrize("cast", [cast_q8, cast_q4ue])
def test_every_bfloat16_magnitude_is_cast_as_on_the_host(cast: object) -> None:
    # All finite positive values, alone in a group and with smaller ones. The interpreter converts subnormals wrongly.
    magnitudes = torch.arange(0x7F80) if HAS_DEVICE else torch.arange(0x80 + 8 * 128, 0x7F80, 37)
    bits = magnitudes.to(torch.int16)
    x = bits.view(torch.bfloat16)[:, None].repeat(1, 64)
    x[:, 1:32] = 0.0
    x[:, 33:] *= torch.linspace(-1, 1, 31).to(torch.bfloat16)
    assert_equal_bits(
        cast(x.to(DEVICE), precision=SERVED_BF16),  # type: ignore[operator]
        cast(x.float(), precision=SERVED).bfloat16(),  # type: ignore[operator]
    )


def test_rows_do_not_depend_on_their_batch() -> None:
    x = values(ROWS, 64, seed=1).to(torch.bfloat16).to(DEVICE)
    assert_rows_independent(lambda rows: cast_q8(x[rows], precision=SERVED_BF16), ROWS, sizes=SIZES_ALONE)


def _compare(cast: object, shape: tuple[int, ...]) -> None:
    x = values(*shape, seed=3)
    got = cast(x.to(torch.bfloat16).to(DEVICE), precision=SERVED_BF16)  # type: ignore[operator]
    assert_equal_bits(got, cast(x, precision=SERVED).bfloat16())  # type: ignore[operator]
