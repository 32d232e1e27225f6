"""linear and the activation casts: compiled bits equal the reference's; rows are independent."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import EXACT, KV, SERVED
from shoal_kernels.formats import dequantise_fp8_weight
from shoal_kernels.ops.cast import cast_q4ue, cast_q8
from shoal_kernels.ops.linear import LinearWeight, linear
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


def _fp8(out: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    data = normal(out, size, seed=seed).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = (-(-out // 32), -(-size // 32))
    return data, torch.randint(118, 126, blocks, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize(("size", "out"), [(32, 1), (64, 24), (160, 70), (256, 513)])
def test_fp8_linear_has_the_bits_of_the_reference(rows: int, size: int, out: int) -> None:
    weight, x = LinearWeight.from_fp8(*_fp8(out, size, 1)), values(rows, size, seed=rows)
    want = linear(x, weight, precision=SERVED, backend="reference")
    assert_same_bits(linear(x, weight, precision=SERVED, backend="cpu"), want)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("out_kind", ["bf16", "f32"])
def test_bf16_linear_has_the_bits_of_the_reference(rows: int, out_kind: str) -> None:
    weight, x = LinearWeight.from_bf16(normal(37, 45, seed=3).bfloat16()), values(rows, 45, seed=rows)
    kind = "f32" if out_kind == "f32" else "bf16"
    want = linear(x, weight, out=kind, precision=SERVED, backend="reference")  # type: ignore[arg-type]
    assert_same_bits(linear(x, weight, out=kind, precision=SERVED, backend="cpu"), want)  # type: ignore[arg-type]


def test_grouped_linear_is_the_block_diagonal_one() -> None:
    data, scale = _fp8(3 * 32, 64, 5)
    grouped, x = LinearWeight.from_fp8(data, scale, groups=3), values(6, 3 * 64, seed=6)
    got = linear(x, grouped, precision=SERVED, backend="cpu")
    assert_same_bits(got, linear(x, grouped, precision=SERVED, backend="reference"))
    for group in range(3):
        part = LinearWeight.from_fp8(data[group * 32 : group * 32 + 32], scale[group : group + 1])
        alone = linear(x[:, group * 64 : group * 64 + 64].contiguous(), part, precision=SERVED)
        assert_same_bits(got[:, group * 32 : group * 32 + 32], alone)


def test_rows_do_not_depend_on_their_batch() -> None:
    weight, x = LinearWeight.from_fp8(*_fp8(70, 96, 7)), values(70, 96, seed=8)
    assert_rows_independent(lambda rows: linear(x[rows], weight, precision=SERVED), 70)


def test_concatenated_weights_give_the_outputs_side_by_side() -> None:
    first, second = LinearWeight.from_fp8(*_fp8(32, 64, 1)), LinearWeight.from_fp8(*_fp8(64, 64, 2))
    x = values(5, 64, seed=9)
    both = linear(x, LinearWeight.concat([first, second]), precision=SERVED)
    assert_same_bits(both, torch.cat([linear(x, part, precision=SERVED) for part in (first, second)], dim=1))


def test_a_cast_input_may_come_from_the_caller() -> None:
    weight, x = LinearWeight.from_fp8(*_fp8(32, 64, 1)), values(9, 64, seed=9)
    cast = cast_q8(x, precision=SERVED)
    assert_same_bits(linear(cast, weight, cast=False, precision=SERVED), linear(x, weight, precision=SERVED))


def test_exact_precision_is_the_float64_product() -> None:
    data, scale = _fp8(40, 64, 4)
    x = values(5, 64, seed=1).double()
    want = x @ dequantise_fp8_weight(data, scale).double().t()
    torch.testing.assert_close(linear(x, LinearWeight.from_fp8(data, scale), precision=EXACT), want)
    near = linear(x.float(), LinearWeight.from_fp8(data, scale), precision=KV)
    torch.testing.assert_close(near.double(), want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_casts_have_the_bits_of_the_reference(rows: int) -> None:
    for scale in (1.0, 1e-3, 1e-8, 1e5, 1e20, 1e-38):
        x = values(rows, 96, seed=rows, bf16=False) * scale
        for cast in (cast_q8, cast_q4ue):
            got, want = (cast(x, precision=SERVED, backend=name) for name in ("cpu", "reference"))
            assert_same_bits(got, want)


def test_a_wrong_input_is_refused() -> None:
    weight = LinearWeight.from_fp8(*_fp8(32, 64, 1))
    with pytest.raises(ValueError, match=r"x must be torch\.float32 \[\*, 64\], got torch\.float32 \[2, 65\]"):
        linear(torch.zeros(2, 65), weight, precision=SERVED)
    with pytest.raises(ValueError, match=r"x must be torch\.float32"):
        linear(torch.zeros(2, 64, dtype=torch.float64), weight, precision=SERVED)
    with pytest.raises(ValueError, match="one kind of storage"):
        LinearWeight.concat([weight, LinearWeight.from_bf16(torch.zeros(4, 64))])
