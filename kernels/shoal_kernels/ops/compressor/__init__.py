"""Pooling of token pairs into one compressed entry."""

from __future__ import annotations

from torch import Tensor

from shoal_kernels.checks import check_wide
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


def pool_pairs(score: Tensor, value: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """bf16(sum over the pair of softmax(score) * value), channel by channel.

    score, value  [2, R, d] in the precision's wide dtype: first and second member of R pairs
    returns       [R, d] in the precision's dtype
    raises        ValueError for shape or dtype
    exact         all implementations agree bit for bit
    source        specification of the model, section 7.3
    """
    check_wide("score", score, 2, None, None, precision=precision)
    check_wide("value", value, *score.shape, precision=precision)
    result: Tensor = resolve("pool_pairs", score.device.type, precision, backend)(score, value, precision)
    return result
