"""Chooses the store by its URL."""

from __future__ import annotations

from shoal_kv_cache.tiers.remote.store import RemoteStore


def open_remote(url: str, *, max_bytes_in_flight: int = 256 << 20) -> RemoteStore:
    """The store at `url`; nothing is connected yet.

    redis://host:port/db, rediss://, unix:///path.sock   a server of the Redis protocol
    redis+cluster://host:port                            a cluster of them
    dir:///shared/folder?capacity_bytes=N                a shared directory, kept below N bytes
    mooncake://master:port?metadata=http://...           a Mooncake store
    Raises ValueError naming what is wrong with it; Unimplemented if the extra it needs is not installed.
    """
    raise NotImplementedError
