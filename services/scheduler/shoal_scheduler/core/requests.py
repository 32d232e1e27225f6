"""What has to be placed, and what it will hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 128
"""Tokens of a KV block, in every model."""
ADMITTED_OUTPUT_TOKENS = 2048
"""Output tokens of a choice for which a worker holds blocks from admission on; the rest grows."""


Pool = tuple[str, str | None, str | None]
"""Model, pair and constraint engines asked for."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request holds on its worker: blocks from admission on, and one slot per choice."""

    blocks: int
    slots: int


@dataclass(frozen=True, slots=True)
class Size:
    """What a request needs of a worker to run to its end: all it may hold, and positions of one choice."""

    most: Need
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a gateway submitted.

    model           name asked for; empty: any
    chains          per numerics_id the shortened hashes of the prompt's full blocks, from position 0
    numerics_id     only this pair will do; None: any
    constraint_id   only these constraint engines will do; empty: any that a worker announces; None: it needs none
    user            of the tenant, who has a fair share of its share; empty: those of whom nothing is known
    traceparent     the trace that it belongs to
    """

    prompt_tokens: int
    max_tokens: int
    choice_count: int = 1
    model: str = ""
    priority: int = 0
    tenant: str = ""
    user: str = ""
    numerics_id: str | None = None
    constraint_id: str | None = None
    chains: Mapping[str, array[int]] = field(default_factory=dict)
    traceparent: str = ""

    @property
    def pool(self) -> Pool:
        """Requests of one pool may run on the same workers, sizes aside."""
        return (self.model, self.numerics_id, self.constraint_id)

    @property
    def total_tokens(self) -> int:
        """Tokens at most, over all choices; what fair share counts."""
        return self.prompt_tokens + self.choice_count * self.max_tokens

    @property
    def chain_length(self) -> int:
        """Hashes kept for this request."""
        return sum(len(chain) for chain in self.chains.values())

    def need(self, output_counts: Sequence[int] = ()) -> Need:
        """What it holds from admission on: prompt + tokens so far + min(rest, 2,048) of every choice."""
        so_far = [*output_counts, *(0 for _ in range(self.choice_count - len(output_counts)))][: self.choice_count]
        own = (
            _own_blocks(self.prompt_tokens, count + min(max(self.max_tokens - count, 0), ADMITTED_OUTPUT_TOKENS))
            for count in so_far
        )
        return Need(blocks=self.prompt_tokens // BLOCK_TOKENS + sum(own), slots=self.choice_count)

    def size(self) -> Size:
        """What it needs when every choice runs to max_tokens."""
        own = self.choice_count * _own_blocks(self.prompt_tokens, self.max_tokens)
        most = Need(blocks=self.prompt_tokens // BLOCK_TOKENS + own, slots=self.choice_count)
        return Size(most, self.prompt_tokens + self.max_tokens)


def _own_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Blocks of one choice beyond the prompt's full ones, which all choices share. The last token gets no KV."""
    positions = prompt_tokens + max(output_tokens - 1, 0)
    return -(-positions // BLOCK_TOKENS) - prompt_tokens // BLOCK_TOKENS


def short_hash(block_hash: bytes) -> int:
    """Eight of a block hash's 32 bytes: the index is a hint, and a chance of 2^-64 to err is cheaper than 24 bytes."""
    return int.from_bytes(block_hash[:8], "little")


def short_chain(block_hashes: Iterable[bytes]) -> array[int]:
    """Shortened hashes, eight bytes each."""
    return array("Q", map(short_hash, block_hashes))
