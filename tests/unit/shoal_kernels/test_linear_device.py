"""linear on the accelerator, or in Triton's interpreter: near the host's values, and rows depend on themselves only."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.formats import dequantise_fp8_weight
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.linear.segments import segment_count
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, backends, needs_device, relative_error
from support.seldom import seldom
from torch import Tensor
from unit.shoal_kernels.parity import normal, values

BACKENDS = backends(tilelang=True)
RELEASED = [
    (1792, 5120, 1),
    (32768, 1280, 1),
    (36864, 1280, 1),
    (8192, 4096, 8),
    (5120, 8192, 1),
    (4608, 5120, 1),
    (5120, 2304, 1),
    (25600, 6144, 1),
    (5120, 15360, 1),
]
RELEASED_BF16 = [
    (384, 5120),
    (1056, 5120),
    (544, 5120),
    (32, 5120),
    (128, 512),
    (129280, 5120),
    (129280, 256),
    (1, 5376),
]


def _fp8(out: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every finite e4m3 byte, subnormals and both zeros among them, and scales over a wide range."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (out, size), generator=generator, dtype=torch.uint8)
    data = torch.where((data & 0x7F) == 0x7F, data ^ 1, data)
    scale = torch.randint(100, 132, (-(-out // 32), -(-size // 32)), generator=generator, dtype=torch.uint8)
    return data, scale


def _on_device(weight: LinearWeight) -> LinearWeight:
    scale = weight.scale if weight.scale is None else weight.scale.to(DEVICE)
    return LinearWeight(weight.data.to(DEVICE), weight.quantised, scale, weight.groups)


def _pair_fp8(out: int, size: int, seed: int, groups: int = 1) -> tuple[LinearWeight, LinearWeight]:
    data, scale = _fp8(out, size, seed)
    stored = LinearWeight.from_fp8(data, scale, groups=groups, keep_bytes=True)
    return LinearWeight.from_fp8(data, scale, groups=groups), _on_device(stored)


def _assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    for row, reference in zip(got, want, strict=True):
        assert relative_error(row, reference) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("out", "size", "groups"), [(160, 96, 1), (192, 64, 3), *seldom((512, 1184, 1))])
def test_fp8_linear_is_near_the_host(out: int, size: int, groups: int, backend: str) -> None:
    host, device = _pair_fp8(out, size, 1, groups)
    for rows in (1, 7, 21):
        x = values(rows, groups * size, seed=rows)
        want = linear(x, host, precision=SERVED)
        got = linear(x.bfloat16().to(DEVICE), device, precision=SERVED_BF16, backend=backend)
        assert got.dtype == torch.bfloat16
        _assert_near(got, want, 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("out", "size"), [(1, 672), (37, 45), (160, 1056)])
def test_bf16_linear_is_near_the_host(out: int, size: int, backend: str) -> None:
    weight = normal(out, size, seed=3).bfloat16()
    device = _on_device(LinearWeight.from_bf16(weight, keep_bytes=True))
    x = values(21, size, seed=4)
    kinds: tuple[tuple[Literal["bf16", "f32"], torch.dtype, float], ...] = (
        ("bf16", torch.bfloat16, 1e-2),
        ("f32", torch.float32, 1e-4),
    )
    for kind, dtype, tolerance in kinds:
        want = linear(x, LinearWeight.from_bf16(weight), out=kind, precision=SERVED)
        got = linear(x.bfloat16().to(DEVICE), device, out=kind, precision=SERVED_BF16, backend=backend)
        assert got.dtype == dtype
        assert relative_error(got, want) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_weight_byte_has_its_exact_value_on_the_device(backend: str) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    data = torch.where((data & 0x7F) == 0x7F, data ^ 1, data)
    for scale_byte in (40, 120, 127, 134):
        scale = torch.full((1, 8), scale_byte, dtype=torch.uint8)
        device = _on_device(LinearWeight.from_fp8(data, scale, keep_bytes=True))
        unit = torch.eye(256, dtype=torch.bfloat16, device=DEVICE)
        got = linear(unit, device, out="f32", cast=False, precision=SERVED_BF16, backend=backend)
        assert_equal_bits(got.cpu() + 0.0, dequantise_fp8_weight(data, scale).t() + 0.0)


def test_a_scale_that_bytes_cannot_carry_is_refused() -> None:
    data, scale = torch.zeros(32, 32, dtype=torch.uint8), torch.full((1, 1), 135, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2\\^7 at most"):
        LinearWeight.from_fp8(data, scale, keep_bytes=True)
    LinearWeight.from_fp8(data, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_an_empty_result_on_the_device(backend: str) -> None:
    _, device = _pair_fp8(64, 64, 1)
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert linear(x, device, precision=SERVED_BF16, backend=backend).shape == (0, 64)
    assert linear(x, device, out="f32", precision=SERVED_BF16, backend=backend).dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_column_slice_is_an_input_without_a_copy(backend: str) -> None:
    _, device = _pair_fp8(96, 128, 2)
    wide = values(9, 320, seed=5).bfloat16().to(DEVICE)
    for cast in (True, False):
        got = linear(wide[:, 64:192], device, cast=cast, precision=SERVED_BF16, backend=backend)
        same = linear(wide[:, 64:192].contiguous(), device, cast=cast, precision=SERVED_BF16, backend=backend)
        assert_equal_bits(got, same)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bf16", *seldom("f32")])
def test_device_rows_do_not_depend_on_their_batch(kind: Literal["bf16", "f32"], backend: str) -> None:
    _, device = _pair_fp8(128, 1216, 7)
    assert segment_count(128, 1216) > 1
    x = values(18, 1216, seed=8).bfloat16().to(DEVICE)
    assert_rows_independent(
        lambda rows: linear(x[rows], device, out=kind, precision=SERVED_BF16, backend=backend), 18, sizes=(1, 5)
    )


def test_a_few_rows_fill_the_chip_in_one_round() -> None:
    assert [segment_count(columns, depth) for columns, depth, _ in RELEASED] == [8, 1, 1, 2, 2, 2, 2, 1, 2]
    for columns, depth in [shape[:2] for shape in RELEASED] + RELEASED_BF16:
        count = segment_count(columns, depth)
        assert count == 1 or (count * -(-columns // 128) <= 132 and depth // count >= 512)


def _sweep(weight: LinearWeight, x: Tensor, kind: Literal["bf16", "f32"], backend: str) -> None:
    """Every row of every batch must have the bits that it has in the largest batch."""

    def run(rows: Tensor) -> Tensor:
        return linear(rows, weight, out=kind, cast=False, precision=SERVED_BF16, backend=backend)

    whole = run(x)
    assert bool(torch.isfinite(whole).all())
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1)).to(x.device)
    assert torch.equal(run(x[order]), whole[order])
    for size in (1, 2, 3, 4, 5, 6, 8, 16, 17, 48, 64, 65, 96, 128, 129, 192, 256, 257, 360, 1000, 1536, 4096):
        for first in (0, 1, 511, x.shape[0] - size):
            if 0 <= first <= x.shape[0] - size:
                assert torch.equal(run(x[first : first + size]), whole[first : first + size]), (size, first)
    for position in range(6):
        shifted = torch.cat((x[100 : 100 + position], x[7:8], x[200:205]))
        assert torch.equal(run(shifted)[position], whole[7])


@needs_device
@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("columns", "depth", "groups"), RELEASED)
def test_released_fp8_rows_have_the_same_bits_in_every_batch(
    columns: int, depth: int, groups: int, backend: str
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(columns)
    data = torch.randn(columns, depth, device=DEVICE, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-columns // 32), -(-depth // 32))
    scale = torch.randint(112, 122, blocks, device=DEVICE, generator=generator, dtype=torch.uint8)
    weight = LinearWeight.from_fp8(data, scale, groups=groups, keep_bytes=True)
    x = torch.randn(8192, groups * depth, device=DEVICE, generator=generator).bfloat16()
    _sweep(weight, x, "bf16", backend)
    values = dequantise_fp8_weight(data.view(torch.uint8), scale).view(groups, -1, depth)
    want = torch.einsum("rgk,gnk->rgn", x[:64].double().view(64, groups, depth), values.double()).flatten(1)
    _assert_near(linear(x[:64], weight, out="f32", cast=False, precision=SERVED_BF16, backend=backend), want, 1e-5)


@needs_device
@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("columns", "depth"), RELEASED_BF16)
def test_released_bf16_rows_have_the_same_bits_in_every_batch(columns: int, depth: int, backend: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(columns)
    weight = LinearWeight.from_bf16(torch.randn(columns, depth, device=DEVICE, generator=generator), keep_bytes=True)
    x = torch.randn(1536 if columns > 4096 else 8192, depth, device=DEVICE, generator=generator).bfloat16()
    _sweep(weight, x, "f32", backend)
    want = x[:32].double() @ weight.data.double().t()
    _assert_near(linear(x[:32], weight, out="f32", precision=SERVED_BF16, backend=backend), want, 1e-5)


@needs_device
@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize(("columns", "depth", "groups"), [(1792, 5120, 1), (8192, 4096, 8), (5120, 8192, 1)])
def test_no_tile_changes_a_bit(columns: int, depth: int, groups: int) -> None:
    from shoal_kernels.ops.linear.tilelang import run
    from shoal_kernels.ops.linear.tiles import plan

    generator = torch.Generator(DEVICE).manual_seed(columns)
    data = torch.randn(columns, depth, device=DEVICE, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.full((columns // 32, depth // 32), 117, device=DEVICE, dtype=torch.uint8)
    weight = LinearWeight.from_fp8(data, scale, groups=groups, keep_bytes=True)
    x = torch.randn(400, groups * depth, device=DEVICE, generator=generator).bfloat16()
    want = linear(x, weight, cast=False, precision=SERVED_BF16, backend="triton")
    for split, tiles in ((1, (16, 48, 128, 192, 256)), (segment_count(columns, depth), (16, 48, 96))):
        for tile in tiles:
            assert torch.equal(run(plan(tile, split, True), x, weight, torch.bfloat16), want), (tile, split)
