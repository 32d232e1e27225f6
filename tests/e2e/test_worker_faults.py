"""What breaks between the workers and kv_cache costs time, never tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as cache_rpc
from shoal.prefill.v1 import prefill_service_pb2 as prefill_pb
from shoal.prefill.v1 import prefill_service_pb2_grpc as prefill_rpc
from shoal_common.chains import HashChain
from shoal_common.kv_transport import host_id
from shoal_common.rpc import from_rpc_error
from support import damage
from support import fake_prefill as fakes
from support.decode_caller import FramesCall
from support.fake_prefill import Behaviour, fake_prefill
from support.kv_cluster import metric
from support.seldom import seldom
from support.service_process import ServiceProcess
from support.waiting import until, until_async
from support.worker_pair import Answer, WorkerPair, ask, cache_stats, counted, numbers, prompt_of, until_idle

pytestmark = pytest.mark.timeout(300)


MISDEEDS = (
    fakes.refuses,
    fakes.hangs,
    fakes.ends_early,
    fakes.promises_a_hit_that_nobody_has,
    fakes.damages_rows,
    fakes.sends_rows_of_another_layout,
    fakes.damages_the_hidden_row,
)
WAYS_ON = list(zip(MISDEEDS, itertools.cycle(("remote", "local"))))
OTHER_WAYS_ON = list(zip(MISDEEDS, itertools.cycle(("local", "remote"))))


@pytest.mark.parametrize(
    ("behave", "then"),
    [*WAYS_ON, *seldom(*OTHER_WAYS_ON)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
async def test_a_bad_prefill_worker_costs_time_only(pair: WorkerPair, behave: Behaviour, then: str) -> None:
    prompt, root = prompt_of(200, seed=60), secrets.token_bytes(32)
    healthy = await ask(pair, prompt)
    async with fake_prefill(behave) as (fake, address):
        bad = pb.PrefillTarget(instance_id="bad", address=address)
        targets = [bad, pair.target] if then == "remote" else [bad]
        answer = await ask(pair, prompt, root=root, targets=targets)
        assert fake.started.is_set()
        assert answer.tokens == healthy.tokens
        await asyncio.wait_for(fake.ended.wait(), 5)
    await until_idle(pair)


async def test_a_prefill_worker_that_is_not_there_costs_time_only(pair: WorkerPair) -> None:
    prompt = prompt_of(200, seed=61)
    gone = pb.PrefillTarget(instance_id="gone", address="127.0.0.1:1")
    assert (await ask(pair, prompt, targets=[gone])).tokens == (await ask(pair, prompt)).tokens


async def test_cancelling_reaches_the_prefill_worker(pair: WorkerPair) -> None:
    async with fake_prefill(fakes.hangs) as (fake, address):
        bad = pb.PrefillTarget(instance_id="bad", address=address)
        asking = asyncio.create_task(ask(pair, prompt_of(200, seed=62), targets=[bad]))
        await asyncio.wait_for(fake.started.wait(), 5)
        began = time.monotonic()
        asking.cancel()
        await asyncio.wait_for(fake.ended.wait(), 5)
        # Long before the 2 s that a prefill worker has for its first word.
        assert time.monotonic() - began < 1.0
    await until_idle(pair)


@contextlib.contextmanager
def stopped(process: ServiceProcess) -> Iterator[None]:
    """The process is there, its connections stand, and nothing answers."""
    process.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.popen.send_signal(signal.SIGCONT)


async def test_a_prefill_worker_that_stands_still_costs_time_only(pair: WorkerPair) -> None:
    prompt = prompt_of(200, seed=70)
    healthy = await ask(pair, prompt)
    with stopped(pair.prefill):
        began = time.monotonic()
        answer = await ask(pair, prompt, targets=[pair.target])
        assert answer.tokens == healthy.tokens
        # 2 s until its first word is given up, and the prompt run here.
        assert time.monotonic() - began < 10
    await until_idle(pair)


async def test_a_kv_cache_node_that_stands_still_costs_its_timeout_once(pair: WorkerPair) -> None:
    root, prompt = secrets.token_bytes(32), prompt_of(200, seed=71)
    # Both have met the node before: a first connection to it would fail otherwise, and sooner.
    await ask(pair, prompt, root=secrets.token_bytes(32), targets=[pair.target])
    healthy, before = await ask(pair, prompt), await failures(pair, "acquire")
    with stopped(pair.kv_cache):
        for targets in ([], [pair.target], [], []):
            assert (await ask(pair, prompt, root=root, targets=targets)).tokens == healthy.tokens
        waited = await failures(pair, "acquire") - before
    # One wait in the decode worker; it leaves the node alone from then on.
    assert waited == 1

    async def is_back() -> bool:
        return (await ask(pair, prompt, root=root, max_tokens=1)).cached == 128

    await until_async(is_back, what="the cache in use again", timeout_s=30)
    # The prefill worker ran into its own wait, a second after the other: what follows needs both.
    numerics_id = (await ids_of(pair))[1]

    async def is_back_there() -> bool:
        hit, _ = await prefill_by_hand(pair, say=[], numerics_id=numerics_id, cache_root=root, prompt_ids=prompt)
        return hit == 128

    await until_async(is_back_there, what="the cache in use again by the prefill worker", timeout_s=30)
    await until_idle(pair)


async def failures(pair: WorkerPair, call: str) -> float:
    """Calls of the decode worker to kv_cache that ran into their deadline."""
    return await counted(pair.decode, "shoal_kv_cache_client_failures", call=call, reason="DEADLINE_EXCEEDED")


async def acquire(pair: WorkerPair, chain: HashChain, ids: tuple[str, str]) -> cache_pb.AcquireResponse:
    request = cache_pb.AcquireRequest(
        lease_id=secrets.token_hex(8),
        owner_id="test",
        kv_id=ids[0],
        numerics_id=ids[1],
        block_hashes=chain.hashes,
        max_hit_tokens=len(chain.hashes) * 128,
        want_replay=True,
        offer=transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id()),
    )
    async with grpc.aio.insecure_channel(pair.kv_cache.address) as channel:
        stub: Any = cache_rpc.KvCacheServiceStub(channel)
        answer: cache_pb.AcquireResponse = await stub.Acquire(request, timeout=5)
        await stub.Release(cache_pb.ReleaseRequest(lease_id=request.lease_id), timeout=5)
        return answer


async def ids_of(pair: WorkerPair) -> tuple[str, str]:
    """kv_id as the prefill worker's payloads carry it, and the numerics_id of the pair."""
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        request = pb.GenerateRequest(
            request_id=secrets.token_hex(8),
            attempt=1,
            prompt_ids=[5],
            params=sampling_pb2.SamplingParams(max_tokens=1),
        )
        call: Any = rpc.DecodeServiceStub(channel).Generate(request, timeout=10)
        numerics_id = (await call.read()).admitted.numerics_id
        call.cancel()
    return await kv_id_of(pair, numerics_id), numerics_id


