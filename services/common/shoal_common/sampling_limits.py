"""Bounds of sampling parameters that gateway, worker and engine check alike; see `shoal.common.v1.SamplingParams`."""

from __future__ import annotations

MAX_TOP_LOGPROBS = 20
"""Also of prompt_logprobs."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 32
MAX_FORCED_IDS = 8_192
