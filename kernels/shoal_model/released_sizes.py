"""The configuration of the released model as one rank of an expert-parallel group sees it, whole or a few layers of it.

Source: v41-flash specification, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_model.config import DsparkConfig, EngramConfig, ModelConfig, YarnScaling
from shoal_model.engram_tables import search_primes

NUM_LAYERS = 40
DEFAULT_EP_SIZE = 64
"""Ranks of the group: six experts a rank, so that every row visits all of them, as 64 ranks' rows would."""

_RATIOS = (0, 0, *(2,) * 18, *(1,) * 20)
_KV_SOURCES = (2, 8, 14, 20)
_INDEX_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
_ENGRAM_LAYERS = (1, 14)
_NUM_EXPERTS, _NUM_DRAFT_EXPERTS = 384, 128
_ENGRAM_VOCAB = 16_000_000
_NUM_TAPS = 3
# In which order layers come in as more of them are asked for: one of every kind first.
_PRIORITY = (0, 1, 2, 20, 24, 3, 21, 8, 14, 25, 37, 38, 39)
LEAST_LAYERS = 4


def released_share(num_layers: int = NUM_LAYERS, ep_size: int = DEFAULT_EP_SIZE) -> ModelConfig:
    """The released configuration with the share of one of `ep_size` ranks.

    num_layers  layers kept, renumbered: sliding window, Engram, both kinds of KV owner, then reindex and reuse layers;
                40 keeps all. The draft head reads the last layers, at most three
    ep_size     experts are divided by it and routing goes to the rank's own ones only; Engram tables are divided by
                row. At 64, six experts serve each row: the load of one rank when all 64 have as many rows. The draft
                blocks keep at least as many experts as a row visits
    raises      ValueError
    """
    if not LEAST_LAYERS <= num_layers <= NUM_LAYERS:
        raise ValueError(f"layers must be in [{LEAST_LAYERS}, {NUM_LAYERS}], got {num_layers}")
    full = _released()
    if ep_size < 1 or _NUM_EXPERTS % ep_size or _NUM_EXPERTS // ep_size < full.num_experts_per_tok:
        raise ValueError(
            f"ep_size must divide {_NUM_EXPERTS} experts and leave {full.num_experts_per_tok}, got {ep_size}"
        )
    order = [*_PRIORITY, *(layer for layer in range(NUM_LAYERS) if layer not in _PRIORITY)]
    kept = sorted(order[:num_layers])
    ratios = tuple(_RATIOS[layer] for layer in kept)
    engram_layers = _renumbered(_ENGRAM_LAYERS, kept)
    assert full.engram is not None
    assert full.dspark is not None
    engram = replace(full.engram, layer_ids=engram_layers, vocab_size=max(_ENGRAM_VOCAB // ep_size, 2))
    engram = replace(engram, num_embeddings=tuple(int(primes.sum()) for primes in search_primes(engram)))
    boundary = ratios.index(1)
    dspark = replace(
        full.dspark,
        target_layer_ids=tuple(range(max(boundary, num_layers - _NUM_TAPS), num_layers)),
        n_routed_experts=max(_NUM_DRAFT_EXPERTS // ep_size, full.dspark.num_experts_per_tok),
    )
    return replace(
        full,
        num_hidden_layers=num_layers,
        compress_ratios=ratios,
        kv_source_layer_ids=_renumbered(_KV_SOURCES, kept),
        index_source_layer_ids=_renumbered(_INDEX_SOURCES, kept),
        candidate_source_layer_id=boundary,
        n_routed_experts=_NUM_EXPERTS // ep_size,
        engram=engram,
        dspark=dspark,
    )


def _renumbered(layers: tuple[int, ...], kept: list[int]) -> tuple[int, ...]:
    return tuple(kept.index(layer) for layer in layers if layer in kept)


def _released() -> ModelConfig:
    return ModelConfig(
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=1048576,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536),
        sliding_window=128,
        compress_ratios=_RATIOS,
        kv_source_layer_ids=_KV_SOURCES,
        index_source_layer_ids=_INDEX_SOURCES,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        moe_intermediate_size=2304,
        n_routed_experts=_NUM_EXPERTS,
        num_experts_per_tok=6,
        routed_scaling_factor=1.5,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram=EngramConfig(
            layer_ids=_ENGRAM_LAYERS,
            num_embeddings=(384006168, 384016682),
            max_ngram_size=4,
            vocab_size=_ENGRAM_VOCAB,
            n_heads=8,
            head_dim=256,
            pad_token_id=2,
            compressed_vocab_size=99092,
        ),
        dspark=DsparkConfig(
            num_blocks=3,
            block_size=5,
            noise_token_id=128799,
            target_layer_ids=(37, 38, 39),
            markov_rank=256,
            n_routed_experts=_NUM_DRAFT_EXPERTS,
            num_experts_per_tok=3,
        ),
        vision=None,
    )
