"""Moving KV bytes between processes: shared memory, a byte stream or gRPC, chosen by handshake, checked on arrival."""

from shoal_common.host import host_id, host_of
from shoal_common.kv_transport.arena import ArenaFull, SharedArena
from shoal_common.kv_transport.engines import ENGINES, TransferEngine, open_engines
from shoal_common.kv_transport.exports import Arena, Export, ExportTable, Piece
from shoal_common.kv_transport.fill import fill
from shoal_common.kv_transport.fill_locks import filling
from shoal_common.kv_transport.local_calls import local_address
from shoal_common.kv_transport.mapped import MappedArenas
from shoal_common.kv_transport.payloads import ITEM_BYTES, PayloadSpec, RunSpec, checksum_of, describe, verify
from shoal_common.kv_transport.puller import KvPuller, stream_address
from shoal_common.kv_transport.servicer import KvTransportServicer
from shoal_common.kv_transport.slabs import SlabArena
from shoal_common.kv_transport.stream_caller import BegunCall, StreamCaller
from shoal_common.kv_transport.stream_calls import StreamCall
from shoal_common.kv_transport.stream_client import StreamUnreachable
from shoal_common.kv_transport.stream_frames import StreamBroken
from shoal_common.kv_transport.stream_server import StreamServer

__all__ = [
    "ENGINES",
    "ITEM_BYTES",
    "Arena",
    "ArenaFull",
    "BegunCall",
    "Export",
    "ExportTable",
    "KvPuller",
    "KvTransportServicer",
    "MappedArenas",
    "PayloadSpec",
    "Piece",
    "RunSpec",
    "SharedArena",
    "SlabArena",
    "StreamBroken",
    "StreamCall",
    "StreamCaller",
    "StreamServer",
    "StreamUnreachable",
    "TransferEngine",
    "checksum_of",
    "describe",
    "fill",
    "filling",
    "host_id",
    "host_of",
    "local_address",
    "open_engines",
    "stream_address",
    "verify",
]
