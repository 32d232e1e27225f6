"""From a pinned prefix in kv_cache to the rows that an engine loads: which part to use, and what to store again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_common.chains import HashChain
from shoal_common.identity import BLOCK_TOKENS
from shoal_common.kv_cache_client import CacheItem, Prefix
from shoal_common.kv_transport import PayloadSpec

from shoal_engine.logical_rows import PrefixRows


@dataclass(frozen=True, slots=True)
class ChosenHit:
    """How much of a prefix is used: blocks of [0, tokens), with the snapshot at `tokens` or by warm replay."""

    tokens: int
    has_snapshot: bool


def choose_hit(hit_tokens: int, replay_tokens: int, encoder_reach: int) -> ChosenHit:
    """The way that runs fewer encoder rows: from the hit on, or from `encoder_reach` (E * W) before the replay point.

    With nothing but blocks, replay is used even where it saves no row: it stores the snapshot for the next visitor.
    """
    replay_start = max(0, replay_tokens - encoder_reach)
    if replay_tokens > hit_tokens and (replay_start > hit_tokens or hit_tokens == 0):
        return ChosenHit(replay_tokens, False)
    return ChosenHit(hit_tokens, True)


async def read_prefix(prefix: Prefix, hit: ChosenHit) -> PrefixRows | None:
    """Copy the chosen part out of the cache. None if its blocks cannot be had: run the prompt from its start.

    A snapshot that cannot be had any more turns the hit into a warm replay. Where nothing is used of blocks that are
    there, since loading them saves nothing, the rows are none, and say where the snapshot for the next visitor belongs.
    """
    if hit.tokens == 0:
        if prefix.present_tokens == 0:
            return None
        return PrefixRows(hit_tokens=0, blocks=(), encoder_window=None, branch_tokens=prefix.present_tokens)
    blocks = await prefix.blocks(hit.tokens)
    if blocks is None:
        return None
    window = await prefix.snapshot() if hit.has_snapshot else None
    return PrefixRows(hit_tokens=hit.tokens, blocks=blocks, encoder_window=window, branch_tokens=prefix.present_tokens)


def block_items(chain: HashChain, first_index: int, blocks: Sequence[bytes], kv_id: str) -> list[CacheItem]:
    """Full blocks as kv_cache stores them; those beyond the chain's known tokens are left out."""
    items = []
    for index, data in enumerate(blocks, start=first_index):
        if index >= len(chain.hashes):
            break
        spec = PayloadSpec(
            kind=pb.PAYLOAD_KIND_BLOCK,
            position_begin=index * BLOCK_TOKENS,
            position_end=(index + 1) * BLOCK_TOKENS,
            shape=(len(data),),
            dtype="uint8",
            kv_id=kv_id,
            block_hash=chain.hashes[index],
        )
        items.append(CacheItem(spec=spec, parent_hash=chain.parent_of(index), data=data))
    return items


def snapshot_item(
    chain: HashChain, position: int, rows: bytes, kv_id: str, *, layers: int, window: int
) -> CacheItem | None:
    """The snapshot at `position` as kv_cache stores it; None beyond the chain's known tokens."""
    index = position // BLOCK_TOKENS - 1
    if not 0 <= index < len(chain.hashes):
        return None
    positions = min(window, position)
    spec = PayloadSpec(
        kind=pb.PAYLOAD_KIND_ENCODER_WINDOW,
        position_begin=position - positions,
        position_end=position,
        shape=(layers, positions, len(rows) // (layers * positions)),
        dtype="uint8",
        kv_id=kv_id,
        block_hash=chain.hashes[index],
    )
    return CacheItem(spec=spec, parent_hash=chain.parent_of(index), data=rows)
