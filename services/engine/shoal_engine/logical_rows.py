"""Logical rows: position-addressed cache content as it travels between engines. Never ring images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class RowKind(Enum):
    """What rows hold; the kinds of `shoal.common.v1.PayloadKind`."""

    BLOCK = "block"
    """A whole block of 128 positions, all KV owners."""
    PARTIAL_BLOCK = "partial_block"
    """The entries of a block that is not full: per owner its index rows, then its main rows."""
    ENCODER_WINDOW = "encoder_window"
    """[encoder layers, positions, record bytes]."""
    DECODER_WINDOW = "decoder_window"
    """[decoder layers, positions, record bytes]."""
    DRAFT_WINDOW = "draft_window"
    """[draft blocks, positions, record bytes]."""
    OPEN_PAIR = "open_pair"
    """[ratio-2 sources, 2, head_dim] float32: raw score and value of the pair that the last position opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalRows:
    """One array of rows of positions [position_begin, position_end)."""

    kind: RowKind
    position_begin: int
    position_end: int
    shape: tuple[int, ...]
    dtype: str
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRows:
    """A prefix hit to load: blocks of [0, hit_tokens) and, unless it was evicted, the snapshot at hit_tokens.

    encoder_window   rows of positions hit_tokens - W .. hit_tokens - 1; None runs the warm replay instead
    branch_tokens    up to where blocks exist in the cache beyond the hit; a snapshot is stored below it. 0: nowhere
    """

    hit_tokens: int
    blocks: Sequence[bytes | memoryview]
    encoder_window: bytes | memoryview | None
    branch_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverRows:
    """A prompt prefilled elsewhere: the rows that are not loaded yet, and the final hidden row (bf16).

    cached_tokens   prompt tokens whose KV came from the cache, for the usage
    """

    rows: Sequence[LogicalRows]
    hidden_row: bytes
    cached_tokens: int = 0
