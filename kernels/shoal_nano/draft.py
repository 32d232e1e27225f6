"""The DSpark draft blocks as a differentiable function of target features, for many anchors at once.

source  v41-flash.md section 10, dspark.md section 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_nano.net import Net, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """Draft rows of A anchors per packed row; J = block size.

    hidden  [B, A, J, D] before the last norm (what the confidence head reads)
    base    [B, A, J, V] logits before the Markov bias
    loads   [blocks, E] chosen counts
    """

    hidden: Tensor
    base: Tensor
    loads: Tensor


def context_features(net: Net, w: Served, features: Tensor) -> Tensor:
    """[B, T, 3 * D] taps -> [B, T, D], the single vector every draft block reads."""
    c, nu = net.config, net.nu
    projected = net.linear(net.op("q8", features, nu), w["mtp.main_proj"][0])
    out: Tensor = net.op("norm_cast", projected, w["mtp.main_norm"][0], c.rms_norm_eps, nu)
    return out


def draft_blocks(net: Net, w: Served, features: Tensor, anchors: Tensor, tokens: Tensor, low: Tensor) -> DraftBlock:
    """Run the draft after position `anchors`.

    features  [B, T, 3 * D] detached taps of the target
    anchors   int64[B, A] position P of the last row the target has seen
    tokens    int64[B, A] the token at P + 1
    low       int64[B, A] lowest position whose context exists
    """
    c, nu = net.config, net.nu
    b, a = anchors.shape
    j, window = c.dspark_block_size, c.sliding_window
    context = context_features(net, w, features)
    noise = torch.full((b, a, j - 1), c.dspark_noise_token_id, device=tokens.device, dtype=tokens.dtype)
    ids = torch.cat((tokens[..., None], noise), -1)
    streams = F.embedding(ids, w["embed"][0]).flatten(0, 2)[:, None].expand(-1, c.hc_mult, -1).contiguous()
    pre = torch.zeros(b * a * j, c.hc_mult, device=ids.device, dtype=nu.math)
    pre[:, 0] = 1
    seen = anchors[..., None] + torch.arange(1 - window, 1, device=ids.device)  # [B, A, window]
    visible = F.pad(seen >= low[..., None], (0, j), value=True)
    index = seen.clamp(min=0).flatten(1)[..., None]
    own = anchors[..., None] + torch.arange(1, j + 1, device=ids.device)  # [B, A, J]
    context_angles = net.angles(False, torch.arange(features.shape[1], device=ids.device))
    own_angles = net.angles(False, own)
    loads = []
    for block in range(c.num_nextn_predict_layers):

        def attend(plain: Tensor, cast: Tensor, block: int = block) -> Tensor:
            norm, weight = w["mtp.attn.kv_norm"][block], w["mtp.attn.wkv"][block]
            far = net.op("window_kv", net.linear(context, weight), norm, *context_angles, c.rms_norm_eps, nu)
            near = net.op("window_kv", net.linear(cast, weight), norm, *own_angles, c.rms_norm_eps, nu)
            _, q = net.query(w, "mtp", block, cast, *own_angles)
            gathered = far.gather(1, index.expand(-1, -1, far.shape[-1])).unflatten(1, (a, window))
            o, lse = net.op("block_attention", q, torch.cat((gathered, near), 2), visible, nu)
            cos, sin = (x.flatten(1, 2)[:, :, None] for x in own_angles)
            out = net.op("attention_output", o.flatten(1, 2), lse.flatten(1, 2), w["mtp.attn.attn_sink"][block], cos, sin, nu)
            return out.unflatten(1, (a, j))  # type: ignore[no-any-return]

        streams, pre, chosen = net.block(w, "mtp", block, streams, pre, (b, a, j), attend, c.dspark_num_experts_per_tok)
        loads.append(chosen.sum(0))
    hidden = net.op("collapse", streams, pre, nu)
    base = net.logits(w, net.op("rms_norm", hidden, w["mtp.norm"][0], c.rms_norm_eps, nu))
    shape = (b, a, j)
    return DraftBlock(hidden=hidden.unflatten(0, shape), base=base.unflatten(0, shape), loads=torch.stack(loads))


def markov(net: Net, w: Served, hidden: Tensor, base: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """One slot, or many at once with known previous tokens: logits [..., V] and confidence logits [...]."""
    e = F.embedding(previous, w["mtp.markov_embed"][0])
    logits = base + net.linear32(e, w["mtp.markov_head"][0])
    confidence = net.linear32(torch.cat((hidden, e), -1), w["mtp.confidence"][0])[..., 0]
    return logits, confidence
