"""A prefill worker that misbehaves in a chosen way, on a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_rpc
from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal.prefill.v1 import prefill_service_pb2_grpc as rpc
from shoal_common.kv_transport import ExportTable, KvTransportServicer, PayloadSpec

Behaviour = Callable[["FakePrefill", Any], Awaitable[None]]


@dataclass
class FakePrefill(rpc.PrefillServiceServicer):
    """Runs `behave` for each call after its Start; notes how calls end."""

    behave: Behaviour
    exports: ExportTable = field(default_factory=lambda: ExportTable(None))
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def Prefill(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.PrefillRequest], context: Any
    ) -> None:
        await anext(aiter(request_iterator))
        self.started.set()
        try:
            await self.behave(self, context)
        finally:
            self.ended.set()


@asynccontextmanager
async def fake_prefill(behave: Behaviour) -> AsyncIterator[tuple[FakePrefill, str]]:
    """The servicer and its address."""
    fake = FakePrefill(behave)
    server = grpc.aio.server()
    rpc.add_PrefillServiceServicer_to_server(fake, server)
    transport_rpc.add_KvTransportServiceServicer_to_server(KvTransportServicer(fake.exports), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield fake, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def refuses(fake: FakePrefill, context: Any) -> None:
    """RESOURCE_EXHAUSTED at once."""
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def hangs(fake: FakePrefill, context: Any) -> None:
    """Never says a word."""
    await asyncio.Event().wait()


async def ends_early(fake: FakePrefill, context: Any) -> None:
    """OK, but without Done."""
    await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0)))


async def promises_a_hit_that_nobody_has(fake: FakePrefill, context: Any) -> None:
    """Hit(128) of a prompt that is not cached, then nothing below it."""
    await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=128)))
    await context.write(pb.PrefillResponse(done=pb.Done(hidden_row=b"", checksum=0x2D06800538D394C2)))


async def damages_rows(fake: FakePrefill, context: Any) -> None:
    """A block whose bytes are not those of its checksum."""
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_BLOCK,
        position_begin=0,
        position_end=128,
        shape=(64,),
        dtype="uint8",
        kv_id="whatever",
    )
    with fake.exports.opened(transport_pb.TransportOffer()) as export:
        payload = export.add(spec, b"x" * 64)
        payload.checksum ^= 1
        await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0, grant=export.grant)))
        await context.write(pb.PrefillResponse(ready=pb.Ready(payloads=[payload])))
        await asyncio.Event().wait()


async def sends_rows_of_another_layout(fake: FakePrefill, context: Any) -> None:
    """A sound payload of a kv_id that the decode worker does not have."""
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_BLOCK,
        position_begin=0,
        position_end=128,
        shape=(64,),
        dtype="uint8",
        kv_id="whatever",
    )
    with fake.exports.opened(transport_pb.TransportOffer()) as export:
        payload = export.add(spec, b"x" * 64)
        await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0, grant=export.grant)))
        await context.write(pb.PrefillResponse(ready=pb.Ready(payloads=[payload])))
        await asyncio.Event().wait()


async def damages_the_hidden_row(fake: FakePrefill, context: Any) -> None:
    """A hidden row that does not match its checksum."""
    await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0)))
    await context.write(pb.PrefillResponse(done=pb.Done(hidden_row=b"\x00" * 256, checksum=1)))
