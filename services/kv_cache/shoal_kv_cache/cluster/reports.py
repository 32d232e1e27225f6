"""Tells the owners of a segment that a payload of it is damaged."""

from __future__ import annotations

import asyncio
import logging

import grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.rpc import Channels, from_rpc_error

from shoal_kv_cache.cluster.forwarder import SegmentNames
from shoal_kv_cache.cluster.members import Members, Peer
from shoal_kv_cache.core.entries import Group, Key
from shoal_kv_cache.store import PAYLOAD_KIND

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0


def report_of(group: Group, key: Key) -> pb.ReportCorruptRequest:
    """A report of damage."""
    return pb.ReportCorruptRequest(
        kind=PAYLOAD_KIND[key.kind],
        block_hash=key.block_hash,
        kv_id=group.kv_id,
        numerics_id=group.numerics_id,
        tenant_tag=group.tenant_tag,
    )


class Reporter:
    """Reports end: a node tells others only of a copy that it has just dropped."""

    def __init__(self, members: Members, names: SegmentNames, channels: Channels) -> None:
        self._members, self._names, self._channels = members, names, channels

    async def report(self, group: Group, key: Key, segment_name: bytes) -> None:
        """Tells the owners, who check theirs. Never raises: who does not hear of it finds out by the checksum."""
        owners = (self._members.peer(one) for one in self._members.owners(segment_name))
        await asyncio.gather(*(self._tell(peer, group, key) for peer in owners if peer is not None))

    async def _tell(self, peer: Peer, group: Group, key: Key) -> None:
        request = report_of(group, key)
        stub = rpc.KvCacheServiceStub(self._channels.get(peer.address).as_grpc())
        try:
            await stub.ReportCorrupt(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.info(
                "peer did not hear of damage", extra={"peer": peer.node_id, "reason": from_rpc_error(error).reason}
            )
