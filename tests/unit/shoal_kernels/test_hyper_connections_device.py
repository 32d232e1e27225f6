"""Hyper-connections on an accelerator, or in Triton's interpreter, against the compiled host operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops import cast as casts
from shoal_kernels.ops.hyper_connections import (
    MixWeight,
    collapse,
    collapse_norm,
    collapse_norm_cast,
    expand,
    expand_norm,
    mix,
)
from support.on_device import DEVICE, HAS_DEVICE, assert_equal_bits, assert_rows_independent, needs_device
from support.seldom import seldom
from torch import Tensor
from unit.shoal_kernels.parity import normal, values

N = 4
# D: less than a step of K, not a power of two, tiny and nano; on a device each size costs compilations
SIZES = (96, 256) if HAS_DEVICE else (32, 96, 128, 256)
RELEASED = 5120
ITERATIONS = 20 if HAS_DEVICE else 4
ON_DEVICE: dict[str, Any] = {"precision": SERVED_BF16, "backend": "triton"}
ON_HOST: dict[str, Any] = {"precision": SERVED}


def _streams(rows: int, d: int, seed: int) -> Tensor:
    return values(rows, N, d, seed=seed).to(torch.bfloat16)


def _mix(streams: Tensor, weight: MixWeight, *, on_device: bool) -> tuple[Tensor, Tensor, Tensor]:
    return mix(
        streams,
        weight,
        iterations=ITERATIONS,
        eps=1e-6,
        rms_eps=1e-20,
        **(ON_DEVICE if on_device else ON_HOST),
    )


def _fused(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, weight: Tensor, **where: Any
) -> tuple[Tensor, Tensor, Tensor]:
    after, normed, q8 = expand_norm(y, streams, post, comb, pre, weight, 1e-20, cast=True, **where)
    assert q8 is not None
    return after, normed, q8


def _stored(d: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(24, N * d, seed=1, scale=(N * d) ** -0.5), normal(3, seed=2), normal(24, seed=3)


def _weight(d: int) -> MixWeight:
    return MixWeight.prepare(*(t.to(DEVICE) for t in _stored(d)), keep_bytes=True)


def _assert_near(got: Tensor, want: Tensor, *, bf16_steps: float = 1.0, share: float = 0.01) -> None:
    """bfloat16 rows equal but for a few values that rounded to the neighbour."""
    left, right = got.float().cpu(), want.float().cpu()
    assert left.shape == right.shape
    assert torch.isfinite(left).all()
    assert ((left - right).abs() <= bf16_steps * 2.0**-7 * right.abs() + 1e-30).all()
    assert int((left != right).sum()) <= share * left.numel()


def _inputs(rows: int, d: int, seed: int = 0) -> tuple[Tensor, ...]:
    streams, y = _streams(rows, d, seed), values(rows, d, seed=seed + 1).to(torch.bfloat16)
    pre, post, comb = _mix(streams.float(), MixWeight.prepare(*_stored(d)), on_device=False)
    return tuple(t.to(DEVICE) for t in (y, streams, post, comb, pre, normal(d, seed=7)))


def test_the_parts_of_a_weight_add_up_to_it() -> None:
    stored, _, _ = _stored(64)
    torch.testing.assert_close(_weight(64).fn.float().sum(1).cpu(), stored, rtol=2.0**-17, atol=0.0)


def _check_mix(rows: int, d: int) -> None:
    streams = _streams(rows, d, seed=rows)
    got = _mix(streams.to(DEVICE), _weight(d), on_device=True)
    want = _mix(streams.float(), MixWeight.prepare(*_stored(d)), on_device=False)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", SIZES)
def test_mix_is_near_the_host(d: int) -> None:
    for rows in (0, 1, 5):
        _check_mix(rows, d)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("rows", [1, 65, 360])
def test_mix_of_released_size_is_near_the_host(rows: int) -> None:
    _check_mix(rows, RELEASED)


def _check_rows(rows: int, d: int) -> None:
    device = _inputs(rows, d, seed=rows)
    y, streams, post, comb, pre, weight = device
    host_y, host_streams, host_post, host_comb, host_pre, host_weight = host = [t.float().cpu() for t in device]
    after = expand(y, streams, post, comb, **ON_DEVICE)
    assert_equal_bits(after.float(), expand(host_y, host_streams, host_post, host_comb, **ON_HOST))
    assert_equal_bits(collapse(streams, pre, **ON_DEVICE).float(), collapse(host_streams, host_pre, **ON_HOST))
    normed = collapse_norm(streams, pre, weight, 1e-20, **ON_DEVICE)
    _assert_near(normed, collapse_norm(host_streams, host_pre, host_weight, 1e-20, **ON_HOST))
    again, q8 = collapse_norm_cast(streams, pre, weight, 1e-20, **ON_DEVICE)
    assert_equal_bits(again, normed)
    assert torch.equal(q8.float().cpu(), casts.cast_q8(normed.float().cpu(), **ON_HOST))
    fused = _fused(*device, **ON_DEVICE)
    assert_equal_bits(fused, (after, *collapse_norm_cast(after, pre, weight, 1e-20, **ON_DEVICE)))
    without = expand_norm(y, streams, post, comb, pre, weight, 1e-20, cast=False, **ON_DEVICE)
    assert without[2] is None
    assert_equal_bits(without[:2], fused[:2])
    _assert_near(fused[1], _fused(*host, **ON_HOST)[1])


@pytest.mark.parametrize("d", [SIZES[1], *seldom(SIZES[0], *SIZES[2:])])
def test_rows_are_those_of_the_host(d: int) -> None:
    for rows in (0, 1, 6):
        _check_rows(rows, d)


@pytest.mark.gpu
@needs_device
def test_rows_of_released_size_are_those_of_the_host() -> None:
    for rows in (1, 48):
        _check_rows(rows, RELEASED)


def test_huge_and_tiny_rows_stay_finite() -> None:
    for scale in (1e16, 1e-18, 0.0):
        streams = (normal(3, N, 64, seed=4) * scale).to(torch.bfloat16).to(DEVICE)
        pre, post, comb = _mix(streams, _weight(64), on_device=True)
        weight = torch.ones(64, device=DEVICE)
        outputs = _fused(streams[:, 0].contiguous(), streams, post, comb, pre, weight, **ON_DEVICE)
        for tensor in (pre, post, comb, *outputs):
            assert torch.isfinite(tensor).all()


def _chain(streams: Tensor, y: Tensor, weight: MixWeight, norm: Tensor) -> tuple[Tensor, ...]:
    pre, post, comb = _mix(streams, weight, on_device=True)
    return pre, post, comb, *_fused(y, streams, post, comb, pre, norm, **ON_DEVICE)


def _check_independence(rows: int, d: int, sizes: tuple[int, ...]) -> None:
    y, streams, weight, norm = *_inputs(rows, d)[:2], _weight(d), normal(d, seed=7).to(DEVICE)
    assert_rows_independent(lambda chosen: _chain(streams[chosen], y[chosen], weight, norm), rows, sizes=sizes)


def test_rows_do_not_depend_on_their_batch() -> None:
    _check_independence(8, 96, (3,))


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("d", [256, RELEASED])
def test_rows_do_not_depend_on_their_batch_on_the_device(d: int) -> None:
    _check_independence(390, d, (1, 2, 3, 4, 5, 6, 48, 64, 65, 360))


@pytest.mark.gpu
@needs_device
def test_mix_gives_the_same_bits_every_time() -> None:
    streams, weight = _streams(600, RELEASED, seed=3).to(DEVICE), _weight(RELEASED)
    first = _mix(streams, weight, on_device=True)
    for _ in range(50):
        assert_equal_bits(_mix(streams, weight, on_device=True), first)


def test_a_weight_of_the_other_form_is_refused() -> None:
    with pytest.raises(ValueError, match="not prepared for precision served_bf16"):
        _mix(_streams(1, 32, seed=1).to(DEVICE), MixWeight.prepare(*_stored(32)), on_device=True)
