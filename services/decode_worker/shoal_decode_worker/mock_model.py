"""What a model says that takes no time: tokens as a pure function of seed, prompt, choice and position."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from shoal_decode_worker.generation import GenerationStart

RUN_TOKENS = 16
"""Tokens that one digest gives: what a mock says must cost next to nothing."""
_NUMBERS = struct.Struct(f"<{RUN_TOKENS}I")


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModel:
    """What the model says. `lowest_token_id` .. `vocab_size` - 1 come out; `eos_token_id` among them ends a choice."""

    vocab_size: int
    lowest_token_id: int
    eos_token_id: int

    def run(self, key: bytes, run_index: int) -> tuple[int, ...]:
        """The tokens at output indices from `run_index` * RUN_TOKENS on of the choice that `key` names."""
        digest = hashlib.blake2b(run_index.to_bytes(8, "little"), key=key).digest()
        lowest, span = self.lowest_token_id, self.vocab_size - self.lowest_token_id
        return tuple([lowest + number % span for number in _NUMBERS.unpack(digest)])

    @staticmethod
    def key(start: GenerationStart, choice_index: int) -> bytes:
        """Names a choice: its seed, its prompt and its index."""
        state = hashlib.blake2b(start.prompt_ids.tobytes(), digest_size=32)
        state.update(start.sampling.seed.to_bytes(8, "little") + choice_index.to_bytes(4, "little"))
        return state.digest()
