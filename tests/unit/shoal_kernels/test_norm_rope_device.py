"""Norms and rotation on a device, alone and with the casts that follow, against the host."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.cast import cast_q4ue, cast_q8
from shoal_kernels.ops.norm_rope import (
    RopeTable,
    latents,
    plain_rope_table,
    rms_norm,
    rms_norm_cast,
    rms_norm_rope,
    rope,
    rope_cast,
    window_rows,
)
from shoal_kernels.row_formats import window_format
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, needs_device, relative_error
from torch import Tensor
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import assert_same_bits, normal, values

EPS = 1e-20
SIZES = [(0, 64), (1, 96), (7, 64), (5, 80)]
RELEASED = [(1536, 1280), (360, 512), (48, 5120), (515, 128)]


def _table(dims: int = 16) -> RopeTable:
    table = plain_rope_table(dims, 10000.0, 1 << 20)
    table.cover(1 << 17, DEVICE)
    return table


def _slice(rows: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same rows as a column slice on the device, and on the host in float32."""
    wide = values(rows, size + 48, seed=seed)
    return wide.bfloat16().to(DEVICE)[:, 32 : 32 + size], wide[:, 32 : 32 + size]


def _positions(rows: int) -> Tensor:
    return (torch.arange(rows) * 997) % (1 << 17)


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_norms_are_near_the_host(rows: int, size: int) -> None:
    _compare_norms(rows, size, _table(), 2e-3)


@needs_device
@pytest.mark.parametrize(("rows", "size"), RELEASED)
def test_norms_of_released_sizes_are_near_the_host(rows: int, size: int) -> None:
    _compare_norms(rows, size, _table(64), 2e-3)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 32), (7, 48), (5, 3, 64), (2, 5, 16)])
def test_rotation_has_the_bits_of_the_host(shape: tuple[int, ...], inverse: bool) -> None:
    _compare_rope(shape, _table(), inverse)


@needs_device
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(360, 64, 512), (1537, 32, 128), (48, 512)])
def test_rotation_of_released_sizes_has_the_bits_of_the_host(shape: tuple[int, ...], inverse: bool) -> None:
    _compare_rope(shape, _table(64), inverse)


@pytest.mark.parametrize("shape", [(0, 2, 32), (5, 3, 64), (3, 4, 32)])
def test_cast_rotation_has_the_bits_of_the_host(shape: tuple[int, ...]) -> None:
    x = values(*shape, seed=5)
    got = rope_cast(x.bfloat16().to(DEVICE), _positions(shape[0]).to(DEVICE), _table(), precision=SERVED_BF16)
    assert_equal_bits(got, rope_cast(x, _positions(shape[0]), _table(), precision=SERVED).bfloat16())


def test_rows_do_not_depend_on_their_batch() -> None:
    x, weight = values(ROWS, 96, seed=1).bfloat16().to(DEVICE), normal(96, seed=2).to(DEVICE)
    positions, table, p = _positions(ROWS).to(DEVICE), _table(), SERVED_BF16

    def everything(rows: Tensor) -> tuple[Tensor, ...]:
        given, at = x[rows], positions[rows]
        return (
            rms_norm(given, weight, EPS, precision=p),
            rms_norm_cast(given, weight, EPS, precision=p),
            rms_norm_rope(given, weight, EPS, at, table, precision=p),
            window_rows(given, weight, EPS, at, table, precision=p),
            rope_cast(given.view(-1, 3, 32), at, table, precision=p),
            *latents(given, weight[:64], weight[:32], EPS, at, table, precision=p),
        )

    assert_rows_independent(everything, ROWS, sizes=SIZES_ALONE)


def test_window_rows_go_where_they_are_wanted() -> None:
    x, weight, positions = values(5, 64, seed=1), normal(64, seed=2), _positions(5)
    for device, precision, units in ((DEVICE, SERVED_BF16, 66), ("cpu", SERVED, 64)):
        given = x.to(precision.dtype).to(device), weight.to(device), EPS, positions.to(device), _table()
        want = window_rows(*given, precision=precision)
        ring = torch.zeros(9, units, dtype=want.dtype, device=device)
        out = window_rows(*given, precision=precision, out=ring[3:8])
        assert out.data_ptr() == ring[3:8].data_ptr()
        assert_equal_bits(ring[3:8], want)
        assert not ring[:3].any()
        assert not ring[8:].any()


def test_window_rows_of_the_wrong_form_are_refused() -> None:
    x, weight, positions = values(2, 64, seed=1), normal(64, seed=2), _positions(2)
    with pytest.raises(ValueError, match="out must be"):
        window_rows(x, weight, EPS, positions, _table(), precision=SERVED, out=torch.empty(2, 66))


def test_rotation_in_place_gives_up_its_input_on_a_device_only() -> None:
    x, positions = values(3, 2, 32, seed=1), _positions(3)
    given = x.bfloat16().to(DEVICE)
    got = rope(given, positions.to(DEVICE), _table(), in_place=True, precision=SERVED_BF16)
    assert got.data_ptr() == given.data_ptr()
    kept = x.clone()
    want = rope(x, positions, _table(), in_place=True, precision=SERVED)
    assert_equal_bits(got, want.bfloat16())
    assert_same_bits(x, kept)


