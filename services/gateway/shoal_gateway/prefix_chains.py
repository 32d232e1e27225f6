"""Which (kv_id, numerics_id) pairs are live, and a prompt's block hashes under each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common import identity
from shoal_common.presence import Presence

MAX_PAIRS = 4
_SHARE_CHARS = 16
_LARGE_PROMPT_TOKENS = 16 * 1024
"""From here on hashing takes more than a millisecond: it goes to a thread."""


class FairShare(NamedTuple):
    """Whose turn in the queue a request takes: names that tell a scheduler nothing, empty where there is none."""

    tenant: str
    user: str


class PrefixChains:
    """Live pairs by what decode workers announce, newest first, and the hashing under them."""

    def __init__(self, cache_secret: str) -> None:
        self._secret = cache_secret
        self._pair_of: dict[str, tuple[str, str]] = {}
        self._pairs: list[tuple[str, str]] = []

    def announced(self, worker: Presence) -> None:
        """A decode worker is up, or says something new."""
        if not worker.kv_id or not worker.numerics_id:
            return
        self.lapsed(worker.instance_id)
        pair = self._pair_of[worker.instance_id] = (worker.kv_id, worker.numerics_id)
        if pair not in self._pairs:
            self._pairs.insert(0, pair)

    def lapsed(self, instance_id: str) -> None:
        """A decode worker is gone."""
        pair = self._pair_of.pop(instance_id, None)
        if pair is not None and pair not in self._pair_of.values():
            self._pairs.remove(pair)

    def root(self, *, kv_id: str, numerics_id: str, tenant: str, user_id: str) -> bytes:
        """Root of the chains of one user of a tenant under one pair, 32 bytes."""
        salt = identity.tenant_salt(self._secret, tenant=tenant, user_id=user_id)
        return identity.root_hash(kv_id=kv_id, numerics_id=numerics_id, tenant_salt=salt)

    def tenant_tag(self, tenant: str) -> bytes:
        """Whose entries these are, 32 bytes. Without API keys there is one tenant, of the empty name."""
        return identity.tenant_tag(self._secret, tenant=tenant)

    def fair_share(self, tenant: str, user_id: str) -> FairShare:
        """By which names the scheduler shares its queue out. Without API keys every user is a tenant."""
        if not tenant:
            return FairShare(self._opaque(user_id), "")
        return FairShare(self._opaque(tenant), self._opaque(user_id))

    def _opaque(self, name: str) -> str:
        return identity.tenant_tag(self._secret, tenant=name).hex()[:_SHARE_CHARS] if name else ""

    async def of_prompt(self, prompt_ids: Sequence[int], *, tenant: str, user_id: str) -> list[pb.HashChain]:
        """The prompt's chains, newest pair first, at most MAX_PAIRS."""
        if len(prompt_ids) < _LARGE_PROMPT_TOKENS:
            return self._hash(prompt_ids, tenant, user_id)
        return await asyncio.to_thread(self._hash, prompt_ids, tenant, user_id)

    def _hash(self, prompt_ids: Sequence[int], tenant: str, user_id: str) -> list[pb.HashChain]:
        chains = []
        for kv_id, numerics_id in self._pairs[:MAX_PAIRS]:
            root = self.root(kv_id=kv_id, numerics_id=numerics_id, tenant=tenant, user_id=user_id)
            hashes = identity.block_hashes(root, prompt_ids)
            chains.append(pb.HashChain(kv_id=kv_id, numerics_id=numerics_id, block_hashes=hashes))
        return chains
