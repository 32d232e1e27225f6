"""Segments of chains, and who owns them."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS
from shoal_kv_cache.core.rendezvous import Ring
from shoal_kv_cache.core.segments import is_first_of_segment, segments_of


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


CHAIN = [hash_of(number) for number in range(4 * SEGMENT_BLOCKS)]
NODES = [f"node-{number}" for number in range(8)]


@given(st.integers(0, len(CHAIN)), st.integers(0, len(CHAIN)))
def test_segments_name_and_cover_every_block_from_the_first_boundary_on(begin: int, count: int) -> None:
    part = CHAIN[begin : begin + count]
    segments = segments_of(part, first_index=begin)
    covered = [index for one in segments for index in range(one.begin, one.end)]
    boundary = next((index for index in range(begin, begin + len(part)) if is_first_of_segment(index)), None)
    assert covered == ([] if boundary is None else list(range(boundary, begin + len(part))))
    for one in segments:
        assert one.first_hash == CHAIN[one.begin]
        assert is_first_of_segment(one.begin)
        assert 0 < one.end - one.begin <= SEGMENT_BLOCKS


@given(st.lists(st.sampled_from(NODES), min_size=1, max_size=8, unique=True), st.integers(1, 2), st.integers(0, 1000))
def test_owners_depend_on_the_set_of_nodes_alone(nodes: list[str], copies: int, number: int) -> None:
    owners = Ring(nodes, copies=copies).owners(hash_of(number))
    assert owners == Ring(reversed(nodes), copies=copies).owners(hash_of(number))
    assert len(set(owners)) == len(owners) == min(copies, len(nodes))
    assert set(owners) <= set(nodes)


@given(st.sampled_from(NODES), st.integers(0, 1000))
def test_without_a_node_its_segments_go_to_the_next_owner_and_no_other_moves(dead: str, number: int) -> None:
    before = Ring(NODES, copies=len(NODES)).owners(hash_of(number))
    after = Ring([one for one in NODES if one != dead], copies=len(NODES)).owners(hash_of(number))
    assert after == tuple(one for one in before if one != dead)


def test_every_node_owns_its_share_and_a_new_one_takes_only_its_own() -> None:
    count = 4000
    ring, larger = Ring(NODES, copies=1), Ring([*NODES, "node-new"], copies=1)
    owned = Counter(ring.owners(hash_of(number))[0] for number in range(count))
    assert all(0.8 * count / 8 < owned[node] < 1.2 * count / 8 for node in NODES)
    moved = [number for number in range(count) if ring.owners(hash_of(number)) != larger.owners(hash_of(number))]
    assert all(larger.owners(hash_of(number)) == ("node-new",) for number in moved)
    assert 0.8 * count / 9 < len(moved) < 1.2 * count / 9


def test_nobody_owns_where_nobody_is() -> None:
    assert Ring([], copies=2).owners(hash_of(1)) == ()
