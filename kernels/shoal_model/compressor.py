"""Compressed KV of an owner layer: pooling, main entries and index keys. Source: v41-flash.md sections 7.3 and 7.4."""

from __future__ import annotations

from shoal_kernels.ops import compressor, linear
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.rows import EntryWrite
from shoal_model.weights import AttentionWeights


class Compressor:
    """Turns attention inputs of one owner layer into the entries that close in this step."""

    def __init__(
        self,
        weights: AttentionWeights,
        config: ModelConfig,
        precision: Precision,
        rope: RopeTable,
        *,
        ratio: int,
        main: PagedRows,
        index: PagedRows,
    ) -> None:
        if weights.index_key is None or weights.compressor_norm is None:
            raise ValueError("a layer that owns compressed KV needs compressor and index key weights")
        self._key = weights.index_key
        self._norm = weights.compressor_norm
        self._config = config
        self._precision = precision
        self._rope = rope
        self._ratio = ratio
        self._main = main
        self._index = index

    def store(self, raw: Tensor, pairs: Tensor | None, write: EntryWrite) -> None:
        """Pool and store the groups that close.

        raw    [rows, 2 * head_dim] score | value of every row (ratio 2), or [rows, head_dim] the value (ratio 1)
        pairs  [places, 2, head_dim]: what earlier steps left open (ratio 2); None at ratio 1
        """
        eps, precision = self._config.rms_norm_eps, self._precision
        if not write.blocks.shape[0]:
            return
        latent = compressor.store_main(
            raw,
            raw.new_empty((0, 1, self._config.head_dim)) if pairs is None else pairs,
            write.members,
            self._norm,
            eps,
            write.positions,
            self._rope,
            self._main,
            write.blocks,
            write.entries,
            precision=precision,
        )
        compressor.store_key(
            linear.linear(latent, self._key.wk, precision=precision),
            self._key.k_norm,
            eps,
            write.positions,
            self._rope,
            self._index,
            write.blocks,
            write.entries,
            precision=precision,
        )
