"""A holder of payloads that serves them in every way, for tests of the wire."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from shoal.common.v1 import kv_transport_pb2 as pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as pb_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal_common.errors import InvalidArgument
from shoal_common.kv_transport import (
    Arena,
    ExportTable,
    KvTransportServicer,
    PayloadSpec,
    RunSpec,
    StreamCall,
    StreamCaller,
    StreamServer,
    TransferEngine,
)
from shoal_common.rpc.channels import Channel
from shoal_common.rpc.interceptors import ServerInterceptor
from shoal_common.telemetry import Metrics

SHM, TCP, GRPC = pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_TCP, pb.TRANSPORT_KIND_GRPC


@dataclass
class Holder:
    """What a test needs of it."""

    exports: ExportTable
    stream: StreamServer
    channel: Channel


@asynccontextmanager
async def holder(
    arena: Arena | None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    calls: Mapping[str, StreamCall] | None = None,
    max_connections: int = 16,
    io_timeout_s: float = 5.0,
    idle_s: float = 60.0,
    slowest_bytes_per_s: float = 10e6,
    engines: Sequence[TransferEngine] = (),
) -> AsyncIterator[Holder]:
    """An export table behind a stream and behind gRPC."""
    exports = ExportTable(arena, stream_address=lambda: stream.address, engines=engines)
    stream = StreamServer(
        exports,
        listen_address="127.0.0.1:0",
        calls=calls,
        ssl_context=ssl_context,
        max_connections=max_connections,
        io_timeout_s=io_timeout_s,
        idle_s=idle_s,
        slowest_bytes_per_s=slowest_bytes_per_s,
    )
    server = grpc.aio.server(interceptors=[ServerInterceptor(Metrics())])
    pb_grpc.add_KvTransportServiceServicer_to_server(KvTransportServicer(exports), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stream.start()
    channel = Channel(f"127.0.0.1:{port}")
    try:
        yield Holder(exports, stream, channel)
    finally:
        stream.close()
        await channel.close()
        await server.stop(None)


def run_of(size: int, *, position_begin: int = 0) -> RunSpec:
    """Blocks of `size` bytes."""
    return RunSpec(
        kind=pb.PAYLOAD_KIND_BLOCK,
        position_begin=position_begin,
        positions=128,
        shape=(size,),
        dtype="uint8",
        kv_id="kv",
    )


def block_of(size: int) -> PayloadSpec:
    """One block of `size` bytes."""
    return PayloadSpec(
        kind=pb.PAYLOAD_KIND_BLOCK, position_begin=0, position_end=128, shape=(size,), dtype="uint8", kv_id="kv"
    )


def mutual_tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and a client that know each other by one certificate."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(certificate)
    server.verify_mode = ssl.CERT_REQUIRED
    return server, client


async def double(request: cache_pb.ReleaseRequest) -> cache_pb.ReleaseRequest:
    """A method that doubles what it is given, fails for nothing and for "bug", and is "slow"."""
    if not request.lease_id:
        raise InvalidArgument.at("lease_id", "must not be empty", reason="EMPTY")
    if request.lease_id == "bug":
        raise ZeroDivisionError
    if request.lease_id == "slow":
        await asyncio.sleep(3600)
    return cache_pb.ReleaseRequest(lease_id=request.lease_id * 2)


async def call_by_stream(
    caller: StreamCaller, address: str, text: str, *, method: str = "Double", timeout_s: float = 5
) -> str:
    """What a holder that serves `double` by its stream makes of it."""
    request = cache_pb.ReleaseRequest(lease_id=text)
    answer = await caller.call(address, method, request, cache_pb.ReleaseRequest, timeout_s=timeout_s)
    return answer.lease_id
