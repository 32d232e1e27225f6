"""Every tensor a checkpoint of a given configuration holds: name, shape, storage type.

Source: v41-flash specification, section 3. On the released configuration the sum is 96,085 tensors and
763,205,315,794 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from shoal_model.config import WEIGHT_BLOCK, EngramConfig, ModelConfig, VisionConfig
from shoal_model.layer_map import AttentionMode, LayerPlan, build_layer_map


class StorageType(Enum):
    """Storage types of the released layout, spelled as in a safetensors header."""

    BF16 = "BF16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    FP4_PAIRS = "I8"
    """Two e2m1 codes a byte, the even index in the low nibble."""

    @property
    def bytes(self) -> int:
        """Bytes of one stored element."""
        return {StorageType.BF16: 2, StorageType.F32: 4}.get(self, 1)


class Part(Enum):
    """Which part of the model a tensor belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    EXPERTS = "experts"
    """Routed experts: what an expert-parallel group divides by expert."""
    DENSE = "dense"
    """Norms, hyper-connections, gates, shared experts."""
    ENGRAM_TABLE = "engram table"
    """What an expert-parallel group divides by row."""
    ENGRAM = "engram"
    HEAD = "head"
    VISION = "vision"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the checkpoint must hold under one name. `layer` is the backbone layer, `draft_block` the DSpark block."""

    name: str
    shape: tuple[int, ...]
    storage: StorageType
    part: Part
    layer: int | None = None
    draft_block: int | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.storage.bytes

    @property
    def parameters(self) -> int:
        """Weights in it: scales are not counted, a byte of FP4 pairs counts as two."""
        if self.storage is StorageType.F8_E8M0:
            return 0
        return prod(self.shape) * (2 if self.storage is StorageType.FP4_PAIRS else 1)


def build_inventory(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """All tensors by name, in reading order: globals, layers, draft blocks, vision.

    The image tensors (vision tower, aligner, the three learned rows) belong to it only with `config.vision`.
    """
    specs: dict[str, TensorSpec] = {}
    for spec in _all(config):
        assert spec.name not in specs
        specs[spec.name] = spec
    return specs


class _Scope:
    """Makes the specs below one name prefix."""

    def __init__(self, prefix: str, *, layer: int | None = None, draft_block: int | None = None) -> None:
        self._prefix = prefix
        self._layer = layer
        self._draft_block = draft_block

    def tensor(self, name: str, storage: StorageType, part: Part, *shape: int) -> TensorSpec:
        return TensorSpec(
            name=self._prefix + name,
            shape=shape,
            storage=storage,
            part=part,
            layer=self._layer,
            draft_block=self._draft_block,
        )

    def bf16(self, name: str, part: Part, *shape: int) -> TensorSpec:
        return self.tensor(name, StorageType.BF16, part, *shape)

    def f32(self, name: str, part: Part, *shape: int) -> TensorSpec:
        return self.tensor(name, StorageType.F32, part, *shape)

    def fp8(self, name: str, part: Part, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield self.tensor(f"{name}.weight", StorageType.F8_E4M3, part, rows, columns)
        yield self.tensor(f"{name}.scale", StorageType.F8_E8M0, part, _blocks(rows), _blocks(columns))

    def fp4(self, name: str, part: Part, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield self.tensor(f"{name}.weight", StorageType.FP4_PAIRS, part, rows, columns // 2)
        yield self.tensor(f"{name}.scale", StorageType.F8_E8M0, part, rows, _blocks(columns))


def _blocks(size: int) -> int:
    return -(-size // WEIGHT_BLOCK)


def _all(config: ModelConfig) -> Iterator[TensorSpec]:
    root = _Scope("")
    width = config.hidden_size
    yield root.bf16("embed.weight", Part.EMBEDDING, config.vocab_size, width)
    for plan in build_layer_map(config).layers:
        scope = _Scope(f"layers.{plan.layer}.", layer=plan.layer)
        yield from _block(config, scope, config.n_routed_experts)
        yield from _compressed_attention(config, scope, plan)
        if config.engram is not None and plan.has_engram:
            rows = config.engram.num_embeddings[config.engram.layer_ids.index(plan.layer)]
            yield from _engram(config, config.engram, scope, rows)
    yield root.bf16("norm.weight", Part.DENSE, width)
    yield root.bf16("head.weight", Part.HEAD, config.vocab_size, width)
    yield from _draft(config)
    if config.vision is not None:
        for name in ("image_start", "image_end", "image_newline"):
            yield root.bf16(name, Part.VISION, width)
        yield from _vision(config.vision, width)


def _block(config: ModelConfig, scope: _Scope, num_experts: int) -> Iterator[TensorSpec]:
    """The tensors that every backbone layer and every draft block has."""
    width, heads = config.hidden_size, config.num_attention_heads
    attn_width = heads * config.head_dim
    output_rank = config.o_groups * config.o_lora_rank
    yield from scope.fp8("attn.wq_a", Part.ATTENTION, config.q_lora_rank, width)
    yield scope.bf16("attn.q_norm.weight", Part.ATTENTION, config.q_lora_rank)
    yield from scope.fp8("attn.wq_b", Part.ATTENTION, attn_width, config.q_lora_rank)
    yield from scope.fp8("attn.wkv", Part.ATTENTION, config.head_dim, width)
    yield scope.bf16("attn.kv_norm.weight", Part.ATTENTION, config.head_dim)
    yield scope.f32("attn.attn_sink", Part.ATTENTION, heads)
    yield from scope.fp8("attn.wo_a", Part.ATTENTION, output_rank, attn_width // config.o_groups)
    yield from scope.fp8("attn.wo_b", Part.ATTENTION, width, output_rank)
    for side in ("attn", "ffn"):
        yield scope.bf16(f"{side}_norm.weight", Part.DENSE, width)
        yield scope.f32(f"hc_{side}_fn", Part.DENSE, config.hc_mix_size, config.hc_mult * width)
        yield scope.f32(f"hc_{side}_base", Part.DENSE, config.hc_mix_size)
        yield scope.f32(f"hc_{side}_scale", Part.DENSE, 3)
    yield scope.bf16("ffn.gate.weight", Part.DENSE, num_experts, width)
    yield scope.f32("ffn.gate.bias", Part.DENSE, num_experts)
    yield scope.f32("ffn.gate.bias_vl", Part.DENSE, num_experts)
    inner = config.moe_intermediate_size
    for name, rows, columns in (("w1", inner, width), ("w3", inner, width), ("w2", width, inner)):
        for expert in range(num_experts):
            yield from scope.fp4(f"ffn.experts.{expert}.{name}", Part.EXPERTS, rows, columns)
        yield from scope.fp8(f"ffn.shared_experts.{name}", Part.DENSE, rows, columns)


def _compressed_attention(config: ModelConfig, scope: _Scope, plan: LayerPlan) -> Iterator[TensorSpec]:
    width, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    if plan.mode is AttentionMode.FULL:
        yield scope.bf16("attn.compressor.wkv.weight", Part.ATTENTION, head_dim, width)
        if plan.ratio > 1:
            yield scope.bf16("attn.compressor.wgate.weight", Part.ATTENTION, head_dim, width)
        yield scope.bf16("attn.compressor.norm.weight", Part.ATTENTION, head_dim)
        yield scope.bf16("attn.indexer.wk.weight", Part.ATTENTION, index_dim, head_dim)
        yield scope.bf16("attn.indexer.k_norm.weight", Part.ATTENTION, index_dim)
    if plan.has_indexer:
        yield from scope.fp8("attn.indexer.wq_b", Part.ATTENTION, config.index_n_heads * index_dim, config.q_lora_rank)
        yield scope.bf16("attn.indexer.weights_proj.weight", Part.ATTENTION, config.index_n_heads, width)


def _engram(config: ModelConfig, engram: EngramConfig, scope: _Scope, rows: int) -> Iterator[TensorSpec]:
    width, streams = config.hidden_size, config.hc_mult
    yield scope.tensor("engram.embed.weight", StorageType.F8_E4M3, Part.ENGRAM_TABLE, rows, engram.head_dim)
    # Unlike an FP8 matrix, a table has a scale per row: rows are read one by one.
    yield scope.tensor("engram.embed.scale", StorageType.F8_E8M0, Part.ENGRAM_TABLE, rows, _blocks(engram.head_dim))
    yield from scope.fp8("engram.wkv", Part.ENGRAM, (streams + 1) * width, engram.width)
    yield scope.bf16("engram.q_weight", Part.ENGRAM, streams, width)
    yield scope.bf16("engram.k_weight", Part.ENGRAM, streams, width)


def _draft(config: ModelConfig) -> Iterator[TensorSpec]:
    dspark = config.dspark
    if dspark is None:
        return
    width = config.hidden_size
    for block in range(dspark.num_blocks):
        yield from _block(config, _Scope(f"mtp.{block}.", draft_block=block), dspark.n_routed_experts)
    first = _Scope("mtp.0.", draft_block=0)
    yield from first.fp8("main_proj", Part.HEAD, width, len(dspark.target_layer_ids) * width)
    yield first.bf16("main_norm.weight", Part.HEAD, width)
    last = _Scope(f"mtp.{dspark.num_blocks - 1}.", draft_block=dspark.num_blocks - 1)
    yield last.bf16("norm.weight", Part.HEAD, width)
    yield last.bf16("markov_head.embed.weight", Part.HEAD, config.vocab_size, dspark.markov_rank)
    yield last.bf16("markov_head.head.weight", Part.HEAD, config.vocab_size, dspark.markov_rank)
    yield last.bf16("confidence_head.proj.weight", Part.HEAD, 1, width + dspark.markov_rank)


def _vision(vision: VisionConfig, text_width: int) -> Iterator[TensorSpec]:
    width, inner = vision.hidden_size, vision.intermediate_size
    patch_values = 3 * vision.patch_size**2
    scope = _Scope("vision.")
    yield scope.bf16("patch_embed.proj.weight", Part.VISION, width, patch_values)
    yield scope.bf16("patch_embed.proj.bias", Part.VISION, width)
    for block in range(vision.num_hidden_layers):
        inside = _Scope(f"vision.blocks.{block}.")
        for name in ("norm1", "norm2"):
            yield inside.bf16(f"{name}.weight", Part.VISION, width)
        for name, rows in (("wqkv", 3 * width), ("wo", width)):
            yield inside.bf16(f"attn.{name}.weight", Part.VISION, rows, width)
            yield inside.bf16(f"attn.{name}.bias", Part.VISION, rows)
        yield inside.bf16("mlp.w1.weight", Part.VISION, 2 * inner, width)
        yield inside.bf16("mlp.w2.weight", Part.VISION, width, inner)
    yield scope.bf16("norm.weight", Part.VISION, width)
    aligner = _Scope("aligner.")
    for name, columns in (("w1", width * vision.downsample_ratio**2), ("w2", text_width)):
        yield aligner.bf16(f"{name}.weight", Part.VISION, text_width, columns)
        yield aligner.bf16(f"{name}.bias", Part.VISION, text_width)
