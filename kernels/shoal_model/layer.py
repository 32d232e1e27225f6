"""One backbone layer: its block, its attention, and where they apply its compressor and indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal_kernels.ops import linear, records
from shoal_kernels.ops.engram import Fetched
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.attention import Attention, Selection
from shoal_model.block import Block, Normed, Streams
from shoal_model.compressor import Compressor
from shoal_model.config import ModelConfig
from shoal_model.engram import Engram
from shoal_model.indexer import Indexer, Selected
from shoal_model.layer_map import LayerPlan
from shoal_model.pages import PagedCache
from shoal_model.rows import HalfPlan, StepPlan
from shoal_model.state import StateSlots
from shoal_model.trace import Trace
from shoal_model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Normalised rows [rows, D] of a layer, and what its BF16 projections make of them (None on other layers)."""

    normed: Normed
    index_weights: Tensor | None  # [rows, index heads]

    def select(self, rows: Tensor) -> AttentionInput:
        """Only these rows."""
        weights, normed = self.index_weights, self.normed
        return AttentionInput(
            Normed(normed.x.index_select(0, rows), normed.cast.index_select(0, rows)),
            None if weights is None else weights.index_select(0, rows),
        )


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
        self._pairs: Tensor | None = None
        if plan.layer in state.pair_layers:
            self._pairs = state.pairs.places(state.pair_layers.index(plan.layer))
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

    @property
    def norm_before(self) -> Tensor | None:
        """The norm that the layer before may apply to this one's input; None where Engram comes in between."""
        return None if self._engram is not None else self._block.attn_norm

    def look_up(self, compressed: Tensor, device: torch.device, trace: Trace) -> dict[int, Fetched]:
        """This layer's part of a step's Engram rows, under its number; nothing without Engram."""
        return {} if self._engram is None else {self.plan.layer: self._engram.look_up(compressed, device, trace)}

    def enter(self, streams: Streams, fetched: Mapping[int, Fetched], step: StepPlan, trace: Trace) -> Streams:
        """Apply this layer's Engram, if it has one, to all rows of a step."""
        if self._engram is not None:
            streams = Streams(self._engram(streams.x, fetched[self.plan.layer], step.is_image), streams.pre)
        trace.record(self._scope, "streams_in", streams.x)
        return streams

    def attention_input(self, streams: Streams) -> Normed:
        """The normalised rows that this layer's attention and compressor read."""
        return self._block.attention_input(streams)

    def prepare(self, normed: Normed, step: StepPlan) -> AttentionInput:
        """On an owner layer, store the compressed entries that close in this step; `normed` of all its rows."""
        if self._compress_index is None:
            return AttentionInput(normed, None)
        raw = linear.linear(normed.x, self._compress_index, out="f32", precision=self._precision)
        split = raw.shape[1] - self._num_index_heads
        if self._compressor is not None:
            self._store(raw[:, :split], step)
        return AttentionInput(normed, self._precision.bf16(raw[:, split:]))

    def attend(
        self, given: AttentionInput, half: HalfPlan, block_table: Tensor, selected: Selected | None, trace: Trace
    ) -> tuple[Tensor, Selected | None]:
        """Attention output [rows, D] of the rows of `half`, and the running selection after this layer."""
        trace.record(self._scope, "attn_in", given.normed.x)
        rows = self._ring.scratch(self._ring_layer, half.num_rows)
        projected = self._attention.project(given.normed, half.positions, rows)
        trace.record(self._scope, "window_kv", rows)
        if self._indexer is not None and projected.index_q is not None and given.index_weights is not None:
            selected = self._indexer.select(projected.index_q, given.index_weights, half, block_table, selected, trace)
        selection = None
        if self._entries is not None and selected is not None:
            selection = Selection(self._entries, block_table, half.row_seq, selected.topk)
        window = self._ring.layers[self._ring_layer]
        y = self._attention.attend(projected, half.positions, window, half.window_index, selection)
        write = half.window_write
        records.copy_rows(window, write.targets, rows, write.sources, precision=self._precision)
        trace.record(self._scope, "attn_out", y)
        return y, selected

    def finish(
        self, streams: Streams, attention: Tensor, following: Tensor | None, trace: Trace, *, cast: bool = True
    ) -> tuple[Streams, Normed | None]:
        """Add the attention's output and run the MoE, see `Block.finish`."""
        return self._block.finish(streams, attention, following, trace, cast=cast)

    def feed_forward(self, x: Tensor, trace: Trace) -> Tensor:
        """The MoE alone, on normalised rows [rows, D]."""
        return self._block.feed_forward(x, trace)

    def _store(self, raw: Tensor, step: StepPlan) -> None:
        """Entries that close; then the step's open pairs enter the ring, for later steps."""
        assert self._compressor is not None
        self._compressor.store(raw, self._pairs, step.entries[self.plan.ratio])
        if self._pairs is not None:
            write, pairs = step.pair_write, raw.view(-1, *self._pairs.shape[1:])
            records.copy_rows(self._pairs, write.targets, pairs, write.sources, precision=self._precision)
