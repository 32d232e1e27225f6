"""Engram of one layer: hash, table look-up and gate. Source: v41-flash.md section 6."""

from __future__ import annotations

import torch
from shoal_kernels.ops import engram, linear
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.trace import Trace
from shoal_model.weights import EngramLayerWeights


class Engram:
    """Adds what the table knows about the last n tokens to every stream."""

    def __init__(
        self, weights: EngramLayerWeights, config: ModelConfig, precision: Precision, *, pad_id: int, scope: str
    ) -> None:
        self._weights = weights
        self._config = config
        self._precision = precision
        self._pad_id = pad_id
        self._scope = scope

    def __call__(self, x: Tensor, compressed: Tensor, trace: Trace) -> Tensor:
        """Streams [rows, N, D] after the gate.

        compressed  int64 [rows, 4]: compressed id of the row's token, then of the three before it
        """
        w, precision = self._weights, self._precision
        is_image = torch.zeros_like(compressed, dtype=torch.bool)
        rows = engram.hash_rows(compressed, is_image, w.multipliers, w.primes, w.offsets, self._pad_id)
        trace.record(self._scope, "engram.rows", rows)
        values = engram.gather(w.table, rows, precision=precision)
        kv = linear.linear(values, w.wkv, cast=False, precision=precision)
        return engram.gate(x, kv, w.gate_weight, is_image[:, 0], rms_eps=self._config.rms_norm_eps, precision=precision)