def test_what_is_fused_has_the_bits_of_its_parts_on_the_host() -> None:
    x, weight, positions, table = values(7, 64, seed=1), normal(64, seed=2), _positions(7), _table()
    normed = rms_norm(x, weight, EPS, precision=SERVED)
    record = window_format(64, SERVED)
    assert_same_bits(rms_norm_cast(x, weight, EPS, precision=SERVED), cast_q8(normed, precision=SERVED))
    rotated = rope(normed, positions, table, precision=SERVED)
    got = window_rows(x, weight, EPS, positions, table, precision=SERVED)
    assert_same_bits(got, record.decode(record.encode(rotated)))
    heads = x.view(7, 2, 32)
    want = cast_q4ue(rope(heads, positions, table, precision=SERVED), precision=SERVED)
    assert_same_bits(rope_cast(heads, positions, table, precision=SERVED), want)


@pytest.mark.parametrize(("rows", "query", "window"), [(0, 32, 64), (5, 96, 64)])
def test_latents_are_the_norm_and_the_window_rows(rows: int, query: int, window: int) -> None:
    _compare_latents(rows, query, window, _table())


@needs_device
@pytest.mark.parametrize("rows", [6, 1536])
def test_latents_of_released_size_are_the_norm_and_the_window_rows(rows: int) -> None:
    _compare_latents(rows, 1280, 512, _table(64))


@needs_device
def test_device_positions_need_a_covered_table() -> None:
    with pytest.raises(RuntimeError, match="call RopeTable"):
        plain_rope_table(16, 10000.0, 64).cos_sin(torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.float32)


def test_a_position_that_cannot_be_covered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"highest must be in \[0, 64\), got 64"):
        plain_rope_table(16, 10000.0, 64).cover(64, DEVICE)


def _compare_norms(rows: int, size: int, table: RopeTable, tolerance: float) -> None:
    (x, host), weight, positions = _slice(rows, size, rows), normal(size, seed=2), _positions(rows)
    gain, at = weight.to(DEVICE), positions.to(DEVICE)
    pairs = [
        (rms_norm(x, gain, EPS, precision=SERVED_BF16), rms_norm(host, weight, EPS, precision=SERVED)),
        (
            rms_norm_rope(x, gain, EPS, at, table, precision=SERVED_BF16),
            rms_norm_rope(host, weight, EPS, positions, table, precision=SERVED),
        ),
    ]
    if size % 32 == 0:
        records = window_rows(x, gain, EPS, at, table, precision=SERVED_BF16)
        pairs += [
            (rms_norm_cast(x, gain, EPS, precision=SERVED_BF16), rms_norm_cast(host, weight, EPS, precision=SERVED)),
            (
                window_format(size, SERVED).decode(records.cpu()),
                window_rows(host, weight, EPS, positions, table, precision=SERVED),
            ),
        ]
    for got, want in pairs:
        assert got.shape == want.shape
        assert relative_error(got, want) < tolerance


def _compare_rope(shape: tuple[int, ...], table: RopeTable, inverse: bool) -> None:
    x, positions = values(*shape, seed=4), _positions(shape[0])
    wide = torch.zeros(shape[0], x[:1].numel() + 16, dtype=torch.bfloat16, device=DEVICE)
    given = wide[:, : x[:1].numel()].view(shape)
    given.copy_(x)
    want = rope(x, positions, table, inverse=inverse, precision=SERVED).bfloat16()
    for in_place in (False, True):
        got = rope(given, positions.to(DEVICE), table, inverse=inverse, in_place=in_place, precision=SERVED_BF16)
        assert_equal_bits(got, want)


def _compare_latents(rows: int, query: int, window: int, table: RopeTable) -> None:
    both, gains = values(rows, query + window, seed=rows), (normal(query, seed=2), normal(window, seed=3))
    positions = _positions(rows)
    want = latents(both, *gains, EPS, positions, table, precision=SERVED)
    alone = rms_norm_cast(both[:, :query], gains[0], EPS, precision=SERVED)
    assert_same_bits(want, (alone, window_rows(both[:, query:], gains[1], EPS, positions, table, precision=SERVED)))
    ring = torch.zeros(rows + 3, window + window // 32, dtype=torch.uint8, device=DEVICE)
    query_gain, window_gain = (gain.to(DEVICE) for gain in gains)
    given = both.bfloat16().to(DEVICE), query_gain, window_gain, EPS, positions.to(DEVICE), table
    latent, records = latents(*given, precision=SERVED_BF16, out=ring[3:])
    assert records.data_ptr() == ring[3:].data_ptr()
    assert not ring[:3].any()
    assert relative_error(latent, want[0]) < 2e-3
    assert relative_error(window_format(window, SERVED).decode(ring[3:].cpu()), want[1]) < 2e-3
