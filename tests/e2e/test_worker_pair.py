"""One answer whatever the way of the prompt: prefilled here or there, cached or not, moved or not."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as cache_rpc
from shoal_common.chains import HashChain
from shoal_common.kv_transport import host_id
from shoal_common.kv_transport.arena import ArenaView
from support.seldom import seldom
from support.waiting import until_async
from support.worker_pair import Answer, WorkerPair, ask, cache_stats, counted, prompt_of, until_idle

pytestmark = pytest.mark.timeout(300)

# Around: nothing, ratio 2, the window (16), the replay length (28), one block, one block + replay, two, three and more.
LENGTHS = (1, 2, 3, 15, 16, 17, 27, 28, 29, 127, 128, 129, 155, 156, 157, 256, 301, 412, 513)


@pytest.fixture(autouse=True)
async def no_remote_prefill_fails(pair: WorkerPair) -> AsyncIterator[None]:
    """Without this, a remote prefill that always failed would pass for a local one: the tokens are the same."""
    before = await counted(pair.decode, "shoal_remote_prefill_failures")
    yield
    assert await counted(pair.decode, "shoal_remote_prefill_failures") == before


def new_root() -> bytes:
    """A root that nothing is stored under."""
    return secrets.token_bytes(32)


async def until_stored(pair: WorkerPair, root: bytes, prompt: list[int], *, blocks: int, snapshot_at: int = 0) -> None:
    """Wait until kv_cache holds the leading blocks of a prompt, and the snapshot."""
    chain = HashChain(root, prompt)
    wanted = set(chain.hashes[:blocks])

    async def is_stored() -> bool:
        held, snapshots = await held_hashes(pair)
        has_snapshot = not snapshot_at or chain.hashes[snapshot_at // 128 - 1] in snapshots
        return wanted <= held and has_snapshot

    await until_async(is_stored, what=f"{blocks} blocks and the snapshot at {snapshot_at} in kv_cache")


async def held_hashes(pair: WorkerPair) -> tuple[set[bytes], set[bytes]]:
    blocks: set[bytes] = set()
    snapshots: set[bytes] = set()
    async with grpc.aio.insecure_channel(pair.kv_cache.address) as channel:
        stub: Any = cache_rpc.KvCacheServiceStub(channel)
        async for message in stub.ListHeld(cache_pb.ListHeldRequest(), timeout=5):
            blocks.update(message.page.block_hashes)
            snapshots.update(message.page.snapshot_hashes)
    return blocks, snapshots


async def drop_snapshots(pair: WorkerPair, hashes: list[bytes]) -> None:
    """Damages the snapshots of a chain where they lie, and tells the node."""
    async with grpc.aio.insecure_channel(pair.kv_cache.address) as channel:
        stub: Any = cache_rpc.KvCacheServiceStub(channel)
        for group in (await stub.ListGroups(cache_pb.ListGroupsRequest(), timeout=5)).groups:
            named = {"kv_id": group.kv_id, "numerics_id": group.numerics_id, "tenant_tag": group.tenant_tag}
            for count, one in enumerate(hashes, 1):
                lease_id = secrets.token_hex(8)
                request = cache_pb.AcquireRequest(
                    lease_id=lease_id,
                    block_hashes=hashes[:count],
                    max_hit_tokens=128 * count,
                    offer=transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id()),
                    **named,
                )
                answer = await stub.Acquire(request, timeout=5)
                if answer.hit_tokens == 128 * count:
                    damage(answer.grant, answer.runs[-1].slabs[0])
                    kind = transport_pb.PAYLOAD_KIND_ENCODER_WINDOW
                    report = cache_pb.ReportCorruptRequest(kind=kind, block_hash=one, **named)
                    await stub.ReportCorrupt(report, timeout=5)
                await stub.Release(cache_pb.ReleaseRequest(lease_id=lease_id), timeout=5)


def damage(grant: transport_pb.TransportGrant, slab: int) -> None:
    view = ArenaView(grant.arena_name, grant.arena_nonce, is_writable=True)
    view.memory[grant.first_slab_offset + slab * grant.slab_bytes] ^= 1
    view.close()


def computed(answer: Answer) -> int:
    return answer.ended.usage.prompt_tokens - answer.cached


@pytest.mark.parametrize("temperature", [1.0, *seldom(0.0)])
async def test_remote_prefill_gives_the_tokens_of_local_prefill_at_every_length(
    pair: WorkerPair, temperature: float
) -> None:
    before = await counted(pair.decode, "shoal_prefills", where="remote")
    for length in LENGTHS:
        prompt = prompt_of(length)
        local = await ask(pair, prompt, temperature=temperature)
        remote = await ask(pair, prompt, temperature=temperature, targets=[pair.target])
        assert remote.tokens == local.tokens, f"at length {length}"
    assert await counted(pair.decode, "shoal_prefills", where="remote") == before + len(LENGTHS)
    await until_idle(pair)


@pytest.mark.parametrize(
    ("length", "is_remote"),
    [
        (155, True),
        (156, False),
        (513, True),
        *seldom((155, False), (156, True), (301, False), (301, True), (513, False)),
    ],
)
async def test_a_hit_gives_the_tokens_of_a_cold_prompt(pair: WorkerPair, is_remote: bool, length: int) -> None:
    root, prompt = new_root(), prompt_of(length, seed=length)
    targets = [pair.target] if is_remote else []
    cold = await ask(pair, prompt, root=root, targets=targets, temperature=1.0)
    stored_at = (length - 28) // 128 * 128
    await until_stored(pair, root, prompt, blocks=length // 128, snapshot_at=stored_at)
    hit = await ask(pair, prompt, root=root, targets=targets, temperature=1.0)
    assert cold.cached == 0
    assert hit.cached == stored_at
    assert hit.tokens == cold.tokens
    await until_idle(pair)


@pytest.mark.parametrize("stored_by", ["local", "remote"])
async def test_what_one_side_stored_hits_on_the_other(pair: WorkerPair, stored_by: str) -> None:
    root, prompt = new_root(), prompt_of(400, seed=5)
    ways = {"local": [], "remote": [pair.target]}
    other = next(name for name in ways if name != stored_by)
    cold = await ask(pair, prompt, root=root, targets=ways[stored_by])
    await until_stored(pair, root, prompt, blocks=3, snapshot_at=256)
    hit = await ask(pair, prompt, root=root, targets=ways[other])
    assert (hit.cached, hit.tokens) == (256, cold.tokens)


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
async def test_a_hit_without_its_snapshot_is_replayed_and_stores_it_again(pair: WorkerPair, is_remote: bool) -> None:
    root, prompt = new_root(), prompt_of(500, seed=6)
    targets = [pair.target] if is_remote else []
    cold = await ask(pair, prompt, root=root, targets=targets, temperature=1.0)
    await until_stored(pair, root, prompt, blocks=3, snapshot_at=384)
    await drop_snapshots(pair, HashChain(root, prompt).hashes)
    replayed = await ask(pair, prompt, root=root, targets=targets, temperature=1.0)
    assert (replayed.cached, replayed.tokens) == (384, cold.tokens)
    await until_stored(pair, root, prompt, blocks=3, snapshot_at=384)
    hit = await ask(pair, prompt, root=root, targets=targets, temperature=1.0)
    assert (hit.cached, hit.tokens) == (384, cold.tokens)


async def test_the_second_turn_hits_beyond_the_first_prompt(pair: WorkerPair) -> None:
    root, first = new_root(), prompt_of(250, seed=7)
    answer = await ask(pair, first, root=root, max_tokens=40)
    second = [*first, *answer.tokens[0], *prompt_of(60, seed=8)]
    await until_stored(pair, root, second, blocks=2, snapshot_at=256)
    warm = await ask(pair, second, root=root)
    cold = await ask(pair, second)
    assert warm.cached == 256
    assert warm.tokens == cold.tokens


async def test_a_branch_is_stored_by_its_second_visitor_and_hit_by_the_third(pair: WorkerPair) -> None:
    root, system = new_root(), prompt_of(300, seed=9)
    users = [[*system, *prompt_of(200, seed=20 + index)] for index in range(3)]
    await ask(pair, users[0], root=root)
    await until_stored(pair, root, users[0], blocks=3, snapshot_at=384)
    second = await ask(pair, users[1], root=root)
    await until_stored(pair, root, users[1], blocks=3, snapshot_at=256)
    third = await ask(pair, users[2], root=root)
    assert (second.cached, third.cached) == (256, 256)
    assert third.tokens == (await ask(pair, users[2])).tokens


async def test_without_a_root_nothing_is_read_or_stored(pair: WorkerPair) -> None:
    before = await cache_stats(pair)
    await ask(pair, prompt_of(300, seed=10), targets=[pair.target])
    await ask(pair, prompt_of(300, seed=10))
    after = await cache_stats(pair)
    assert (after.block_count, after.acquire_count) == (before.block_count, before.acquire_count)


@pytest.mark.parametrize(
    ("so_far", "is_remote"),
    [(1, True), (29, False), (60, True), *seldom((1, False), (7, False), (7, True), (29, True), (60, False))],
)
async def test_tokens_so_far_continue_with_the_same_next_tokens(pair: WorkerPair, is_remote: bool, so_far: int) -> None:
    prompt = prompt_of(140, seed=12)
    targets = [pair.target] if is_remote else []
    whole = await ask(pair, prompt, temperature=1.0, max_tokens=80)
    state = pb.ChoiceState(output_ids=whole.tokens[0][:so_far])
    rest = await ask(pair, prompt, temperature=1.0, max_tokens=80, choices=[state], targets=targets)
    assert rest.tokens[0] == whole.tokens[0][so_far:]
    assert rest.ended.choices[0].token_count == 80


async def test_of_two_choices_one_finished_the_other_continues(pair: WorkerPair) -> None:
    prompt = prompt_of(200, seed=13)
    both = [pb.ChoiceState(), pb.ChoiceState()]
    whole = await ask(pair, prompt, temperature=1.0, max_tokens=30, choices=both, targets=[pair.target])
    assert whole.tokens[0] != whole.tokens[1]
    states = [
        pb.ChoiceState(output_ids=whole.tokens[0], is_finished=True),
        pb.ChoiceState(output_ids=whole.tokens[1][:9]),
    ]
    rest = await ask(pair, prompt, temperature=1.0, max_tokens=30, choices=states)
    assert rest.tokens == {1: whole.tokens[1][9:]}
    assert [one.token_count for one in rest.ended.choices] == [30, 30]


@pytest.mark.parametrize("length", [5, 300])
async def test_an_answer_interrupted_after_its_last_token_ends_without_another(pair: WorkerPair, length: int) -> None:
    prompt, root = prompt_of(length, seed=44), new_root()
    (tokens,) = (await ask(pair, prompt, root=root)).tokens.values()
    other = (await ask(pair, prompt, choices=[pb.ChoiceState()] * 2)).tokens[1]
    for targets in ([], [pair.target]):
        alone = await ask(pair, prompt, root=root, targets=targets, choices=[pb.ChoiceState(output_ids=tokens)])
        assert alone.tokens == {0: []}
        assert [(end.finish_reason, end.token_count) for end in alone.ended.choices] == [
            (sampling_pb2.FINISH_REASON_LENGTH, 8)
        ]
        choices = [pb.ChoiceState(output_ids=tokens), pb.ChoiceState(output_ids=other[:3])]
        both = await ask(pair, prompt, root=root, targets=targets, choices=choices)
        assert both.tokens == {0: [], 1: other[3:]}
        assert [end.token_count for end in both.ended.choices] == [8, 8]
    await until_idle(pair)


@pytest.mark.parametrize("max_tokens", [1, 3, *seldom(2)])
async def test_remote_prefill_counts_tokens_as_local_does(pair: WorkerPair, max_tokens: int) -> None:
    prompt = prompt_of(90, seed=14)
    local = await ask(pair, prompt, max_tokens=max_tokens)
    remote = await ask(pair, prompt, max_tokens=max_tokens, targets=[pair.target])
    assert len(remote.tokens[0]) == len(local.tokens[0]) == max_tokens
    assert remote.ended.usage.completion_tokens == max_tokens


async def test_a_stop_token_that_comes_first_ends_the_answer_after_remote_prefill(pair: WorkerPair) -> None:
    prompt = prompt_of(90, seed=15)
    first = (await ask(pair, prompt)).tokens[0][0]
    params = sampling_pb2.SamplingParams(temperature=0, seed=11, max_tokens=12, stop_token_ids=[first])
    request = pb.GenerateRequest(
        request_id="stop", attempt=1, prompt_ids=prompt, params=params, prefill_targets=[pair.target]
    )
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        call: Any = rpc.DecodeServiceStub(channel).Generate(request, timeout=30)
        events = [event async for event in call]
    assert events[-1].ended.choices[0].token_count == 1
    assert events[-1].ended.choices[0].finish_reason == sampling_pb2.FINISH_REASON_STOP


async def test_a_batch_of_many_gives_each_the_tokens_it_gets_alone(pair: WorkerPair) -> None:
    prompts = [prompt_of(20 + 37 * index, seed=30 + index) for index in range(8)]
    alone = [await ask(pair, prompt, temperature=1.0) for prompt in prompts]
    together = await asyncio.gather(
        *(
            ask(pair, prompt, temperature=1.0, targets=[pair.target] if index % 2 else [])
            for index, prompt in enumerate(prompts)
        )
    )
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    await until_idle(pair)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2, *seldom(0.005, 0.05, 0.1, 0.4)])
async def test_a_call_cancelled_in_any_phase_leaves_nothing_behind(pair: WorkerPair, after_s: float) -> None:
    root, prompt = new_root(), prompt_of(900, seed=int(after_s * 1000) + 50)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await ask(pair, prompt, root=root, targets=[pair.target], max_tokens=2000)
    await until_idle(pair)


async def test_more_prompts_than_the_prefill_worker_has_slots_wait_their_turn(pair: WorkerPair) -> None:
    before = await counted(pair.decode, "shoal_prefills", where="remote")
    prompts = [prompt_of(129, seed=100 + index) for index in range(24)]
    await asyncio.gather(*(ask(pair, prompt, targets=[pair.target], max_tokens=1) for prompt in prompts))
    assert await counted(pair.decode, "shoal_prefills", where="remote") == before + 24
    await until_idle(pair)


async def logprobs_of(pair: WorkerPair, targets: list[pb.PrefillTarget]) -> list[tuple[int, float, list[int]]]:
    params = sampling_pb2.SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True, top_logprobs=3)
    request = pb.GenerateRequest(
        request_id=secrets.token_hex(8), attempt=1, prompt_ids=prompt_of(70), params=params, prefill_targets=targets
    )
    found = []
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        call: Any = rpc.DecodeServiceStub(channel).Generate(request, timeout=30)
        async for event in call:
            for entry in event.entries.entries:
                assert [one.emitted.token_id for one in entry.logprobs] == list(entry.token_ids)
                for one in entry.logprobs:
                    assert one.emitted.logprob <= 0
                    assert [top.logprob for top in one.top] == sorted((top.logprob for top in one.top), reverse=True)
                    found.append((one.emitted.token_id, one.emitted.logprob, [top.token_id for top in one.top]))
    return found


async def test_every_token_has_its_logprobs_and_they_are_the_same_after_remote_prefill(pair: WorkerPair) -> None:
    local = await logprobs_of(pair, [])
    assert len(local) == 20
    assert all(len(top) == 3 for _, _, top in local)
    assert await logprobs_of(pair, [pair.target]) == local
