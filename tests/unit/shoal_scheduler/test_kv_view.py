from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.presence import Presence
from shoal_scheduler.core.event_log import KvChange
from shoal_scheduler.core.kv_view import KvView
from shoal_scheduler.core.prefix_index import PrefixIndex
from support.scheduler_world import presence


def node(instance_id: str, host: str = "") -> Presence:
    return Presence(instance_id=instance_id, role="kv_cache", address="x:1", labels={"host_id": host})


def view(*nodes: Presence, max_entries: int = 1000, max_waiting_events: int = 8) -> KvView:
    made = KvView(max_entries=max_entries, max_waiting_events=max_waiting_events, replay_tokens=140)
    for one in nodes:
        made.up(one)
    return made


def stored(number: int, blocks: Iterable[int] = (), snapshots: Iterable[int] = ()) -> KvChange:
    return KvChange(number=number, stored_blocks=list(blocks), stored_snapshots=list(snapshots))


def hit(kv: KvView, chain: Iterable[int], prompt_tokens: int, host: str = "") -> int:
    worker = presence("w", labels={"host_id": host})
    return kv.hits({"n1": array("Q", chain)}, prompt_tokens).on(worker)


def test_a_hit_ends_at_the_last_snapshot_below_the_first_missing_block() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1, 2, 3, 5], [2, 5]))
    assert hit(kv, [1, 2, 3, 4, 5], 2000) == 256


def test_a_hit_leaves_the_replayed_end_of_the_prompt() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1, 2], [1, 2]))
    assert [hit(kv, [1, 2], tokens) for tokens in (256 + 140, 256 + 139, 128 + 140, 128 + 139)] == [256, 128, 128, 0]


def test_blocks_of_several_nodes_add_up_less_the_way() -> None:
    kv = view(node("a", "h1"), node("b", "h2"))
    kv.take("a", stored(1, [1], [1]))
    kv.take("b", stored(1, [2, 3], [3]))
    assert [hit(kv, [1, 2, 3], 2000, host) for host in ("h1", "h2")] == [384 - 256 // 16, 384 - 384 // 16]
    assert hit(kv, [2, 3, 9], 2000, "h2") == 256
    assert hit(kv, [1, 4, 3], 2000, "h1") == 128


def test_a_worker_expects_most_of_the_node_on_its_host() -> None:
    kv = view(node("a", "h1"), node("b", "h2"))
    kv.take("a", stored(1, [1], [1]))
    kv.take("b", stored(1, [1, 2], [1, 2]))
    assert [hit(kv, [1, 2], 2000, host) for host in ("h1", "h2", "h3", "")] == [256 - 128 // 16, 256, 256, 256]


def test_another_pair_expects_nothing() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1], [1]))
    hits = kv.hits({"n1": array("Q", [1])}, 2000)
    assert hits.on(presence("w", numerics_id="n2")) == 0


def test_what_a_vanished_node_held_is_gone_and_its_place_is_used_again() -> None:
    kv = view(node("a"), node("b"))
    kv.take("a", stored(1, [1], [1]))
    kv.down("a")
    kv.up(node("c"))
    assert hit(kv, [1], 2000) == 0
    kv.take("a", stored(2, [1], [1]))
    assert hit(kv, [1], 2000) == 0
    assert len(kv.index) == 0


def test_a_cleared_node_holds_nothing_but_what_comes_with_the_event() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1, 2], [2]))
    kv.take("a", KvChange(number=2, stored_blocks=[3], is_cleared=True))
    assert kv.index.held("a") == ({3}, set())


def test_the_index_is_bounded_and_drops_the_longest_untouched() -> None:
    index = PrefixIndex(max_entries=3)
    index.add_node("a")
    index.stored("a", [1, 2, 3], [])
    index.hits([1], 128)
    index.stored("a", [4], [])
    assert index.held("a") == ({1, 3, 4}, set())
    assert index.dropped_count == 1


def test_a_new_node_is_listed_even_if_its_first_events_were_seen() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1]))
    assert kv.needing_list() == ["a"]
    kv.listed("a", 1, [1], [])
    assert kv.needing_list() == []


def test_a_list_that_is_older_than_an_exact_view_changes_nothing() -> None:
    kv = view(node("a"))
    kv.take("a", stored(1, [1]))
    kv.take("a", stored(2, [2]))
    kv.listed("a", 1, [1], [])
    assert kv.index.held("a") == ({1, 2}, set())
    assert kv.needing_list() == []


def test_after_a_lost_connection_every_node_is_listed_again() -> None:
    kv = view(node("a"))
    kv.listed("a", 0, [], [])
    kv.doubt()
    assert kv.needing_list() == ["a"]
    kv.listed("a", 7, [9], [9])
    assert kv.index.held("a") == ({9}, {9})


