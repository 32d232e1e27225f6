"""Weights of the backbone and the draft blocks in the shape the operations want them.

Fused projections are pure concatenations on the output axis; each field says in which order. `Tensor` fields that were
BF16 in the checkpoint hold float32 (every bf16 value is exact in it), F32 fields stay float32; the two embedding tables
stay bfloat16, being looked up row by row. Weights of products are held as values or as the checkpoint's bytes, as the
precision wants them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal_kernels.ops.engram import EngramTable
    from shoal_kernels.ops.experts import ExpertWeights
    from shoal_kernels.ops.hyper_connections import MixWeight
    from shoal_kernels.ops.linear import LinearWeight
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKeyWeights:
    """What turns a compressed latent into an index key (`attn.indexer.{wk,k_norm}`)."""

    wk: LinearWeight
    """[index_head_dim, head_dim], BF16."""
    k_norm: Tensor
    """[index_head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One layer's attention. H heads of d = head_dim, Hi index heads of di, G output groups, rank o."""

    wq_a_wkv: LinearWeight
    """FP8 [q_lora_rank + d, D]: `wq_a` | `wkv`."""
    q_norm: Tensor
    """[q_lora_rank]."""
    kv_norm: Tensor
    """[d]."""
    wq_b: LinearWeight
    """FP8 [H*d (+ Hi*di), q_lora_rank]: `wq_b`, followed by `indexer.wq_b` on layers with an indexer."""
    attn_sink: Tensor
    """[H] float32."""
    wo_a: LinearWeight
    """FP8, G groups of [o, H/G*d]; group g serves heads g*H/G .. (g+1)*H/G - 1."""
    wo_b: LinearWeight
    """FP8 [D, G*o]."""
    compress_index: LinearWeight | None
    """BF16 [(d) + (d) + Hi, D]: `compressor.wgate` (FULL layers of ratio 2) | `compressor.wkv` (FULL layers) |
    `indexer.weights_proj` (FULL and REINDEX layers). Use float32 output; None on layers with no indexer."""
    compressor_norm: Tensor | None
    """[d], FULL layers only."""
    index_key: IndexKeyWeights | None
    """FULL layers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """One layer's experts. E routed experts of inner width I."""

    gate: LinearWeight
    """BF16 [E, D]; use float32 output."""
    bias: Tensor
    """[E] float32, added to the scores for selection only."""
    bias_vl: Tensor
    """[E] float32, in place of `bias` for image tokens."""
    experts: ExpertWeights
    """FP4, per expert `w1` | `w3` [2I, D] and `w2` [D, I]."""
    shared: ExpertWeights
    """FP8, the one shared expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramLayerWeights:
    """One Engram layer: the memory-mapped table, its hash and the gate. C columns of width w.

    Rows are hashed and looked up in host memory, so table and hash stay there; `wkv` and `gate_weight` compute.
    """

    table: EngramTable
    """[rows, w] FP8 with one scale per row and 32 values; mapped, never read whole."""
    multipliers: Tensor
    """[max_ngram_size] int64, odd."""
    primes: Tensor
    """[C] int64, columns in the order of the released layout: n-gram size, then head."""
    offsets: Tensor
    """[C] int64: first table row of each column."""
    wkv: LinearWeight
    """FP8 [(N+1)*D, C*w]: N keys, then the value."""
    gate_weight: Tensor
    """[N, D] float32: `q_weight` * `k_weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One backbone layer or draft block."""

    attn_norm: Tensor
    """[D]."""
    ffn_norm: Tensor
    """[D]."""
    hc_attn: MixWeight
    hc_ffn: MixWeight
    attn: AttentionWeights
    ffn: MoeWeights
    engram: EngramLayerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """The DSpark head (`mtp.*`). Embedding and lm head are the backbone's. R = markov rank, T = number of taps."""

    blocks: tuple[LayerWeights, ...]
    main_proj: LinearWeight
    """FP8 [D, T*D], input in ascending order of the target layers."""
    main_norm: Tensor
    """[D]."""
    norm: Tensor
    """[D]."""
    markov_embed: Tensor
    """[V, R] bfloat16."""
    markov_head: LinearWeight
    """BF16 [V, R]; use float32 output."""
    confidence: LinearWeight
    """BF16 [1, D + R], input h | e; use float32 output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneWeights:
    """All text weights of a checkpoint."""

    embed: Tensor
    """[V, D] bfloat16."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[D]."""
    head: LinearWeight
    """BF16 [V, D]; use float32 output."""
    compressed_ids: Tensor | None
    """[V] int64, in host memory: Engram's compressed id of every token id; None without Engram."""
    draft: DraftWeights | None
