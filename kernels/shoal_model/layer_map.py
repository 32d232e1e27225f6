"""Which layer owns, reuses or reindexes what. Source: v41-flash specification, section 2."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal_model.config import ModelConfig


class AttentionMode(Enum):
    """How a layer gets the compressed entries it attends to."""

    SWA = "swa"
    """Sliding window only: no compressed entries."""
    FULL = "full"
    """Owns compressor, main KV, index keys and an indexer."""
    REUSE = "reuse"
    """Takes KV and the list of selected entries from earlier layers."""
    REINDEX = "reindex"
    """Runs its own indexer over an earlier layer's index keys and KV, among the candidate blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The role of one backbone layer. Sources are layer ids, None for a sliding-window layer."""

    layer: int
    ratio: int
    mode: AttentionMode
    kv_source: int | None
    index_source: int | None
    has_engram: bool
    is_encoder: bool
    is_candidate_source: bool
    is_draft_target: bool

    @property
    def owns_kv(self) -> bool:
        """Has a compressor, main KV and index keys in the paged cache."""
        return self.mode is AttentionMode.FULL

    @property
    def has_indexer(self) -> bool:
        return self.mode in (AttentionMode.FULL, AttentionMode.REINDEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The plans of all backbone layers in order; `boundary` is the first decoder layer (E)."""

    layers: tuple[LayerPlan, ...]
    boundary: int

    @property
    def kv_owners(self) -> tuple[LayerPlan, ...]:
        """Layers with a section in the paged cache, ascending."""
        return tuple(plan for plan in self.layers if plan.owns_kv)


def build_layer_map(config: ModelConfig) -> LayerMap:
    """The layer map of a (checked) configuration."""
    return LayerMap(
        layers=tuple(_plan(config, layer) for layer in range(config.num_hidden_layers)), boundary=config.boundary
    )


def _plan(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    return LayerPlan(
        layer=layer,
        ratio=ratio,
        mode=_mode(config, layer),
        kv_source=_latest(config.kv_source_layer_ids, layer) if ratio else None,
        index_source=_latest(config.index_source_layer_ids, layer) if ratio else None,
        has_engram=config.engram is not None and layer in config.engram.layer_ids,
        is_encoder=layer < config.boundary,
        is_candidate_source=layer == config.candidate_source_layer_id,
        is_draft_target=config.dspark is not None and layer in config.dspark.target_layer_ids,
    )


def _mode(config: ModelConfig, layer: int) -> AttentionMode:
    if config.compress_ratios[layer] == 0:
        return AttentionMode.SWA
    if layer in config.kv_source_layer_ids:
        return AttentionMode.FULL
    if layer in config.index_source_layer_ids:
        return AttentionMode.REINDEX
    return AttentionMode.REUSE


def _latest(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)
