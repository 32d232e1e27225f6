"""Hyper-parameters of nano, and the `config.json` they become."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoConfig:
    """One V4.1 architecture at small size. Field names follow the released `text_config`.

    The defaults are the shipped nano model; tests build other sizes. Inner sizes of FP8 and FP4 matrices are
    multiples of 32 because scales cover groups of 32.
    """

    vocab_size: int = 3584
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 96
    o_groups: int = 2
    o_lora_rank: int = 64
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    original_max_position_embeddings: int = 2048
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 4)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 6)
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 64
    candidate_source_layer_id: int = 4
    candidate_topk_blocks: int = 64
    candidate_block_size: int = 8
    moe_intermediate_size: int = 96
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 4
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 3)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 1000
    engram_n_heads: int = 2
    engram_head_dim: int = 32
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 8
    dspark_target_layer_ids: tuple[int, ...] = (5, 6, 7)
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 4
    dspark_num_experts_per_tok: int = 2
    image_token_id: int = 0

    @property
    def decoder_start(self) -> int:
        """First layer of ratio 1: the first one that bounded replay runs on the kept rows only."""
        return self.compress_ratios.index(1)

    def source_of(self, layer: int, sources: tuple[int, ...]) -> int:
        """Largest source id <= layer. Raises ValueError if there is none."""
        return max(s for s in sources if s <= layer)


_DIRECT = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups o_lora_rank "
    "swiglu_limit rms_norm_eps max_position_embeddings rope_theta compress_rope_theta sliding_window compress_ratios "
    "kv_source_layer_ids index_source_layer_ids index_n_heads index_head_dim index_topk candidate_source_layer_id "
    "candidate_topk_blocks candidate_block_size moe_intermediate_size n_routed_experts num_experts_per_tok "
    "routed_scaling_factor hc_mult hc_sinkhorn_iters hc_eps engram_layer_ids engram_max_ngram_size engram_vocab_size "
    "engram_n_heads engram_head_dim engram_pad_token_id engram_compressed_vocab_size num_nextn_predict_layers "
    "dspark_block_size dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank dspark_n_routed_experts "
    "dspark_num_experts_per_tok"
).split()


def config_json(config: NanoConfig, engram_rows: list[int]) -> dict[str, object]:
    """The released `config.json` of a text-only checkpoint; `engram_rows` is the row count of each Engram table."""
    text: dict[str, object] = {"model_type": "deepseek_v41_text"}
    for name in _DIRECT:
        value = getattr(config, name)
        text[name] = list(value) if isinstance(value, tuple) else value
    text |= {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "engram_num_embeddings": engram_rows,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": config.original_max_position_embeddings,
        },
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": config.image_token_id,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def config_from_json(data: dict[str, object]) -> NanoConfig:
    """Inverse of `config_json`. Raises KeyError for a missing field."""
    text = data["text_config"]
    assert isinstance(text, dict)
    fields = {name: tuple(text[name]) if isinstance(text[name], list) else text[name] for name in _DIRECT}
    scaling = text["rope_scaling"]
    return NanoConfig(
        **fields,
        rope_factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        image_token_id=data["image_token_id"],  # type: ignore[arg-type]
    )
