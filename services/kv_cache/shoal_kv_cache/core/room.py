"""Makes room in a tier: tenants over their quota lose theirs first, and take none from others."""

from __future__ import annotations

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.eviction import Evictor
from shoal_kv_cache.core.groups import Groups
from shoal_kv_cache.core.quotas import Quotas
from shoal_kv_cache.core.table import RAM


class Room:
    """Asks the evictor of a tier for bytes, tenant by tenant where quotas are passed, then of all."""

    def __init__(self, groups: Groups, quotas: Quotas, evictors: tuple[Evictor, Evictor]) -> None:
        self._groups, self._quotas, self._evictors = groups, quotas, evictors

    def make(self, tier: int, size_bytes: int, changes: Changes, tenant_tag: bytes | None) -> int:
        """Lets copies go until their payloads sum up to `size_bytes`; returns the bytes.

        Less where the rest is pinned, or where in memory `tenant_tag` would be over its quota with so much more: then
        only tenants that are over theirs lose something. What is free it may use.
        """
        done = 0
        evictor = self._evictors[tier]
        for tenant, excess in self._quotas_passed(tier, size_bytes, tenant_tag):
            if done < size_bytes:
                done += evictor.evict(min(excess, size_bytes - done), changes, only_tenant=tenant)
        if done < size_bytes and not self._is_beyond(tier, size_bytes, tenant_tag):
            done += evictor.evict(size_bytes - done, changes)
        return done

    def _is_beyond(self, tier: int, size_bytes: int, tenant_tag: bytes | None) -> bool:
        # A batch for the disk holds what several tenants put: it takes at most its own size from others, once.
        limit = self._quotas.ram(tenant_tag) if tier == RAM and tenant_tag is not None else None
        if limit is None or tenant_tag is None:
            return False
        tenant = self._groups.tenant_number(tenant_tag)
        used = self._groups.tenant_bytes[tier][tenant] if tenant is not None else 0
        return used + size_bytes > limit

    def _quotas_passed(self, tier: int, size_bytes: int, tenant_tag: bytes | None) -> list[tuple[int, int]]:
        """Tenants that hold more than they may, with room for `size_bytes` of `tenant_tag` to come, and by how much."""
        quota = self._quotas.ram if tier == RAM else self._quotas.ssd
        passed = []
        if not self._quotas.is_unlimited:
            for tenant, used in enumerate(self._groups.tenant_bytes[tier]):
                tag = self._groups.tenant_tags[tenant]
                limit = quota(tag)
                wanted = used + (size_bytes if tag == tenant_tag else 0)
                if limit is not None and used and wanted > limit:
                    passed.append((tenant, min(used, wanted - limit)))
        return passed
