"""From what decides a token to the sampler's view of its row: one path for plain, draft and verify rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from shoal_kernels.ops.sampling import RowSampling
from shoal_model.sampler import SampleRow, TokenLogprobs

from shoal_engine.constraint import Mask
from shoal_engine.events import PositionLogprobs, TokenLogprob
from shoal_engine.model_port import TokenContext
from shoal_engine.row_rules import forced_id, is_empty, row_mask
from shoal_engine.token_history import Counted, TokenHistory


def sample_row(context: TokenContext, vocab: int) -> SampleRow | None:
    """How the token of this row is chosen; None where no token may come."""
    forced = forced_id(context.spec, context.output_index)
    mask = row_mask(context.mask, context.banned, forced, vocab)
    if mask is not None and is_empty(mask, vocab):
        return None
    return SampleRow(
        sampling=_sampling(context, mask),
        seed=context.seed,
        output_index=context.output_index,
        num_logprobs=context.spec.top_logprobs,
    )


def draft_row(context: TokenContext, vocab: int) -> SampleRow:
    """How a draft is chosen: as its token will be, where one may come at all. Nobody reads its log-probabilities."""
    row = sample_row(context, vocab)
    if row is None:
        return SampleRow(sampling=RowSampling(temperature=0.0), seed=context.seed, output_index=context.output_index)
    return replace(row, num_logprobs=None)


def is_plain(row: SampleRow) -> bool:
    """Whether the row needs no logits."""
    return row.sampling.is_plain and row.num_logprobs is None


def position_logprobs(token_id: int, found: TokenLogprobs | None) -> PositionLogprobs | None:
    """The sampler's log-probabilities as the engine reports them."""
    if found is None:
        return None
    top = tuple(TokenLogprob(token, value) for token, value in found.top)
    return PositionLogprobs(TokenLogprob(token_id, found.logprob), top)


def _sampling(context: TokenContext, mask: Mask | None) -> RowSampling:
    spec = context.spec
    bias_ids = bias = None
    if spec.logit_bias:
        bias_ids = torch.tensor([*spec.logit_bias], dtype=torch.int64)
        bias = torch.tensor([*spec.logit_bias.values()], dtype=torch.float32)
    counted = _counted(context) if spec.has_penalties else None
    return RowSampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        bias_ids=bias_ids,
        bias=bias,
        output_ids=None if counted is None else torch.from_numpy(counted.output_ids),
        output_counts=None if counted is None else torch.from_numpy(counted.output_counts),
        seen_ids=None if counted is None else torch.from_numpy(counted.seen_ids),
        allowed=None if mask is None else torch.from_numpy(mask),
    )


def _counted(context: TokenContext) -> Counted:
    history = context.history or TokenHistory(context.prompt)
    return history.counted(context.output, context.assumed)
