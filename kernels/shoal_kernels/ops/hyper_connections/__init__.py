"""Single-pass manifold hyper-connections: N residual streams, mixed per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_rows, check_values, check_wide
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

MIX_PARTS = 2
"""bfloat16 terms that stand for a float32 weight: 16 significant bits. What they leave out is below the rounding of the
sum over N*D itself."""


@dataclass(frozen=True, slots=True)
class MixWeight:
    """Weights of one `mix`, prepared from the stored tensors with `prepare`, in one of two forms.

    fn     float32 [N*D, (2+N)*N], transposed from the stored [(2+N)*N, N*D]; or, for precisions that keep bytes,
           bfloat16 [(2+N)*N, MIX_PARTS, N*D] whose sum over the parts is the stored weight to a relative 2^-17: each
           product with a bfloat16 stream value is exact in float32
    scale  float32 [3]: of pre, post, comb
    base   float32 [(2+N)*N]
    """

    fn: Tensor
    scale: Tensor
    base: Tensor

    @staticmethod
    def prepare(fn: Tensor, scale: Tensor, base: Tensor, *, keep_bytes: bool = False) -> MixWeight:
        """fn [(2+N)*N, N*D], scale [3], base [(2+N)*N], all float32 as stored."""
        check_rows("scale", scale, 3, dtype=torch.float32)
        check_rows("base", base, fn.shape[0], dtype=torch.float32)
        check_rows("fn", fn, None, None, dtype=torch.float32)
        prepared = _bf16_parts(fn) if keep_bytes else fn.t().contiguous()
        return MixWeight(prepared, scale.contiguous(), base.contiguous())

    @property
    def keeps_bytes(self) -> bool:
        """Whether `fn` is split into bfloat16 parts."""
        return self.fn.dtype == torch.bfloat16


def _bf16_parts(fn: Tensor) -> Tensor:
    """float32 [M, K] -> bfloat16 [M, MIX_PARTS, K], largest first, each the rounding of what the ones before leave."""
    parts = []
    rest = fn
    for _ in range(MIX_PARTS):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(torch.float32)
    return torch.stack(parts, dim=1).contiguous()


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
    exact       a row depends on itself only; all implementations on the host agree bit for bit. On an accelerator the
                sum over N*D has another fixed order: coefficients within 1e-4 of the host's
    source      specification of the model, section 5.1
    """
    check_values("streams", streams, None, None, None, precision=precision)
    n, d = streams.shape[1], streams.shape[2]
    if weight.keeps_bytes != precision.keeps_bytes:
        raise ValueError(f"this weight was not prepared for precision {precision.name}")
    if weight.keeps_bytes:
        check_rows("fn", weight.fn, (2 + n) * n, MIX_PARTS, n * d, dtype=torch.bfloat16)
    else:
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

    streams [R, N, D], pre [R, N], weight float32 [D] -> [R, D]. Exact on the host: the bits of the two operations one
    by one. On an accelerator the mean square has another fixed order: relative error below 1e-2 of the row's norm, from
    values that round to the other neighbour in bfloat16.
    """
    _check_streams(streams, pre, precision)
    check_rows("weight", weight, streams.shape[2], dtype=torch.float32)
    result: Tensor = resolve("collapse_norm", streams.device.type, precision, backend)(
        streams, pre, weight, eps, precision
    )
    return result


def collapse_norm_cast(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, precision: Precision, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """collapse_norm, and cast_q8 of its result: both inputs of a sub-layer in one pass.

    streams, pre, weight  as for collapse_norm; D is a multiple of 32 if the precision casts activations
    returns               normed [R, D] and its Q8 values [R, D], for FP8 linears called with cast=False. They are the
                          normed row itself where the precision does not cast activations
    raises                ValueError for shape or dtype
    exact                 the host has the bits of the operations one by one; an accelerator those of its collapse_norm
                          and cast_q8
    source                specification of the model, sections 4 and 5.1
    """
    _check_streams(streams, pre, precision)
    check_rows("weight", weight, streams.shape[2], dtype=torch.float32)
    if precision.cast_activations:
        _check_groups(streams.shape[2])
    normed, cast = resolve("collapse_norm_cast", streams.device.type, precision, backend)(
        streams, pre, weight, eps, precision
    )
    return normed, cast


def expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, precision: Precision, backend: str | None = None
) -> Tensor:
    """Destination stream k = bf16(post[k] * y + sum over j ascending of comb[j, k] * streams[j]).

    y [R, D], streams [R, N, D], post [R, N], comb [R, N, N], coefficients wide -> [R, N, D], a new tensor.
    Exact. Source: section 5.1.
    """
    _check_expand(y, streams, post, comb, precision)
    result: Tensor = resolve("expand", streams.device.type, precision, backend)(y, streams, post, comb, precision)
    return result


def expand_norm(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    *,
    cast: bool,
    precision: Precision,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """expand, then collapse_norm of the new streams with `pre`: from one sub-layer's output to the next one's input.

    y, streams, post, comb  as for expand
    pre, weight, eps        as for collapse_norm
    cast                    also cast_q8 of the normed row (see collapse_norm_cast)
    returns                 new streams [R, N, D], normed [R, D], and the Q8 values [R, D] (as collapse_norm_cast gives
                            them) or None
    raises                  ValueError for shape or dtype
    exact                   the host has the bits of the operations one by one; an accelerator those of its own
    source                  specification of the model, sections 4 and 5.1
    """
    _check_expand(y, streams, post, comb, precision)
    check_wide("pre", pre, streams.shape[0], streams.shape[1], precision=precision)
    check_rows("weight", weight, streams.shape[2], dtype=torch.float32)
    if cast and precision.cast_activations:
        _check_groups(streams.shape[2])
    after, normed, values = resolve("expand_norm", streams.device.type, precision, backend)(
        y, streams, post, comb, pre, weight, eps, cast, precision
    )
    return after, normed, values


def _check_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, precision: Precision) -> None:
    _check_streams(streams, post, precision)
    rows, n, d = streams.shape
    check_values("y", y, rows, d, precision=precision)
    check_wide("comb", comb, rows, n, n, precision=precision)


def _check_groups(size: int) -> None:
    if size % 32:
        raise ValueError(f"a Q8 row needs a size that is a multiple of 32, got {size}")


def _check_streams(streams: Tensor, coefficients: Tensor, precision: Precision) -> None:
    check_values("streams", streams, None, None, None, precision=precision)
    check_wide("coefficients", coefficients, streams.shape[0], streams.shape[1], precision=precision)
