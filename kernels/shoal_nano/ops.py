"""The pointwise parts of a V4.1 block as plain functions on tensors, so that a compiler can fuse each of them.

`Numerics` says what the arithmetic is: `EXACT` is float64 without casts, `SERVED` holds activations in bfloat16, computes
in float32 and applies every released cast. N rows = batch x positions; D hidden size; S streams.

source  v41-flash.md sections 5 to 9
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_nano import quantise


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """act: dtype of activations between operations; math: dtype inside them; casts: FP8/FP4 casts on or off."""

    act: torch.dtype
    math: torch.dtype
    casts: bool


SERVED = Numerics(act=torch.bfloat16, math=torch.float32, casts=True)
EXACT = Numerics(act=torch.float64, math=torch.float64, casts=False)


def q8(x: Tensor, nu: Numerics) -> Tensor:
    return quantise.q8(x) if nu.casts else x


def rms_norm(x: Tensor, w: Tensor, eps: float, nu: Numerics) -> Tensor:
    """bf16(x / rms(x) * w) over the last axis."""
    y = x.to(nu.math)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * w.to(nu.act).to(nu.math)).to(nu.act)


def norm_cast(x: Tensor, w: Tensor, eps: float, nu: Numerics) -> Tensor:
    return q8(rms_norm(x, w, eps, nu), nu)


def collapse(streams: Tensor, pre: Tensor, nu: Numerics) -> Tensor:
    """[N, S, D], [N, S] -> [N, D]."""
    return (streams.to(nu.math) * pre[..., None]).sum(1).to(nu.act)


def collapse_norm_cast(streams: Tensor, pre: Tensor, w: Tensor, eps: float, nu: Numerics) -> tuple[Tensor, Tensor]:
    """A sub-layer's input: the plain copy and its Q8 copy."""
    x = rms_norm(collapse(streams, pre, nu), w, eps, nu)
    return x, q8(x, nu)


def mix(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, hc_eps: float, eps: float, nu: Numerics
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """mHC coefficients pre [N, S], post [N, S], comb [N, S, S]; comb[:, j, k] goes from stream j to stream k."""
    s = streams.shape[1]
    u = streams.flatten(1).to(nu.math)
    m = F.linear(u, fn.to(nu.math)) * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    scale, base = scale.to(nu.math), base.to(nu.math)
    pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + hc_eps
    post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    c = (m[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s))
    c = torch.softmax(c, -1) + hc_eps
    c = c / (c.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + hc_eps)
        c = c / (c.sum(-2, keepdim=True) + hc_eps)
    return pre, post, c


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, nu: Numerics) -> Tensor:
    """[N, D] and [N, S, D] -> [N, S, D]."""
    x = streams.to(nu.math)
    mixed = (comb[..., None] * x[:, :, None, :]).sum(1)
    return (post[..., None] * y.to(nu.math)[:, None, :] + mixed).to(nu.act)


def rope(x: Tensor, cos: Tensor, sin: Tensor, nu: Numerics) -> Tensor:
    """Rotate interleaved pairs of the last 2 * cos.shape[-1] columns. cos and sin broadcast against x's leading axes."""
    width = 2 * cos.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].to(nu.math).unflatten(-1, (-1, 2))
    a, b = turned[..., 0], turned[..., 1]
    out = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((plain.to(nu.act), out.to(nu.act)), -1)


def window_kv(raw: Tensor, w: Tensor, cos: Tensor, sin: Tensor, eps: float, nu: Numerics) -> Tensor:
    return q8(rope(rms_norm(raw, w, eps, nu), cos, sin, nu), nu)


def main_kv(latent: Tensor, cos: Tensor, sin: Tensor, nu: Numerics) -> Tensor:
    out = rope(latent, cos, sin, nu)
    return quantise.q4nv(out) if nu.casts else out


def index_vector(raw: Tensor, cos: Tensor, sin: Tensor, nu: Numerics) -> Tensor:
    out = rope(raw, cos, sin, nu)
    return quantise.q4ue(out) if nu.casts else out


