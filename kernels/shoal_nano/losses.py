"""What training minimises: next tokens, the indexer's divergence, and the draft's closeness to the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_nano.draft import draft_blocks, markov
from shoal_nano.net import Forward, Net, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """total to minimise; hits [J] share of supervised slots whose arg-max is the target's; loads [blocks, E]."""

    total: Tensor
    hits: Tensor
    length: Tensor
    loads: Tensor


def token_loss(net: Net, w: Served, out: Forward, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of the next token, and the unreduced losses [B, T] (zero where the weight is)."""
    chosen = weight.flatten().nonzero()[:, 0]
    following = torch.roll(ids, -1, 1).flatten()[chosen]
    each = F.cross_entropy(net.logits(w, out.hidden.flatten(0, 1)[chosen]), following, reduction="none")
    share = weight.flatten()[chosen]
    spread = torch.zeros_like(weight).flatten().index_put((chosen,), each.detach()).view_as(weight)
    return (each * share).sum() / share.sum(), spread


def sample_anchors(weight: Tensor, count: int, block: int, generator: torch.Generator | None = None) -> Tensor:
    """int64[B, count] positions P, drawn by the loss weight of their next token, far enough from the row's end."""
    allowed = weight.clone()
    allowed[:, -(block + 2) :] = 0
    return torch.multinomial(allowed + 1e-9, count, generator=generator).clamp(max=weight.shape[1] - block - 2)


def draft_loss(net: Net, w: Served, out: Forward, ids: Tensor, weight: Tensor, low: Tensor, anchors: Tensor, token_share: float) -> DraftLoss:
    """The draft against the frozen target's distributions along the data.

    Slot j predicts the token at P + 2 + j. It counts while every token up to P + 1 + j is one the model is trained to write.
    Loss = token_share x cross-entropy to the target's distribution + 0.9 x L1 + BCE of the confidence against 1 - L1 / 2.

    source  dspark.md section 2.4; the cross-entropy there takes the sampled token, ours the whole distribution
    """
    j = net.config.dspark_block_size
    own = anchors[..., None] + torch.arange(1, j + 1, device=ids.device)  # [B, A, J] positions P+1..P+5
    flat = own.flatten(1)
    previous = ids.gather(1, flat).view_as(own)
    trained = (weight.gather(1, flat).view_as(own) > 0) & (weight.gather(1, anchors) > 0)[..., None]
    counted = trained.long().cumprod(-1).float()
    draft = draft_blocks(net, w, out.features.detach(), anchors, previous[..., 0], low.gather(1, anchors))
    logits, confidence = markov(net, w, draft.hidden, draft.base, previous)
    with torch.no_grad():
        rows = out.hidden.gather(1, flat[..., None].expand(-1, -1, out.hidden.shape[-1]))
        target_logits = net.logits(w, rows).view_as(logits)
        target = torch.softmax(target_logits, -1)
        hit = (target_logits.argmax(-1) == logits.argmax(-1)).float()
    log_q = torch.log_softmax(logits, -1)
    soft = -(target * log_q).sum(-1)
    distance = (log_q.exp() - target).abs().sum(-1)
    accepted = (1 - distance / 2).detach().clamp(0, 1)
    sure = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    each = token_share * soft + 0.9 * distance + sure
    number = counted.sum() + 1e-6
    hits = (hit * counted).sum((0, 1)) / (counted.sum((0, 1)) + 1e-6)
    full = counted[..., -1]
    length = ((hit * counted).cumprod(-1).sum(-1) * full).sum() / (full.sum() + 1e-6)
    return DraftLoss(total=(each * counted).sum() / number, hits=hits, length=length, loads=draft.loads)
