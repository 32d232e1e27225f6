"""The 40-layer forward over one step: encoder half on all rows, decoder half on the rows that run it.

Source: v41-flash.md sections 5, 8.4 and 10 (features).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal_kernels.ops.engram import Fetched
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.block import Normed, Streams, embed
from shoal_model.config import ModelConfig
from shoal_model.indexer import Selected
from shoal_model.layer import Layer
from shoal_model.layer_map import LayerMap
from shoal_model.pages import PagedCache
from shoal_model.rows import StepPlan
from shoal_model.state import StateSlots
from shoal_model.trace import SILENT, Trace
from shoal_model.weights import BackboneWeights


@dataclass(frozen=True, slots=True)
class DecoderResult:
    """What a step's decoder rows leave: final hidden rows (after the last norm) and the taps of the draft head."""

    hidden: Tensor  # [rows, D]
    taps: Tensor | None  # [rows, targets * D], ascending target layers; None without a draft head


class Backbone:
    """Embedding, all layers and the last norm, bound to their weights, pages and rings."""

    def __init__(
        self,
        weights: BackboneWeights,
        config: ModelConfig,
        layer_map: LayerMap,
        precision: Precision,
        pages: PagedCache,
        state: StateSlots,
        *,
        plain_rope: RopeTable,
        compressed_rope: RopeTable,
    ) -> None:
        self._weights = weights
        self._config = config
        self._precision = precision
        engram_pad_id = 0
        if config.engram is not None and weights.compressed_ids is not None:
            engram_pad_id = int(weights.compressed_ids[config.engram.pad_token_id])
        layers = [
            Layer(
                plan,
                weights.layers[plan.layer],
                config,
                precision,
                compressed_rope if plan.ratio else plain_rope,
                pages,
                state,
                engram_pad_id=engram_pad_id,
            )
            for plan in layer_map.layers
        ]
        self.layers = tuple(layers)
        self._encoder, self._decoder = layers[: layer_map.boundary], layers[layer_map.boundary :]

    def look_up(self, step: StepPlan, device: torch.device, trace: Trace = SILENT) -> Mapping[int, Fetched]:
        """Start to fetch the Engram rows of a planned step that is still in host memory, by layer."""
        compressed = self._weights.compressed_ids
        fetched: dict[int, Fetched] = {}
        if compressed is not None:
            history = compressed[step.history]
            for layer in self.layers:
                fetched |= layer.look_up(history, device, trace)
        return fetched

    def run(self, step: StepPlan, fetched: Mapping[int, Fetched], trace: Trace) -> DecoderResult | None:
        """Run a planned step: writes entries and rings; None where no row runs the decoder half."""
        embedding = embed(self._weights.embed, step.token_ids, self._precision)
        streams = Streams.start(embedding, self._config.hc_mult, self._precision)
        normed: Normed | None = None
        selected: Selected | None = None
        for layer, following in zip(self._encoder, self._encoder[1:] + self._decoder[:1], strict=True):
            streams = layer.enter(streams, fetched, step, trace)
            given = layer.prepare(normed or layer.attention_input(streams), step)
            y, selected = layer.attend(given, step.encoder, step.block_table, selected, trace)
            streams, normed = layer.finish(streams, y, following.norm_before, trace)
        return self._run_decoder(streams, normed, step, trace)

    def _run_decoder(
        self, streams: Streams, normed: Normed | None, step: StepPlan, trace: Trace
    ) -> DecoderResult | None:
        # The first decoder layer compresses the encoder's output of every row, also of rows that end here.
        given = self._decoder[0].prepare(normed or self._decoder[0].attention_input(streams), step)
        half, rows = step.decoder, step.decoder_rows
        if half is None:
            return None
        if rows is not None:
            streams, given = streams.select(rows), given.select(rows)
        selected: Selected | None = None
        taps: list[Tensor] = []
        last = len(self._decoder) - 1
        for i, layer in enumerate(self._decoder):
            streams = layer.enter(streams, {}, step, trace)
            if layer.plan.is_draft_target:
                taps.append(self._tap(streams.x))
            if i:
                given = layer.prepare(normed or layer.attention_input(streams), step)
            y, selected = layer.attend(given, half, step.block_table, selected, trace)
            norm = self._weights.norm if i == last else self._decoder[i + 1].norm_before
            streams, normed = layer.finish(streams, y, norm, trace, cast=i < last)
        trace.record("", "streams_out", streams.x)
        for i, tap in enumerate(taps):
            trace.record("", f"dspark.tap{i}", tap)
        assert normed is not None, "the last layer's finish applies the model's norm"
        return DecoderResult(normed.x, torch.cat(taps, dim=1) if taps else None)

    def _tap(self, x: Tensor) -> Tensor:
        """Mean over the streams, added in their order: a fixed order, whatever the number of rows."""
        total = x[:, 0].to(self._precision.wide)
        for n in range(1, x.shape[1]):
            total = total + x[:, n]
        return self._precision.bf16(total / x.shape[1])
