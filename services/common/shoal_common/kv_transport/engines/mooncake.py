"""Mooncake's transfer engine over TCP. Source: mooncake.engine of mooncake-transfer-engine-non-cuda 0.3.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.kv_transport.buffers import address_of
from shoal_common.kv_transport.engines.engine import EngineFailed, Move


def open_mooncake(host: str) -> MooncakeEngine:
    """An engine that others reach at `host`, without a metadata server. Raises EngineFailed."""
    try:
        from mooncake.engine import TransferEngine as Engine
    except (ImportError, OSError) as error:
        raise EngineFailed(f"Mooncake: {error}", engine="mooncake") from error
    engine = Engine()
    status = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if status:
        raise EngineFailed(f"Mooncake cannot be reached at {host}: status {status}", engine="mooncake", status=status)
    return MooncakeEngine(engine, host)


class MooncakeEngine:
    """One engine, safe from any thread as it is.

    A read ends by the engine's own time limit (MC_TRANSFER_TIMEOUT), since one under way cannot be given up: its
    destination stays in use until then.
    """

    kind = pb.TRANSPORT_KIND_MOONCAKE

    def __init__(self, engine: Any, host: str) -> None:
        """engine: a mooncake.engine.TransferEngine that is initialised for `host`."""
        self._engine, self._host = engine, host
        self._served: list[int] = []

    def serve(self, arena: memoryview) -> bytes:
        """Register it; host:port of the handshake."""
        self._register(arena)
        self._served.append(address_of(arena))
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def read(
        self, peer: bytes, base_address: int, moves: Sequence[Move], memory: memoryview, *, timeout_s: float
    ) -> None:
        """One batch of all moves."""
        base = address_of(memory)
        self._register(memory)
        try:
            status = self._engine.batch_transfer_sync_read(
                peer.decode(),
                [base + one.to_offset for one in moves],
                [base_address + one.from_offset for one in moves],
                [one.size_bytes for one in moves],
            )
        finally:
            self._engine.unregister_memory(base)
        if status:
            raise EngineFailed(f"Mooncake read nothing: status {status}", engine="mooncake", status=status)

    def close(self) -> None:
        """Deregister what is served."""
        served, self._served = self._served, []
        for address in served:
            self._engine.unregister_memory(address)

    def _register(self, memory: memoryview) -> None:
        status = self._engine.register_memory(address_of(memory), memory.nbytes)
        if status:
            raise EngineFailed(f"Mooncake registers no memory: status {status}", engine="mooncake", status=status)
