"""One model instance: weights, paged cache, state slots, and the forwards over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from shoal_kernels.ops import linear
from shoal_kernels.ops.lm_head import MarkovDraft, lm_head_argmax
from shoal_kernels.ops.norm_rope import plain_rope_table, yarn_rope_table
from shoal_kernels.precision import SERVED, Precision
from shoal_kernels.row_formats import index_format, main_format, window_format
from torch import Tensor

from shoal_model.backbone import Backbone
from shoal_model.cache import ModelCache
from shoal_model.checkpoint import Checkpoint
from shoal_model.config import ModelConfig
from shoal_model.device import check_room, open_device, served_precision, use
from shoal_model.draft import Anchor, Drafter, DraftHead, MarkovStep
from shoal_model.kv_layout import KvLayout
from shoal_model.layer_map import build_layer_map
from shoal_model.load_weights import load_weights
from shoal_model.pages import PagedCache
from shoal_model.rows import HalfPlan, RowBatch, StepLimits, plan_step
from shoal_model.sampler import RowChoice
from shoal_model.shipping import ship
from shoal_model.state import StateSlots
from shoal_model.synthetic import Synthetic, check_weights, synthetic_weights
from shoal_model.trace import SILENT, Trace
from shoal_model.weights import BackboneWeights

DEFAULT_BACKTRACK = 6


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Final hidden rows of a step, after the last norm, in the order of its segments' outputs."""

    hidden: Tensor  # [outputs, D] in the precision's dtype


class NoDraftHead(RuntimeError):
    """The checkpoint has no DSpark head."""


