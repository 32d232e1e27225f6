"""A chain cut into segments: the unit that one owner keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_kv_cache.core.entries import SEGMENT_BLOCKS


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks [begin, end) of a chain, numbered from position 0. `end` may lie before the segment is full."""

    first_hash: bytes
    begin: int
    end: int


def segments_of(hashes: Sequence[bytes], *, first_index: int = 0) -> list[Segment]:
    """The segments of a chain whose first hash is that of block `first_index`, in order.

    Blocks before the first boundary have no name that is known here and are left out.
    """
    end = first_index + len(hashes)
    begin = -(-first_index // SEGMENT_BLOCKS) * SEGMENT_BLOCKS
    return [
        Segment(hashes[start - first_index], start, min(start + SEGMENT_BLOCKS, end))
        for start in range(begin, end, SEGMENT_BLOCKS)
    ]


def is_first_of_segment(block_index: int) -> bool:
    """Whether the block names its segment, and so may stand without a parent."""
    return block_index % SEGMENT_BLOCKS == 0
