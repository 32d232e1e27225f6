"""Whatever a caller says: a typed answer, nothing held for it, and the node serves on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import shoal_kv_cache
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import Unavailable
from shoal_kv_cache.core.prefix_plan import Level
from shoal_kv_cache.movement.background import Item, WriteBack
from shoal_kv_cache.tier_counts import TierCounts
from support.kv_client import KvClient, TestChain, begin_of, items_of
from support.kv_nodes import ServedNode, open_disk, served_node
from support.waiting import until

CHAIN = TestChain("bad input", 10)
DATA = {(one.payload.kind, one.payload.block_hash): one.data for one in items_of(CHAIN, 0, 10, range(10))}
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}
NUMBERS = st.sampled_from([0, 1, 127, 128, 256, 1280, 1 << 20, (1 << 32) - 128, (1 << 32) - 1])
HASHES = st.sampled_from([*CHAIN.hashes[:3], bytes(32), b"", b"short", bytes(33)])
TEXTS = st.sampled_from(["", "kv", "numerics", "x" * 257, "\0", "lease\0loading", "\0put 1", "é" * 200])
TAGS = st.sampled_from([b"", b"t" * 32, b"t" * 300])
SECONDS = st.builds(Duration, seconds=st.sampled_from([0, -5, 1, 1 << 62, -(1 << 62)]))
FLOATS = st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e30])
OFFERS = st.builds(transport_pb.TransportOffer, kinds=st.lists(st.integers(0, 7), max_size=2), host_id=TEXTS)

ACQUIRES = st.builds(
    pb.AcquireRequest,
    lease_id=TEXTS,
    owner_id=TEXTS,
    kv_id=TEXTS,
    numerics_id=TEXTS,
    tenant_tag=TAGS,
    block_hashes=st.lists(HASHES, max_size=4),
    max_hit_tokens=NUMBERS,
    position_begin=NUMBERS,
    time_to_live=SECONDS,
    offer=OFFERS,
    want_replay=st.booleans(),
    blocks_only=st.booleans(),
    is_from_peer=st.booleans(),
    recompute_tokens_per_s=FLOATS,
    replay_reach_tokens=NUMBERS,
    release_lease_ids=st.lists(TEXTS, max_size=2),
)
PAYLOADS = st.builds(
    transport_pb.Payload,
    payload_id=NUMBERS,
    kind=st.integers(0, 7),
    position_begin=NUMBERS,
    position_end=NUMBERS,
    shape=st.lists(st.sampled_from([0, 1, 1000, (1 << 32) - 1]), max_size=3) | st.just([1] * 300),
    dtype=st.sampled_from(["uint8", "float32", "", "object"]),
    kv_id=TEXTS,
    size_bytes=st.sampled_from([0, 1, 4, 1000, 4000, 1 << 40]),
    block_hash=HASHES,
)


@st.composite
def begins(draw: st.DrawFn) -> pb.PutBegin:
    """Of a good put, with some fields put wrong, or anything at all."""
    if draw(st.booleans()):
        payloads = draw(st.lists(PAYLOADS, max_size=3))
        return pb.PutBegin(
            kv_id=draw(TEXTS),
            numerics_id=draw(TEXTS),
            tenant_tag=draw(TAGS),
            payloads=payloads,
            parent_hashes=draw(st.lists(HASHES, max_size=3)),
            offer=draw(OFFERS),
        )
    begin = begin_of(items_of(CHAIN, 0, 3, [2]))
    one = begin.payloads[draw(st.integers(0, 3))]
    other = draw(PAYLOADS)
    for name in draw(st.lists(st.sampled_from([field.name for field in other.DESCRIPTOR.fields]), max_size=2)):
        if name == "shape":
            one.shape[:] = other.shape
        else:
            setattr(one, name, getattr(other, name))
    for name, values in (("kv_id", TEXTS), ("numerics_id", TEXTS), ("tenant_tag", TAGS)):
        if draw(st.integers(0, 4)) == 0:
            setattr(begin, name, draw(values))
            if name == "kv_id":
                for payload in begin.payloads:
                    payload.kv_id = begin.kv_id
    return begin


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[ServedNode]:
    async with served_node(ssd=open_disk(tmp_path), max_leases=16) as served:
        yield served


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def answer_of(call: Any) -> object:
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return None


async def put(client: KvClient, begin: pb.PutBegin, data: bytes) -> grpc.StatusCode:
    call: Any = client.stub.Put(None, timeout=10)
    await call.write(pb.PutRequest(begin=begin))
    try:
        answer = await call.read()
        sizes = {one.payload_id: one.size_bytes for one in begin.payloads}
        hashes = {one.payload_id: (one.kind, one.block_hash) for one in begin.payloads}
        for payload_id in answer.wanted.payload_ids:
            part = DATA.get(hashes[payload_id], data * 4000)[: sizes[payload_id]]
            await call.write(pb.PutRequest(data=pb.PutData(payload_id=payload_id, data=part)))
        await call.write(pb.PutRequest(commit=pb.PutCommit()))
        await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def serves_on(served: ServedNode) -> None:
    """Nothing of what was said is in the way of the next caller."""
    node, client = served.node, served.client
    for lease_id in list(node.store.index.leases._open):
        node.acquirer.release(lease_id)
    await client.flush(everything=True)
    await until(lambda: not node.puts._filling, what="puts to end")
    assert node.store.ram.used_bytes == 0
    assert await client.put(items_of(CHAIN, 0, 3, [2])) == 4
    assert (await client.acquire(CHAIN, lease_id="after")).hit_tokens == 384
    await client.release("after")
    await asyncio.wait_for(node.write_out(), 10)
    assert node.disk is not None
    assert node.counts[Level.SSD].failing_reason == ""
    assert node.is_healthy


MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_any_acquire_is_answered_or_refused_by_name(tmp_path: Path) -> None:
    @MANY
    @given(requests=st.lists(ACQUIRES, min_size=1, max_size=6))
    def run(requests: list[pb.AcquireRequest]) -> None:
        runner.run(ask(requests))

    async def ask(requests: list[pb.AcquireRequest]) -> None:
        await served.client.put(items_of(CHAIN, 0, 3, [2]))
        for request in requests:
            assert await code_of(served.client.stub.Acquire(request, timeout=10)) in TYPED, request
        await serves_on(served)

    with asyncio.Runner() as runner:
        context = served_node(ssd=open_disk(tmp_path), max_leases=16)
        served = runner.run(context.__aenter__())
        run()
        runner.run(context.__aexit__(None, None, None))


def test_any_put_is_answered_or_refused_by_name(tmp_path: Path) -> None:
    @MANY
    @given(begins=st.lists(begins(), min_size=1, max_size=4), data=st.sampled_from([CHAIN.hashes[0], b"x"]))
    def run(begins: list[pb.PutBegin], data: bytes) -> None:
        runner.run(ask(begins, data))

    async def ask(begins: list[pb.PutBegin], data: bytes) -> None:
        for begin in begins:
            assert await put(served.client, begin, data) in TYPED, begin
        await asyncio.wait_for(served.node.write_out(), 10)
        await serves_on(served)

    with asyncio.Runner() as runner:
        context = served_node(ssd=open_disk(tmp_path), max_leases=16)
        served = runner.run(context.__aenter__())
        run()
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("what", [{"tenant_tag": b"t" * 300}, {"kv_id": "k" * 70_000}, {"numerics_id": "n" * 70_000}])
async def test_names_too_long_for_the_disk_are_refused_at_the_door(one: ServedNode, what: dict[str, Any]) -> None:
    begin = begin_of(items_of(CHAIN, 0, 1))
    for name, value in what.items():
        setattr(begin, name, value)
        if name == "kv_id":
            begin.payloads[0].kv_id = value
    assert await put(one.client, begin, b"x") is grpc.StatusCode.INVALID_ARGUMENT
    await serves_on(one)


async def test_messages_out_of_order_and_beyond_the_end_are_refused(one: ServedNode) -> None:
    begin = pb.PutRequest(begin=begin_of(items_of(CHAIN, 0, 2)))
    data = pb.PutRequest(data=pb.PutData(payload_id=0, data=CHAIN.block(0)))
    more = pb.PutRequest(data=pb.PutData(payload_id=0, offset=1 << 60, data=b"x"))
    commit = pb.PutRequest(commit=pb.PutCommit())
    for messages in (
        [data],
        [commit],
        [begin, begin],
        [begin, data, data, commit],
        [begin, more, commit],
        [begin, commit],
        [pb.PutRequest()],
    ):
        call: Any = one.client.stub.Put(None, timeout=10)
        for message in messages:
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                break
        while isinstance(await answer_of(call), pb.PutResponse):
            pass
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await serves_on(one)


async def test_a_message_beyond_the_limit_is_refused_and_the_next_one_served(one: ServedNode) -> None:
    request = pb.AcquireRequest(lease_id="large", block_hashes=[bytes(32)] * (1 << 20), max_hit_tokens=128)
    assert await code_of(one.client.stub.Acquire(request, timeout=20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await serves_on(one)


class BrokenSink:
    """A mistake of ours: not a typed error."""

    def __init__(self) -> None:
        self.is_broken = True
        self.written: list[Item] = []

    async def write(self, items: Any) -> int:
        if self.is_broken:
            raise ZeroDivisionError
        self.written += items
        return 1


async def test_a_bug_in_a_slower_place_ends_one_batch_and_not_the_writing(one: ServedNode) -> None:
    sink, counts = BrokenSink(), TierCounts()
    now_s = [0.0]
    writer = WriteBack(sink, counts, name="x", max_queued_bytes=100, bytes_per_s=0, clock=lambda: now_s[0])
    running = asyncio.create_task(writer.run())
    items = [Item(None, number) for number in range(2)]  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await writer.carry([(items[0], 1)])
    assert (counts.failing_reason, counts.dropped_count) == ("INTERNAL", 1)
    sink.is_broken, now_s[0] = False, 100.0
    await writer.carry([(items[1], 1)])
    assert sink.written == [items[1]]
    running.cancel()


def test_nothing_asks_the_wall_clock_which_may_jump() -> None:
    sources = Path(shoal_kv_cache.__file__).parent.rglob("*.py")
    asking = {path.name for path in sources if re.search(r"time\.time(_ns)?\(|datetime\.|utcnow", path.read_text())}
    assert asking == set()
