"""One round of drafting: the parallel block, then the sequential head, position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_model.draft import Anchor
from shoal_model.model import Model

Choose = Callable[[int, Tensor, Tensor], Tensor]
"""(draft position j, logits [n, V], tokens drafted before [n, j]) -> tokens int64 [n]."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of n sequences and, for each, the logit of the chance that it stands if those before it do."""

    token_ids: Tensor  # int64 [n, B]
    confidence_logits: Tensor  # [n, B]


def propose(model: Model, anchors: Sequence[Anchor], choose: Choose) -> Proposal:
    """Draft after every anchor; `choose` samples with the target's parameters and the noise of the same output index.

    raises  NoDraftHead, StaleRingRead
    """
    head = model.draft(anchors)
    previous = torch.tensor([anchor.token_id for anchor in anchors], dtype=torch.int64, device=model.device)
    drafted = previous.new_empty((len(anchors), 0))
    confidence = []
    for j in range(model.draft_size):
        step = model.markov_step(previous, head.base_logits[:, j], head.hidden[:, j])
        confidence.append(step.confidence_logit)
        previous = choose(j, step.logits, drafted)
        drafted = torch.cat([drafted, previous[:, None]], dim=1)
    return Proposal(drafted, torch.stack(confidence, dim=1))