async def kv_id_of(pair: WorkerPair, numerics_id: str) -> str:
    async def messages() -> AsyncIterator[prefill_pb.PrefillRequest]:
        start = prefill_pb.Start(
            request_id=secrets.token_hex(8), attempt=1, numerics_id=numerics_id, prompt_ids=prompt_of(40)
        )
        yield prefill_pb.PrefillRequest(start=start)
        yield prefill_pb.PrefillRequest(have=prefill_pb.Have())
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(pair.prefill.address) as channel:
        call: Any = prefill_rpc.PrefillServiceStub(channel).Prefill(messages(), timeout=30)
        async for message in call:
            if message.ready.payloads:
                call.cancel()
                return str(message.ready.payloads[0].kv_id)
    raise AssertionError("no rows")


@pytest.mark.parametrize(
    ("damaged", "is_remote"), [("block", True), ("snapshot", False), *seldom(("block", False), ("snapshot", True))]
)
async def test_a_corrupt_payload_is_dropped_and_computed_again(pair: WorkerPair, damaged: str, is_remote: bool) -> None:
    root, prompt, ids = secrets.token_bytes(32), prompt_of(400, seed=63), await ids_of(pair)
    targets = [pair.target] if is_remote else []
    chain = HashChain(root, prompt)
    cold = await ask(pair, prompt, root=root, targets=targets)

    async def is_stored() -> bool:
        return (await acquire(pair, chain, ids)).hit_tokens == 256

    await until_async(is_stored, what="blocks and snapshot in kv_cache")
    kind = transport_pb.PAYLOAD_KIND_BLOCK if damaged == "block" else transport_pb.PAYLOAD_KIND_ENCODER_WINDOW
    damage.in_memory(await acquire(pair, chain, ids), kind).flip()
    before = (await cache_stats(pair)).corrupt_count
    answer = await ask(pair, prompt, root=root, targets=targets)
    assert answer.tokens == cold.tokens
    assert answer.cached == (0 if damaged == "block" else 256)
    assert (await cache_stats(pair)).corrupt_count > before
    await until_async(is_stored, what="the dropped payload stored again")
    healed = await ask(pair, prompt, root=root, targets=targets)
    assert (healed.cached, healed.tokens) == (256, cold.tokens)
    await until_idle(pair)


