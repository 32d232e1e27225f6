"""What this process offers to others, until it is let go of."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import NotFound, ResourceExhausted
from shoal_common.kv_transport.arena import SharedArena
from shoal_common.kv_transport.buffers import Buffer
from shoal_common.kv_transport.host import host_id
from shoal_common.kv_transport.payloads import PayloadSpec, describe


class Export:
    """Payloads offered under one grant. With an arena they lie in shared memory, else in this process."""

    def __init__(self, export_id: str, grant: pb.TransportGrant, arena: SharedArena | None) -> None:
        self.grant = grant
        self.export_id = export_id
        self._arena = arena
        self._own_offsets: list[int] = []
        self._payloads: dict[int, pb.Payload] = {}
        self._data: dict[int, bytes] = {}
        self._held: dict[int, Callable[[], bytes]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes offered."""
        return sum(payload.size_bytes for payload in self._payloads.values())

    def add(self, spec: PayloadSpec, data: Buffer) -> pb.Payload:
        """Offers a copy of `data`. Raises ArenaFull without room in shared memory, InvalidArgument for a wrong size."""
        payload = describe(len(self._payloads), spec, data)
        if self._arena is None:
            self._data[payload.payload_id] = bytes(memoryview(data).cast("B"))
        else:
            payload.arena_offset = self._arena.store(data)
            self._own_offsets.append(payload.arena_offset)
        self._payloads[payload.payload_id] = payload
        return payload

    def add_held(
        self, spec: PayloadSpec, *, checksum: int, load: Callable[[], bytes], arena_offset: int | None = None
    ) -> pb.Payload:
        """Offers what lies elsewhere and stays there at least as long as this export; `load` copies it out.

        `checksum` is the writer's, so that damage in between shows at the reader. `arena_offset` is where it lies in
        the arena, which a grant of shared memory needs.
        """
        if (arena_offset is None) != (self._arena is None):
            raise ValueError("an offset in the arena goes with a grant of shared memory, and only with one")
        payload = pb.Payload(
            payload_id=len(self._payloads),
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
        return payload

    def read(self, payload_id: int) -> bytes:
        """The bytes of a payload. Raises NotFound (UNKNOWN_PAYLOAD)."""
        payload = self._payloads.get(payload_id)
        if payload is None:
            raise NotFound(f"payload {payload_id}", reason="UNKNOWN_PAYLOAD", payload_id=payload_id)
        if payload_id in self._held:
            return self._held[payload_id]()
        if self._arena is None:
            return self._data[payload_id]
        return self._arena.load(payload.arena_offset, payload.size_bytes)

    def close(self) -> None:
        """Frees what this export copied into the arena. Safe to repeat."""
        if self._arena is not None:
            for offset in self._own_offsets:
                self._arena.free(offset)
        self._own_offsets.clear()
        self._payloads.clear()
        self._data.clear()
        self._held.clear()


class ExportTable:
    """Live exports by id. Bounded; one event loop owns it."""

    def __init__(self, arena: SharedArena | None, *, max_exports: int = 1024) -> None:
        self.arena = arena
        self._max_exports = max_exports
        self._exports: dict[str, Export] = {}

    def __len__(self) -> int:
        return len(self._exports)

    def open(self, offer: pb.TransportOffer) -> Export:
        """A new export by the best way that both sides have. Raises ResourceExhausted (TOO_MANY_EXPORTS).

        Shared memory is granted to a puller on this host; gRPC, which always works, to everyone else.
        """
        if len(self._exports) >= self._max_exports:
            raise ResourceExhausted(
                f"{len(self._exports)} exports are live", reason="TOO_MANY_EXPORTS", max_exports=self._max_exports
            )
        export_id = secrets.token_hex(16)
        arena = self.arena if self._shares_memory(offer) else None
        grant = pb.TransportGrant(kind=pb.TRANSPORT_KIND_GRPC, export_id=export_id)
        if arena is not None:
            grant.kind = pb.TRANSPORT_KIND_SHM
            grant.arena_name, grant.arena_nonce = arena.name, arena.nonce
        export = Export(export_id, grant, arena)
        self._exports[export_id] = export
        return export

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

    def _shares_memory(self, offer: pb.TransportOffer) -> bool:
        return (
            self.arena is not None
            and pb.TRANSPORT_KIND_SHM in offer.kinds
            and offer.host_id != ""
            and offer.host_id == host_id()
        )
