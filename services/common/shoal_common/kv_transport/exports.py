"""What this process offers to others, until it is let go of."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import NotFound, ResourceExhausted
from shoal_common.host import host_id
from shoal_common.kv_transport.arena import SharedArena
from shoal_common.kv_transport.buffers import Buffer, address_of
from shoal_common.kv_transport.engines import TransferEngine
from shoal_common.kv_transport.payloads import PayloadSpec, RunSpec, describe
from shoal_common.kv_transport.slabs import SlabArena, slab_views

Arena: TypeAlias = SharedArena | SlabArena
_BY_SLABS = frozenset({pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_NIXL, pb.TRANSPORT_KIND_MOONCAKE})


@dataclass(frozen=True, slots=True)
class Piece:
    """Payloads that follow each other and have one size, in place: what a byte stream sends."""

    first_payload_id: int
    count: int
    size_bytes: int
    views: list[memoryview]


@dataclass(frozen=True, slots=True)
class _Run:
    """Payloads in slabs; `per_payload` slabs each."""

    first_payload_id: int
    count: int
    size_bytes: int
    per_payload: int
    slabs: Sequence[int]


class Export:
    """Payloads offered under one grant. They lie in the arena of the table, else in this process.

    The event loop of the table adds and closes; any thread may read what is there (`piece`).
    """

    def __init__(self, export_id: str, grant: pb.TransportGrant, arena: Arena | None) -> None:
        self.grant = grant
        self.export_id = export_id
        self.is_open = True
        self._arena = arena
        self._shares_memory = grant.kind in _BY_SLABS
        self._count = 0
        self._own_offsets: list[int] = []
        self._payloads: dict[int, pb.Payload] = {}
        self._data: dict[int, bytes] = {}
        self._held: dict[int, Callable[[], bytes]] = {}
        self._runs: list[_Run] = []

    @property
    def size_bytes(self) -> int:
        """Bytes offered."""
        singles = sum(payload.size_bytes for payload in self._payloads.values())
        return singles + sum(run.count * run.size_bytes for run in self._runs)

    def add(self, spec: PayloadSpec, data: Buffer) -> pb.Payload:
        """Offers a copy of `data`. Raises ArenaFull without room in shared memory, InvalidArgument for a wrong size."""
        payload = describe(self._count, spec, data)
        if self._shares_memory and isinstance(self._arena, SharedArena):
            payload.arena_offset = self._arena.store(data)
            self._own_offsets.append(payload.arena_offset)
        else:
            self._data[payload.payload_id] = bytes(memoryview(data).cast("B"))
        self._payloads[payload.payload_id] = payload
        self._count += 1
        return payload

    def add_held(
        self, spec: PayloadSpec, *, checksum: int, load: Callable[[], bytes], arena_offset: int | None = None
    ) -> pb.Payload:
        """Offers what lies elsewhere and stays there at least as long as this export; `load` copies it out.

        `checksum` is the writer's, so that damage in between shows at the reader. `arena_offset` is where it lies in
        the arena, which a grant of shared memory needs.
        """
        if (arena_offset is None) == self._shares_memory:
            raise ValueError("an offset in the arena goes with a grant of shared memory, and only with one")
        payload = pb.Payload(
            payload_id=self._count,
            kind=spec.kind,
            position_begin=spec.position_begin,
            position_end=spec.position_end,
            shape=spec.shape,
            dtype=spec.dtype,
            kv_id=spec.kv_id,
            size_bytes=spec.size_bytes,
            checksum=checksum,
            block_hash=spec.block_hash,
            arena_offset=arena_offset or 0,
        )
        self._payloads[payload.payload_id] = payload
        self._held[payload.payload_id] = load
        self._count += 1
        return payload

    def add_run(self, spec: RunSpec, checksums: Sequence[int], firsts: Sequence[int]) -> pb.PayloadRun:
        """Offers payloads that lie in the table's SlabArena and stay there at least as long as this export.

        checksums   the writers', in position order
        firsts      first slab of each (SlabArena.allocate), as many
        """
        if not isinstance(self._arena, SlabArena) or len(checksums) != len(firsts):
            raise ValueError("a run has a checksum and a first slab for each payload, and lies in a SlabArena")
        size_bytes = spec.size_bytes
        per_payload = self._arena.slabs_for(size_bytes)
        slabs = firsts if per_payload == 1 else self._arena.slabs_of(firsts)
        self._runs.append(_Run(self._count, len(firsts), size_bytes, per_payload, slabs))
        run = pb.PayloadRun(
            first_payload_id=self._count,
            kind=spec.kind,
            position_begin=spec.position_begin,
            positions=spec.positions,
            shape=spec.shape,
            dtype=spec.dtype,
            kv_id=spec.kv_id,
            size_bytes=size_bytes,
            checksums=checksums,
            slabs=slabs if self._shares_memory else (),
        )
        self._count += len(firsts)
        return run

    def read(self, payload_id: int) -> bytes:
        """A copy of a payload. Raises NotFound (UNKNOWN_PAYLOAD)."""
        return b"".join(self.piece(payload_id, 1).views)

    def piece(self, first_payload_id: int, count: int, *, max_bytes: int = 1 << 40) -> Piece:
        """The first payloads of [first_payload_id, + count) as far as one piece holds them; one at least.

        Larger ones than `max_bytes` come one by one.

        Raises NotFound (UNKNOWN_PAYLOAD). The views stay mapped as long as they are held; what they show is right only
        while the export is open.
        """
        index = bisect_right(self._runs, first_payload_id, key=lambda run: run.first_payload_id) - 1
        if index >= 0:
            run = self._runs[index]
            skipped = first_payload_id - run.first_payload_id
            if skipped < run.count:
                limit = max(1, max_bytes // max(1, run.size_bytes))
                return self._piece_of_run(run, skipped, min(count, run.count - skipped, limit))
        payload = self._payloads.get(first_payload_id)
        if payload is None:
            raise NotFound(f"payload {first_payload_id}", reason="UNKNOWN_PAYLOAD", payload_id=first_payload_id)
        return Piece(first_payload_id, 1, payload.size_bytes, [self._view(payload)])

    def close(self) -> None:
        """Frees what this export copied into the arena. Safe to repeat."""
        self.is_open = False
        if isinstance(self._arena, SharedArena):
            for offset in self._own_offsets:
                self._arena.free(offset)
        self._own_offsets.clear()
        # New ones, since a stream may be reading the old ones.
        self._payloads, self._data, self._held, self._runs = {}, {}, {}, []

    def _piece_of_run(self, run: _Run, skipped: int, count: int) -> Piece:
        assert self._arena is not None
        slabs = run.slabs[skipped * run.per_payload : (skipped + count) * run.per_payload]
        offset, slab_bytes = self._arena.first_slab_offset, self._arena.slab_bytes
        first_id = run.first_payload_id + skipped
        if run.size_bytes == run.per_payload * slab_bytes:
            views = slab_views(self._arena.memory, offset, slab_bytes, slabs, count * run.size_bytes)
            return Piece(first_id, count, run.size_bytes, views)
        views = []
        for begin in range(0, len(slabs), run.per_payload):
            own = slabs[begin : begin + run.per_payload]
            views += slab_views(self._arena.memory, offset, slab_bytes, own, run.size_bytes)
        return Piece(first_id, count, run.size_bytes, views)

    def _view(self, payload: pb.Payload) -> memoryview:
        if payload.payload_id in self._held:
            return memoryview(self._held[payload.payload_id]())
        if payload.payload_id in self._data:
            return memoryview(self._data[payload.payload_id])
        assert self._arena is not None
        return self._arena.memory[payload.arena_offset : payload.arena_offset + payload.size_bytes]


class ExportTable:
    """Live exports by id. Bounded; one event loop owns it, any thread may `get`."""

    def __init__(
        self,
        arena: Arena | None,
        *,
        max_exports: int = 1024,
        stream_address: Callable[[], str] = lambda: "",
        call_socket: Callable[[], str] = lambda: "",
        engines: Sequence[TransferEngine] = (),
    ) -> None:
        """arena            where payloads lie; None: in this process, copied
        stream_address   host:port of the byte stream that serves this table (StreamServer.address); an empty host
                         means the one that the caller called; empty while none is served
        call_socket      name of the unix socket that serves the stream's calls (StreamServer.call_socket)
        engines          by which others may read the arena, best first. Raises EngineFailed if one cannot serve it
        """
        self._engines = [(one.kind, one.serve(arena.memory)) for one in engines] if arena is not None else []
        self._base_address = address_of(arena.memory) if self._engines and arena is not None else 0
        self.arena = arena
        self._max_exports = max_exports
        self._stream_address, self._call_socket = stream_address, call_socket
        self._exports: dict[str, Export] = {}
        self._shared: tuple[tuple[str, str, int], pb.TransportGrant] | None = None

    def __len__(self) -> int:
        return len(self._exports)

    def open(self, offer: pb.TransportOffer) -> Export:
        """A new export by the best way that both sides have. Raises ResourceExhausted (TOO_MANY_EXPORTS).

        Shared memory for a puller on this host, then an engine that both have, then the byte stream; gRPC, which always
        works, for everyone else.
        """
        if len(self._exports) >= self._max_exports:
            raise ResourceExhausted(
                f"{len(self._exports)} exports are live", reason="TOO_MANY_EXPORTS", max_exports=self._max_exports
            )
        export_id = secrets.token_hex(16)
        export = Export(export_id, self._grant(offer, export_id), self.arena)
        self._exports[export_id] = export
        return export

    def grant_fill(self, offer: pb.TransportOffer) -> pb.TransportGrant | None:
        """For PutWanted: the arena that a writer on this host fills itself; None when its bytes must be sent."""
        if not isinstance(self.arena, SlabArena) or not self._shares_memory(offer):
            return None
        return self._grant(offer, "")

    def grant_nothing(self, offer: pb.TransportOffer) -> pb.TransportGrant:
        """For a caller that gets no payloads: where the stream is that takes its next call."""
        return self._grant(offer, "")

    def get(self, export_id: str) -> Export:
        """A live export. Raises NotFound (UNKNOWN_EXPORT)."""
        export = self._exports.get(export_id)
        if export is None:
            raise NotFound(f"export {export_id}", reason="UNKNOWN_EXPORT", export_id=export_id)
        return export

    def close(self, export: Export) -> None:
        """Ends an export. Safe to repeat."""
        self._exports.pop(export.export_id, None)
        export.close()

    @contextmanager
    def opened(self, offer: pb.TransportOffer) -> Iterator[Export]:
        """An export that ends with the block."""
        export = self.open(offer)
        try:
            yield export
        finally:
            self.close(export)

    def _grant(self, offer: pb.TransportOffer, export_id: str) -> pb.TransportGrant:
        """The stream's address goes along whatever the way: it is the next one where that fails."""
        if self.arena is not None and self._shares_memory(offer):
            return self._shared_grant(self.arena, export_id)
        grant = pb.TransportGrant(
            kind=pb.TRANSPORT_KIND_GRPC, export_id=export_id, stream_address=self._stream_address()
        )
        if (engine := next((one for one in self._engines if one[0] in offer.kinds), None)) and self.arena is not None:
            grant.kind, grant.peer = engine
            grant.base_address = self._base_address
            grant.slab_bytes, grant.first_slab_offset = self.arena.slab_bytes, self.arena.first_slab_offset
        elif grant.stream_address and pb.TRANSPORT_KIND_TCP in offer.kinds:
            grant.kind = pb.TRANSPORT_KIND_TCP
        return grant

    def _shared_grant(self, arena: Arena, export_id: str) -> pb.TransportGrant:
        """All but the id stays the same until something is started or cut."""
        what_changes = self._stream_address(), self._call_socket(), arena.slab_bytes
        if self._shared is None or self._shared[0] != what_changes:
            self._shared = (
                what_changes,
                pb.TransportGrant(
                    kind=pb.TRANSPORT_KIND_SHM,
                    stream_address=what_changes[0],
                    call_socket=what_changes[1],
                    slab_bytes=arena.slab_bytes,
                    first_slab_offset=arena.first_slab_offset,
                    arena_name=arena.name,
                    arena_nonce=arena.nonce,
                ),
            )
        grant = pb.TransportGrant()
        grant.CopyFrom(self._shared[1])
        grant.export_id = export_id
        return grant

    def _shares_memory(self, offer: pb.TransportOffer) -> bool:
        return (
            self.arena is not None
            and self.arena.name != ""
            and pb.TRANSPORT_KIND_SHM in offer.kinds
            and offer.host_id == host_id() != ""
        )
