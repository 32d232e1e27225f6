"""Writers that outlive their puts: what they may still write into is nobody else's until they have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal_common.errors import FailedPrecondition
from shoal_common.kv_transport import SlabArena, filling, host_id
from shoal_common.kv_transport.arena import ArenaView
from support.kv_client import SLAB_BYTES, TestChain, begin_of, items_of
from support.kv_nodes import ServedNode, served_node
from support.stopping_writer import COUNT
from support.waiting import until

TESTS = Path(__file__).parents[2]
OFFER = transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id())


def start_writer(one: ServedNode, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.stopping_writer", one.address, name]
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL)


async def until_stopped(*writers: subprocess.Popen[bytes]) -> None:
    for writer in writers:
        _, status = await asyncio.to_thread(os.waitpid, writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


async def read_all(one: ServedNode, chains: list[TestChain]) -> None:
    for chain in chains:
        found = await one.client.acquire(chain, lease_id=chain.name)
        assert await one.client.read(found) == chain.blocks(chain.count)
        await one.client.release(chain.name)


async def test_a_writer_stopped_past_its_put_overwrites_nothing_that_others_put_meanwhile() -> None:
    async with served_node(ram_bytes=80 * SLAB_BYTES, put_timeout_s=1.0) as one:
        goes_on, dies = start_writer(one, "goes on"), start_writer(one, "dies")
        await until_stopped(goes_on, dies)
        await until(lambda: not one.node.puts._filling, what="puts to end")
        fills = one.node.store.fills
        assert fills.kept_bytes == 2 * COUNT * SLAB_BYTES
        # All the rest is used by others.
        chains = [TestChain(f"other {number}", 8) for number in range(8)]
        for chain in chains:
            assert await one.client.put(items_of(chain, 0, 8)) == 8
        assert one.node.store.ram.used_bytes == 80 * SLAB_BYTES
        dies.kill()
        dies.wait()
        one.node.expire()
        assert fills.kept_bytes == COUNT * SLAB_BYTES
        goes_on.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(goes_on.wait) != 0
        one.node.expire()
        assert fills.kept_bytes == 0
        await read_all(one, chains)
        assert (await one.client.stats()).corrupt_count == 0
        more = [TestChain(f"more {number}", 8) for number in range(2)]
        for chain in more:
            assert await one.client.put(items_of(chain, 0, 8)) == 8
        await read_all(one, [*chains, *more])


async def test_while_stopped_writers_keep_a_quarter_of_the_memory_nothing_more_is_granted() -> None:
    async with served_node(ram_bytes=80 * SLAB_BYTES) as one:
        puts, opened = one.node.puts, []
        for number in range(4):
            begin = begin_of(items_of(TestChain(f"stopped {number}", 8), 0, 8))
            begin.offer.CopyFrom(OFFER)
            put = puts.begin(begin)
            opened.append((put, put.wanted))
        granted = [wanted for _, wanted in opened]
        view = ArenaView(granted[0].grant.arena_name, granted[0].grant.arena_nonce, is_writable=True)
        assert view.descriptor is not None
        with filling(view.descriptor, granted[0].fill_number), filling(view.descriptor, granted[1].fill_number):
            with filling(view.descriptor, granted[2].fill_number):
                for put, _ in opened:
                    put.discard()
                assert one.node.store.fills.kept_bytes == 24 * SLAB_BYTES
                begin = begin_of(items_of(TestChain("next", 8), 0, 8))
                begin.offer.CopyFrom(OFFER)
                refused = puts.begin(begin)
                assert not refused.wanted.HasField("grant")
                refused.discard()
            # One has ended.
            one.node.expire()
            assert one.node.store.fills.kept_bytes == 16 * SLAB_BYTES
            again = puts.begin(begin)
            assert again.wanted.HasField("grant")
            again.discard()
        one.node.expire()
        assert one.node.store.ram.used_bytes == 0
        view.close()


async def test_a_commit_that_comes_while_the_memory_is_still_written_is_refused() -> None:
    items = items_of(TestChain("early", 4), 0, 4)
    async with served_node() as one:
        begin = begin_of(items)
        begin.offer.CopyFrom(OFFER)
        put = one.node.puts.begin(begin)
        grant = put.wanted.grant
        view = ArenaView(grant.arena_name, grant.arena_nonce, is_writable=True)
        assert view.descriptor is not None
        with filling(view.descriptor, put.wanted.fill_number):
            with pytest.raises(Exception, match="still being written"):
                await put.commit()
            put.discard()
            assert one.node.store.fills.kept_bytes == 4 * SLAB_BYTES
        one.node.expire()
        assert one.node.store.ram.used_bytes == 0
        view.close()


def test_a_writer_that_comes_after_the_end_writes_nothing_and_two_writers_do_not_end_each_others_locks() -> None:
    with SlabArena(1 << 16, slab_bytes=1024) as arena:
        view = ArenaView(arena.name, arena.nonce, is_writable=True)
        assert arena.fills is not None
        assert view.descriptor is not None
        first, second, third = (arena.fills.open() or 0 for _ in range(3))
        with filling(view.descriptor, first):
            with filling(view.descriptor, second):
                assert arena.fills.close(third)
            assert arena.fills.close(second)
            assert not arena.fills.close(first)
        assert arena.fills.close(first)
        with pytest.raises(FailedPrecondition, match="over"), filling(view.descriptor, second):
            pass
        view.close()
