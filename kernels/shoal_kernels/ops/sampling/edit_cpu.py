"""Compiled bias, penalties, mask and temperature: in place, and no more of a row is read than they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels.arith_nb import INF, ONE, ZERO
from shoal_kernels.jit import kernel
from shoal_kernels.ops.sampling.reference import repetition_factor

if TYPE_CHECKING:
    from shoal_kernels.ops.sampling import RowSampling

_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)
_NO_COUNTS = np.empty(0, np.int32)
_ALL, _NONE = np.int32(-1), np.int32(0)


@kernel("void(f4[::1], i8[::1], f4[::1], i8[::1], f4, i8[::1], i4[::1], f4, f4)")
def _edit(
    z: Any, bias_ids: Any, bias: Any, seen: Any, factor: Any, output: Any, counts: Any, frequency: Any, presence: Any
) -> None:
    for i in range(bias_ids.shape[0]):
        z[bias_ids[i]] += bias[i]
    for i in range(seen.shape[0]):
        value = z[seen[i]]
        z[seen[i]] = value / factor if value > ZERO else value * factor
    for i in range(output.shape[0]):
        if frequency != ZERO:
            z[output[i]] -= np.float32(counts[i]) * frequency
        if presence != ZERO:
            z[output[i]] -= presence


@kernel("void(f4[::1], i4[::1])")
def _mask(z: Any, words: Any) -> None:
    vocab = z.shape[0]
    for w in range(words.shape[0]):
        word = words[w]
        if word == _ALL:
            continue
        start = w * 32
        part = z[start : min(start + 32, vocab)]
        if word == _NONE:
            for i in range(part.shape[0]):
                part[i] = -INF
        else:
            for i in range(part.shape[0]):
                part[i] = part[i] if (word >> i) & 1 else -INF


@kernel("void(f4[::1], f4)")
def _scale(z: Any, factor: Any) -> None:
    for v in range(z.shape[0]):
        z[v] = z[v] * factor


def edit_logits(
    logits: Tensor, rows: Sequence[RowSampling], inverse_temperature: Tensor, in_place: bool = False
) -> Tensor:
    """logits [R, V] -> [R, V] after bias, penalties, mask and temperature."""
    kept = logits if in_place and logits.is_contiguous() else logits.clone(memory_format=torch.contiguous_format)
    z, inverse = kept.numpy(), inverse_temperature.numpy()
    for at, row in enumerate(rows):
        if row.is_edited:
            _edit(
                z[at],
                _of(row.bias_ids, _NO_IDS),
                _of(row.bias, _NO_VALUES),
                _of(row.seen_ids if row.repetition_penalty != 1.0 else None, _NO_IDS),
                np.float32(repetition_factor(row.repetition_penalty)),
                _of(row.output_ids, _NO_IDS),
                _of(row.output_counts, _NO_COUNTS),
                np.float32(row.frequency_penalty),
                np.float32(row.presence_penalty),
            )
            if row.allowed is not None:
                _mask(z[at], row.allowed.numpy())
        if inverse[at] != ONE:
            _scale(z[at], inverse[at])
    return kept


def _of(tensor: Tensor | None, nothing: NDArray[Any]) -> NDArray[Any]:
    return nothing if tensor is None else tensor.numpy()
