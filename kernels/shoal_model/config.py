"""The released fields of `config.json`, read strictly. Source: v41-flash specification, section 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_model.config_checks import check_consistency
from shoal_model.config_sections import (
    MAX_EXPERTS,
    MAX_LAYERS,
    DsparkConfig,
    EngramConfig,
    VisionConfig,
    YarnScaling,
    read_dspark,
    read_engram,
    read_vision,
    read_yarn,
)
from shoal_model.json_fields import Fields, read_object

__all__ = ["WEIGHT_BLOCK", "DsparkConfig", "EngramConfig", "ModelConfig", "VisionConfig", "YarnScaling"]

WEIGHT_BLOCK = 32
"""Rows and columns of an FP8 weight that share one scale; also the group of the Q8 and Q4ue casts."""

_MIN_ROPE_THETA = 2.0
"""YaRN divides by its logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One DeepSeek-V4.1 configuration; names are those of `config.json`, text fields at the top.

    `engram`, `dspark` and `vision` are None when the checkpoint has none of their fields; a part of a set is refused.
    `compress_ratios` holds the backbone layers only (the draft blocks' entries are checked to be 0 and dropped).
    Invariant: the fields are consistent with each other and with what this implementation computes.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig | None
    dspark: DsparkConfig | None
    vision: VisionConfig | None

    @property
    def boundary(self) -> int:
        """First decoder layer (E): the first layer with ratio 1. Layers below it form the causal encoder."""
        return self.compress_ratios.index(1)

    @property
    def num_draft_blocks(self) -> int:
        return self.dspark.num_blocks if self.dspark else 0

    @property
    def hc_mix_size(self) -> int:
        """Outputs of one hyper-connection mix: pre [N], post [N] and comb [N, N]."""
        return self.hc_mult * (self.hc_mult + 2)

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json. Raises CheckpointError naming the field at fault."""
        path = Path(directory) / "config.json"
        return cls.from_fields(read_object(path), path)

    @classmethod
    def from_fields(cls, values: Mapping[str, object], path: str | Path = "config.json") -> ModelConfig:
        """Build from a parsed config.json. Raises CheckpointError; `path` only names the file in its message."""
        root = Fields(values, path)
        root.constant("architectures", ["DeepseekV41ForCausalLM"])
        root.constant("model_type", "deepseek_v41")
        root.constant("dtype", "bfloat16")
        _check_quantization(root.section("quantization_config"))
        text = root.section("text_config")
        _check_fixed_text(text)
        vocab_size = text.integer("vocab_size")
        num_layers = text.integer("num_hidden_layers", below=MAX_LAYERS)
        vision = read_vision(root.section("vision_config")) if root.has("vision_config") else None
        dspark = read_dspark(text, vocab_size, num_layers)
        config = cls(
            bos_token_id=root.integer("bos_token_id", minimum=0, below=vocab_size),
            eos_token_id=root.integer("eos_token_id", minimum=0, below=vocab_size),
            pad_token_id=root.integer("pad_token_id", minimum=0, below=vocab_size),
            image_token_id=root.integer("image_token_id", minimum=0, below=vocab_size)
            if vision or root.has("image_token_id")
            else None,
            vocab_size=vocab_size,
            hidden_size=text.integer("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=text.integer("num_attention_heads"),
            head_dim=text.integer("head_dim"),
            qk_rope_head_dim=text.integer("qk_rope_head_dim"),
            q_lora_rank=text.integer("q_lora_rank"),
            o_groups=text.integer("o_groups"),
            o_lora_rank=text.integer("o_lora_rank"),
            swiglu_limit=text.positive("swiglu_limit"),
            rms_norm_eps=text.positive("rms_norm_eps"),
            max_position_embeddings=text.integer("max_position_embeddings"),
            rope_theta=text.number("rope_theta", minimum=_MIN_ROPE_THETA),
            compress_rope_theta=text.number("compress_rope_theta", minimum=_MIN_ROPE_THETA),
            rope_scaling=read_yarn(text.section("rope_scaling")),
            sliding_window=text.integer("sliding_window"),
            compress_ratios=_ratios(text, num_layers, dspark.num_blocks if dspark else 0),
            kv_source_layer_ids=text.ascending("kv_source_layer_ids", below=num_layers),
            index_source_layer_ids=text.ascending("index_source_layer_ids", below=num_layers),
            index_n_heads=text.integer("index_n_heads"),
            index_head_dim=text.integer("index_head_dim"),
            index_topk=text.integer("index_topk"),
            candidate_source_layer_id=text.integer("candidate_source_layer_id", minimum=0, below=num_layers),
            candidate_topk_blocks=text.integer("candidate_topk_blocks"),
            candidate_block_size=text.integer("candidate_block_size"),
            moe_intermediate_size=text.integer("moe_intermediate_size"),
            n_routed_experts=text.integer("n_routed_experts", below=MAX_EXPERTS),
            num_experts_per_tok=text.integer("num_experts_per_tok"),
            routed_scaling_factor=text.positive("routed_scaling_factor"),
            hc_mult=text.integer("hc_mult"),
            hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters"),
            hc_eps=text.number("hc_eps"),
            engram=read_engram(text, vocab_size, num_layers),
            dspark=dspark,
            vision=vision,
        )
        check_consistency(config, text)
        return config


def _check_quantization(quantization: Fields) -> None:
    quantization.constant("quant_method", "fp8")
    quantization.constant("activation_scheme", "dynamic")
    quantization.constant("weight_block_size", [WEIGHT_BLOCK, WEIGHT_BLOCK])
    quantization.constant("scale_fmt", "ue8m0")
    quantization.constant("expert_dtype", "fp4")


def _check_fixed_text(text: Fields) -> None:
    """Fields whose other values would mean another computation than the one implemented."""
    text.constant("model_type", "deepseek_v41_text")
    text.constant("num_key_value_heads", 1)
    text.constant("attention_bias", False)
    text.constant("attention_dropout", 0.0)
    text.constant("hidden_act", "silu")
    text.constant("tie_word_embeddings", False)
    text.constant("n_shared_experts", 1)
    text.constant("scoring_func", "sqrtsoftplus")
    text.constant("topk_method", "noaux_tc")
    text.constant("norm_topk_prob", True)
    # Absent in the release, which means true.
    text.constant("hc_shifted", True, default=True)
    text.constant("dspark_target_attn_input", True, default=True)
    text.constant("use_fp4_sparse_kv", True, default=True)
    if text.has("index_k_source_layer_ids"):
        text.constant("index_k_source_layer_ids", list(text.integers("kv_source_layer_ids")))


def _ratios(text: Fields, num_layers: int, num_blocks: int) -> tuple[int, ...]:
    ratios = text.integers("compress_ratios", below=3)
    if len(ratios) != num_layers + num_blocks:
        raise text.fail(
            "compress_ratios", f"must have {num_layers} layers + {num_blocks} draft blocks entries, got {len(ratios)}"
        )
    if any(ratios[num_layers:]):
        raise text.fail("compress_ratios", f"must be 0 for the draft blocks, got {list(ratios[num_layers:])}")
    return ratios[:num_layers]
