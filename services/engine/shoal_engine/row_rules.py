"""What a request forbids at one output index, the constraint apart: pure functions of the output so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS

from shoal_engine.constraint import Mask
from shoal_engine.requests import SamplingSpec


def banned_ids(
    spec: SamplingSpec, stop_ids: frozenset[int], min_tokens: int, output: Sequence[int], assumed: Sequence[int]
) -> frozenset[int]:
    """Ids that must not come after output + assumed: stops below min_tokens, and the last ids of bad words."""
    banned = stop_ids if len(output) + len(assumed) < min_tokens else frozenset()
    if not spec.bad_words:
        return banned
    reach = MAX_BAD_WORD_TOKENS - 1
    tail = (*output[-reach:], *assumed)
    ends = {word[-1] for word in spec.bad_words if _ends_with(tail, word[:-1])}
    return banned | ends


def forced_id(spec: SamplingSpec, output_index: int) -> int | None:
    """The only id that may come at this output index; None: any."""
    return spec.forced_ids[output_index] if output_index < len(spec.forced_ids) else None


def row_mask(mask: Mask | None, banned: frozenset[int], forced: int | None, vocab: int) -> Mask | None:
    """What is left of a constraint's mask without the banned ids and, where one is forced, all others.

    None: every id may come. The given mask is not written to.
    """
    if not banned and forced is None:
        return mask
    if mask is None:
        kept = np.full(-(-vocab // 32), -1, dtype=np.int32)
        if vocab % 32:
            kept[-1] = (1 << vocab % 32) - 1
    else:
        kept = mask.copy()
    bits = kept.view(np.uint32)
    for token in banned:
        bits[token >> 5] &= ~np.uint32(1 << (token & 31))
    if forced is not None:
        only = bits[forced >> 5] & np.uint32(1 << (forced & 31))
        bits[:] = 0
        bits[forced >> 5] = only
    return kept


def bans_beside(mask: Mask | None, banned: frozenset[int], stop_ids: frozenset[int], vocab: int) -> frozenset[int]:
    """The bans that hold beside a constraint's mask: where that allows nothing but stops, the answer is complete."""
    if mask is None or not banned & stop_ids:
        return banned
    left = row_mask(mask, banned, None, vocab)
    return banned - stop_ids if left is not None and is_empty(left, vocab) else banned


def is_empty(mask: Mask, vocab: int) -> bool:
    """Whether no id below `vocab` is left."""
    whole = vocab // 32
    if mask[:whole].any():
        return False
    return not (vocab % 32 and int(mask[whole]) & ((1 << vocab % 32) - 1))


def _ends_with(tail: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return not start or tail[-len(start) :] == start