@pytest.fixture
def disk(pair: WorkerPair) -> Iterator[Path]:
    """Of the node, for one test."""
    pair.node.restart(has_disk=True)
    yield pair.node.disk
    pair.node.restart()


async def test_after_a_kill_hits_come_from_disk_and_what_is_damaged_there_is_computed_again(
    pair: WorkerPair, disk: Path
) -> None:
    ids = await ids_of(pair)
    prompts = {name: prompt_of(400, seed=64 + number) for number, name in enumerate(("whole", "damaged"))}
    chains = {name: HashChain(secrets.token_bytes(32), prompt) for name, prompt in prompts.items()}

    async def ask_both() -> dict[str, Answer]:
        return {
            name: await ask(pair, prompt, root=chains[name].parent_of(0), temperature=1.0)
            for name, prompt in prompts.items()
        }

    async def on_disk() -> cache_pb.TierStats:
        return next(one for one in (await cache_stats(pair)).tiers if one.tier == cache_pb.TIER_SSD)

    async def is_stored() -> bool:
        hits = [(await acquire(pair, chain, ids)).hit_tokens for chain in chains.values()]
        return hits == [256, 256] and metric(pair.kv_cache, "shoal_kv_cache_queued_bytes") == 0

    cold = await ask_both()
    await until_async(is_stored, what="blocks and snapshots on disk")
    block = damage.in_memory(await acquire(pair, chains["damaged"], ids), transport_pb.PAYLOAD_KIND_BLOCK).read()
    pair.node.kill()
    damage.on_disk(disk, block).flip()
    await asyncio.to_thread(pair.node.start, has_disk=True)
    warm = await ask_both()
    assert {name: one.tokens for name, one in warm.items()} == {name: one.tokens for name, one in cold.items()}
    assert {name: one.cached for name, one in warm.items()} == {"whole": 256, "damaged": 0}
    assert (await on_disk()).read_bytes > 0
    await until_async(is_stored, what="the damaged block stored again")
    assert [one.cached for one in (await ask_both()).values()] == [256, 256]
    await until_idle(pair)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"numerics_id": "other"}, "FAILED_PRECONDITION", "NUMERICS_MISMATCH"),
        ({"prompt_ids": []}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
        ({"prompt_ids": [512]}, "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        ({"prompt_ids": [5] * 4096}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        ({"cache_root": b"short"}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"request_id": ""}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
async def test_a_prefill_worker_refuses_bad_input(
    pair: WorkerPair, fields: dict[str, Any], code: str, reason: str
) -> None:
    numerics_id = (await ids_of(pair))[1]

    async def messages() -> AsyncIterator[prefill_pb.PrefillRequest]:
        values = {"request_id": "r", "attempt": 1, "numerics_id": numerics_id, "prompt_ids": [5], **fields}
        yield prefill_pb.PrefillRequest(start=prefill_pb.Start(**values))

    async with grpc.aio.insecure_channel(pair.prefill.address) as channel:
        call: Any = prefill_rpc.PrefillServiceStub(channel).Prefill(messages(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (code, reason)


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_a_newer_prefill_attempt_stops_the_older(pair: WorkerPair) -> None:
    numerics_id = (await ids_of(pair))[1]

    def start(attempt: int) -> AsyncIterator[prefill_pb.PrefillRequest]:
        async def messages() -> AsyncIterator[prefill_pb.PrefillRequest]:
            message = prefill_pb.Start(
                request_id="twice", attempt=attempt, numerics_id=numerics_id, prompt_ids=prompt_of(300)
            )
            yield prefill_pb.PrefillRequest(start=message)
            await asyncio.Event().wait()

        return messages()

    async with grpc.aio.insecure_channel(pair.prefill.address) as channel:
        stub: Any = prefill_rpc.PrefillServiceStub(channel)
        older = stub.Prefill(start(1), timeout=30)
        assert (await older.read()).HasField("hit")
        newer = stub.Prefill(start(2), timeout=30)
        assert (await newer.read()).HasField("hit")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_the_end(older)
        assert from_rpc_error(raised.value).reason == "SUPERSEDED"
        refused = stub.Prefill(start(1), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
        assert from_rpc_error(raised.value).reason == "ATTEMPT_NOT_NEWER"
        newer.cancel()
    await until_idle(pair)


async def prefill_by_hand(
    pair: WorkerPair, *, say: list[prefill_pb.PrefillRequest], **fields: Any
) -> tuple[int, list[transport_pb.Payload]]:
    """Prefill without a decode worker: the hit, and everything announced until Done."""
    outgoing: asyncio.Queue[prefill_pb.PrefillRequest] = asyncio.Queue()

    async def messages() -> AsyncIterator[prefill_pb.PrefillRequest]:
        while True:
            yield await outgoing.get()

    start = prefill_pb.Start(request_id=secrets.token_hex(8), attempt=1, **fields)
    outgoing.put_nowait(prefill_pb.PrefillRequest(start=start))
    async with grpc.aio.insecure_channel(pair.prefill.address) as channel:
        call: Any = prefill_rpc.PrefillServiceStub(channel).Prefill(messages(), timeout=30)
        hit = (await call.read()).hit.hit_tokens
        for message in say:
            outgoing.put_nowait(message)
        payloads: list[transport_pb.Payload] = []
        while not (message := await call.read()).HasField("done"):
            payloads += message.ready.payloads
        outgoing.put_nowait(prefill_pb.PrefillRequest(pulled=prefill_pb.Pulled()))
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    return hit, payloads


async def test_blocks_below_the_hit_are_announced_only_when_they_are_needed(pair: WorkerPair) -> None:
    root, prompt, ids = secrets.token_bytes(32), prompt_of(400, seed=67), await ids_of(pair)
    await ask(pair, prompt, root=root)
    chain = HashChain(root, prompt)

    async def is_stored() -> bool:
        return (await acquire(pair, chain, ids)).hit_tokens == 256

    await until_async(is_stored, what="blocks and snapshot in kv_cache")
    fields = {"numerics_id": ids[1], "cache_root": root, "prompt_ids": prompt}
    have = prefill_pb.PrefillRequest(have=prefill_pb.Have())
    need = prefill_pb.PrefillRequest(need=prefill_pb.Need(block_indices=[1]))
    for said, wanted in ((have, [256]), (need, [128, 256])):
        hit, payloads = await prefill_by_hand(pair, say=[said], **fields)
        blocks = [one.position_begin for one in payloads if one.kind == transport_pb.PAYLOAD_KIND_BLOCK]
        assert (hit, sorted(blocks)) == (256, wanted)
    await until_idle(pair)


async def test_draft_windows_go_only_to_a_caller_with_the_same_draft_weights(pair: WorkerPair) -> None:
    numerics_id = (await ids_of(pair))[1]
    _, payloads = await prefill_by_hand(
        pair, say=[], numerics_id=numerics_id, draft_id="another", prompt_ids=prompt_of(301)
    )
    kinds = {one.kind for one in payloads}
    assert transport_pb.PAYLOAD_KIND_DRAFT_WINDOW not in kinds
    # An odd length: the pair that its last token opened travels too.
    assert {
        transport_pb.PAYLOAD_KIND_BLOCK,
        transport_pb.PAYLOAD_KIND_PARTIAL_BLOCK,
        transport_pb.PAYLOAD_KIND_ENCODER_WINDOW,
        transport_pb.PAYLOAD_KIND_DECODER_WINDOW,
        transport_pb.PAYLOAD_KIND_OPEN_PAIR,
    } <= kinds


async def test_the_real_engine_pauses_below_256_unacknowledged_tokens_and_goes_on(pair: WorkerPair) -> None:
    prompt = prompt_of(30, seed=64)
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        stub: Any = rpc.DecodeServiceStub(channel)
        frames = await FramesCall(stub).open()
        request = pb.GenerateRequest(
            request_id="paused",
            attempt=1,
            gateway_id="gateway",
            prompt_ids=prompt,
            params=sampling_pb2.SamplingParams(temperature=0, seed=11, max_tokens=270, ignore_eos=True),
            prefill_targets=[pair.target],
        )
        call = stub.Generate(request, timeout=60)
        await until(lambda: len(frames.of("paused")) > 250, timeout_s=60)
        # It stops by itself: beats say that nothing of this gateway can run.
        await until(lambda: frames.beats[-1].runnable_count == 0)
        assert 250 < len(frames.of("paused")) <= 256
        frames.acknowledge("paused")
        await until(lambda: len(frames.of("paused")) == 270, timeout_s=60)
        frames.acknowledge("paused")
        assert isinstance(await call.read(), pb.GenerateResponse)
        assert (await call.read()).ended.usage.completion_tokens == 270
        await frames.close()
    so_far = pb.ChoiceState(output_ids=frames.of("paused")[:240])
    rest = await ask(pair, prompt, max_tokens=270, choices=[so_far])
    assert frames.of("paused")[240:] == rest.tokens[0]
    await until_idle(pair)


async def test_finish_stores_what_lies_below_its_index(pair: WorkerPair) -> None:
    root, prompt = secrets.token_bytes(32), prompt_of(250, seed=65)
    whole = await ask(pair, prompt, max_tokens=60)
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        stub: Any = rpc.DecodeServiceStub(channel)
        frames = await FramesCall(stub).open()
        request = pb.GenerateRequest(
            request_id="finished",
            attempt=1,
            gateway_id="gateway",
            prompt_ids=prompt,
            params=sampling_pb2.SamplingParams(temperature=0, seed=11, max_tokens=60, ignore_eos=True),
            cache_root=root,
        )
        call = stub.Generate(request, timeout=60)
        await until(lambda: len(frames.of("finished")) >= 45, timeout_s=60)
        frames.say(pb.FramesRequest(finish=pb.Finish(request_id="finished", attempt=1, choice_index=0, end_index=40)))
        events = [event async for event in call]
        assert events[-1].ended.choices[0].token_count == 40
        await frames.close()
    follow_up = [*prompt, *whole.tokens[0][:40], *prompt_of(50, seed=66)]

    async def is_warm() -> bool:
        return (await ask(pair, follow_up, root=root, max_tokens=1)).cached == 256

    await until_async(is_warm, what="the finished turn in kv_cache", timeout_s=20)
    warm = await ask(pair, follow_up, root=root)
    assert warm.tokens == (await ask(pair, follow_up)).tokens


async def test_both_workers_tell_their_figures(pair: WorkerPair) -> None:
    decode, prefill = await numbers(pair.decode), await numbers(pair.prefill)
    assert decode["step_count"] > 0
    assert prefill["step_count"] > 0
    assert 0 < decode["verify_width"] <= 5


async def test_a_request_finished_while_its_prompt_is_on_its_way_ends_normally(pair: WorkerPair) -> None:
    async with fake_prefill(fakes.hangs) as (fake, address), grpc.aio.insecure_channel(pair.decode.address) as channel:
        stub: Any = rpc.DecodeServiceStub(channel)
        request = pb.GenerateRequest(
            request_id="early",
            attempt=1,
            prompt_ids=prompt_of(100),
            params=sampling_pb2.SamplingParams(max_tokens=20),
            choices=[pb.ChoiceState(output_ids=[7, 8, 9])],
            prefill_targets=[pb.PrefillTarget(instance_id="bad", address=address)],
        )
        call = stub.Generate(request, timeout=30)
        await asyncio.wait_for(fake.started.wait(), 5)
        finish = pb.Finish(request_id="early", attempt=1, choice_index=0, end_index=2)
        await stub.Finish(pb.FinishRequest(finish=finish), timeout=5)
        events = [event async for event in call]
        assert events[-1].ended.choices[0].token_count == 2
        await asyncio.wait_for(fake.ended.wait(), 5)
    await until_idle(pair)
