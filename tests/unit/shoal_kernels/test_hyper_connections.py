"""mix, collapse, expand: compiled bits equal the reference's; rows are independent."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import KV, SERVED
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.ops.hyper_connections import (
    MixWeight,
    collapse,
    collapse_norm,
    collapse_norm_cast,
    expand,
    expand_norm,
    mix,
)
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


def _weight(n: int, d: int) -> MixWeight:
    m = (2 + n) * n
    return MixWeight.prepare(normal(m, n * d, seed=1, scale=0.3), normal(3, seed=2), normal(m, seed=3))


def _mix(streams: torch.Tensor, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = _weight(streams.shape[1], streams.shape[2])
    return mix(streams, weight, iterations=20, eps=1e-6, rms_eps=1e-20, precision=SERVED, backend=backend)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize(("n", "d"), [(4, 32), (4, 33), (3, 20), (2, 8)])
def test_mix_has_the_bits_of_the_reference(rows: int, n: int, d: int) -> None:
    streams = values(rows, n, d, seed=rows)
    assert_same_bits(_mix(streams, "cpu"), _mix(streams, "reference"))


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_collapse_and_expand_have_the_bits_of_the_reference(rows: int) -> None:
    streams, y = values(rows, 4, 48, seed=rows), values(rows, 48, seed=rows + 1)
    pre, post, comb = normal(rows, 4, seed=1), normal(rows, 4, seed=2), normal(rows, 4, 4, seed=3)
    weight = normal(48, seed=4)
    for name in ("cpu",):
        assert_same_bits(
            collapse(streams, pre, precision=SERVED, backend=name),
            collapse(streams, pre, precision=SERVED, backend="reference"),
        )
        assert_same_bits(
            collapse_norm(streams, pre, weight, 1e-20, precision=SERVED, backend=name),
            collapse_norm(streams, pre, weight, 1e-20, precision=SERVED, backend="reference"),
        )
        assert_same_bits(
            expand(y, streams, post, comb, precision=SERVED, backend=name),
            expand(y, streams, post, comb, precision=SERVED, backend="reference"),
        )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_fused_step_has_the_bits_of_the_single_ones(backend: str) -> None:
    streams, y, pre, post, comb = (values(7, *shape, seed=1) for shape in ((4, 64), (64,), (4,), (4,), (4, 4)))
    weight = normal(64, seed=4)
    after = expand(y, streams, post, comb, precision=SERVED)
    normed = collapse_norm(after, pre, weight, 1e-20, precision=SERVED)
    q8 = cast_q8(normed, precision=SERVED)

    def fused(cast: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return expand_norm(y, streams, post, comb, pre, weight, 1e-20, cast=cast, precision=SERVED, backend=backend)

    first, second, third = fused(True)
    assert third is not None
    assert_same_bits((first, second, third), (after, normed, q8))
    assert fused(False)[2] is None
    assert_same_bits(collapse_norm_cast(after, pre, weight, 1e-20, precision=SERVED, backend=backend), (normed, q8))


def test_without_activation_casts_the_cast_row_is_the_normed_one() -> None:
    normed, q8 = collapse_norm_cast(normal(3, 4, 8, seed=1), normal(3, 4, seed=2), torch.ones(8), 1e-20, precision=KV)
    assert q8 is normed


def test_a_one_hot_collapse_is_that_stream() -> None:
    streams = values(6, 4, 32, seed=1)
    pre = torch.zeros(6, 4)
    pre[:, 0] = 1.0
    assert torch.equal(collapse(streams, pre, precision=SERVED), streams[:, 0])


def test_comb_is_doubly_stochastic() -> None:
    _, _, comb = _mix(normal(9, 4, 32, seed=5))
    torch.testing.assert_close(comb.sum(1), torch.ones(9, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(9, 4), rtol=0, atol=1e-2)


def test_rows_do_not_depend_on_their_batch() -> None:
    streams, y = values(70, 4, 32, seed=1), values(70, 32, seed=2)

    def both(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pre, post, comb = _mix(streams[rows])
        x = collapse_norm(streams[rows], pre, torch.ones(32), 1e-20, precision=SERVED)
        return pre, post, comb, x, expand(y[rows], streams[rows], post, comb, precision=SERVED)

    assert_rows_independent(both, 70)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fn must be torch\.float32 \[128, 24\]"):
        mix(torch.zeros(1, 4, 32), _weight(4, 33), iterations=1, eps=1e-6, rms_eps=1e-20, precision=SERVED)
    with pytest.raises(ValueError, match="iterations must be positive"):
        mix(torch.zeros(1, 4, 32), _weight(4, 32), iterations=0, eps=1e-6, rms_eps=1e-20, precision=SERVED)
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        collapse_norm_cast(torch.zeros(1, 4, 33), torch.zeros(1, 4), torch.zeros(33), 1e-20, precision=SERVED)
