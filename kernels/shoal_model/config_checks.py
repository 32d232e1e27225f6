"""What the fields of a configuration must agree on. Source: v41-flash specification, sections 1, 2, 4 and 8.4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_model.json_fields import Fields

if TYPE_CHECKING:
    from shoal_model.config import ModelConfig
    from shoal_model.config_sections import EngramConfig

CAST_GROUP = 32
"""Values that share a scale in Q8 and Q4ue: every cast width is a multiple of it."""

ENGRAM_LOOKBACK = 4
"""Tokens hashed together at most; a sequence's state keeps the three ids before the current one."""


def check_consistency(config: ModelConfig, text: Fields) -> None:
    """Raise CheckpointError naming the first field of `text` that contradicts another one."""
    _check_sizes(config, text)
    _check_halves(config, text)
    _check_sources(config, text)
    if config.engram is not None:
        _check_engram(config, config.engram, text)
    if config.dspark is not None:
        targets = config.dspark.target_layer_ids
        if not targets or targets[0] < config.boundary:
            # Bounded replay runs only the last rows of a prompt through the decoder, and drafts need just those rows.
            raise text.fail(
                "dspark_target_layer_ids", f"must be decoder layers, {config.boundary} or later, got {list(targets)}"
            )


def _check_sizes(config: ModelConfig, text: Fields) -> None:
    heads, head_dim, rope_dim = config.num_attention_heads, config.head_dim, config.qk_rope_head_dim
    if heads % config.o_groups:
        raise text.fail("o_groups", f"must divide num_attention_heads {heads}, got {config.o_groups}")
    if rope_dim % 2 or rope_dim > min(head_dim, config.index_head_dim):
        raise text.fail("qk_rope_head_dim", f"must be even and fit head_dim and index_head_dim, got {rope_dim}")
    for name in ("hidden_size", "head_dim", "q_lora_rank", "index_head_dim", "moe_intermediate_size"):
        if getattr(config, name) % CAST_GROUP:
            raise text.fail(name, f"must be a multiple of {CAST_GROUP}, got {getattr(config, name)}")
    if config.o_groups * config.o_lora_rank % CAST_GROUP:
        raise text.fail("o_lora_rank", f"times o_groups must be a multiple of {CAST_GROUP}, got {config.o_lora_rank}")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise text.fail(
            "num_experts_per_tok",
            f"must be at most n_routed_experts {config.n_routed_experts}, got {config.num_experts_per_tok}",
        )


def _check_halves(config: ModelConfig, text: Fields) -> None:
    ratios = list(config.compress_ratios)
    if 1 not in ratios:
        raise text.fail("compress_ratios", f"must hold a decoder layer (ratio 1), got {ratios}")
    if any(ratio != 1 for ratio in ratios[config.boundary :]):
        raise text.fail("compress_ratios", f"must be 1 from the first decoder layer on, got {ratios}")


def _check_sources(config: ModelConfig, text: Fields) -> None:
    kv, index, ratios = config.kv_source_layer_ids, config.index_source_layer_ids, config.compress_ratios
    for source in kv:
        if ratios[source] == 0:
            raise text.fail("kv_source_layer_ids", f"names layer {source}, which has no compressed KV (ratio 0)")
        if source not in index:
            raise text.fail("index_source_layer_ids", f"must hold the KV source layer {source}")
    for layer, ratio in enumerate(ratios):
        latest = max((i for i in kv if i <= layer), default=None)
        if ratio and (latest is None or ratios[latest] != ratio):
            raise text.fail("kv_source_layer_ids", f"must hold a source of ratio {ratio} at or before layer {layer}")
    if [source for source in kv if source >= config.boundary] != [config.boundary]:
        raise text.fail(
            "kv_source_layer_ids", f"must hold of the decoder layers just the first, {config.boundary}, got {list(kv)}"
        )
    for source in index:
        if source not in kv and source < config.boundary:
            raise text.fail("index_source_layer_ids", f"names encoder layer {source}, which is no KV source")
    if config.candidate_source_layer_id != config.boundary:
        raise text.fail(
            "candidate_source_layer_id",
            f"must be the first decoder layer, {config.boundary}, got {config.candidate_source_layer_id}",
        )


def _check_engram(config: ModelConfig, engram: EngramConfig, text: Fields) -> None:
    if engram.max_ngram_size != ENGRAM_LOOKBACK:
        raise text.fail("engram_max_ngram_size", f"must be {ENGRAM_LOOKBACK}, got {engram.max_ngram_size}")
    if not engram.layer_ids or engram.layer_ids[-1] >= config.boundary:
        raise text.fail(
            "engram_layer_ids", f"must be encoder layers, below {config.boundary}, got {list(engram.layer_ids)}"
        )
    if len(engram.num_embeddings) != len(engram.layer_ids):
        raise text.fail(
            "engram_num_embeddings",
            f"must have one entry per Engram layer ({len(engram.layer_ids)}), got {len(engram.num_embeddings)}",
        )
    if engram.head_dim % CAST_GROUP:
        raise text.fail("engram_head_dim", f"must be a multiple of {CAST_GROUP}, got {engram.head_dim}")
