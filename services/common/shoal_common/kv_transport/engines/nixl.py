"""NVIDIA NIXL over UCX. Source: nixl_cu13/_api.py of nixl-cu13 1.5.1."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import DeadlineExceeded
from shoal_common.kv_transport.buffers import address_of
from shoal_common.kv_transport.engines.engine import EngineFailed, Move

_MAX_PEERS = 64
_SPIN_S = 0.002
_POLL_S = 0.0002


def open_nixl(host: str) -> NixlEngine:
    """An agent with the UCX backend; UCX finds its own addresses. Raises EngineFailed."""
    try:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        return NixlEngine(nixl_agent(f"shoal-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"])))
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineFailed(f"NIXL: {error}", engine="nixl") from error


class NixlEngine:
    """One agent. Its calls are made under a lock: an agent is not safe to share between threads."""

    kind = pb.TRANSPORT_KIND_NIXL

    def __init__(self, agent: Any) -> None:
        """agent: a nixl_agent."""
        self._agent = agent
        self._lock = threading.Lock()
        self._served: list[Any] = []
        self._peers: dict[bytes, str] = {}
        # Memory of transfers that could not be ended: the network may still write to it.
        self._abandoned: list[memoryview] = []

    def serve(self, arena: memoryview) -> bytes:
        """Register it; the agent's metadata."""
        with self._lock, _as_engine_failed():
            self._served.append(self._agent.register_memory([(address_of(arena), arena.nbytes, 0, "")], "DRAM"))
            return bytes(self._agent.get_agent_metadata())

    def read(
        self, peer: bytes, base_address: int, moves: Sequence[Move], memory: memoryview, *, timeout_s: float
    ) -> None:
        """One READ request of all moves."""
        ends_s = time.monotonic() + timeout_s
        base = address_of(memory)
        with _as_engine_failed():
            with self._lock:
                name = self._peer(peer)
                registered = self._agent.register_memory([(base, memory.nbytes, 0, "")], "DRAM")
                local = self._agent.get_xfer_descs([(base + one.to_offset, one.size_bytes, 0) for one in moves], "DRAM")
                remote = self._agent.get_xfer_descs(
                    [(base_address + one.from_offset, one.size_bytes, 0) for one in moves], "DRAM"
                )
                handle = self._agent.initialize_xfer("READ", local, remote, name)
                state = self._agent.transfer(handle)
            try:
                self._wait(handle, state, ends_s, timeout_s)
            finally:
                self._end(handle, registered, memory)

    def close(self) -> None:
        """Deregister what is served."""
        with self._lock:
            served, self._served = self._served, []
            for one in served:
                self._agent.deregister_memory(one)

    def _peer(self, metadata: bytes) -> str:
        name = self._peers.get(metadata)
        if name is None:
            while len(self._peers) >= _MAX_PEERS:
                self._agent.remove_remote_agent(self._peers.pop(next(iter(self._peers))))
            added = self._agent.add_remote_agent(metadata)
            name = self._peers[metadata] = added.decode() if isinstance(added, bytes) else added
        return name

    def _wait(self, handle: Any, state: str, ends_s: float, timeout_s: float) -> None:
        spins_until_s = time.monotonic() + _SPIN_S
        while state == "PROC":
            now_s = time.monotonic()
            if now_s > ends_s:
                raise DeadlineExceeded(f"NIXL took more than {timeout_s} s", timeout_s=timeout_s)
            if now_s > spins_until_s:
                time.sleep(_POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise EngineFailed(f"NIXL says {state}", engine="nixl")

    def _end(self, handle: Any, registered: Any, memory: memoryview) -> None:
        with self._lock:
            try:
                self._agent.release_xfer_handle(handle)
                self._agent.deregister_memory(registered)
            except Exception:
                self._abandoned.append(memory)
                raise


class _as_engine_failed:
    """The bindings raise classes of their own, all of them Exceptions, which no caller can name."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (EngineFailed, DeadlineExceeded)):
            raise EngineFailed(f"NIXL: {type(error).__name__}: {error}", engine="nixl") from error
