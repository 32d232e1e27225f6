"""Prefill on another worker: follow the call, pull the rows, hand them to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal.prefill.v1 import prefill_service_pb2_grpc as rpc
from shoal_common.errors import ChecksumMismatch, DataLoss, DeadlineExceeded, MeshError, NotFound, Unavailable
from shoal_common.identity import BLOCK_TOKENS
from shoal_common.kv_cache_client import Prefix, PrefixCache
from shoal_common.kv_transport import KvPuller, StreamBroken, checksum_of
from shoal_common.rpc import Channel, Channels, from_rpc_error, is_transport_failure
from shoal_engine.errors import BadRows, HitNotUsable
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows
from shoal_engine.payload_rows import rows_of

from shoal_decode_worker.generation import EngineFacts, GenerationStart, PrefillTarget

logger = logging.getLogger(__name__)

_GOODBYE_TIMEOUT_S = 1.0


class RemotePrefillFailed(Unavailable):
    """The prompt did not come from that worker; another one, or this one, can still run it."""

    reason = "REMOTE_PREFILL_FAILED"


class RowsEngine(Protocol):
    """Where rows go, by the attempt they belong to. Fails with UnknownRequest once the attempt is over."""

    def load_prefix(self, start: GenerationStart, prefix: PrefixRows) -> Future[None]: ...

    def load_rows(self, start: GenerationStart, rows: list[LogicalRows]) -> Future[None]: ...

    def load_prompt(self, start: GenerationStart, handover: HandoverRows) -> Future[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimeouts:
    """Seconds: to the Hit; between two messages; for one pull; for the whole call."""

    hit_s: float
    idle_s: float
    pull_s: float
    total_s: float


class PrefillClient:
    """Calls prefill workers for one decode worker. Belongs to one event loop."""

    def __init__(
        self,
        *,
        channels: Channels,
        puller: KvPuller,
        cache: PrefixCache,
        engine: RowsEngine,
        timeouts: PrefillTimeouts,
    ) -> None:
        self._channels, self._puller, self._cache, self._engine = channels, puller, cache, engine
        self._timeouts = timeouts
        self._ending: set[asyncio.Task[None]] = set()

    async def prefill(
        self, start: GenerationStart, target: PrefillTarget, facts: EngineFacts, hashes: list[bytes], prefix: Prefix
    ) -> None:
        """Get the prompt from `target` into the engine, which then decodes.

        prefix   what this worker itself has pinned of the chain `hashes`
        Raises RemotePrefillFailed; any other MeshError is the engine's, and the request is over.
        """
        channel = self._channels.get(target.address)
        try:
            async with asyncio.timeout(self._timeouts.total_s):
                await self._follow(start, channel, facts, hashes, prefix)
        except grpc.aio.AioRpcError as error:
            if is_transport_failure(error):
                self._channels.rebuild(channel)
            raise _failed(target, from_rpc_error(error)) from error
        except (DataLoss, DeadlineExceeded, HitNotUsable) as error:
            raise _failed(target, error) from error
        except TimeoutError as error:
            raise _failed(target, DeadlineExceeded(f"not done in {self._timeouts.total_s} s")) from error

    async def _follow(
        self, start: GenerationStart, channel: Channel, facts: EngineFacts, hashes: list[bytes], prefix: Prefix
    ) -> None:
        talk = _Talk(channel, self._timeouts)
        try:
            await self._talk(talk, start, channel, facts, hashes, prefix)
        except BaseException:
            talk.cancel()
            raise
        # The request may end before the other side has let go of its rows; neither waits for the other.
        ending = asyncio.create_task(talk.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _talk(
        self,
        talk: _Talk,
        start: GenerationStart,
        channel: Channel,
        facts: EngineFacts,
        hashes: list[bytes],
        prefix: Prefix,
    ) -> None:
        talk.say(pb.PrefillRequest(start=self._start(start, facts)))
        hit = (await talk.hear("hit", self._timeouts.hit_s)).hit
        talk.say(await self._load_below(start, facts, hashes, prefix, hit.hit_tokens))
        # The engine takes what it is given in order: only what it refused is waited for, one message behind.
        loading: Future[None] | None = None
        while True:
            message = await talk.hear("ready", self._timeouts.idle_s, or_kind="done")
            if message.HasField("done"):
                break
            payloads = message.ready.payloads
            pulled = await self._pulled(hit.grant, payloads, channel)
            rows = [rows_of(one, data, facts.kv_id) for one, data in zip(payloads, pulled, strict=True)]
            if loading is not None:
                await asyncio.wrap_future(loading)
            loading = self._engine.load_rows(start, rows)
        done = message.done
        if checksum_of(done.hidden_row) != done.checksum:
            raise ChecksumMismatch("the hidden row is damaged", size_bytes=len(done.hidden_row))
        talk.say(pb.PrefillRequest(pulled=pb.Pulled()))
        handover = HandoverRows(rows=(), hidden_row=done.hidden_row, cached_tokens=done.cached_tokens)
        if loading is not None:
            # Before the prompt counts as loaded: draft rows may be missing, but not have been refused.
            await asyncio.wrap_future(loading)
        await asyncio.wrap_future(self._engine.load_prompt(start, handover))

    async def _pulled(
        self, grant: transport_pb.TransportGrant, payloads: Sequence[transport_pb.Payload], channel: Channel
    ) -> list[memoryview]:
        """Rows of a grant. A holder that breaks off, or has let go, loses them: DataLoss."""
        try:
            return await self._puller.pull(grant, payloads, channel, timeout_s=self._timeouts.pull_s)
        except (NotFound, StreamBroken) as error:
            raise DataLoss(f"rows cannot be pulled: {error.message}", reason=error.reason) from error

    async def _load_below(
        self, start: GenerationStart, facts: EngineFacts, hashes: list[bytes], prefix: Prefix, hit_tokens: int
    ) -> pb.PrefillRequest:
        """Load the blocks of [0, hit_tokens) from kv_cache. What to answer: Have, or Need for all of them."""
        if hit_tokens == 0:
            return pb.PrefillRequest(have=pb.Have())
        blocks = await prefix.blocks(hit_tokens)
        if blocks is None:
            async with self._cache.acquired(
                hashes,
                kv_id=facts.kv_id,
                numerics_id=facts.numerics_id,
                tenant_tag=start.tenant_tag,
                max_hit_tokens=hit_tokens,
                blocks_only=True,
            ) as longer:
                blocks = await longer.blocks(hit_tokens)
        if blocks is None:
            return pb.PrefillRequest(need=pb.Need(block_indices=range(hit_tokens // BLOCK_TOKENS)))
        rows = PrefixRows(hit_tokens=hit_tokens, blocks=blocks, encoder_window=None)
        try:
            await asyncio.wrap_future(self._engine.load_prefix(start, rows))
        except BadRows as error:
            logger.warning("cached blocks refused", extra={"reason": error.reason, "error": error.message})
            return pb.PrefillRequest(need=pb.Need(block_indices=range(hit_tokens // BLOCK_TOKENS)))
        return pb.PrefillRequest(have=pb.Have())

    def _start(self, start: GenerationStart, facts: EngineFacts) -> pb.Start:
        return pb.Start(
            request_id=start.request_id,
            attempt=start.attempt,
            numerics_id=facts.numerics_id,
            draft_id=facts.draft_id,
            cache_root=start.cache_root,
            tenant_tag=start.tenant_tag,
            prompt_ids=start.prompt_ids,
            cache_points=start.cache_points,
            offer=self._puller.offer,
            priority=start.priority,
        )


class _Talk:
    """One Prefill call: what to say goes through a small queue, what is heard has a time limit each."""

    def __init__(self, channel: Channel, timeouts: PrefillTimeouts) -> None:
        self._outgoing: asyncio.Queue[pb.PrefillRequest | None] = asyncio.Queue(8)
        stub: Any = rpc.PrefillServiceStub(channel.as_grpc())
        self._call = stub.Prefill(self._messages(), timeout=timeouts.total_s)

    def say(self, message: pb.PrefillRequest) -> None:
        """Send; there are three messages at most, and the end."""
        self._outgoing.put_nowait(message)

    async def hear(self, kind: str, timeout_s: float, *, or_kind: str = "") -> pb.PrefillResponse:
        """The next message, which must be of a kind. Raises DeadlineExceeded, DataLoss, AioRpcError."""
        try:
            message = await asyncio.wait_for(self._call.read(), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no {kind} in {timeout_s} s", timeout_s=timeout_s) from error
        if not isinstance(message, pb.PrefillResponse):
            # An error status has been raised by the read; this is an OK that came too early.
            raise DataLoss(f"the call ended where {kind} was due", reason="PREFILL_CUT_SHORT")
        heard = message.WhichOneof("message")
        if heard not in (kind, or_kind):
            raise DataLoss(f"{heard} came where {kind} was due", reason="PREFILL_OUT_OF_ORDER")
        return message

    async def end(self) -> None:
        """Wait a moment for the call to end by itself, then end it."""
        try:
            await asyncio.wait_for(self._call.read(), _GOODBYE_TIMEOUT_S)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            logger.debug("prefill call did not end well", extra={"error": repr(error)})
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call, whatever its state."""
        self._call.cancel()
        # Of a call that has ended by itself grpc still waits for the next message to send: a task, for ever.
        self._outgoing.put_nowait(None)

    async def _messages(self) -> AsyncIterator[pb.PrefillRequest]:
        while True:
            message = await self._outgoing.get()
            if message is None:
                return
            yield message


def _failed(target: PrefillTarget, error: MeshError) -> RemotePrefillFailed:
    return RemotePrefillFailed(
        f"prefill on {target.instance_id or target.address} failed: {error.message}",
        cause=error.reason,
        target=target.instance_id,
    )
