"""Calls to prefill workers, seen from the client: what is left when they have ended."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal_common.kv_cache_client import CacheNodes, Prefix, PrefixCache
from shoal_common.kv_transport import KvPuller, PayloadSpec, checksum_of
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics
from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.generation import EngineFacts, GenerationStart, PrefillTarget, SamplingSpec
from shoal_decode_worker.prefill_client import PrefillClient, PrefillTimeouts, RemotePrefillFailed
from shoal_engine.errors import BadRows
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows
from support import fake_prefill as fakes
from support.fake_prefill import Behaviour, FakePrefill, fake_prefill
from support.waiting import until

FACTS = EngineFacts(
    model="m",
    kv_id="kv",
    numerics_id="n",
    draft_id="d",
    vocab_size=10,
    max_context=100,
    block_count=1,
    slot_count=1,
)
START = GenerationStart(
    request_id="r",
    attempt=1,
    gateway_id="",
    numerics_id=None,
    cache_root=None,
    tenant_tag=b"",
    prompt_ids=array("I", [1]),
    sampling=SamplingSpec(seed=1),
    choices=(ChoiceStart(),),
)


class TakesAll:
    """An engine that everything fits into."""

    def load_prefix(self, start: GenerationStart, prefix: PrefixRows) -> Future[None]:
        return self._done()

    def load_rows(self, start: GenerationStart, rows: list[LogicalRows]) -> Future[None]:
        return self._done()

    def load_prompt(self, start: GenerationStart, handover: HandoverRows) -> Future[None]:
        return self._done()

    def _done(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


async def finishes(fake: FakePrefill, context: Any) -> None:
    """A prompt without rows, then OK."""
    row = b"\x01" * 8
    await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0)))
    await context.write(pb.PrefillResponse(done=pb.Done(hidden_row=row, checksum=checksum_of(row))))


@contextlib.asynccontextmanager
async def client_of(engine: TakesAll) -> AsyncIterator[tuple[PrefillClient, Prefix]]:
    """A client without a cache."""
    channels, puller = Channels(), KvPuller()
    cache = PrefixCache(
        channels=channels,
        puller=puller,
        nodes=CacheNodes(address="", watcher=None),
        metrics=Metrics(),
        owner_id="me",
        acquire_timeout_s=1,
        pull_timeout_s=1,
        lease_s=1,
    )
    timeouts = PrefillTimeouts(hit_s=5, idle_s=5, pull_s=5, total_s=10)
    client = PrefillClient(channels=channels, puller=puller, cache=cache, engine=engine, timeouts=timeouts)
    yield client, Prefix(cache)
    await cache.close()
    puller.close()
    await channels.close()


@pytest.mark.parametrize("behave", [finishes, fakes.refuses, fakes.ends_early], ids=lambda one: one.__name__)
async def test_a_call_that_the_worker_ended_leaves_no_task_behind(behave: Behaviour) -> None:
    def feeding() -> list[str]:
        """Tasks of grpc that wait for the next message to send."""
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return [name for name in names if "_consume_request_iterator" in name]

    async with fake_prefill(behave) as (_, address), client_of(TakesAll()) as (client, prefix):
        target = PrefillTarget(instance_id="p", address=address)
        if behave is finishes:
            await client.prefill(START, target, FACTS, [], prefix)
        else:
            with pytest.raises(RemotePrefillFailed):
                await client.prefill(START, target, FACTS, [], prefix)
        await until(lambda: not feeding(), timeout_s=2, what="no task that waits for a message to send")


class RefusesRows(TakesAll):
    """An engine that says so only after a while."""

    def __init__(self) -> None:
        self.prompts = 0

    def load_rows(self, start: GenerationStart, rows: list[LogicalRows]) -> Future[None]:
        future: Future[None] = Future()
        asyncio.get_running_loop().call_later(0.05, future.set_exception, BadRows("another size"))
        return future

    def load_prompt(self, start: GenerationStart, handover: HandoverRows) -> Future[None]:
        self.prompts += 1
        return super().load_prompt(start, handover)


async def sends_all(fake: FakePrefill, context: Any) -> None:
    """Rows, and the end right behind them."""
    spec = PayloadSpec(
        kind=transport_pb.PAYLOAD_KIND_DRAFT_WINDOW,
        position_begin=0,
        position_end=1,
        shape=(64,),
        dtype="uint8",
        kv_id=FACTS.kv_id,
    )
    row = b"\x01" * 8
    with fake.exports.opened(transport_pb.TransportOffer()) as export:
        payload = export.add(spec, b"x" * 64)
        await context.write(pb.PrefillResponse(hit=pb.Hit(hit_tokens=0, grant=export.grant)))
        await context.write(pb.PrefillResponse(ready=pb.Ready(payloads=[payload])))
        await context.write(pb.PrefillResponse(done=pb.Done(hidden_row=row, checksum=checksum_of(row))))
        await asyncio.Event().wait()


async def test_a_prompt_whose_last_rows_are_refused_is_not_begun_with_them() -> None:
    engine = RefusesRows()
    async with fake_prefill(sends_all) as (_, address), client_of(engine) as (client, prefix):
        target = PrefillTarget(instance_id="p", address=address)
        with pytest.raises(RemotePrefillFailed, match="another size"):
            await client.prefill(START, target, FACTS, [], prefix)
    assert engine.prompts == 0, "whoever goes on elsewhere finds the request as it was"
