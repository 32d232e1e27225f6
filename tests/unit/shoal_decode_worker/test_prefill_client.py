"""Calls to prefill workers, seen from the client: what is left when they have ended."""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import Future
from typing import Any

import pytest
from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal_common.kv_cache_client import CacheNodes, Prefix, PrefixCache
from shoal_common.kv_transport import KvPuller, checksum_of
from shoal_common.rpc import Channels
from shoal_common.telemetry import Metrics
from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.generation import EngineFacts, GenerationStart, PrefillTarget, SamplingSpec
from shoal_decode_worker.prefill_client import PrefillClient, PrefillTimeouts, RemotePrefillFailed
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


@pytest.mark.parametrize("behave", [finishes, fakes.refuses, fakes.ends_early], ids=lambda one: one.__name__)
async def test_a_call_that_the_worker_ended_leaves_no_task_behind(behave: Behaviour) -> None:
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
    client = PrefillClient(channels=channels, puller=puller, cache=cache, engine=TakesAll(), timeouts=timeouts)

    def feeding() -> list[str]:
        """Tasks of grpc that wait for the next message to send."""
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return [name for name in names if "_consume_request_iterator" in name]

    async with fake_prefill(behave) as (_, address):
        target = PrefillTarget(instance_id="p", address=address)
        if behave is finishes:
            await client.prefill(START, target, FACTS, [], Prefix(cache))
        else:
            with pytest.raises(RemotePrefillFailed):
                await client.prefill(START, target, FACTS, [], Prefix(cache))
        await until(lambda: not feeding(), timeout_s=2, what="no task that waits for a message to send")
    await cache.close()
    puller.close()
    await channels.close()
