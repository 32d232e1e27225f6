"""An acquire that memory answers without waiting: the answer of one that may wait, or none and nothing done."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import InvalidArgument
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.servicer import KvCacheServicer
from support.kv_client import KV_ID, NUMERICS_ID, SLAB_BYTES, TENANT, TestChain, items_of
from support.kv_nodes import ServedNode, introduce, open_disk, served_node

CHAIN = TestChain("at once", 80)
HELD = 70


def request(
    one: ServedNode, lease_id: str, *, begin: int = 0, end: int = 80, bound: int = 80, **more: object
) -> pb.AcquireRequest:
    return pb.AcquireRequest(
        lease_id=lease_id,
        owner_id="owner",
        kv_id=KV_ID,
        numerics_id=NUMERICS_ID,
        tenant_tag=TENANT,
        block_hashes=CHAIN.hashes[begin:end],
        position_begin=begin * 128,
        max_hit_tokens=bound * 128,
        time_to_live=Duration(seconds=30),
        offer=one.client.puller.offer,
        **more,  # type: ignore[arg-type]
    )


def servicer_of(one: ServedNode, **settings: object) -> KvCacheServicer:
    return KvCacheServicer(one.node, KvCacheConfig(**settings), instance_id="node")  # type: ignore[arg-type]


def without_id(answer: pb.AcquireResponse | None) -> pb.AcquireResponse:
    assert answer is not None
    copied = pb.AcquireResponse()
    copied.CopyFrom(answer)
    copied.grant.export_id = ""
    return copied


@pytest.mark.parametrize("has_disk", [False, True])
async def test_it_is_the_answer_of_an_acquire_that_may_wait(has_disk: bool, tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path) if has_disk else None) as one:
        await one.client.put(items_of(CHAIN, 0, HELD, [20, 66]))
        servicer = servicer_of(one)
        cases = [
            {"begin": begin, "end": end, "bound": bound, "want_replay": replay, "blocks_only": blocks_only}
            for begin, end in ((0, 80), (0, 67), (0, 10), (3, 80), (64, 66))
            for bound in (0, 5, 21, 67, 80)
            for replay in (False, True)
            for blocks_only in (False, True)
        ]
        for number, case in enumerate(cases):
            case |= {"replay_reach_tokens": 256}
            ids = f"now {number}", f"later {number}"
            now = servicer.acquire_at_once(request(one, ids[0], **case))
            later = await servicer.acquire(request(one, ids[1], **case))
            assert without_id(now) == without_id(later), case
            leases = [one.node.store.index.leases.get(lease_id) for lease_id in ids]
            assert [lease and lease.rows for lease in leases[:1]] == [lease and lease.rows for lease in leases[1:]]
            for lease_id in ids:
                one.node.acquirer.release(lease_id)


async def test_leases_that_ride_end_after_the_answer_and_a_repeat_is_the_same_answer() -> None:
    async with served_node() as one:
        await one.client.put(items_of(CHAIN, 0, HELD, [66]))
        servicer, leases = servicer_of(one), one.node.store.index.leases
        first = servicer.acquire_at_once(request(one, "first"))
        assert first is not None
        assert servicer.acquire_at_once(request(one, "first")) == first
        assert servicer.acquire_at_once(request(one, "second", release_lease_ids=["first"])) is not None
        assert len(leases) == 2
        await asyncio.sleep(0)
        assert leases.get("first") is None
        assert leases.get("second") is not None
        with pytest.raises(InvalidArgument, match="block_hashes"):
            servicer.acquire_at_once(pb.AcquireRequest(lease_id="x", block_hashes=[b"short"]))


async def test_what_may_have_to_wait_is_left_with_nothing_done(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path), max_leases=2) as one, served_node("other") as other:
        servicer, store = servicer_of(one), one.node.store
        await one.client.put(items_of(CHAIN, 0, HELD, [66]))
        await one.node.write_out()
        assert servicer.acquire_at_once(request(one, "own", release_lease_ids=["own"])) is None
        assert all(servicer.acquire_at_once(request(one, lease_id)) is not None for lease_id in ("fills", "too"))
        # No room before the lease that rides has ended.
        riding = request(one, "rides", release_lease_ids=["fills"])
        assert servicer.acquire_at_once(riding) is None
        assert len(store.index.leases) == 2
        assert (await servicer.acquire(riding)).hit_tokens == 67 * 128
        for lease_id in ("rides", "too"):
            one.node.acquirer.release(lease_id)
        store.ram.free(store.allocate([store.ram.capacity_bytes - 20 * SLAB_BYTES], TENANT))
        assert servicer.acquire_at_once(request(one, "part is on disk")) is None
        assert (await servicer.acquire(request(one, "part is on disk"))).hit_tokens == 67 * 128
        one.node.acquirer.release("part is on disk")
        introduce([one, other])
        assert servicer.acquire_at_once(request(one, "another node may have more")) is None
        assert len(store.index.leases) == 0


async def test_a_miss_is_answered_at_once_unless_another_node_may_have_it(tmp_path: Path) -> None:
    async with served_node(ssd=open_disk(tmp_path)) as one, served_node("other") as other:
        servicer, counts = servicer_of(one), one.node.store.counts
        now = servicer.acquire_at_once(request(one, "now"))
        assert now == await servicer.acquire(request(one, "later"))
        assert (now.hit_tokens, now.present_tokens, list(now.runs)) == (0, 0, [])
        assert (counts.acquire_count, counts.hit_count) == (2, 0)
        introduce([one, other])
        assert servicer.acquire_at_once(request(one, "asked of the other")) is None
        from_peer = request(one, "from the other", is_from_peer=True)
        assert servicer.acquire_at_once(from_peer) is not None
        assert len(one.node.store.index.leases) == 0