class Model:
    """DeepSeek-V4.1 for text over one paged cache and one set of state slots.

    Not thread-safe: one thread runs steps. A row's bits depend on that row's own inputs only, in precisions SERVED and
    SERVED_BF16. Steps are planned in host memory; on an accelerator, what a step needs goes there in one copy, and
    nothing is read back before the caller asks for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: BackboneWeights,
        *,
        precision: Precision = SERVED,
        device: torch.device | str = "cpu",
        num_blocks: int,
        num_slots: int,
    ) -> None:
        """`weights` lie on `device`, prepared for `precision`. Raises DoesNotFit."""
        self.device = open_device(device)
        self.config = config
        self.precision = precision
        self.layer_map = build_layer_map(config)
        self._weights = weights
        self._ratios = tuple(sorted({plan.ratio for plan in self.layer_map.layers if plan.ratio}))
        num_layers, boundary, num_draft = config.num_hidden_layers, config.boundary, config.num_draft_blocks
        main, index = main_format(config.head_dim, precision), index_format(config.index_head_dim, precision)
        layout = KvLayout.build([(plan.layer, plan.ratio) for plan in self.layer_map.kv_owners], main, index)
        slot_bytes = StateSlots.slot_bytes(
            num_windows=num_layers + num_draft,
            num_pairs=sum(plan.ratio == 2 for plan in self.layer_map.kv_owners),
            window=config.sliding_window,
            backtrack=self.backtrack,
            head_dim=config.head_dim,
            precision=precision,
        )
        check_room(
            self.device,
            num_blocks * layout.block_bytes + num_slots * slot_bytes,
            f"{num_blocks} blocks and {num_slots} state slots",
        )
        pages = PagedCache(layout, main, index, num_blocks=num_blocks, device=device)
        state = StateSlots(
            num_slots=num_slots,
            num_encoder=boundary,
            num_decoder=num_layers - boundary,
            num_draft=num_draft,
            pair_layers=tuple(plan.layer for plan in self.layer_map.kv_owners if plan.ratio == 2),
            window=config.sliding_window,
            backtrack=self.backtrack,
            head_dim=config.head_dim,
            window_format=window_format(config.head_dim, precision),
            device=device,
        )
        self._limits = StepLimits(
            num_blocks=num_blocks, vocab_size=config.vocab_size, max_positions=config.max_position_embeddings
        )
        self.cache = ModelCache(
            pages,
            state,
            encoder_layers=range(boundary),
            decoder_layers=range(boundary, num_layers),
            draft_layers=range(num_layers, num_layers + num_draft),
        )
        # A draft block near the end of the context has rows behind it; they are never verified, but they run.
        last_draft = config.max_position_embeddings + self.draft_size
        plain = plain_rope_table(config.qk_rope_head_dim, config.rope_theta, last_draft)
        scaling = config.rope_scaling
        compressed = yarn_rope_table(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            config.max_position_embeddings,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_positions=scaling.original_max_position_embeddings,
        )
        self._ropes = (plain, compressed)
        self.backbone = Backbone(
            weights,
            config,
            self.layer_map,
            precision,
            pages,
            state,
            plain_rope=plain,
            compressed_rope=compressed,
        )
        self.drafter: Drafter | None = None
        if weights.draft is not None and config.dspark is not None:
            self.drafter = Drafter(weights.draft, weights, config, config.dspark, precision, state, plain, self.device)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        num_blocks: int,
        num_slots: int,
    ) -> Model:
        """Read a checkpoint folder. Without `precision` the one that the device serves in.

        raises   CheckpointError naming the file and the tensor or field at fault; ValueError for no name of a device;
                 DeviceUnavailable; DoesNotFit
        """
        device = open_device(device)
        precision = precision or served_precision(device)
        checkpoint = Checkpoint.open(directory)
        weights = load_weights(checkpoint, precision=precision, device=device)
        return cls(
            checkpoint.config,
            weights,
            precision=precision,
            device=device,
            num_blocks=num_blocks,
            num_slots=num_slots,
        )

    @classmethod
    def synthetic(
        cls, synthetic: Synthetic, *, device: torch.device | str = "cpu", num_blocks: int, num_slots: int
    ) -> Model:
        """A model of random weights, made on the device. Raises ValueError, DeviceUnavailable, DoesNotFit."""
        device, config = open_device(device), synthetic.config()
        precision = served_precision(device)
        check_weights(config, precision, device)
        weights = synthetic_weights(config, precision=precision, device=device, seed=synthetic.seed)
        return cls(config, weights, precision=precision, device=device, num_blocks=num_blocks, num_slots=num_slots)

    @property
    def backtrack(self) -> int:
        """B: how far a sequence may step back by position; a draft block and its anchor, at least."""
        return max(DEFAULT_BACKTRACK, self.draft_size + 1)

    @property
    def default_replay_length(self) -> int:
        """K: rows of a prompt's end that run the decoder half, unless a deployment says otherwise (140 as released)."""
        return self.config.sliding_window + 2 * self.backtrack

    @property
    def draft_size(self) -> int:
        """Draft positions per round, 0 without a draft head."""
        return self.config.dspark.block_size if self.config.dspark else 0

    def forward(self, batch: RowBatch, trace: Trace = SILENT) -> ForwardResult:
        """Run one step: writes entries, rings and draft context of all its rows.

        raises   ValueError for a malformed batch, StaleRingRead where a ring lacks a position that a row needs
        """
        use(self.device)
        self.cache.state.reserve(sum(len(segment.token_ids) for segment in batch.segments))
        planned = plan_step(
            batch, self.cache.state, window=self.config.sliding_window, ratios=self._ratios, limits=self._limits
        )
        self.cover_positions(max(segment.start + len(segment.token_ids) for segment in batch.segments))
        fetched = self.backbone.look_up(planned, self.device, trace)
        step = ship(planned, self.device)
        result = self.backbone.run(step, fetched, trace)
        if result is None or step.decoder is None:
            empty = torch.empty((0, self.config.hidden_size), dtype=self.precision.dtype, device=self.device)
            return ForwardResult(empty)
        if self.drafter is not None and result.taps is not None:
            self._write_draft_context(self.drafter, result.taps, step.decoder, trace)
        trace.record("", "final_hidden", result.hidden)
        return ForwardResult(result.hidden.index_select(0, step.output_rows))

    def cover_positions(self, length: int) -> None:
        """Make the rotary tables reach positions 0 .. length - 1. Steps do it themselves; a recorded step does not."""
        for table in self._ropes:
            table.cover(length - 1, self.device, self.precision.wide)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of final hidden rows [n, D], not rounded (float32; float64 in precision EXACT)."""
        use(self.device)
        return linear.linear(hidden, self._weights.head, out="f32", precision=self.precision)

    def choose(self, hidden: Tensor, choice: RowChoice) -> Tensor:
        """Tokens int64 [n] after final hidden rows [n, D] whose logits are neither edited nor filtered.

        Those that `sample` takes from `logits`, which are not stored here.
        """
        use(self.device)
        return lm_head_argmax(
            hidden,
            self._weights.head,
            choice.inverse_temperature,
            choice.seeds,
            choice.positions,
            choice.is_greedy,
            precision=self.precision,
        )

    def draft(self, anchors: Sequence[Anchor], trace: Trace = SILENT) -> DraftHead:
        """Hidden rows and base logits of one draft block per anchor. Raises NoDraftHead, StaleRingRead."""
        use(self.device)
        return self._require_drafter().draft(anchors, trace)

    def markov_step(self, previous: Tensor, base_logits: Tensor, hidden: Tensor) -> MarkovStep:
        """Logits and confidence logit of one draft position, see `Drafter.markov_step`. Raises NoDraftHead."""
        return self._require_drafter().markov_step(previous, base_logits, hidden)

    def markov_loop(self, head: DraftHead, previous: Tensor, choice: RowChoice, width: int) -> MarkovDraft:
        """Draft tokens that are neither edited nor filtered, see `Drafter.markov_loop`. Raises NoDraftHead."""
        return self._require_drafter().markov_loop(head, previous, choice, width)

    def _write_draft_context(self, drafter: Drafter, taps: Tensor, half: HalfPlan, trace: Trace) -> None:
        """For every decoder row that enters the rings, accepted or not: rejected ones are overwritten by position."""
        write = half.window_write
        features = drafter.features(taps.index_select(0, write.sources))
        trace.record("", "dspark.features", features)
        drafter.write_context(features, half.positions.index_select(0, write.sources), write.targets)

    def _require_drafter(self) -> Drafter:
        if self.drafter is None:
            raise NoDraftHead("this checkpoint has no DSpark draft head")
        return self.drafter
