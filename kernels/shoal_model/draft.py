"""The DSpark draft head: context KV, parallel block, Markov bias, confidence. Source: v41-flash.md section 10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from shoal_kernels.ops import hyper_connections, linear, norm_rope, records
from shoal_kernels.ops.lm_head import MarkovDraft, markov_loop
from shoal_kernels.ops.norm_rope import RopeTable
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.attention import Attention
from shoal_model.block import Block, Normed, Streams, collapse_norm, embed
from shoal_model.config import DsparkConfig, ModelConfig
from shoal_model.rings import Ring
from shoal_model.sampler import RowChoice
from shoal_model.shipping import ship
from shoal_model.state import StateSlots
from shoal_model.trace import Trace
from shoal_model.weights import BackboneWeights, DraftWeights, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Where a draft begins: the newest token, sampled but not yet run through the target.

    Its context is the window that ends before `position`; keys below `window_start` do not exist (positions that the
    decoder half never ran, or whose draft context was not handed over).
    """

    slot: int
    position: int
    token_id: int
    window_start: int = 0


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What the parallel block gives for n anchors and B draft positions."""

    hidden: Tensor  # [n, B, D], before the norm
    base_logits: Tensor  # [n, B, V]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of one draft round: anchor after anchor, `block_size` rows each."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    window_index: Tensor  # int32 [rows, W + block size]


@dataclass(frozen=True, slots=True)
class MarkovStep:
    """One draft position of n sequences."""

    logits: Tensor  # [n, V]
    confidence_logit: Tensor  # [n]


class Drafter:
    """The draft blocks and their heads, bound to weights and rings."""

    def __init__(
        self,
        weights: DraftWeights,
        backbone: BackboneWeights,
        config: ModelConfig,
        dspark: DsparkConfig,
        precision: Precision,
        state: StateSlots,
        rope: RopeTable,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._rope = rope
        self._device = device
        self._backbone = backbone
        self._config = config
        self._dspark = dspark
        self._precision = precision
        self._ring = state.draft
        self.blocks = [
            DraftBlock(layer, config, dspark, precision, rope, f"mtp.{i}") for i, layer in enumerate(weights.blocks)
        ]

    @property
    def block_size(self) -> int:
        """Draft positions per round."""
        return self._dspark.block_size

    def features(self, taps: Tensor) -> Tensor:
        """What draft blocks know of decoder rows with taps [rows, targets * D]: [rows, D]."""
        projected = linear.linear(taps, self._weights.main_proj, precision=self._precision)
        return norm_rope.rms_norm(
            projected, self._weights.main_norm, self._config.rms_norm_eps, precision=self._precision
        )

    def write_context(self, features: Tensor, positions: Tensor, places: Tensor) -> None:
        """Write every block's context KV: features [n, D], positions int64 [n], flat ring places int64 [n]."""
        rows = torch.arange(features.shape[0], device=features.device)
        for i, block in enumerate(self.blocks):
            records.copy_rows(
                self._ring.layers[i],
                places,
                block.attention.window_kv(features, positions),
                rows,
                precision=self._precision,
            )

    def draft(self, anchors: Sequence[Anchor], trace: Trace) -> DraftHead:
        """Run the parallel block for every anchor. Raises StaleRingRead where a ring lacks a context position."""
        rows = ship(self.plan(anchors), self._device)
        embedding = embed(self._backbone.embed, rows.token_ids, self._precision)
        streams = Streams.start(embedding, self._config.hc_mult, self._precision)
        normed: Normed | None = None
        for i, block in enumerate(self.blocks):
            y = block.attend(normed or block.frame.attention_input(streams), rows, self._ring, i, trace)
            # The head reads the streams also before the norm.
            following = self.blocks[i + 1].frame.attn_norm if i + 1 < len(self.blocks) else None
            streams, normed = block.frame.finish(streams, y, following, trace)
        return self._head(streams, len(anchors))

    def plan(self, anchors: Sequence[Anchor]) -> DraftRows:
        """The rows of one draft round, in host memory."""
        size, count = self._dspark.block_size, len(anchors)
        self._rope.cover(max(anchor.position for anchor in anchors) + size - 1, self._device, self._precision.wide)
        first = np.repeat([anchor.position for anchor in anchors], size)
        numbers = np.arange(count * size)
        positions = first + numbers % size
        self._ring.reserve(count * size)
        index = self._ring.plan_window(
            np.repeat([anchor.slot for anchor in anchors], size),
            positions,
            first,
            np.repeat([anchor.window_start for anchor in anchors], size),
            numbers,
            self._config.sliding_window,
            block_length=size,
        )
        ids = np.full((count, size), self._dspark.noise_token_id, dtype=np.int64)
        ids[:, 0] = [anchor.token_id for anchor in anchors]
        return DraftRows(torch.from_numpy(ids.reshape(-1)), torch.from_numpy(positions), index)

    def markov_step(self, previous: Tensor, base_logits: Tensor, hidden: Tensor) -> MarkovStep:
        """Logits of one draft position given the token before it, and the logit of its confidence.

        previous     int64 [n], the anchor's token or the draft token before
        base_logits  [n, V] and hidden [n, D]: this position's rows of a `DraftHead`
        """
        embedded = embed(self._weights.markov_embed, previous, self._precision)
        bias = linear.linear(embedded, self._weights.markov_head, out="f32", precision=self._precision)
        confidence = linear.linear(
            torch.cat([hidden, embedded], dim=1), self._weights.confidence, out="f32", precision=self._precision
        )
        return MarkovStep(base_logits + bias, confidence[:, 0])

    def markov_loop(self, head: DraftHead, previous: Tensor, choice: RowChoice, width: int) -> MarkovDraft:
        """`width` draft positions of every anchor, one after the other without a look from outside.

        previous  int64 [n], the anchors' tokens
        choice    of the n anchors; its positions are the output indices of the first draft
        """
        return markov_loop(
            head.base_logits,
            head.hidden,
            previous,
            self._weights.markov_embed,
            self._weights.markov_head,
            self._weights.confidence,
            choice.inverse_temperature,
            choice.seeds,
            choice.positions,
            choice.is_greedy,
            width=width,
            precision=self._precision,
        )

    def _head(self, streams: Streams, count: int) -> DraftHead:
        hidden = hyper_connections.collapse(streams.x, streams.pre, precision=self._precision)
        normed = collapse_norm(streams, self._weights.norm, self._config, self._precision)
        logits = linear.linear(normed, self._backbone.head, out="f32", precision=self._precision)
        return DraftHead(hidden.view(count, -1, hidden.shape[1]), logits.view(count, -1, logits.shape[1]))


class DraftBlock:
    """One draft block: a layer's frame and window attention."""

    def __init__(
        self,
        weights: LayerWeights,
        config: ModelConfig,
        dspark: DsparkConfig,
        precision: Precision,
        rope: RopeTable,
        scope: str,
    ) -> None:
        self._scope = scope
        self.attention = Attention(weights.attn, config, precision, rope, has_indexer=False)
        self.frame = Block(weights, config, precision, experts_per_token=dspark.num_experts_per_tok, scope=scope)

    def attend(self, normed: Normed, rows: DraftRows, ring: Ring, layer: int, trace: Trace) -> Tensor:
        """Attention output [rows, D] of normalised block rows; their own keys stay in the ring's scratch."""
        trace.record(self._scope, "attn_in", normed.x)
        own = ring.scratch(layer, rows.positions.shape[0])
        projected = self.attention.project(normed, rows.positions, own)
        trace.record(self._scope, "block_kv", own)
        y = self.attention.attend(projected, rows.positions, ring.layers[layer], rows.window_index, None)
        trace.record(self._scope, "attn_out", y)
        return y
