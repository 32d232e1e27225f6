"""Queries, window KV and output projection of one layer. Source: v41-flash.md sections 7.1, 7.2 and 7.5."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_kernels.ops import linear, norm_rope
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.ops.sparse_attention import sparse_attention
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.block import Normed
from shoal_model.config import ModelConfig
from shoal_model.weights import AttentionWeights


@dataclass(frozen=True, slots=True)
class Projected:
    """What a row asks with."""

    q: Tensor  # [rows, heads, head_dim], rotated
    index_q: Tensor | None  # [rows, index heads, index_head_dim], rotated, dequantised Q4ue in cast precisions


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that rows attend to besides their window."""

    entries: PagedRows
    block_table: Tensor  # int32 [segments, max blocks]
    row_seq: Tensor  # int32 [rows]
    topk: Tensor  # int32 [rows, k], ascending, -1 padded


class Attention:
    """One layer's attention, bound to its weights and its rotary table."""

    def __init__(
        self,
        weights: AttentionWeights,
        config: ModelConfig,
        precision: Precision,
        rope: RopeTable,
        *,
        has_indexer: bool,
    ) -> None:
        self._weights = weights
        self._config = config
        self._precision = precision
        self._rope = rope
        self._has_indexer = has_indexer
        self._scale = config.head_dim**-0.5

    def project(self, normed: Normed, positions: Tensor, window_rows: Tensor) -> Projected:
        """Queries of normalised rows at their positions; what they offer to the window goes to `window_rows`.

        window_rows  [rows, units] as rings hold it, written here
        """
        c, w, precision = self._config, self._weights, self._precision
        both = linear.linear(normed.cast, w.wq_a_wkv, cast=False, precision=precision)
        latent, _ = norm_rope.latents(
            both, w.q_norm, w.kv_norm, c.rms_norm_eps, positions, self._rope, precision=precision, out=window_rows
        )
        heads = linear.linear(latent, w.wq_b, cast=False, precision=precision)
        split = c.num_attention_heads * c.head_dim
        q = heads[:, :split].view(-1, c.num_attention_heads, c.head_dim)
        # Beside index queries the rows are not dense, and attention wants them so: there they are copied on the way.
        q = norm_rope.rope(q, positions, self._rope, in_place=not self._has_indexer, precision=precision)
        index_q = None
        if self._has_indexer:
            index_q = heads[:, split:].view(-1, c.index_n_heads, c.index_head_dim)
            index_q = norm_rope.rope_cast(index_q, positions, self._rope, precision=precision)
        return Projected(q, index_q)

    def window_kv(self, x: Tensor, positions: Tensor) -> Tensor:
        """Window rows alone, of rows [rows, D] that need no query: [rows, units]."""
        both = linear.linear(x, self._weights.wq_a_wkv, precision=self._precision)
        return norm_rope.window_rows(
            both[:, self._config.q_lora_rank :],
            self._weights.kv_norm,
            self._config.rms_norm_eps,
            positions,
            self._rope,
            precision=self._precision,
        )

    def attend(
        self, projected: Projected, positions: Tensor, window: Tensor, window_index: Tensor, selection: Selection | None
    ) -> Tensor:
        """Attention output [rows, D] over a window (ring rows [places, units], index [rows, W]) and a selection."""
        out = sparse_attention(
            projected.q,
            window,
            window_index,
            self._weights.attn_sink,
            self._scale,
            positions,
            self._rope,
            entries=selection.entries if selection else None,
            block_table=selection.block_table if selection else None,
            row_seq=selection.row_seq if selection else None,
            topk=selection.topk if selection else None,
            cast_out=True,
            precision=self._precision,
        )
        low_rank = linear.linear(out.flatten(1), self._weights.wo_a, cast=False, precision=self._precision)
        return linear.linear(low_rank, self._weights.wo_b, precision=self._precision)
