"""A prompt that its answer repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What the answer says of one prompt.

    text        the client's own text, or its token ids spelled out
    first       index of the first of `prompt_ids` that the client knows of: a begin-of-sequence that was put in front
                is not reported
    """

    text: str
    prompt_ids: Sequence[int]
    first: int
