"""Nano's parameters: one stacked tensor per kind, so that casts and optimiser steps run over all layers at once.

`specs` names every stack with its shape; `served_weights` turns the master tensors into the values the checkpoint stores,
one list entry per layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_nano import quantise
from shoal_nano.config import NanoConfig
from shoal_nano.engram import engram_layout
from shoal_nano.ops import Numerics

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """shape: of the stack; storage: fp8, fp4, fp8_rows, bf16 or f32; init: standard deviation, or the fill value."""

    shape: tuple[int, ...]
    storage: str
    std: float = 0.0
    fill: float = 0.0


def _block_specs(prefix: str, layers: int, experts: int, c: NanoConfig) -> dict[str, Spec]:
    d, h, s = c.hidden_size, c.head_dim, c.hc_mult
    heads, q, o, i = c.num_attention_heads, c.q_lora_rank, c.o_groups * c.o_lora_rank, c.moe_intermediate_size
    group = heads * h // c.o_groups
    rows = s * (s + 2)
    out = 0.5 / math.sqrt(2 * c.num_hidden_layers)  # residual writers start small

    def matrix(*shape: int, storage: str = "fp8", gain: float = 1.0) -> Spec:
        return Spec(shape=(layers, *shape), storage=storage, std=gain / math.sqrt(shape[-1]))

    specs = {
        "attn.wq_a": matrix(q, d),
        "attn.q_norm": Spec(shape=(layers, q), storage="bf16", fill=1.0),
        "attn.wq_b": matrix(heads * h, q),
        "attn.wkv": matrix(h, d),
        "attn.kv_norm": Spec(shape=(layers, h), storage="bf16", fill=1.0),
        "attn.attn_sink": Spec(shape=(layers, heads), storage="f32"),
        "attn.wo_a": matrix(o, group),
        "attn.wo_b": matrix(d, o, gain=out * 2),
        "attn_norm": Spec(shape=(layers, d), storage="bf16", fill=1.0),
        "ffn_norm": Spec(shape=(layers, d), storage="bf16", fill=1.0),
        "ffn.gate": matrix(experts, d, storage="bf16"),
        "ffn.gate_bias": Spec(shape=(layers, experts), storage="f32"),
        "ffn.w1": matrix(experts, i, d, storage="fp4"),
        "ffn.w3": matrix(experts, i, d, storage="fp4"),
        "ffn.w2": matrix(experts, d, i, storage="fp4", gain=out * 2),
        "ffn.shared.w1": matrix(i, d),
        "ffn.shared.w3": matrix(i, d),
        "ffn.shared.w2": matrix(d, i, gain=out * 2),
    }
    for part in ("attn", "ffn"):
        specs[f"hc_{part}_fn"] = Spec(shape=(layers, rows, s * d), storage="f32", std=0.3 / math.sqrt(s * d))
        specs[f"hc_{part}_base"] = Spec(shape=(layers, rows), storage="f32", std=0.1)
        specs[f"hc_{part}_scale"] = Spec(shape=(layers, 3), storage="f32", fill=0.3)
    return {f"{prefix}.{name}": spec for name, spec in specs.items()}


def specs(c: NanoConfig) -> dict[str, Spec]:
    """Every parameter stack of the model and its draft blocks."""
    d, h = c.hidden_size, c.head_dim
    sources = c.kv_source_layer_ids
    pooled = [s for s in sources if c.compress_ratios[s] == 2]
    indexers = len(c.index_source_layer_ids)
    engrams = len(c.engram_layer_ids)
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    result = {
        "embed": Spec(shape=(c.vocab_size, d), storage="bf16", std=1.0),
        "head": Spec(shape=(c.vocab_size, d), storage="bf16", std=0.02),
        "norm": Spec(shape=(d,), storage="bf16", fill=1.0),
        **_block_specs("layers", c.num_hidden_layers, c.n_routed_experts, c),
        "compressor.wkv": Spec(shape=(len(sources), h, d), storage="bf16", std=d**-0.5),
        "compressor.wgate": Spec(shape=(len(pooled), h, d), storage="bf16", std=0.1 * d**-0.5),
        "compressor.norm": Spec(shape=(len(sources), h), storage="bf16", fill=1.0),
        "indexer.wk": Spec(shape=(len(sources), c.index_head_dim, h), storage="bf16", std=h**-0.5),
        "indexer.k_norm": Spec(shape=(len(sources), c.index_head_dim), storage="bf16", fill=1.0),
        "indexer.wq_b": Spec(shape=(indexers, c.index_n_heads * c.index_head_dim, c.q_lora_rank), storage="fp8", std=c.q_lora_rank**-0.5),
        "indexer.weights_proj": Spec(shape=(indexers, c.index_n_heads, d), storage="bf16", std=0.5 * d**-0.5),
        "engram.wkv": Spec(shape=(engrams, (c.hc_mult + 1) * d, columns), storage="fp8", std=columns**-0.5),
        "engram.q_weight": Spec(shape=(engrams, c.hc_mult, d), storage="bf16", fill=1.0),
        "engram.k_weight": Spec(shape=(engrams, c.hc_mult, d), storage="bf16", fill=1.0),
        **_block_specs("mtp", c.num_nextn_predict_layers, c.dspark_n_routed_experts, c),
        "mtp.main_proj": Spec(shape=(d, len(c.dspark_target_layer_ids) * d), storage="fp8", std=(3 * d) ** -0.5),
        "mtp.main_norm": Spec(shape=(d,), storage="bf16", fill=1.0),
        "mtp.norm": Spec(shape=(d,), storage="bf16", fill=1.0),
        "mtp.markov_embed": Spec(shape=(c.vocab_size, c.dspark_markov_rank), storage="bf16", std=0.1),
        "mtp.markov_head": Spec(shape=(c.vocab_size, c.dspark_markov_rank), storage="bf16", std=0.02),
        "mtp.confidence": Spec(shape=(1, d + c.dspark_markov_rank), storage="bf16", std=0.01),
    }
    for e, rows in enumerate(engram_layout(c).rows):
        result[f"engram.embed.{e}"] = Spec(shape=(rows, c.engram_head_dim), storage="fp8_rows", std=0.5)
    return result


def initial_parameters(c: NanoConfig, seed: int) -> Parameters:
    """Seeded float32 start values. mHC starts as a mean over the streams, each stream mostly keeping itself."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, spec in specs(c).items():
        noise = torch.randn(spec.shape, generator=generator) * spec.std if spec.std else torch.zeros(spec.shape)
        value = noise + spec.fill
        if name.endswith("_base"):
            s = c.hc_mult
            value[:, :s] -= math.log(s - 1)
            value[:, 2 * s :] += 3 * torch.eye(s).flatten()
        result[name] = value
    return result


