"""Fill-in-the-middle prompts: prefix, a hole and suffix, as V4.1 was trained to see them.

Source: the three tokens stand in the tokenizer of the release; their order is that of DeepSeek's models since V2
(prefix, suffix, middle). The recipe has no form for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_recipe import Tokenizer

_BEGIN, _HOLE, _END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """The ids of one tokenizer."""

    begin_id: int
    hole_id: int
    end_id: int

    def prompt(self, bos_id: int, prefix_ids: Sequence[int], suffix_ids: Sequence[int]) -> list[int]:
        """What the model goes on from with the text of the hole."""
        return [bos_id, self.begin_id, *prefix_ids, self.hole_id, *suffix_ids, self.end_id]


def find_fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """The tokens, looked up by name; None for a tokenizer that lacks one of them."""
    ids = [tokenizer.encode(spelling) for spelling in (_BEGIN, _HOLE, _END)]
    if any(len(one) != 1 for one in ids):
        return None
    (begin_id,), (hole_id,), (end_id,) = ids
    return FimTokens(begin_id=begin_id, hole_id=hole_id, end_id=end_id)
