"""Engram of one layer: hash, table look-up and gate. Source: v41-flash.md section 6.

The rows a token needs follow from token ids alone: they are worked out and fetched when a step is planned, before the
first layer runs, and are there when their layer comes.
"""

from __future__ import annotations

import torch
from shoal_kernels.ops import engram, linear
from shoal_kernels.ops.engram import Fetched
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

    def look_up(self, compressed: Tensor, device: torch.device, trace: Trace) -> Fetched:
        """Start to fetch the table rows of a step to the device it runs on.

        compressed  int64 [rows, 4] in host memory: compressed id of the row's token, then of the three before it
        """
        w = self._weights
        is_image = torch.zeros_like(compressed, dtype=torch.bool)
        rows = engram.hash_rows(compressed, is_image, w.multipliers, w.primes, w.offsets, self._pad_id)
        trace.record(self._scope, "engram.rows", rows)
        return engram.prefetch(w.table, rows, device)

    def __call__(self, x: Tensor, fetched: Fetched, is_image: Tensor) -> Tensor:
        """Streams [rows, N, D] after the gate; rows with is_image (bool [rows]) stay as they are."""
        w, precision = self._weights, self._precision
        values = engram.take(fetched, precision=precision)
        kv = linear.linear(values, w.wkv, cast=False, precision=precision)
        return engram.gate(x, kv, w.gate_weight, is_image, rms_eps=self._config.rms_norm_eps, precision=precision)
