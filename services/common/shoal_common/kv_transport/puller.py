"""Copies granted payloads into this process."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import DeadlineExceeded
from shoal_common.host import host_id
from shoal_common.kv_transport.destinations import DestinationPool
from shoal_common.kv_transport.engine_pull import pull_by_engine
from shoal_common.kv_transport.engines import EngineFailed, TransferEngine
from shoal_common.kv_transport.grpc_pull import pull_by_grpc
from shoal_common.kv_transport.mapped import MappedArenas
from shoal_common.kv_transport.shared_pull import SharedCopy
from shoal_common.kv_transport.stream_client import RunningPull, StreamPool, StreamUnreachable
from shoal_common.kv_transport.stream_pull import StreamPull
from shoal_common.kv_transport.wanted import Wanted, wanted_payloads, wanted_runs
from shoal_common.rpc.channels import Channel

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_INLINE_BYTES = 16 << 20
"""Moved on the event loop itself: handing over to threads would cost more than it saves."""
_TURN_CHUNKS = 8
"""Copied before others of the event loop have their turn: 4 MiB, half a millisecond."""
_HELPER_BYTES = 6 << 20
"""For each so many another thread helps, if it comes to run in time; waking it for less costs more than it copies."""
_COPY_THREADS = min(4, os.cpu_count() or 1)
"""More do not copy faster: memory is the limit."""
_UNREACHABLE_S = 30.0
DEFAULT_KINDS = (pb.TRANSPORT_KIND_SHM, pb.TRANSPORT_KIND_TCP, pb.TRANSPORT_KIND_GRPC)


class KvPuller:
    """Pulls payloads by whatever way was granted, checks each, and falls back to gRPC, which every holder serves.

    What comes back is read-only views, each at a multiple of 64 bytes, into memory that is used again once the last
    view of a pull is gone. One event loop owns it.
    """

    def __init__(
        self,
        kinds: Iterable[pb.TransportKind.ValueType] = DEFAULT_KINDS,
        *,
        engines: Sequence[TransferEngine] = (),
        ssl_context: ssl.SSLContext | None = None,
        max_idle_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """kinds           the ways to offer, best first
        engines         offered beside them, between shared memory and the stream; `close` closes them
        ssl_context     of a client, for holders whose streams are TLS
        max_idle_bytes  memory kept for the next pulls
        """
        self._kinds, self._engines = tuple(kinds), {one.kind: one for one in engines}
        self._offer: pb.TransportOffer | None = None
        self._clock = clock
        self.ssl_context = ssl_context
        self._arenas = MappedArenas()
        self._destinations = DestinationPool(max_idle_bytes)
        self._streams = StreamPool(ssl_context=ssl_context)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="kv-pull")
        self._unreachable_until_s: dict[str, float] = {}

    @property
    def offer(self) -> pb.TransportOffer:
        """What to send with a request for a grant."""
        if self._offer is None:
            self._offer = pb.TransportOffer(kinds=(*self._kinds, *self._engines), host_id=host_id())
        return self._offer

    async def pull(
        self, grant: pb.TransportGrant, payloads: Sequence[pb.Payload], channel: Channel, *, timeout_s: float
    ) -> list[memoryview]:
        """The bytes of `payloads`, in their order; `channel` leads to the holder.

        Raises ChecksumMismatch or DataLoss (SHORT_PAYLOAD) for damaged data, DeadlineExceeded, StreamBroken or
        grpc.aio.AioRpcError when the holder does not answer, NotFound when it has let go.
        """
        return await self._pull(grant, *wanted_payloads(payloads), channel, timeout_s)

    async def pull_runs(
        self, grant: pb.TransportGrant, runs: Sequence[pb.PayloadRun], channel: Channel, *, timeout_s: float
    ) -> list[memoryview]:
        """As `pull`, all payloads of `runs` in their order."""
        return await self._pull(grant, *wanted_runs(runs), channel, timeout_s)

    def close(self) -> None:
        """Unmaps and disconnects. Safe to repeat."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._streams.close()
        self._arenas.close()
        for engine in self._engines.values():
            engine.close()

    async def _pull(
        self, grant: pb.TransportGrant, wanted: list[Wanted], size_bytes: int, channel: Channel, timeout_s: float
    ) -> list[memoryview]:
        memory = self._destinations.take(size_bytes)
        ends_s = self._clock() + timeout_s
        for way in (self._by_memory, self._by_engine, self._by_stream):
            if await way(grant, wanted, memory, channel, ends_s - self._clock()):
                break
        else:
            await pull_by_grpc(grant, wanted, memory, channel, max(0.0, ends_s - self._clock()))
        return [view for one in wanted for view in one.views(memory)]

    async def _by_memory(
        self, grant: pb.TransportGrant, wanted: list[Wanted], memory: memoryview, channel: Channel, timeout_s: float
    ) -> bool:
        view = self._arenas.get(grant) if grant.kind == pb.TRANSPORT_KIND_SHM else None
        if view is None:
            return False
        copy = SharedCopy(view.memory, grant, wanted, memory)
        is_inline = memory.nbytes <= _INLINE_BYTES
        helper_count = min(memory.nbytes // _HELPER_BYTES, _COPY_THREADS - is_inline)
        helpers = [self._threads.submit(copy.run) for _ in range(helper_count)]
        try:
            is_left = is_inline and copy.run(_TURN_CHUNKS)
            while is_left:
                await asyncio.sleep(0)
                is_left = copy.run(_TURN_CHUNKS)
        finally:
            # A helper that has not begun yet finds nothing left to do.
            running = [asyncio.wrap_future(one) for one in helpers if not is_inline or not one.cancel()]
            if running:
                await asyncio.gather(*running)
        return True

    async def _by_engine(
        self, grant: pb.TransportGrant, wanted: list[Wanted], memory: memoryview, channel: Channel, timeout_s: float
    ) -> bool:
        engine = self._engines.get(grant.kind)
        if engine is None:
            return False
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._threads, pull_by_engine, engine, grant, wanted, memory, timeout_s)
        try:
            # A read that cannot be given up goes on in its thread, which keeps the memory from being used again.
            await asyncio.wait_for(reading, timeout_s)
        except EngineFailed as error:
            logger.warning("transfer engine failed", extra={"error": error.message})
            return False
        except TimeoutError as error:
            raise DeadlineExceeded(f"{engine.kind} took more than {timeout_s} s", timeout_s=timeout_s) from error
        return True

    async def _by_stream(
        self, grant: pb.TransportGrant, wanted: list[Wanted], memory: memoryview, channel: Channel, timeout_s: float
    ) -> bool:
        address = stream_address(grant, channel) if pb.TRANSPORT_KIND_TCP in self._kinds else ""
        if not address or self._unreachable_until_s.get(address, 0.0) > self._clock():
            return False
        pull = StreamPull(address, grant.export_id, wanted, memory)
        if memory.nbytes <= _INLINE_BYTES and await self._streams.run_on_loop(pull, timeout_s=timeout_s):
            return True
        running = RunningPull(pull)
        try:
            await asyncio.wrap_future(self._threads.submit(self._streams.run, running, timeout_s=timeout_s))
        except StreamUnreachable:
            self._unreachable_until_s[address] = self._clock() + _UNREACHABLE_S
            return False
        except asyncio.CancelledError:
            running.cancel()
            raise
        return True


def stream_address(grant: pb.TransportGrant, channel: Channel) -> str:
    """host:port of the holder's byte stream, empty where there is none. Without a host: the one `channel` calls."""
    if not grant.stream_address.startswith(":"):
        return grant.stream_address
    host, _, _ = channel.address.rpartition(":")
    return f"{host}{grant.stream_address}" if host else ""
