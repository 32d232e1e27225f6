"""Payloads in a store outside of the mesh."""

from shoal_kv_cache.tiers.remote.errors import RemoteBusy, RemoteFull, RemoteResting, RemoteTimeout, RemoteUnavailable
from shoal_kv_cache.tiers.remote.open import open_remote
from shoal_kv_cache.tiers.remote.store import Loaded, RemoteStats, RemoteStore

__all__ = [
    "Loaded",
    "RemoteBusy",
    "RemoteFull",
    "RemoteResting",
    "RemoteStats",
    "RemoteStore",
    "RemoteTimeout",
    "RemoteUnavailable",
    "open_remote",
]
