"""Compressed KV of an owner layer: pooling, main entries and index keys. Source: v41-flash.md sections 7.3 and 7.4."""

from __future__ import annotations

from shoal_kernels.ops import compressor, linear, norm_rope
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.rings import Ring, RingWrite
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

    def store(self, raw: Tensor, write: EntryWrite, pairs: Ring, pair_layer: int, pair_write: RingWrite) -> None:
        """Pool and store the groups that close.

        raw   [rows, 2 * head_dim] score | value of every row (ratio 2), or [rows, head_dim] the value (ratio 1)
        """
        eps, precision = self._config.rms_norm_eps, self._precision
        latent = norm_rope.rms_norm(
            self._pool(raw, write, pairs, pair_layer, pair_write), self._norm, eps, precision=precision
        )
        if not latent.shape[0]:
            return
        main = norm_rope.rope(latent, write.positions, self._rope, precision=precision)
        self._main.write(write.blocks, write.entries, main)
        key = norm_rope.rms_norm(
            linear.linear(latent, self._key.wk, precision=precision), self._key.k_norm, eps, precision=precision
        )
        key = norm_rope.rope(key, write.positions, self._rope, precision=precision)
        self._index.write(write.blocks, write.entries, key)

    def _pool(self, raw: Tensor, write: EntryWrite, pairs: Ring, pair_layer: int, pair_write: RingWrite) -> Tensor:
        if self._ratio == 1:
            return self._precision.bf16(raw.index_select(0, write.members[0]))
        both = raw.view(-1, 2, self._config.head_dim)
        members = pairs.stage(pair_layer, both)[write.members]  # [2 members, groups, score | value, head_dim]
        pooled = compressor.pool_pairs(members[:, :, 0], members[:, :, 1], precision=self._precision)
        pairs.commit(pair_layer, both, pair_write)
        return pooled
