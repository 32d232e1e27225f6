"""Chooses the store by its URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from shoal_kv_cache.tiers.remote.backend import Backend
from shoal_kv_cache.tiers.remote.directory_backend import DirectoryBackend
from shoal_kv_cache.tiers.remote.guarded import GuardedStore
from shoal_kv_cache.tiers.remote.redis_backend import RedisBackend, connect
from shoal_kv_cache.tiers.remote.store import RemoteStore

_REDIS = {"redis": False, "rediss": False, "unix": False, "redis+cluster": True, "rediss+cluster": True}


def open_remote(url: str, *, max_bytes_in_flight: int = 256 << 20) -> RemoteStore:
    """The store at `url`; nothing is connected yet.

    redis://host:port/db, rediss://, unix:///path.sock     a server of the Redis protocol
    redis+cluster://host:port, rediss+cluster://           a cluster of them
      ?ttl_s=N                                             values end after N seconds
    dir:///shared/folder                                   a shared directory, which must be there
      ?capacity_bytes=N                                    kept below N bytes
    mooncake://host:port                                   a Mooncake store, by its master
      ?metadata=URL&hostname=H&protocol=tcp|rdma&devices=D&segment_bytes=N&buffer_bytes=N

    Raises ValueError naming what is wrong with it; Unimplemented if the extra it needs is not installed.
    """
    return GuardedStore(_backend(url), max_bytes_in_flight=max_bytes_in_flight)


def _backend(url: str) -> Backend:
    parts = urlsplit(url)
    options = _Options(parts)
    if parts.scheme in _REDIS:
        ttl_s = options.number("ttl_s")
        bare = urlunsplit((parts.scheme.removesuffix("+cluster"), parts.netloc, parts.path, options.rest(), ""))
        return RedisBackend(connect(bare, is_cluster=_REDIS[parts.scheme]), ttl_s=ttl_s)
    if parts.scheme == "dir":
        capacity_bytes = options.number("capacity_bytes")
        options.end()
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} must be dir:///an/absolute/folder")
        return DirectoryBackend(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
    if parts.scheme == "mooncake":
        return _mooncake(parts, options)
    known = ", ".join([*sorted(_REDIS), "dir", "mooncake"])
    raise ValueError(f"{parts.scheme!r} is none of the stores' schemes: {known}")


def _mooncake(parts: SplitResult, options: _Options) -> Backend:
    from shoal_kv_cache.tiers.remote.mooncake_backend import MooncakeBackend

    backend = MooncakeBackend(
        parts.netloc,
        metadata=options.text("metadata") or "P2PHANDSHAKE",
        hostname=options.text("hostname") or "127.0.0.1",
        protocol=options.text("protocol") or "tcp",
        devices=options.text("devices") or "",
        segment_bytes=options.number("segment_bytes") or 0,
        buffer_bytes=options.number("buffer_bytes") or 256 << 20,
    )
    options.end()
    return backend


class _Options:
    """The part after the question mark, each option taken once."""

    def __init__(self, parts: SplitResult) -> None:
        self._left = dict(parse_qsl(parts.query, keep_blank_values=True))

    def text(self, name: str) -> str | None:
        return self._left.pop(name, None)

    def number(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
        return int(value)

    def rest(self) -> str:
        """What is left, for the client library."""
        return "&".join(f"{name}={value}" for name, value in self._left.items())

    def end(self) -> None:
        if self._left:
            raise ValueError(f"{sorted(self._left)} are no options of this store")
