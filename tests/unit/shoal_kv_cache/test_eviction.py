"""What goes first: tenants over their quota, and what is worth least by what was learned."""

from __future__ import annotations

import hashlib

import numpy as np
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.hit_density import HitDensity
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.core.quotas import Quotas

BLOCK = Form(128, (10,), "uint8", 10)


def group_of(tenant: str) -> Group:
    return Group("k", "n", tenant.encode())


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{place}".encode()).digest() for place in range(count)]


def put(index: Index, name: str, count: int, tenant: str) -> None:
    hashes = hashes_of(name, count)
    parents = [bytes(32), *hashes]
    entries = [
        Entry(Key(Kind.BLOCK, hashes[n]), group_of(tenant), parents[n], (n + 1) * BLOCK_TOKENS, BLOCK, 0)
        for n in range(count)
    ]
    index.store(entries, range(count), Changes())


def held(index: Index, tenant: str) -> int:
    usage = index.groups().get(group_of(tenant))
    return usage[0].used_bytes if usage else 0


def test_a_tenant_over_its_quota_loses_its_own_first() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200, ram_bytes_of={b"big": 1000}))
    put(index, "a", 30, "greedy")
    put(index, "b", 30, "big")
    assert index.evict_ram(80, Changes()) == 80
    assert (held(index, "greedy"), held(index, "big")) == (220, 300)


def test_room_for_a_tenant_that_would_pass_its_quota_comes_from_its_own() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200))
    put(index, "a", 20, "one")
    put(index, "b", 20, "two")
    index.evict_ram(50, Changes(), tenant_tag=b"two")
    assert (held(index, "one"), held(index, "two")) == (200, 150)


def test_what_a_quota_does_not_yield_comes_from_all() -> None:
    index = Index(Leases(max_leases=4), max_entries=1000, quotas=Quotas(ram_bytes=200))
    put(index, "a", 25, "one")
    put(index, "b", 15, "two")
    assert index.evict_ram(400, Changes()) == 400
    assert len(index) == 0


def test_unknown_density_falls_with_age_and_learned_density_ends_with_the_uses() -> None:
    density = HitDensity(lambda: (np.empty(0, np.uint16), np.empty(0, np.uint32)))
    ages = np.array([1 << n for n in range(4, 30)], np.uint32)
    fresh = density.density(np.zeros(len(ages), np.uint16), ages)
    assert (np.diff(fresh) < 0).all()
    for number in range(2048):
        density.used(64, 1000 + number % 50)
        density.given_up(65, 100_000)
    density.renew()
    kept = density.density(np.full(2, 64, np.uint16), np.array([900, 50_000], np.uint32))
    assert kept[0] > 20 * kept[1]
    useless = density.density(np.full(1, 65, np.uint16), np.array([900], np.uint32))
    assert kept[0] > 20 * useless[0]
