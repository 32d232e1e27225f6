"""Full blocks and snapshots of what ran here, named by the tokens under them, for kv_cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheWriter
from shoal_engine.cached_prefix import block_items, snapshot_item

from shoal_decode_worker.generation import GenerationStart


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """What names stored rows: the pair's ids, and the encoder's layers and window."""

    kv_id: str
    numerics_id: str
    encoder_layers: int
    window: int


class _Live:
    """Chains of one request: the prompt's, and one per choice that goes on from it."""

    def __init__(self, start: GenerationStart, root: bytes) -> None:
        self.tenant_tag = start.tenant_tag
        self.prompt = HashChain(root, start.prompt_ids)
        self.choices = [self.prompt.fork() for _ in start.choices]
        for chain, choice in zip(self.choices, start.choices, strict=True):
            chain.extend(choice.output_ids)


class WriteBack:
    """Follows the tokens of live requests that have a cache root. Belongs to one event loop.

    Invariant: a request is followed from `opened` to `closed`; what comes for any other is dropped. Tokens of a choice
    come before the blocks that hold them.
    """

    def __init__(self, writer: CacheWriter) -> None:
        self._writer = writer
        self._live: dict[str, _Live] = {}

    def opened(self, key: str, start: GenerationStart) -> None:
        """Follow a request; nothing is stored for one without a cache root."""
        if start.cache_root is not None:
            self._live[key] = _Live(start, start.cache_root)

    def closed(self, key: str) -> None:
        """Follow it no longer. Safe to repeat."""
        self._live.pop(key, None)

    def tokens(self, key: str, choice_index: int, token_ids: Sequence[int]) -> None:
        """A choice went on."""
        live = self._live.get(key)
        if live is not None:
            live.choices[choice_index].extend(token_ids)

    def blocks(
        self, key: str, choice_index: int | None, first_index: int, blocks: Sequence[bytes], model: StoredModel
    ) -> None:
        """Full blocks are final; choice None: of the prompt."""
        live = self._live.get(key)
        if live is not None:
            items = block_items(self._chain(live, choice_index), first_index, blocks, model.kv_id)
            self._writer.offer(items, numerics_id=model.numerics_id, tenant_tag=live.tenant_tag)

    def snapshot(self, key: str, choice_index: int | None, position: int, rows: bytes, model: StoredModel) -> None:
        """A snapshot is final."""
        live = self._live.get(key)
        if live is None:
            return
        item = snapshot_item(
            self._chain(live, choice_index),
            position,
            rows,
            model.kv_id,
            layers=model.encoder_layers,
            window=model.window,
        )
        if item is not None:
            self._writer.offer([item], numerics_id=model.numerics_id, tenant_tag=live.tenant_tag)

    @staticmethod
    def _chain(live: _Live, choice_index: int | None) -> HashChain:
        return live.prompt if choice_index is None else live.choices[choice_index]
