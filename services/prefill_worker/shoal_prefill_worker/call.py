"""One Prefill call: from Start to Pulled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal_common.chains import HashChain
from shoal_common.errors import DeadlineExceeded, InvalidArgument, MeshError
from shoal_common.identity import BLOCK_TOKENS
from shoal_common.kv_cache_client import CacheWriter, Prefix, PrefixCache
from shoal_common.kv_transport import Export, ExportTable, checksum_of
from shoal_engine.cached_prefix import ChosenHit, block_items, choose_hit, read_prefix, snapshot_item
from shoal_engine.errors import BadRows, HitNotUsable
from shoal_engine.logical_rows import LogicalRows, PrefixRows, RowKind
from shoal_engine.payload_rows import spec_of
from shoal_engine.replay import usable_hit
from shoal_engine.requests import PrefillRequest

from shoal_prefill_worker.core import Job, PrefillFacts, PromptStart
from shoal_prefill_worker.engine_like import PrefillEngine
from shoal_prefill_worker.outbox import Event, Failed, FullBlocks, Outbox, Prefilled, Rows, Snapshot

logger = logging.getLogger(__name__)

Write = Callable[[pb.PrefillResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillModel:
    """What decides which rows are loaded and stored: K, and the encoder's layers and window."""

    replay_length: int
    encoder_layers: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What all calls of one worker share. `slots`: as many as the engine has; calls wait for one in order."""

    facts: PrefillFacts
    model: PrefillModel
    engine: PrefillEngine
    outbox: Outbox
    cache: PrefixCache
    writer: CacheWriter
    exports: ExportTable
    slots: asyncio.Semaphore
    pulled_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Closed:
    """The caller says nothing more."""


Message: TypeAlias = Event | pb.PrefillRequest | _Closed | MeshError
"""What a call waits for: the engine's, the caller's, and the end."""


class PrefillCall:
    """Runs one job. Everything it holds (engine rows, lease, export) is let go of when `run` returns or raises."""

    def __init__(self, job: Job, offer: transport_pb.TransportOffer, tools: Tools, write: Write) -> None:
        self._job, self._offer, self._tools, self._write = job, offer, tools, write
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        start = job.start
        self._chain = HashChain(start.cache_root, start.prompt_ids) if start.cache_root is not None else None
        self._kept: list[bytes | memoryview] = []
        self._cached_tokens = 0
        self._is_over = False  # the caller has said its last word

    def stop(self, error: MeshError) -> None:
        """Make `run` raise this error."""
        self._inbox.put_nowait(error)

    async def run(self, requests: AsyncIterator[pb.PrefillRequest]) -> None:
        """Prefill, announce rows, wait until they are pulled. Raises MeshError."""
        tools, key = self._tools, self._job.key
        tools.outbox.listen(key, self._inbox.put_nowait)
        reading = asyncio.create_task(self._read(requests))
        try:
            with tools.exports.opened(self._offer) as export:
                async with tools.slots:
                    await self._begin(export)
                    await self._serve_until_done(export)
                await self._wait_until_pulled(export)
        finally:
            tools.engine.cancel(key)
            tools.outbox.forget(key)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.PrefillRequest]) -> None:
        async for message in requests:
            self._inbox.put_nowait(message)
        self._inbox.put_nowait(_Closed())

    async def _begin(self, export: Export) -> None:
        """Have it admitted, fix the hit, say it, load it, and let the engine run the rest."""
        tools, start = self._tools, self._job.start
        if self._job.superseded is not None:
            raise self._job.superseded
        admitted = tools.engine.admit(_engine_request(self._job))
        reach = tools.model.encoder_layers * tools.model.window
        async with tools.cache.acquired(
            self._chain.hashes if self._chain else [],
            kv_id=tools.facts.kv_id,
            numerics_id=tools.facts.numerics_id,
            tenant_tag=start.tenant_tag,
            max_hit_tokens=usable_hit(len(start.prompt_ids), len(start.prompt_ids), tools.model.replay_length),
            want_replay=True,
            replay_reach_tokens=reach,
            recompute_tokens_per_s=tools.engine.stats().prefill_tokens_per_s_ema,
        ) as prefix:
            # Shielded: the engine answers in any case, and `run` takes back what it then holds.
            await asyncio.shield(asyncio.wrap_future(admitted))
            hit = choose_hit(prefix.hit_tokens, prefix.replay_tokens, reach)
            # What needs no rows runs while the caller is told.
            starting = None if prefix.present_tokens or hit.tokens else tools.engine.start(self._job.key)
            await self._write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=hit.tokens, grant=export.grant)))
            await self._load(prefix, hit)
        await asyncio.wrap_future(starting or tools.engine.start(self._job.key))

    async def _load(self, prefix: Prefix, hit: ChosenHit) -> None:
        """Without the rows of the hit the whole prompt is run; what the caller was promised is announced then too."""
        rows = await read_prefix(prefix, hit)
        if rows is None:
            return
        try:
            await asyncio.wrap_future(self._tools.engine.load_prefix(self._job.key, rows))
        except (BadRows, HitNotUsable) as error:
            logger.warning("cached prefix refused", extra={"reason": error.reason, "error": error.message})
            return
        self._keep(rows)

    def _keep(self, rows: PrefixRows) -> None:
        self._kept = list(rows.blocks)
        self._cached_tokens = rows.hit_tokens

    async def _serve_until_done(self, export: Export) -> None:
        while not self._job.is_done:
            for event in _merged(await self._arrived()):
                await self._handle(event, export)

    async def _arrived(self) -> list[Message]:
        """All that is there, one at least."""
        messages = [await self._inbox.get()]
        while not self._inbox.empty():
            messages.append(self._inbox.get_nowait())
        return messages

    async def _wait_until_pulled(self, export: Export) -> None:
        seconds = self._tools.pulled_timeout_s
        try:
            async with asyncio.timeout(seconds):
                while not self._is_over:
                    await self._handle(await self._inbox.get(), export)
        except TimeoutError as error:
            raise DeadlineExceeded(f"rows were not pulled in {seconds} s", timeout_s=seconds) from error

    async def _handle(self, event: Message, export: Export) -> None:
        if isinstance(event, MeshError):
            raise event
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, _Closed):
            self._is_over = True
        elif isinstance(event, pb.PrefillRequest):
            self._is_over = event.HasField("pulled")
            await self._answer(event, export)
        elif isinstance(event, Rows):
            await self._announce(export, [rows for rows in event.rows if self._is_wanted(rows)])
        elif isinstance(event, Prefilled):
            await self._write(self._done(event))
            self._job.is_done = True
        else:
            self._store(event)

    async def _answer(self, message: pb.PrefillRequest, export: Export) -> None:
        """Have lets the kept blocks go, Need announces some of them."""
        kept, self._kept = self._kept, []
        if not message.HasField("need"):
            return
        rows = [_block_rows(index, kept[index]) for index in message.need.block_indices if index < len(kept)]
        await self._announce(export, rows)

    def _is_wanted(self, rows: LogicalRows) -> bool:
        """Draft windows of other draft weights are of no use to the caller."""
        return rows.kind is not RowKind.DRAFT_WINDOW or self._job.start.draft_id == self._tools.facts.draft_id

    async def _announce(self, export: Export, rows: list[LogicalRows]) -> None:
        payloads = [export.add(spec_of(one, self._tools.facts.kv_id), one.data) for one in rows]
        if payloads:
            await self._write(pb.PrefillResponse(ready=pb.Ready(payloads=payloads)))

    def _done(self, end: Prefilled) -> pb.PrefillResponse:
        return pb.PrefillResponse(
            done=pb.Done(
                hidden_row=end.hidden_row,
                checksum=checksum_of(end.hidden_row),
                cached_tokens=self._cached_tokens,
                computed_tokens=end.computed_tokens,
            )
        )

    def _store(self, event: FullBlocks | Snapshot) -> None:
        """Write through, as far as the queue takes it."""
        tools, chain = self._tools, self._chain
        if chain is None:
            return
        if isinstance(event, FullBlocks):
            items = block_items(chain, event.first_block_index, event.blocks, tools.facts.kv_id)
        else:
            item = snapshot_item(
                chain,
                event.position,
                event.rows,
                tools.facts.kv_id,
                layers=tools.model.encoder_layers,
                window=tools.model.window,
            )
            items = [item] if item is not None else []
        tools.writer.offer(items, numerics_id=tools.facts.numerics_id, tenant_tag=self._job.start.tenant_tag)


def _merged(messages: Iterable[Message]) -> list[Message]:
    """Rows that follow each other as one: announcing them costs a message each."""
    merged: list[Message] = []
    for one in messages:
        last = merged[-1] if merged else None
        if isinstance(one, Rows) and isinstance(last, Rows):
            merged[-1] = Rows((*last.rows, *one.rows))
        else:
            merged.append(one)
    return merged


def _engine_request(job: Job) -> PrefillRequest:
    start: PromptStart = job.start
    return PrefillRequest(
        request_id=job.key,
        prompt_ids=np.array(start.prompt_ids, dtype=np.int64),
        priority=start.priority,
        arrival=time.monotonic(),
        cache_points=start.cache_points,
        export_chain=start.cache_root is not None,
    )


def _block_rows(index: int, data: bytes | memoryview) -> LogicalRows:
    begin = index * BLOCK_TOKENS
    return LogicalRows(
        kind=RowKind.BLOCK,
        position_begin=begin,
        position_end=begin + BLOCK_TOKENS,
        shape=(len(data),),
        dtype="uint8",
        data=data,
    )


async def first_message(requests: AsyncIterator[pb.PrefillRequest], timeout_s: float) -> pb.Start:
    """The Start that must come first. Raises InvalidArgument, DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(requests, None)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no Start in {timeout_s} s", timeout_s=timeout_s) from error
    if message is None or not message.HasField("start"):
        raise InvalidArgument.at("message", "the first one must be start", reason="START_EXPECTED")
    return message.start
