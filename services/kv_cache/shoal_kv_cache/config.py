"""Settings of a KV cache node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """SHOAL_KV_CACHE_<FIELD>.

    listen_address      host:port of the gRPC server; port 0 picks one
    advertised_address  what others are told to call; empty: the address listened on
    admin_address       host:port of /metrics, /healthz and /readyz
    ram_bytes           payload bytes kept in memory
    max_leases          open leases at most
    max_lease_s         longest time that a lease may live
    max_puts            puts in flight at most
    put_timeout_s       a put that takes longer is dropped
    drain_grace_s       from SIGTERM to the end
    """

    listen_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    admin_address: str = "127.0.0.1:0"
    ram_bytes: int = 512 << 20
    max_leases: int = 4096
    max_lease_s: float = 120.0
    max_puts: int = 64
    put_timeout_s: float = 30.0
    drain_grace_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "max_leases", "max_puts"):
            if getattr(self, name) < 1:
                raise ValueError(f"SHOAL_KV_CACHE_{name.upper()} must be positive, got {getattr(self, name)}")
        for name in ("max_lease_s", "put_timeout_s", "drain_grace_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"SHOAL_KV_CACHE_{name.upper()} must be in (0, 3600), got {getattr(self, name)}")
