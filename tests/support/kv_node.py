"""A kv_cache node that does only what the wire needs: one group, no eviction, everything that was put is found."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.errors import ChecksumMismatch, OutOfCapacity, Unimplemented
from shoal_common.kv_transport import (
    Export,
    ExportTable,
    KvTransportServicer,
    RunSpec,
    SlabArena,
    StreamCall,
    StreamServer,
    TransferEngine,
    open_engines,
)
from shoal_common.rpc import Readiness, RpcServer, Service
from shoal_common.telemetry import Metrics

BLOCK, SNAPSHOT = transport_pb.PAYLOAD_KIND_BLOCK, transport_pb.PAYLOAD_KIND_ENCODER_WINDOW


@dataclass
class Held:
    """One payload."""

    payload: transport_pb.Payload
    first: int


class KvNode(rpc.KvCacheServiceServicer):
    """Serves Acquire, Release, Put, ReportCorrupt and GetStats over an arena of slabs."""

    def __init__(
        self,
        *,
        size_bytes: int,
        has_stream: bool = True,
        is_shared: bool = True,
        engines: Sequence[TransferEngine] = (),
    ) -> None:
        self.arena = SlabArena(size_bytes, is_shared=is_shared)
        self.stream: StreamServer | None = None
        self.exports = ExportTable(
            self.arena,
            stream_address=lambda: self.stream.address if self.stream else "",
            call_socket=lambda: self.stream.call_socket if self.stream else "",
            engines=engines,
        )
        if has_stream:
            self.stream = StreamServer(
                self.exports,
                listen_address="127.0.0.1:0",
                calls={"Acquire": StreamCall(pb.AcquireRequest, self.acquire)},
                io_timeout_s=2.0,
            )
        self.held: dict[tuple[int, bytes], Held] = {}
        self.leases: dict[str, Export] = {}
        self.acquires: list[pb.AcquireRequest] = []
        self.reported: list[bytes] = []
        self.filled_count = 0
        self.fails_next = False
        self.address = ""
        self._server = RpcServer(
            [
                Service("shoal.kv_cache.v1.KvCacheService", rpc.add_KvCacheServiceServicer_to_server, self),
                Service(
                    "shoal.common.v1.KvTransportService",
                    transport_grpc.add_KvTransportServiceServicer_to_server,
                    KvTransportServicer(self.exports),
                ),
            ],
            listen_address="127.0.0.1:0",
            readiness=Readiness(),
            metrics=Metrics(),
            has_reflection=False,
        )

    async def __aenter__(self) -> KvNode:
        if self.stream is not None:
            self.stream.start()
        self.address = await self._server.start()
        return self

    async def __aexit__(self, *details: object) -> None:
        if self.stream is not None:
            self.stream.close()
        await self._server.stop(0)
        self.arena.close()

    async def acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        """Blocks as far as they are there, and the last snapshot on them."""
        self.acquires.append(request)
        if self.fails_next:
            self.fails_next = False
            raise OutOfCapacity("told to fail")
        for lease_id in request.release_lease_ids:
            self._end(lease_id)
        limit = request.max_hit_tokens // 128
        blocks = []
        for one in request.block_hashes[:limit]:
            held = self.held.get((BLOCK, one))
            if held is None:
                break
            blocks.append(held)
        export = self.exports.open(request.offer)
        runs, hit_tokens = [], 0
        if blocks:
            runs.append(export.add_run(_spec(blocks[0]), *_columns(blocks)))
            self.leases[request.lease_id] = export
        for count in range(len(blocks), 0, -1):
            snapshot = self.held.get((SNAPSHOT, request.block_hashes[count - 1]))
            if snapshot is not None and not request.blocks_only:
                runs.append(export.add_run(_spec(snapshot), *_columns([snapshot])))
                hit_tokens = count * 128
                break
        if not runs:
            self.exports.close(export)
        return pb.AcquireResponse(
            hit_tokens=hit_tokens,
            replay_tokens=len(blocks) * 128 if len(blocks) * 128 > hit_tokens else 0,
            present_tokens=len(blocks) * 128,
            grant=export.grant,
            runs=runs,
        )

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:
        return await self.acquire(request)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._end(request.lease_id)
        return pb.ReleaseResponse()

    async def ReportCorrupt(self, request: pb.ReportCorruptRequest, context: Any) -> pb.ReportCorruptResponse:
        self.reported.append(request.block_hash)
        return pb.ReportCorruptResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(lease_count=len(self.leases))

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Any) -> AsyncIterator[pb.PutResponse]:
        begin = (await anext(request_iterator)).begin
        if not self.arena.slab_bytes and begin.payloads:
            size = begin.payloads[0].size_bytes
            self.arena.cut(size + -size % 64)
        new = [one for one in begin.payloads if (one.kind, one.block_hash) not in self.held]
        firsts = {one.payload_id: self.arena.allocate(one.size_bytes) for one in new}
        wanted = pb.PutWanted(payload_ids=list(firsts))
        grant = self.exports.grant_fill(begin.offer)
        if grant is not None:
            self.filled_count += len(new)
            wanted.grant.CopyFrom(grant)
            wanted.slabs.extend(self.arena.slabs_of(firsts.values()))
        yield pb.PutResponse(wanted=wanted)
        async for message in request_iterator:
            if message.HasField("commit"):
                break
            self.arena.write(firsts[message.data.payload_id], message.data.offset, message.data.data)
        for one in new:
            if self.arena.checksum(firsts[one.payload_id], one.size_bytes) != one.checksum:
                raise ChecksumMismatch(f"payload {one.payload_id} is damaged", payload_id=one.payload_id)
        for one in new:
            self.held[one.kind, one.block_hash] = Held(one, firsts[one.payload_id])
        yield pb.PutResponse(committed=pb.PutCommitted(stored_count=len(new)))

    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushResponse:
        raise Unimplemented("not on this node")

    async def ListFlushes(self, request: pb.ListFlushesRequest, context: Any) -> pb.ListFlushesResponse:
        raise Unimplemented("not on this node")

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Any) -> pb.ListGroupsResponse:
        raise Unimplemented("not on this node")

    def ListHeld(self, request: pb.ListHeldRequest, context: Any) -> AsyncIterator[pb.ListHeldResponse]:
        raise Unimplemented("not on this node")

    def Verify(self, request: pb.VerifyRequest, context: Any) -> AsyncIterator[pb.VerifyResponse]:
        raise Unimplemented("not on this node")

    def _end(self, lease_id: str) -> None:
        export = self.leases.pop(lease_id, None)
        if export is not None:
            self.exports.close(export)


def _spec(held: Held) -> RunSpec:
    payload = held.payload
    return RunSpec(
        kind=payload.kind,
        position_begin=payload.position_begin,
        positions=payload.position_end - payload.position_begin,
        shape=tuple(payload.shape),
        dtype=payload.dtype,
        kv_id=payload.kv_id,
    )


def _columns(held: list[Held]) -> tuple[list[int], list[int]]:
    return [one.payload.checksum for one in held], [one.first for one in held]


async def main(size_bytes: int, engines: Sequence[str]) -> None:
    """Serve until killed, saying where."""
    async with KvNode(size_bytes=size_bytes, engines=open_engines(engines, host="127.0.0.1")) as node:
        print(f"READY {node.address}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), sys.argv[2:]))
