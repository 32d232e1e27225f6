"""Sends what was stored here on to the owners of its segments."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

import grpc
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.errors import DataLoss, MeshError
from shoal_common.rpc import Channels, from_rpc_error, is_transport_failure

from shoal_kv_cache.cluster.members import Members, Peer
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Group, Key, Kind
from shoal_kv_cache.movement.background import Item
from shoal_kv_cache.store import PAYLOAD_KIND, Store

_CHUNK_BYTES = 1 << 20
_MAX_NAMES = 1 << 16


class SegmentNames:
    """The first hash of the segment that a block is in: walks up the parents in the index, and remembers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[bytes, bytes] = {}

    def of(self, entry: Entry) -> bytes | None:
        """None where an ancestor is gone."""
        path: list[bytes] = []
        block_hash, parent_hash, index = entry.key.block_hash, entry.parent_hash, entry.block_index
        while index % SEGMENT_BLOCKS and block_hash not in self._known:
            path.append(block_hash)
            block_hash, index = parent_hash, index - 1
            if index % SEGMENT_BLOCKS and block_hash not in self._known:
                held = self._store.index.get(entry.group, Key(Kind.BLOCK, block_hash))
                if held is None:
                    return None
                parent_hash = held.entry.parent_hash
        name = self._known.get(block_hash, block_hash)
        if len(self._known) > _MAX_NAMES:
            self._known.clear()
        self._known.update(dict.fromkeys(path, name))
        return name


class PeerSink:
    """Puts entries at the owners of their segments; what this node owns itself stays. See Sink."""

    def __init__(
        self,
        store: Store,
        members: Members,
        names: SegmentNames,
        channels: Channels,
        *,
        instance_id: str,
        timeout_s: float,
    ) -> None:
        self._store, self._members, self._names, self._channels = store, members, names, channels
        self._instance_id, self._timeout_s = instance_id, timeout_s

    async def write(self, items: Sequence[Item]) -> int:
        """See Sink."""
        puts: dict[tuple[Peer, Group], list[tuple[Entry, int]]] = {}
        for item in items:
            held = self._store.index.get(item.group, item.key)
            if held is None or held.slab is None:
                continue
            name = self._names.of(held.entry)
            for owner in self._members.owners(name) if name is not None else ():
                peer = self._members.peer(owner) if owner != self._members.node_id else None
                if peer is not None:
                    puts.setdefault((peer, item.group), []).append((held.entry, held.slab))
        slabs = [slab for batch in puts.values() for _, slab in batch]
        self._store.ram.hold(slabs)
        try:
            results = await asyncio.gather(
                *(self._put(peer, group, batch) for (peer, group), batch in puts.items()), return_exceptions=True
            )
        finally:
            self._store.ram.let_go(slabs)
        for result in results:
            # One peer that is gone must not keep the others waiting: only if all failed the queue rests.
            if isinstance(result, BaseException) and not isinstance(result, MeshError):
                raise result
        if any(isinstance(result, DataLoss) for result in results):
            self._store.drop_damaged(one for batch in puts.values() for one in batch)
        sent = [result for result in results if isinstance(result, int)]
        failed = [result for result in results if isinstance(result, MeshError)]
        if failed and not sent:
            raise failed[0]
        return sum(sent)

    async def _put(self, peer: Peer, group: Group, batch: Sequence[tuple[Entry, int]]) -> int:
        channel = self._channels.get(peer.address)
        wanted: asyncio.Future[set[int]] = asyncio.get_running_loop().create_future()
        call = rpc.KvCacheServiceStub(channel.as_grpc()).Put(
            self._messages(group, batch, wanted), timeout=self._timeout_s
        )
        try:
            async for answer in call:
                if answer.HasField("wanted"):
                    wanted.set_result(set(answer.wanted.payload_ids))
        except grpc.aio.AioRpcError as error:
            if is_transport_failure(error):
                self._channels.rebuild(channel)
                self._members.failed(peer.node_id)
            raise from_rpc_error(error) from error
        finally:
            wanted.cancel()
        ids = wanted.result() if wanted.done() and not wanted.cancelled() else set()
        return sum(batch[index][0].size_bytes for index in ids if index < len(batch))

    async def _messages(
        self, group: Group, batch: Sequence[tuple[Entry, int]], wanted: asyncio.Future[set[int]]
    ) -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(
            begin=pb.PutBegin(
                put_id=secrets.token_hex(16),
                owner_id=self._instance_id,
                kv_id=group.kv_id,
                numerics_id=group.numerics_id,
                tenant_tag=group.tenant_tag,
                payloads=[_payload(index, entry) for index, (entry, _) in enumerate(batch)],
                parent_hashes=[entry.parent_hash for entry, _ in batch],
                is_from_peer=True,
            )
        )
        ids = await wanted
        for index, (entry, slab) in enumerate(batch):
            if index not in ids:
                continue
            offset = 0
            for view in self._store.ram.arena.views(slab, entry.size_bytes):
                for begin in range(0, view.nbytes, _CHUNK_BYTES):
                    data = bytes(view[begin : begin + _CHUNK_BYTES])
                    yield pb.PutRequest(data=pb.PutData(payload_id=index, offset=offset, data=data))
                    offset += len(data)
        yield pb.PutRequest(commit=pb.PutCommit())


def _payload(payload_id: int, entry: Entry) -> transport_pb.Payload:
    return transport_pb.Payload(
        payload_id=payload_id,
        kind=PAYLOAD_KIND[entry.key.kind],
        position_begin=entry.position_begin,
        position_end=entry.position_end,
        shape=entry.form.shape,
        dtype=entry.form.dtype,
        kv_id=entry.group.kv_id,
        size_bytes=entry.size_bytes,
        checksum=entry.checksum,
        block_hash=entry.key.block_hash,
    )