_CASTS = {"fp8": quantise.fp8_weight, "fp4": quantise.fp4_weight, "fp8_rows": quantise.fp8_rows}


def stored_value(value: Tensor, storage: str) -> Tensor:
    """What a checkpoint keeps of a master tensor: float32 in, float32 out, differentiable."""
    if storage in _CASTS:
        return _CASTS[storage](value)
    return value if storage == "f32" else quantise.straight_through(value, value.to(torch.bfloat16).float())


def served_weights(parameters: Parameters, c: NanoConfig, nu: Numerics) -> dict[str, list[Tensor]]:
    """Per name a list over layers, in the numerics' dtype; single tensors become a list of one.

    Adds `*.w13` and `*.w2all`: gate and up matrices of all experts and the shared one in one matrix, and their down matrices.
    """
    stacked = {"layers.", "mtp.attn", "mtp.ffn", "mtp.hc", "compressor.", "indexer.", "engram.wkv", "engram.q", "engram.k"}
    served: dict[str, list[Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, spec in specs(c).items():
        value = parameters[name]
        if nu.casts:
            value = _CASTS[spec.storage](value) if spec.storage in _CASTS else value
        whole[name] = value if spec.storage == "f32" else value.to(nu.act)
        if not any(name.startswith(prefix) for prefix in stacked):
            served[name] = [whole[name]]
    for prefix in ("layers", "mtp"):
        w = {k: whole.pop(f"{prefix}.ffn.{k}") for k in ("w1", "w2", "w3", "shared.w1", "shared.w2", "shared.w3")}
        halves = [torch.cat((w[k].flatten(1, 2), w[f"shared.{k}"]), 1) for k in ("w1", "w3")]
        whole[f"{prefix}.w13"] = torch.cat(halves, 1)
        down = w["w2"].permute(0, 2, 1, 3).flatten(2)
        whole[f"{prefix}.w2all"] = torch.cat((down, w["shared.w2"]), 2)
    for name, value in whole.items():
        if name not in served:
            served[name] = list(value.unbind(0))
    return served
