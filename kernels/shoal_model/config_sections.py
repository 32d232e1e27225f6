"""The sections of `config.json` beside the backbone's own fields: YaRN, Engram, DSpark, vision.

Engram and DSpark are sets: all of their fields or none. Source: v41-flash specification, section 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_model.json_fields import Fields

# Far above any model, and low enough that a damaged number cannot have anyone list names or search primes for hours.
MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 14
_MAX_ENGRAM_HEADS = 1 << 8
_MAX_ENGRAM_VOCAB = 1 << 32

_ENGRAM_FIELDS = (
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
)
_DSPARK_FIELDS = (
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """`rope_scaling`: YaRN parameters of every layer with a compress ratio above 0."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """The `engram_*` fields. `num_embeddings[i]` rows belong to the table of layer `layer_ids[i]`."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Rows looked up per token and layer: one per n-gram size (2..max) and head."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def width(self) -> int:
        """Values gathered per token and layer, the input width of `engram.wkv`."""
        return self.columns * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkConfig:
    """The DSpark draft head: `num_nextn_predict_layers` and the `dspark_*` fields."""

    num_blocks: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`vision_config`: sizes of the vision tower and limits of the image preprocessing."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


def read_yarn(scaling: Fields) -> YarnScaling:
    """`rope_scaling`. Raises CheckpointError."""
    scaling.constant("rope_type", "yarn")
    if scaling.positive("beta_fast") <= scaling.positive("beta_slow"):
        raise scaling.fail("beta_fast", "must be greater than beta_slow")
    return YarnScaling(
        factor=scaling.number("factor", minimum=1.0),
        beta_fast=scaling.positive("beta_fast"),
        beta_slow=scaling.positive("beta_slow"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )


def _whole_set(text: Fields, names: tuple[str, ...]) -> bool:
    """Whether the set is there. Raises CheckpointError for a part of it: a silent default would change the model."""
    present = [name for name in names if text.has(name)]
    missing = [name for name in names if not text.has(name)]
    if present and missing:
        raise text.fail(missing[0], f"is missing while {present[0]} is set")
    return bool(present)


def read_engram(text: Fields, vocab_size: int, num_layers: int) -> EngramConfig | None:
    """The Engram set, None if it is absent. Raises CheckpointError."""
    if not _whole_set(text, _ENGRAM_FIELDS):
        return None
    return EngramConfig(
        layer_ids=text.ascending("engram_layer_ids", below=num_layers),
        num_embeddings=text.integers("engram_num_embeddings", minimum=1),
        max_ngram_size=text.integer("engram_max_ngram_size", minimum=2),
        vocab_size=text.integer("engram_vocab_size", minimum=2, below=_MAX_ENGRAM_VOCAB),
        n_heads=text.integer("engram_n_heads", below=_MAX_ENGRAM_HEADS),
        head_dim=text.integer("engram_head_dim"),
        pad_token_id=text.integer("engram_pad_token_id", minimum=0, below=vocab_size),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size", below=vocab_size + 1),
    )


def read_dspark(text: Fields, vocab_size: int, num_layers: int) -> DsparkConfig | None:
    """The DSpark set, None if it is absent. Raises CheckpointError."""
    if not _whole_set(text, _DSPARK_FIELDS):
        return None
    n_routed = text.integer("dspark_n_routed_experts", below=MAX_EXPERTS)
    return DsparkConfig(
        num_blocks=text.integer("num_nextn_predict_layers", below=MAX_LAYERS),
        block_size=text.integer("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id", minimum=0, below=vocab_size),
        target_layer_ids=text.ascending("dspark_target_layer_ids", below=num_layers),
        markov_rank=text.integer("dspark_markov_rank"),
        n_routed_experts=n_routed,
        num_experts_per_tok=text.integer("dspark_num_experts_per_tok", below=n_routed + 1),
    )


def read_vision(vision: Fields) -> VisionConfig:
    """`vision_config`. Raises CheckpointError."""
    vision.constant("model_type", "deepseek_v41_vision")
    hidden_size = vision.integer("hidden_size")
    heads = vision.integer("num_attention_heads")
    if hidden_size % heads or (hidden_size // heads) % 4:
        raise vision.fail("num_attention_heads", f"must divide hidden_size {hidden_size} into multiples of 4")
    return VisionConfig(
        num_hidden_layers=vision.integer("num_hidden_layers", below=MAX_LAYERS),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        rope_theta=vision.number("rope_theta", minimum=1.0),
        downsample_ratio=vision.integer("downsample_ratio"),
        max_image_tokens=vision.integer("max_image_tokens", minimum=4),
        min_pixels=vision.integer("min_pixels"),
        max_wh_ratio=vision.positive("max_wh_ratio") if vision.has("max_wh_ratio") else None,
    )