def test_waiting_events_are_bounded() -> None:
    kv = view(node("a"), max_waiting_events=4)
    kv.listed("a", 0, [], [])
    for number in range(2, 100):
        kv.take("a", stored(number, [number]))
    assert kv.needing_list() == ["a"]
    kv.listed("a", 97, range(2, 98), [])
    assert kv.index.held("a")[0] == set(range(2, 100))


class Truth:
    """A node as it is: what it holds after each of its events."""

    def __init__(self) -> None:
        self.events: list[KvChange] = []
        self.blocks: list[frozenset[int]] = [frozenset()]
        self.snapshots: list[frozenset[int]] = [frozenset()]

    def add(self, keys: list[int], snapshots: list[int], removed: list[int], is_cleared: bool) -> None:
        blocks, held = (set(), set()) if is_cleared else (set(self.blocks[-1]), set(self.snapshots[-1]))
        gone = [key for key in removed if key not in keys]
        self.events.append(
            KvChange(
                number=len(self.events) + 1,
                stored_blocks=keys,
                removed_blocks=gone,
                stored_snapshots=snapshots,
                removed_snapshots=[key for key in removed if key not in snapshots],
                is_cleared=is_cleared,
            )
        )
        self.blocks.append(frozenset((blocks - set(gone)) | set(keys)))
        self.snapshots.append(frozenset((held - {key for key in removed if key not in snapshots}) | set(snapshots)))


keys = st.lists(st.integers(1, 12), max_size=3)
changes = st.lists(st.tuples(keys, keys, keys, st.booleans()), min_size=1, max_size=25)


@settings(max_examples=200)
@given(changes, st.data())
def test_the_index_equals_the_truth_after_gaps_doubles_and_reorders_once_listed(
    wanted: list[tuple[list[int], list[int], list[int], bool]], data: st.DataObject
) -> None:
    truth = Truth()
    for change in wanted:
        truth.add(*change)
    kv = view(node("a"), node("other"), max_waiting_events=5)
    kv.take("other", stored(1, range(1, 13), range(1, 13)))
    # Each event comes never, once or more often, in any order near its own.
    copies = [data.draw(st.integers(0, 2), label="copies") for _ in truth.events]
    sent = [one for one, count in zip(truth.events, copies, strict=True) for _ in range(count)]
    delays = [data.draw(st.integers(0, 3), label="delay") for _ in sent]
    sent = [one for _, one in sorted(enumerate(sent), key=lambda item: item[0] + delays[item[0]])]
    for index, event in enumerate(sent):
        kv.take("a", event)
        if data.draw(st.booleans(), label="list"):
            # A list is as of some event that the node had sent by then.
            newest = max(one.number for one in sent[: index + 1])
            number = data.draw(st.integers(0, newest), label="as of")
            kv.listed("a", number, sorted(truth.blocks[number]), sorted(truth.snapshots[number]))
    last = len(truth.events)
    kv.doubt()
    rounds = 0
    while "a" in kv.needing_list():
        rounds += 1
        assert rounds < 3, "asks for lists without end"
        kv.listed("a", last, sorted(truth.blocks[last]), sorted(truth.snapshots[last]))
    assert kv.index.held("a") == (set(truth.blocks[last]), set(truth.snapshots[last]))
    assert kv.index.held("other") == (set(range(1, 13)), set(range(1, 13)))


@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))),
    st.integers(0, 9 * 128),
)
def test_hits_equal_a_naive_search_of_each_node(held: dict[str, tuple[set[int], set[int]]], reach: int) -> None:
    index = PrefixIndex(max_entries=100)
    for name, (blocks, snapshots) in held.items():
        index.add_node(name)
        index.stored(name, blocks, snapshots)
    naive = {}
    for name, (blocks, snapshots) in held.items():
        for count in range(1, 9):
            if set(range(count)) <= blocks and count - 1 in snapshots and count * 128 <= reach:
                naive[name] = count * 128
    assert index.hits(range(8), reach) == naive
    blocks, snapshots = (set[int]().union(*(one[part] for one in held.values())) for part in (0, 1))
    ends = [n for n in range(1, 9) if set(range(n)) <= blocks and n - 1 in snapshots and n * 128 <= reach]
    assert index.hit_of_all(range(8), reach) == max(ends, default=0) * 128


def test_it_says_when_a_node_may_need_a_list_and_only_then() -> None:
    kv = view()
    told: list[tuple[str, ...]] = []
    kv.on_need = lambda: told.append(tuple(kv.needing_list()))
    kv.up(node("a"))
    assert told == [("a",)]
    kv.listed("a", 0, [], [])
    kv.up(node("a"))
    kv.take("a", stored(1, [1]))
    assert told == [("a",)]
    kv.take("a", stored(3, [3]))
    assert told == [("a",), ("a",)]
    kv.listed("a", 3, [1, 2, 3], [])
    kv.doubt()
    assert told == [("a",), ("a",), ("a",)]
