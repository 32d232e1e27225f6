"""Single-pass manifold hyper-connections: N residual streams, mixed per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_rows, check_values, check_wide
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


@dataclass(frozen=True, slots=True)
class MixWeight:
    """Weights of one `mix`, prepared from the stored tensors with `prepare`.

    fn     float32 [N*D, (2+N)*N], transposed from the stored [(2+N)*N, N*D]
    scale  float32 [3]: of pre, post, comb
    base   float32 [(2+N)*N]
    """

    fn: Tensor
    scale: Tensor
    base: Tensor

    @staticmethod
    def prepare(fn: Tensor, scale: Tensor, base: Tensor) -> MixWeight:
        """fn [(2+N)*N, N*D], scale [3], base [(2+N)*N], all float32 as stored."""
        check_rows("scale", scale, 3, dtype=torch.float32)
        check_rows("base", base, fn.shape[0], dtype=torch.float32)
        check_rows("fn", fn, None, None, dtype=torch.float32)
        return MixWeight(fn.t().contiguous(), scale.contiguous(), base.contiguous())


def mix(
    streams: Tensor,
    weight: MixWeight,
    *,
    iterations: int,
    eps: float,
    rms_eps: float,
    precision: Precision,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of a row: how to read (pre), write (post) and carry (comb) its streams.

    streams     [R, N, D] in the precision's dtype
    iterations  Sinkhorn iterations, at least 1
    returns     pre [R, N], post [R, N], comb [R, N, N] (row = source stream, column = destination), in the wide dtype
    raises      ValueError for shape or dtype
    exact       all implementations agree bit for bit
    source      specification of the model, section 5.1
    """
    n, d = streams.shape[1], streams.shape[2]
    check_values("streams", streams, None, n, d, precision=precision)
    check_rows("fn", weight.fn, n * d, (2 + n) * n, dtype=torch.float32)
    if iterations < 1:
        raise ValueError(f"iterations must be positive, got {iterations}")
    pre, post, comb = resolve("mix", streams.device.type, precision, backend)(streams, weight, iterations, eps, rms_eps)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """bf16(sum over n ascending of pre[n] * streams[n]).

    streams [R, N, D], pre [R, N] wide -> [R, D]. Exact. Source: section 5.1.
    """
    _check_streams(streams, pre, precision)
    result: Tensor = resolve("collapse", streams.device.type, precision, backend)(streams, pre, precision)
    return result


def collapse_norm(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, precision: Precision, backend: str | None = None
) -> Tensor:
    """rms_norm(collapse(streams, pre), weight, eps) in one pass: the input of a sub-layer.

    streams [R, N, D], pre [R, N], weight float32 [D] -> [R, D]. Exact: the bits of the two operations one by one.
    """
    _check_streams(streams, pre, precision)
    check_rows("weight", weight, streams.shape[2], dtype=torch.float32)
    result: Tensor = resolve("collapse_norm", streams.device.type, precision, backend)(
        streams, pre, weight, eps, precision
    )
    return result


def expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, precision: Precision, backend: str | None = None
) -> Tensor:
    """Destination stream k = bf16(post[k] * y + sum over j ascending of comb[j, k] * streams[j]).

    y [R, D], streams [R, N, D], post [R, N], comb [R, N, N], coefficients wide -> [R, N, D], a new tensor.
    Exact. Source: section 5.1.
    """
    _check_streams(streams, post, precision)
    rows, n, d = streams.shape
    check_values("y", y, rows, d, precision=precision)
    check_wide("comb", comb, rows, n, n, precision=precision)
    result: Tensor = resolve("expand", streams.device.type, precision, backend)(y, streams, post, comb, precision)
    return result


def _check_streams(streams: Tensor, coefficients: Tensor, precision: Precision) -> None:
    check_values("streams", streams, None, None, None, precision=precision)
    check_wide("coefficients", coefficients, streams.shape[0], streams.shape[1], precision=precision)
