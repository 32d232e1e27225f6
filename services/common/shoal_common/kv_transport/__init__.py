"""Moving KV bytes between processes: shared memory or gRPC, chosen by handshake, checked on arrival."""

from shoal_common.kv_transport.arena import ArenaFull, SharedArena
from shoal_common.kv_transport.exports import Export, ExportTable
from shoal_common.kv_transport.host import host_id
from shoal_common.kv_transport.payloads import ITEM_BYTES, PayloadSpec, checksum_of, describe, verify
from shoal_common.kv_transport.puller import KvPuller
from shoal_common.kv_transport.servicer import KvTransportServicer

__all__ = [
    "ITEM_BYTES",
    "ArenaFull",
    "Export",
    "ExportTable",
    "KvPuller",
    "KvTransportServicer",
    "PayloadSpec",
    "SharedArena",
    "checksum_of",
    "describe",
    "host_id",
    "verify",
]