def index_key(raw: Tensor, w: Tensor, cos: Tensor, sin: Tensor, eps: float, nu: Numerics) -> Tensor:
    return index_vector(rms_norm(raw, w, eps, nu), cos, sin, nu)


def pool_pairs(score: Tensor, value: Tensor, w: Tensor, eps: float, nu: Numerics) -> Tensor:
    """Ratio 2: [B, T, d] scores and values -> latent [B, T/2, d]."""
    s, v = (t.to(nu.math).unflatten(1, (-1, 2)) for t in (score, value))
    return rms_norm((torch.softmax(s, 2) * v).sum(2).to(nu.act), w, eps, nu)


def attention_output(o: Tensor, lse: Tensor, sink: Tensor, cos: Tensor, sin: Tensor, nu: Numerics) -> Tensor:
    """[B, T, H, d] softmax averages without sink, and their log-sum-exp [B, T, H] -> Q8 input of wo_a, [B, T, H * d]."""
    kept = torch.sigmoid(lse.to(nu.math) - sink.to(nu.math))
    y = rope((o.to(nu.math) * kept[..., None]).to(nu.act), cos, -sin, nu)
    return q8(y.flatten(2), nu)


def router(logits: Tensor, bias: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
    """Weights [N, E], zero for experts not chosen, and the 0/1 choice. Ties go to the lower expert."""
    s = torch.sqrt(F.softplus(logits))
    rank_by = s.detach() + bias
    better = rank_by[:, None, :] > rank_by[:, :, None]
    lower = torch.arange(s.shape[1], device=s.device)
    earlier = (rank_by[:, None, :] == rank_by[:, :, None]) & (lower[None, None, :] < lower[None, :, None])
    chosen = ((better | earlier).sum(-1) < k).to(s.dtype)
    kept = s * chosen
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * factor, chosen


def swiglu(h: Tensor, weights: Tensor, limit: float, nu: Numerics) -> Tensor:
    """Gate and up halves [N, 2 * (E + 1) * I] of all experts and the shared one, weighted per expert, cast for w2."""
    gate, up = h.to(nu.math).chunk(2, -1)
    u = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    every = torch.cat((weights, torch.ones_like(weights[:, :1])), 1)
    u = u.unflatten(-1, (every.shape[1], -1)) * every[..., None]
    return q8(u.flatten(1), nu).to(nu.act)


def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, nu: Numerics) -> Tensor:
    """streams [N, S, D], kv [N, (S + 1) * D] -> streams."""
    s, d = streams.shape[1:]
    x = streams.to(nu.math)
    key = kv[:, : s * d].unflatten(-1, (s, d)).to(nu.math)
    value = kv[:, s * d :].to(nu.math)
    weight = q_weight.to(nu.act).to(nu.math) * k_weight.to(nu.act).to(nu.math)
    dot = (x * weight * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * d**-0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    return (x + gate[..., None] * value[:, None, :]).to(nu.act)


def index_scores(iq: Tensor, w: Tensor, keys: Tensor, nu: Numerics) -> Tensor:
    """iq [B, R, H, d], w [B, R, H], keys [B, G, d] -> [B, R, G]."""
    dots = torch.einsum("brhd,bgd->brhg", iq, keys)
    return (torch.relu(dots.to(nu.math)) * w.to(nu.math)[..., None]).sum(2).to(nu.act)


def block_attention(q: Tensor, keys: Tensor, visible: Tensor, nu: Numerics) -> tuple[Tensor, Tensor]:
    """Draft attention, non-causal inside a block: q [B, A, J, H, d], keys [B, A, W + J, d], visible bool[B, A, W + J].

    Returns averages without sink [B, A, J, H, d] and log-sum-exp [B, A, J, H].
    """
    scores = torch.einsum("bajhd,bakd->bajhk", q, keys).to(nu.math) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bajhk,bakd->bajhd", torch.exp(scores - lse[..., None]).to(q.dtype), keys), lse
