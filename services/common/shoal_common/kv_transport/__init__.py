"""Moving KV bytes between processes: shared memory or gRPC, chosen by handshake, checked on arrival."""

from shoal_common.kv_transport.arena import ArenaFull, SharedArena
from shoal_common.kv_transport.exports import Arena, Export, ExportTable, Piece
from shoal_common.kv_transport.host import host_id
from shoal_common.kv_transport.payloads import ITEM_BYTES, PayloadSpec, RunSpec, checksum_of, describe, verify
from shoal_common.kv_transport.puller import KvPuller
from shoal_common.kv_transport.servicer import KvTransportServicer
from shoal_common.kv_transport.slabs import SlabArena
from shoal_common.kv_transport.stream_server import StreamCall, StreamServer

__all__ = [
    "ITEM_BYTES",
    "Arena",
    "ArenaFull",
    "Export",
    "ExportTable",
    "KvPuller",
    "KvTransportServicer",
    "PayloadSpec",
    "Piece",
    "RunSpec",
    "SharedArena",
    "SlabArena",
    "StreamCall",
    "StreamServer",
    "checksum_of",
    "describe",
    "host_id",
    "verify",
]
