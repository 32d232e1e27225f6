"""Payloads on this node's disk."""

from shoal_kv_cache.tiers.ssd.errors import SsdBusy, SsdFull, SsdReadOnly, SsdTimeout, SsdUnavailable
from shoal_kv_cache.tiers.ssd.tier import SsdTier
from shoal_kv_cache.tiers.ssd.values import Fsync, Moved, Read, Recovered, SsdStats

__all__ = [
    "Fsync",
    "Moved",
    "Read",
    "Recovered",
    "SsdBusy",
    "SsdFull",
    "SsdReadOnly",
    "SsdStats",
    "SsdTier",
    "SsdTimeout",
    "SsdUnavailable",
]
