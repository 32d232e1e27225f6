"""V4.1's backbone as a differentiable function of packed rows.

source  v41-flash.md sections 5 to 9
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_nano import ops
from shoal_nano.attention import Sight, plain_attention, visible_entries
from shoal_nano.config import NanoConfig
from shoal_nano.engram import EngramLayout, engram_layout, engram_rows
from shoal_nano.ops import Numerics
from shoal_nano.weights import Parameters, served_weights

Served = dict[str, list[Tensor]]


@dataclass(slots=True)
class Forward:
    """Results of one pass over packed rows.

    hidden    [B, T, D] after the last norm
    features  [B, T, 3 * D] DSpark taps
    loads     [L, E] chosen counts of real tokens
    index_loss  mean divergence of the indexer from the attention it serves, over the sampled rows
    """

    hidden: Tensor
    features: Tensor
    loads: Tensor
    index_loss: Tensor


@dataclass(slots=True)
class _Shared:
    """What source layers hand to the layers after them."""

    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    sampled_scores: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    divergences: list[Tensor] = field(default_factory=list)


def rope_frequencies(c: NanoConfig, compressed: bool) -> Tensor:
    """float64[rope_dim / 2]: plain RoPE for ratio-0 layers, YaRN for the others (section 7.1)."""
    rd = c.qk_rope_head_dim
    i = torch.arange(rd // 2, dtype=torch.float64)
    if not compressed:
        return c.rope_theta ** (-2 * i / rd)
    f = c.compress_rope_theta ** (-2 * i / rd)

    def turn(beta: float) -> float:
        return rd * math.log(c.original_max_position_embeddings / (2 * math.pi * beta)) / (2 * math.log(c.compress_rope_theta))

    low, high = max(math.floor(turn(32.0)), 0), min(math.ceil(turn(1.0)), rd - 1)
    m = 1 - ((i - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f / c.rope_factor * (1 - m) + f * m


def best_of(score: Tensor, k: int) -> Tensor:
    """bool like `score`: its k largest of the last axis, never -inf. Ties go to the lowest index on CPU, to any on a GPU."""
    k = min(k, score.shape[-1])
    if score.device.type == "cpu":
        values, indices = (x[..., :k] for x in torch.sort(score, dim=-1, descending=True, stable=True))
    else:
        values, indices = score.topk(k, -1)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, indices, values > float("-inf"))


class Net:
    """The model: parameters in, hidden rows out. `compiled` fuses the pointwise parts (GPU training).

    sparse  whether layers read only the indexer's choice
    """

    def __init__(self, config: NanoConfig, compressed_ids: Tensor, numerics: Numerics, *, compiled: bool = False,
                 attention: Callable[..., tuple[Tensor, Tensor]] = plain_attention) -> None:  # fmt: skip
        self.config, self.nu = config, numerics
        self.compressed_ids = compressed_ids
        self.attention = attention
        self.layout: EngramLayout = engram_layout(config)
        self._tables: dict[tuple[bool, int, str], tuple[Tensor, Tensor]] = {}
        self._ops: dict[str, Callable[..., Any]] = {}
        self._compiled = compiled

    def op(self, name: str, *arguments: Any) -> Any:
        """Run a function of `ops`, compiled once per name if this net compiles."""
        if not self._compiled:
            return getattr(ops, name)(*arguments)
        if name not in self._ops:
            self._ops[name] = torch.compile(getattr(ops, name), dynamic=False)
        return self._ops[name](*arguments)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """bf16 product with float32 accumulation; on CPU computed in float32, which is far faster there."""
        if x.dtype == torch.bfloat16 and x.device.type == "cpu":
            return F.linear(x.float(), w.float()).to(x.dtype)
        return F.linear(x, w)

    def linear32(self, x: Tensor, w: Tensor) -> Tensor:
        """Product kept in the numerics' inner dtype (router, head, pooled compressor)."""
        return F.linear(x.to(self.nu.math), w.to(self.nu.math))

    def angles(self, compressed: bool, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., rope_dim / 2] at `positions`."""
        frequencies = rope_frequencies(self.config, compressed).to(positions.device)
        angle = positions.to(torch.float64)[..., None] * frequencies
        return angle.cos().to(self.nu.math), angle.sin().to(self.nu.math)

    def _angles_of(self, compressed: bool, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (compressed, length, str(device))
        if key not in self._tables:
            self._tables[key] = self.angles(compressed, torch.arange(length, device=device))
        return self._tables[key]

    def serve(self, parameters: Parameters) -> Served:
        """Weights as the checkpoint stores them, once per step."""
        return served_weights(parameters, self.config, self.nu)

    def forward(self, w: Served, ids: Tensor, start: Tensor, replay: Tensor, *, sparse: bool, sampled_rows: Tensor | None = None,
                probe: dict[str, Tensor] | None = None) -> Forward:  # fmt: skip
        """One causal pass. ids, start, replay int[B, T] as in `Packed`.

        sampled_rows  int64[R] positions at which the indexer's loss is taken, or None for no such loss
        probe         if given, receives named intermediates
        """
        c, nu = self.config, self.nu
        b, t = ids.shape
        rows = engram_rows(c, self.layout_on(ids.device), self.compressed_ids.to(ids.device), ids, start)
        h = F.embedding(ids, w["embed"][0]).flatten(0, 1)
        streams = h[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(b * t, c.hc_mult, device=ids.device, dtype=nu.math)
        pre[:, 0] = 1
        real = (ids != c.engram_pad_token_id).flatten().to(nu.math)[:, None]
        shared = _Shared()
        taps, loads = [], []
        for layer in range(c.num_hidden_layers):
            if layer in c.engram_layer_ids:
                e = c.engram_layer_ids.index(layer)
                streams = self._engram(w, e, rows[e].flatten(0, 1), streams)
            if layer in c.dspark_target_layer_ids:
                taps.append(streams.to(nu.math).mean(1).to(nu.act))
            if probe is not None:
                probe[f"layers.{layer}.streams_in"] = streams
            low = replay if layer >= c.decoder_start else start
            attend = self._attention_of(w, layer, low, start, shared, sparse, sampled_rows)
            streams, pre, chosen = self.block(w, "layers", layer, streams, pre, (b, t), attend, c.num_experts_per_tok)
            loads.append((chosen * real).sum(0))
        hidden = self.op("rms_norm", self.op("collapse", streams, pre, nu), w["norm"][0], c.rms_norm_eps, nu)
        zero = torch.zeros((), device=ids.device, dtype=nu.math)
        index_loss = torch.stack(shared.divergences).mean() if shared.divergences else zero
        return Forward(hidden=hidden.unflatten(0, (b, t)), features=torch.cat(taps, -1).unflatten(0, (b, t)),
                       loads=torch.stack(loads), index_loss=index_loss)  # fmt: skip

    def layout_on(self, device: torch.device) -> EngramLayout:
        """The Engram constants on `device`."""
        if self.layout.primes.device != device:
            old = self.layout
            self.layout = EngramLayout(primes=old.primes.to(device), offsets=old.offsets.to(device),
                                       multipliers=old.multipliers.to(device), rows=old.rows)  # fmt: skip
        return self.layout

    def logits(self, w: Served, hidden: Tensor) -> Tensor:
        return self.linear32(hidden, w["head"][0])

    def _engram(self, w: Served, e: int, rows: Tensor, streams: Tensor) -> Tensor:
        values = F.embedding(rows, w[f"engram.embed.{e}"][0]).flatten(1)
        kv = self.linear(values, w["engram.wkv"][e])
        return self.op("engram_gate", streams, kv, w["engram.q_weight"][e], w["engram.k_weight"][e], self.config.rms_norm_eps, self.nu)

    def block(self, w: Served, prefix: str, layer: int, streams: Tensor, pre: Tensor, shape: tuple[int, ...],
              attend: Callable[[Tensor, Tensor], Tensor], top: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One block of the backbone or the draft: attention and experts, each between mHC mixes.

        attend  (plain copy, Q8 copy), both [*shape, D] -> wo_a input [*shape, H * d]
        returns streams, the last pre, the experts' 0/1 choice [N, E]
        """
        c, nu = self.config, self.nu

        def part(name: str) -> Tensor:
            return w[f"{prefix}.{name}"][layer]

        def mix(kind: str) -> tuple[Tensor, Tensor, Tensor]:
            fn, scale, base = (part(f"hc_{kind}_{piece}") for piece in ("fn", "scale", "base"))
            return self.op("mix", streams, fn, scale, base, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, nu)

        a_pre, post, comb = mix("attn")
        plain, cast = self.op("collapse_norm_cast", streams, pre, part("attn_norm"), c.rms_norm_eps, nu)
        o = attend(plain.unflatten(0, shape), cast.unflatten(0, shape)).flatten(0, -2)
        groups = [self.linear(x, g) for x, g in zip(o.chunk(c.o_groups, -1), part("attn.wo_a").chunk(c.o_groups, 0), strict=True)]
        y = self.linear(self.op("q8", torch.cat(groups, -1), nu), part("attn.wo_b"))
        streams = self.op("expand", y, streams, post, comb, nu)
        f_pre, post, comb = mix("ffn")
        plain, cast = self.op("collapse_norm_cast", streams, a_pre, part("ffn_norm"), c.rms_norm_eps, nu)
        gate = self.linear32(plain, part("ffn.gate"))
        weights, chosen = self.op("router", gate, part("ffn.gate_bias"), top, c.routed_scaling_factor)
        u = self.op("swiglu", self.linear(cast, part("w13")), weights, c.swiglu_limit, nu)
        streams = self.op("expand", self.linear(u, part("w2all")), streams, post, comb, nu)
        return streams, f_pre, chosen

    def query(self, w: Served, prefix: str, layer: int, cast: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Q8 of the low-rank query [..., q] and the rotated heads [..., H, d]."""
        c, nu = self.config, self.nu
        raw = self.linear(cast, w[f"{prefix}.attn.wq_a"][layer])
        qr = self.op("norm_cast", raw, w[f"{prefix}.attn.q_norm"][layer], c.rms_norm_eps, nu)
        q = self.linear(qr, w[f"{prefix}.attn.wq_b"][layer]).unflatten(-1, (c.num_attention_heads, c.head_dim))
        return qr, self.op("rope", q, cos[..., None, :], sin[..., None, :], nu)

    def _attention_of(self, w: Served, layer: int, low: Tensor, start: Tensor, shared: _Shared, sparse: bool,
                      sampled: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
        c, nu = self.config, self.nu
        ratio = c.compress_ratios[layer]

        def attend(plain: Tensor, cast: Tensor) -> Tensor:
            t = plain.shape[1]
            cos, sin = self._angles_of(ratio > 0, t, plain.device)
            qr, q = self.query(w, "layers", layer, cast, cos, sin)
            raw = self.linear(cast, w["layers.attn.wkv"][layer])
            kv = self.op("window_kv", raw, w["layers.attn.kv_norm"][layer], cos, sin, c.rms_norm_eps, nu)
            entries = selected = None
            if ratio:
                source = c.source_of(layer, c.kv_source_layer_ids)
                if layer == source:
                    self._compress(w, layer, plain, shared, cos[::ratio], sin[::ratio])
                entries = shared.entries[source]
                chooser = c.source_of(layer, c.index_source_layer_ids)
                if layer == chooser:
                    self._index(w, layer, qr, plain, start, shared, (cos, sin), sparse, sampled)
                selected = shared.selected.get(chooser)
            sight = Sight(low=low, start=start, window=c.sliding_window, ratio=ratio, selected=selected)
            o, lse = self.attention(q, kv, entries, sight)
            if entries is not None and sampled is not None:
                chooser = c.source_of(layer, c.index_source_layer_ids)
                divergence = self._divergence(q, entries, lse, start, ratio, shared.sampled_scores[chooser], sampled)
                shared.divergences.append(divergence)
            sink = w["layers.attn.attn_sink"][layer]
            out: Tensor = self.op("attention_output", o, lse, sink, cos[:, None], sin[:, None], nu)
            return out

        return attend

    def _compress(self, w: Served, layer: int, plain: Tensor, shared: _Shared, cos: Tensor, sin: Tensor) -> None:
        c, nu = self.config, self.nu
        s = c.kv_source_layer_ids.index(layer)
        norm = w["compressor.norm"][s]
        if c.compress_ratios[layer] == 2:
            pooled = [i for i in c.kv_source_layer_ids if c.compress_ratios[i] == 2].index(layer)
            score, value = (self.linear32(plain, w[f"compressor.{k}"][i]) for k, i in (("wgate", pooled), ("wkv", s)))
            latent = self.op("pool_pairs", score, value, norm, c.rms_norm_eps, nu)
        else:
            latent = self.op("rms_norm", self.linear(plain, w["compressor.wkv"][s]), norm, c.rms_norm_eps, nu)
        shared.entries[layer] = self.op("main_kv", latent, cos, sin, nu)
        raw = self.linear(latent.detach(), w["indexer.wk"][s])
        shared.index_keys[layer] = self.op("index_key", raw, w["indexer.k_norm"][s], cos, sin, c.rms_norm_eps, nu)

    def _index(self, w: Served, layer: int, qr: Tensor, plain: Tensor, start: Tensor, shared: _Shared,
               angles: tuple[Tensor, Tensor], sparse: bool, sampled: Tensor | None) -> None:  # fmt: skip
        """Score entries and choose the best. Gradients reach the indexer through its own loss alone, so inputs are detached."""
        c, nu = self.config, self.nu
        i = c.index_source_layer_ids.index(layer)
        keys = shared.index_keys[c.source_of(layer, c.kv_source_layer_ids)]
        ratio = c.compress_ratios[layer]
        cos, sin = angles

        def scores(rows: Tensor | slice) -> Tensor:
            raw = self.linear(qr.detach()[:, rows], w["indexer.wq_b"][i]).unflatten(-1, (c.index_n_heads, c.index_head_dim))
            iq = self.op("index_vector", raw, cos[rows][:, None], sin[rows][:, None], nu)
            heads = self.linear(plain.detach()[:, rows], w["indexer.weights_proj"][i])
            out: Tensor = self.op("index_scores", iq, heads, keys, nu)
            return out

        if sampled is not None:
            shared.sampled_scores[layer] = scores(sampled)
        if not sparse:
            return
        with torch.no_grad():
            visible = visible_entries(start, ratio, keys.shape[1])
            score = scores(slice(None)).masked_fill(~visible, float("-inf"))
            if layer == c.candidate_source_layer_id:
                shared.candidates = self._candidates(score, start)
            elif ratio == 1 and shared.candidates is not None:
                score = score.masked_fill(~shared.candidates, float("-inf"))
            shared.selected[layer] = best_of(score, c.index_topk)

    def _candidates(self, score: Tensor, start: Tensor) -> Tensor:
        """bool[B, T, G]: entries of the best blocks. Documents start at block boundaries, so blocks never straddle them."""
        c = self.config
        size = c.candidate_block_size
        padded = F.pad(score, (0, -score.shape[-1] % size), value=float("-inf"))
        block = padded.unflatten(-1, (-1, size)).amax(-1)
        own = torch.arange(score.shape[1], device=score.device) // size
        last = own[:, None] == torch.arange(block.shape[-1], device=score.device)
        block = block.masked_fill(last, float("inf"))
        chosen = best_of(block, c.candidate_topk_blocks)
        return chosen.repeat_interleave(size, -1)[..., : score.shape[-1]]

    def _divergence(self, q: Tensor, entries: Tensor, lse: Tensor, start: Tensor, ratio: int, scores: Tensor, rows: Tensor) -> Tensor:
        """KL from the layer's attention over all visible entries (heads summed) to the softmax of the index scores."""
        with torch.no_grad():
            visible = visible_entries(start, ratio, entries.shape[1], rows)
            dots = torch.einsum("brhd,bgd->brhg", q[:, rows], entries).float() * q.shape[-1] ** -0.5
            mass = torch.exp((dots - lse[:, rows, :, None].float()).clamp(max=4.0)).sum(2) * visible
            total = mass.sum(-1, keepdim=True)
            target = mass / (total + 1e-9)
            weight = total[..., 0].clamp(max=q.shape[2]) * visible.any(-1)
        log_prob = torch.log_softmax(scores.float().masked_fill(~visible, -1e4), -1)
        kl = (target * (torch.log(target + 1e-9) - log_prob)).sum(-1)
        return (kl * weight).sum() / (weight.sum() + 1e-6)
