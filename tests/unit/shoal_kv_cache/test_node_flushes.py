"""Flushes and nodes that are away, stopped or stopped in the midst of one: nothing flushed is ever served again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_kv_cache.flush_file import FlushFile
from shoal_kv_cache.tiers.ssd import SsdUnavailable
from support.kv_client import TENANT, TestChain, items_of
from support.kv_nodes import ServedNode, introduce, open_disk, served_node
from support.memory_remote import MemoryRemote
from support.waiting import until

CHAIN, THEIRS, NEW = TestChain("flushed", 10), TestChain("theirs", 10), TestChain("new", 10)
OTHER = b"o" * 32


async def fill(one: ServedNode) -> None:
    """Blocks of two tenants, on disk too."""
    await one.client.put(items_of(CHAIN, 0, 10))
    await one.client.put(items_of(THEIRS, 0, 10), tenant=OTHER)
    await asyncio.wait_for(one.node.write_out(), 10)


async def held(one: ServedNode) -> list[int]:
    """Blocks of the first tenant, of the other one, and of what came after."""
    counts = []
    for chain, tenant in ((CHAIN, TENANT), (THEIRS, OTHER), (NEW, TENANT)):
        counts.append((await one.client.acquire(chain, tenant=tenant)).present_tokens // 128)
    return counts


async def test_a_node_that_was_away_drops_what_was_flushed_meanwhile_and_only_once(tmp_path: Path) -> None:
    async with served_node("a") as other:
        async with served_node("b", ssd=open_disk(tmp_path)) as one:
            await fill(one)
        await other.client.flush(tenant_tag=TENANT, flush_id="f")
        async with served_node("b", ssd=open_disk(tmp_path), others=[other]) as one:
            assert await held(one) == [0, 10, 0]
            await one.client.put(items_of(NEW, 0, 10))
            await asyncio.wait_for(one.node.write_out(), 10)
        async with served_node("b", ssd=open_disk(tmp_path), others=[other]) as one:
            assert await held(one) == [0, 10, 10]
    # And without the other it stays gone.
    async with served_node("b", ssd=open_disk(tmp_path)) as one:
        assert await held(one) == [0, 10, 10]


async def test_a_node_away_for_longer_than_the_others_remember_drops_everything(tmp_path: Path) -> None:
    async with served_node("a") as other:
        async with served_node("b", ssd=open_disk(tmp_path)) as one:
            await fill(one)
        other.node.flusher.log._max_records = 2
        for number in range(4):
            await other.client.flush(kv_id="another", flush_id=str(number))
        async with served_node("b", ssd=open_disk(tmp_path), others=[other]) as one:
            assert await held(one) == [0, 0, 0]


async def test_a_flush_that_was_not_complete_is_done_before_the_next_start_serves(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    async with served_node(ssd=disk) as one:
        await fill(one)

        def fails(*_: object, **__: object) -> None:
            raise SsdUnavailable("broken")

        disk.remove = fails  # type: ignore[method-assign]
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await one.client.flush(tenant_tag=TENANT)
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert await held(one) == [0, 10, 0]
        assert one.node.flusher.log.unfinished() == []
        await one.client.put(items_of(NEW, 0, 10))
        await asyncio.wait_for(one.node.write_out(), 10)
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert await held(one) == [0, 10, 10]


async def test_a_log_that_cannot_be_read_costs_all_that_is_on_disk_and_never_the_start(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one:
        await fill(one)
        await one.client.flush(kv_id="another")
    (tmp_path / "flushes").write_bytes(b"\x00\x01")
    async with served_node(ssd=open_disk(tmp_path)) as one:
        assert await held(one) == [0, 0, 0]
    assert FlushFile(tmp_path).read().unfinished() == []


async def test_a_running_node_hears_of_a_flush_that_did_not_reach_it_from_whoever_comes_up() -> None:
    remote = MemoryRemote()
    async with served_node("a", remote=remote) as one, served_node("b") as other:
        await fill(one)
        assert len(remote.held) == 20
        await other.client.flush(tenant_tag=TENANT)
        assert await held(one) == [10, 10, 0]
        introduce([one, other])
        await until(lambda: len(one.node.store.index) == 10, what="the flush")
        assert await held(one) == [0, 10, 0]
        await until(lambda: len(remote.held) == 10, what="the flush of the store")
        assert one.node.flusher.log.digest() == other.node.flusher.log.digest()


async def test_a_node_that_comes_back_leaves_alone_what_others_have_written_to_the_store_meanwhile(
    tmp_path: Path,
) -> None:
    remote = MemoryRemote()
    async with served_node("a", remote=remote) as other:
        async with served_node("b", ssd=open_disk(tmp_path), remote=remote) as one:
            await fill(one)
        await other.client.flush(tenant_tag=TENANT)
        await other.client.put(items_of(CHAIN, 0, 10))
        await asyncio.wait_for(other.node.write_out(), 10)
        async with served_node("b", ssd=open_disk(tmp_path), remote=remote, others=[other]) as one:
            assert len(one.node.store.index) == 10
            assert await held(one) == [10, 10, 0]


async def test_a_node_that_was_stopped_asks_the_others_before_it_serves_on() -> None:
    async with served_node("a") as one, served_node("b") as other:
        introduce([one, other])
        await fill(one)
        await until(lambda: not one.node.flushes._asking and not other.node.flushes._asking, what="first questions")
        await other.client.flush(tenant_tag=TENANT)
        assert await held(one) == [10, 10, 0]
        one.node.flushes._ran_at_s -= 60
        assert await held(one) == [0, 10, 0]


async def test_until_it_has_caught_up_a_node_answers_nothing_of_what_it_holds(tmp_path: Path) -> None:
    async with served_node("b", load_timeout_s=0.2) as one:
        await fill(one)
        one.node.flushes._caught_up.clear()
        assert await held(one) == [0, 0, 0]
        waiting = asyncio.create_task(one.client.acquire(CHAIN))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await one.node.flushes.catch_up([])
        assert (await waiting).present_tokens == 1280


async def test_a_node_that_cannot_be_asked_holds_nobody_up_and_is_asked_again() -> None:
    async with served_node("a") as gone, served_node("b") as one:
        await gone.kill()
        await one.node.flushes.catch_up([])
        one.node.up(gone.presence)
        await fill(one)
        assert await held(one) == [10, 10, 0]
        assert "a" in one.node.flushes._asking
        one.node.down("a")
        await until(lambda: "a" not in one.node.flushes._asking, what="the end of it")


async def test_lists_of_flushes_are_empty_for_who_knows_them_and_bad_names_are_refused() -> None:
    async with served_node() as one:
        await one.client.flush(kv_id="k", flush_id="f")
        answer = await one.client.stub.ListFlushes(pb.ListFlushesRequest(), timeout=5)
        assert [(record.flush_id, record.kv_id, record.HasField("tenant_tag")) for record in answer.records] == [
            ("f", "k", False)
        ]
        digest = one.node.flusher.log.digest()
        answer = await one.client.stub.ListFlushes(pb.ListFlushesRequest(known_digest=digest), timeout=5)
        assert not answer.records
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.client.flush(kv_id="k", flush_id="f" * 65)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
