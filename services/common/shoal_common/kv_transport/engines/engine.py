"""What a transfer engine does for us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import Unavailable


class EngineFailed(Unavailable):
    """The engine could not read; another way may."""

    reason = "TRANSFER_ENGINE_FAILED"


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes at an offset of the holder's arena, and where they go in the destination."""

    from_offset: int
    to_offset: int
    size_bytes: int


class TransferEngine(Protocol):
    """Holder and puller have one each, of one kind. Methods block and may be called from any thread.

    Reads are one-sided: whoever knows `peer` reads anything in the arena, unlike by the other ways, where an export's
    id opens what it names. Enable one where all workers may see all blocks; tenants are apart by hashes alone there.
    """

    @property
    def kind(self) -> pb.TransportKind.ValueType:
        """Its name in offers and grants."""
        ...

    def serve(self, arena: memoryview) -> bytes:
        """Let others read `arena` until `close`; what a puller needs to know of this one. Raises EngineFailed."""
        ...

    def read(
        self, peer: bytes, base_address: int, moves: Sequence[Move], memory: memoryview, *, timeout_s: float
    ) -> None:
        """Copy from the arena that `peer` serves at `base_address` into `memory`. Unchecked.

        Raises EngineFailed, DeadlineExceeded.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Safe to repeat."""
        ...
