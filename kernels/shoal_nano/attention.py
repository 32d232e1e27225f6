"""One softmax over window keys and compressed entries, as a mask over their concatenation.

Two implementations: plain matrices anywhere, and torch's flex attention with block masks on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What each query row of one layer may see.

    low       int32[B, T]  lowest window position
    start     int32[B, T]  first position of the row's document
    window    number of window positions, the row itself included
    ratio     positions per compressed entry, 0 without entries
    selected  bool[B, T, G] chosen entries, or None for all visible ones
    """

    low: Tensor
    start: Tensor
    window: int
    ratio: int
    selected: Tensor | None = None


def visible_entries(start: Tensor, ratio: int, count: int, rows: Tensor | None = None) -> Tensor:
    """bool[B, R, G]: entry g is complete at the row's position and lies in the row's document."""
    position = torch.arange(start.shape[1], device=start.device) if rows is None else rows
    first = torch.arange(count, device=start.device) * ratio
    lowest = start if rows is None else start[:, rows]
    return (first + ratio - 1 <= position[:, None]) & (first >= lowest[..., None])


def plain_attention(q: Tensor, kv: Tensor, entries: Tensor | None, sight: Sight) -> tuple[Tensor, Tensor]:
    """q [B, T, H, d], kv [B, T, d], entries [B, G, d] -> averages [B, T, H, d] and log-sum-exp [B, T, H]."""
    t = q.shape[1]
    position = torch.arange(t, device=q.device)
    mask = (position <= position[:, None]) & (position > position[:, None] - sight.window) & (position >= sight.low[..., None])
    keys = kv
    if entries is not None:
        chosen = visible_entries(sight.start, sight.ratio, entries.shape[1])
        if sight.selected is not None:
            chosen = sight.selected
        mask = torch.cat((mask, chosen), -1)
        keys = torch.cat((kv, entries), 1)
    math = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bthd,bkd->bthk", q.to(math), keys.to(math)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bthk,bkd->bthd", torch.exp(scores - lse[..., None]), keys.to(math)), lse


def _block_mask(sight: Sight, length: int, count: int, mask_mod: Callable[..., Tensor]) -> object:
    """Superset of the visible 128 x 128 blocks, so that far and foreign blocks cost nothing."""
    from torch.nn.attention.flex_attention import BlockMask

    device = sight.low.device
    rows = torch.arange(length // BLOCK, device=device)
    back = (sight.window + BLOCK - 2) // BLOCK
    window = (rows <= rows[:, None]) & (rows >= rows[:, None] - back)
    dense = window.expand(sight.low.shape[0], -1, -1)
    if count:
        blocks = torch.arange(count // BLOCK, device=device)
        first_closed = (blocks * BLOCK + 1) * sight.ratio - 1
        last_position = (blocks + 1) * BLOCK * sight.ratio - 1
        reached = first_closed <= rows[:, None] * BLOCK + BLOCK - 1
        own = last_position >= sight.start[:, ::BLOCK, None]
        dense = torch.cat((dense, reached & own), -1)
    dense = dense[:, None]
    number = dense.sum(-1, dtype=torch.int32)
    order = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(number, order, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, length + count))


class FlexAttention:
    """`plain_attention` by compiled flex attention; lengths and entry counts are multiples of 128."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        self._flex = torch.compile(flex_attention, dynamic=False)
        self._aux = AuxRequest(lse=True)

    def __call__(self, q: Tensor, kv: Tensor, entries: Tensor | None, sight: Sight) -> tuple[Tensor, Tensor]:
        length = q.shape[1]
        low, start, selected = sight.low, sight.start, sight.selected
        ratio, window = max(sight.ratio, 1), sight.window
        keys = kv if entries is None else torch.cat((kv, entries), 1)

        def in_window(b: Tensor, i: Tensor, k: Tensor) -> Tensor:
            return (k <= i) & (i - k < window) & (k >= low[b, i])

        def window_only(b: Tensor, h: Tensor, i: Tensor, k: Tensor) -> Tensor:
            return in_window(b, i, k)

        def with_visible(b: Tensor, h: Tensor, i: Tensor, k: Tensor) -> Tensor:
            g = k - length
            entry = (g >= 0) & (g * ratio >= start[b, i]) & (g * ratio + ratio - 1 <= i)
            return ((k < length) & in_window(b, i, k)) | entry

        def with_selected(b: Tensor, h: Tensor, i: Tensor, k: Tensor) -> Tensor:
            assert selected is not None
            entry = (k >= length) & selected[b, i, torch.clamp(k - length, min=0)]
            return ((k < length) & in_window(b, i, k)) | entry

        mask_mod = window_only if entries is None else with_visible if selected is None else with_selected
        count = 0 if entries is None else entries.shape[1]
        mask = _block_mask(sight, length, count, mask_mod)
        shared = keys[:, None]
        o, aux = self._flex(q.transpose(1, 2), shared, shared, block_mask=mask, enable_gqa=True, return_aux=self._aux)
        return o.transpose(1, 2), aux.lse.transpose(1, 2)
