"""One backbone layer: its block, its attention, and where they apply its compressor and indexer."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_kernels.ops import linear
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.attention import Attention, Selection
from shoal_model.block import Block, Streams
from shoal_model.compressor import Compressor
from shoal_model.config import ModelConfig
from shoal_model.engram import Engram
from shoal_model.indexer import Indexer, Selected
from shoal_model.layer_map import LayerPlan
from shoal_model.pages import PagedCache
from shoal_model.rings import Ring
from shoal_model.rows import HalfPlan, StepPlan
from shoal_model.state import StateSlots
from shoal_model.trace import Trace
from shoal_model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Normalised rows [rows, D] of a layer, and what its BF16 projections make of them (None on other layers)."""

    x: Tensor
    index_weights: Tensor | None  # [rows, index heads]

    def select(self, rows: Tensor) -> AttentionInput:
        """Only these rows."""
        weights = self.index_weights
        return AttentionInput(self.x.index_select(0, rows), None if weights is None else weights.index_select(0, rows))


class Layer:
    """Layer `plan.layer`, bound to its weights, its pages and its rings."""

    def __init__(
        self,
        plan: LayerPlan,
        weights: LayerWeights,
        config: ModelConfig,
        precision: Precision,
        rope: RopeTable,
        pages: PagedCache,
        state: StateSlots,
        *,
        engram_pad_id: int,
    ) -> None:
        scope = f"layers.{plan.layer}"
        self.plan = plan
        self._scope = scope
        self._precision = precision
        self._ring = state.encoder if plan.is_encoder else state.decoder
        self._ring_layer = plan.layer if plan.is_encoder else plan.layer - config.boundary
        self._pairs: Ring = state.pairs
        self._pair_layer = state.pair_layers.index(plan.layer) if plan.layer in state.pair_layers else 0
        self._compress_index = weights.attn.compress_index
        self._num_index_heads = config.index_n_heads if plan.has_indexer else 0
        self._entries = None if plan.kv_source is None else pages.main(plan.kv_source)
        self._block = Block(weights, config, precision, experts_per_token=config.num_experts_per_tok, scope=scope)
        self._attention = Attention(weights.attn, config, precision, rope, has_indexer=plan.has_indexer)
        self._engram: Engram | None = None
        if weights.engram is not None:
            self._engram = Engram(weights.engram, config, precision, pad_id=engram_pad_id, scope=scope)
        self._compressor: Compressor | None = None
        self._indexer: Indexer | None = None
        if plan.owns_kv:
            self._compressor = Compressor(
                weights.attn,
                config,
                precision,
                rope,
                ratio=plan.ratio,
                main=pages.main(plan.layer),
                index=pages.index(plan.layer),
            )
        if plan.has_indexer and plan.kv_source is not None:
            self._indexer = Indexer(plan, config, precision, pages.index(plan.kv_source), scope)

    def enter(self, streams: Streams, compressed: Tensor | None, trace: Trace) -> Streams:
        """Apply this layer's Engram, if it has one. `compressed` is int64 [rows, 4] as in `Engram`."""
        if self._engram is not None and compressed is not None:
            streams = Streams(self._engram(streams.x, compressed, trace), streams.pre)
        trace.record(self._scope, "streams_in", streams.x)
        return streams

    def attention_input(self, streams: Streams) -> Tensor:
        """The normalised rows [rows, D] that this layer's attention and compressor read."""
        return self._block.attention_input(streams)

    def prepare(self, x: Tensor, step: StepPlan) -> AttentionInput:
        """On an owner layer, store the compressed entries that close in this step; x [rows, D] of all its rows."""
        if self._compress_index is None:
            return AttentionInput(x, None)
        raw = linear.linear(x, self._compress_index, out="f32", precision=self._precision)
        split = raw.shape[1] - self._num_index_heads
        if self._compressor is not None:
            self._compressor.store(
                raw[:, :split], step.entries[self.plan.ratio], self._pairs, self._pair_layer, step.pair_write
            )
        return AttentionInput(x, self._precision.bf16(raw[:, split:]))

    def attend(
        self, given: AttentionInput, half: HalfPlan, block_table: Tensor, selected: Selected | None, trace: Trace
    ) -> tuple[Tensor, Selected | None]:
        """Attention output [rows, D] of the rows of `half`, and the running selection after this layer."""
        trace.record(self._scope, "attn_in", given.x)
        projected = self._attention.project(given.x, half.positions)
        trace.record(self._scope, "window_kv", projected.kv)
        if self._indexer is not None and projected.index_q is not None and given.index_weights is not None:
            selected = self._indexer.select(projected.index_q, given.index_weights, half, block_table, selected, trace)
        selection = None
        if self._entries is not None and selected is not None:
            selection = Selection(self._entries, block_table, half.row_seq, selected.topk)
        window = self._ring.stage(self._ring_layer, projected.kv)
        y = self._attention.attend(projected, half.positions, window, half.window_index, selection)
        self._ring.commit(self._ring_layer, projected.kv, half.window_write)
        trace.record(self._scope, "attn_out", y)
        return y, selected

    def finish(self, streams: Streams, attention: Tensor, trace: Trace) -> Streams:
        """Add the attention's output [rows, D] and run the MoE: the streams after this layer."""
        return self._block.finish(streams, attention, trace)

    def feed_forward(self, x: Tensor, trace: Trace) -> Tensor:
        """The MoE alone, on normalised rows [rows, D]."""
        return self._block.feed_forward(x, trace)
