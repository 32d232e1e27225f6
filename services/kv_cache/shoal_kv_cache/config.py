"""Settings of a KV cache node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from shoal_common.settings import without_credentials

from shoal_kv_cache.core.quotas import Quotas

REMOTE_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix", "dir", "mooncake")
_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POSITIVE = ("ram_bytes", "max_leases", "max_puts", "max_loads", "max_entries", "ssd_threads")
_NOT_NEGATIVE = (
    "slab_bytes",
    "tenant_ram_bytes",
    "tenant_ssd_bytes",
    "ssd_bytes",
    "ssd_write_bytes_per_s",
    "ssd_read_bytes_per_s",
    "peer_bytes_per_s",
    "remote_write_bytes_per_s",
    "queue_bytes",
)
_SECONDS = ("max_lease_s", "put_timeout_s", "load_timeout_s", "peer_timeout_s", "remote_timeout_s", "drain_grace_s")
_MIN_SEGMENT_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """SHOAL_KV_CACHE_<FIELD>.

    listen_address            host:port of the gRPC server; port 0 picks one
    advertised_address        what others are told to call; empty: the address listened on
    admin_address             host:port of /metrics, /healthz and /readyz
    stream_listen_address     host:port of the byte stream by which other hosts pull; off: none, they use gRPC
    stream_advertised_address what others are told to pull from; empty: the address listened on
    node_id                   stable name, by which the node owns segments; empty: the one kept in ssd_directory, else
                              the instance's
    ram_bytes                 payload bytes kept in memory
    slab_bytes                piece in which memory is handed out; 0: the size of the first block that is stored
    max_leases                open leases at most
    max_lease_s               longest time that a lease may live
    max_puts                  puts in flight at most
    put_timeout_s             a put that takes longer is dropped
    max_loads                 acquires at most that load from slower tiers at a time; others use memory alone
    load_timeout_s            longest time that an acquire may spend on loading from slower tiers
    max_entries               blocks and snapshots at most, over memory and disk; tables of 90 bytes each are laid out
    tenant_ram_bytes          bytes in memory of one tenant above which its own are evicted first; 0: no quota
    tenant_ssd_bytes          the same on disk
    tenant_quotas             exceptions from these two: TAG=RAM_BYTES:SSD_BYTES, the tag in hex, commas between
    copies                    owners of a segment, 1 or 2
    peer_timeout_s            longest wait for another node
    peer_bytes_per_s          limit on what is sent on to other nodes; 0: none
    ssd_directory             folder of the disk tier; empty: none. One node per folder
    ssd_bytes                 payload bytes kept on disk
    ssd_segment_file_bytes    size of a segment file
    ssd_fsync                 always: a put is answered when it is durable; interval: once a second; never: the kernel's
    ssd_threads               reads and writes of the disk at a time
    ssd_write_bytes_per_s     limit on write-back to disk; 0: none
    ssd_read_bytes_per_s      limit on promotion from disk; 0: none
    remote_url                store outside of the mesh: redis://HOST:PORT/DB, rediss://, redis+cluster://, unix:///SOCKET,
                              dir:///FOLDER or mooncake://HOST:PORT; empty: none
    remote_timeout_s          longest wait for it
    remote_write_bytes_per_s  limit on write-back to it; 0: none
    queue_bytes               payload bytes at most that wait for each slower tier and for other nodes
    drain_grace_s             from SIGTERM to the end
    """

    listen_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    admin_address: str = "127.0.0.1:0"
    stream_listen_address: str = "127.0.0.1:0"
    stream_advertised_address: str = ""
    node_id: str = ""
    ram_bytes: int = 512 << 20
    slab_bytes: int = 0
    max_leases: int = 4096
    max_lease_s: float = 120.0
    max_puts: int = 64
    put_timeout_s: float = 30.0
    max_loads: int = 16
    load_timeout_s: float = 5.0
    max_entries: int = 1 << 20
    tenant_ram_bytes: int = 0
    tenant_ssd_bytes: int = 0
    tenant_quotas: tuple[str, ...] = ()
    copies: int = 1
    peer_timeout_s: float = 1.0
    peer_bytes_per_s: int = 0
    ssd_directory: str = ""
    ssd_bytes: int = 8 << 30
    ssd_segment_file_bytes: int = 256 << 20
    ssd_fsync: Literal["always", "interval", "never"] = "interval"
    ssd_threads: int = 4
    ssd_write_bytes_per_s: int = 0
    ssd_read_bytes_per_s: int = 0
    remote_url: str = ""
    remote_timeout_s: float = 2.0
    remote_write_bytes_per_s: int = 0
    queue_bytes: int = 256 << 20
    drain_grace_s: float = 5.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"SHOAL_KV_CACHE_{name.upper()} must be positive, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"SHOAL_KV_CACHE_{name.upper()} must not be negative, got {getattr(self, name)}")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"SHOAL_KV_CACHE_{name.upper()} must be in (0, 3600), got {getattr(self, name)}")
        if self.copies not in (1, 2):
            raise ValueError(f"SHOAL_KV_CACHE_COPIES must be 1 or 2, got {self.copies}")
        if self.node_id and not _NODE_ID.fullmatch(self.node_id):
            raise ValueError(f"SHOAL_KV_CACHE_NODE_ID must be 1 to 64 of A-Z a-z 0-9 . _ -, got {self.node_id!r}")
        if self.ssd_directory and self.ssd_bytes < 2 * self.ssd_segment_file_bytes:
            raise ValueError(
                f"SHOAL_KV_CACHE_SSD_BYTES must be at least twice SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES, got"
                f" {self.ssd_bytes} and {self.ssd_segment_file_bytes}"
            )
        if self.ssd_segment_file_bytes < _MIN_SEGMENT_FILE_BYTES:
            raise ValueError(
                f"SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES must be at least {_MIN_SEGMENT_FILE_BYTES},"
                f" got {self.ssd_segment_file_bytes}"
            )
        self.quotas()
        scheme = urlsplit(self.remote_url).scheme
        if self.remote_url and scheme not in REMOTE_SCHEMES:
            shown = without_credentials(self.remote_url)
            raise ValueError(
                f"SHOAL_KV_CACHE_REMOTE_URL must begin with one of {', '.join(REMOTE_SCHEMES)}, got {shown!r}"
            )

    def quotas(self) -> Quotas:
        """Who may hold how much. Raises ValueError for an exception that cannot be read."""
        ram: dict[bytes, int] = {}
        ssd: dict[bytes, int] = {}
        for one in self.tenant_quotas:
            tag, _, sizes = one.partition("=")
            ram_bytes, _, ssd_bytes = sizes.partition(":")
            try:
                raw = bytes.fromhex(tag)
                ram[raw], ssd[raw] = int(ram_bytes), int(ssd_bytes)
            except ValueError as error:
                raise ValueError(
                    f"SHOAL_KV_CACHE_TENANT_QUOTAS must hold TAG=RAM_BYTES:SSD_BYTES, got {one!r}"
                ) from error
        return Quotas(
            ram_bytes=self.tenant_ram_bytes or None,
            ssd_bytes=self.tenant_ssd_bytes or None,
            ram_bytes_of=ram,
            ssd_bytes_of=ssd,
        )
