"""The baselines of eviction: worked traces, and naive restatements on pages that stand on nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from bench.kv_arc import Arc
from bench.kv_s3_fifo import S3Fifo
from bench.kv_tree import Item, TreePolicy

ROOT = b""


class Cache:
    """Asks a policy for pages or paths, and keeps what it says."""

    def __init__(self, policy: TreePolicy, capacity_bytes: int) -> None:
        self.policy, self.capacity_bytes = policy, capacity_bytes
        self.held: dict[bytes, Item] = {}

    def ask(self, path: Sequence[Item]) -> list[bytes]:
        """Use what is held of a path from its first on, store the rest; what went."""
        count = next((n for n, one in enumerate(path) if one.name not in self.held), len(path))
        self.policy.use([one.name for one in path[:count]])
        coming = [one for one in path[count:] if one.name not in self.held]
        excess = sum(one.size_bytes for one in [*self.held.values(), *coming]) - self.capacity_bytes
        gone = self.policy.make_room(excess, coming, {one.name for one in path}) if excess > 0 else []
        for name in gone:
            assert name not in {one.parent for one in self.held.values()}
            del self.held[name]
        self.policy.store(coming)
        self.held |= {one.name: one for one in coming}
        return gone


def pages(names: str) -> list[list[Item]]:
    return [[Item(name.encode(), ROOT, 1)] for name in names]


def chain(names: str, size_bytes: int = 1) -> list[Item]:
    return [Item(name.encode(), names[n - 1 : n].encode(), size_bytes) for n, name in enumerate(names)]


def went(policy: TreePolicy, capacity: int, asked: str) -> str:
    """Of pages of one size, asked for one by one: what went, in order."""
    cache = Cache(policy, capacity)
    return "".join(gone.decode() for page in pages(asked) for gone in cache.ask(page))


def test_s3_fifo_lets_a_page_go_from_the_small_queue_unless_it_was_used_twice() -> None:
    # Small: a..j, of which a is used twice and b once. K comes: a moves to the main queue, b goes.
    assert went(S3Fifo(10), 10, "abcdefghijaabK") == "b"


def test_s3_fifo_puts_what_comes_back_soon_into_the_main_queue() -> None:
    # b goes and comes back at once, for c; what is new then goes by the small queue, past b.
    assert went(S3Fifo(10), 10, "abcdefghijaabKbLMNOPQRS") == "bcdefghijK"


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    # The target is 0: all that goes was used once, and what is left of it is the newest.
    assert went(Arc(4), 4, "ababWXYZ") == "WX"


def test_arc_gives_more_to_what_was_used_once_when_that_comes_back() -> None:
    # a and b in the second list; W goes for Y, comes back: the target is 1 now, and X goes for W, then a for Z.
    assert went(Arc(4), 4, "ababWXYWZ") == "WXa"


@pytest.mark.parametrize("policy", [S3Fifo, Arc])
def test_leaves_go_before_what_they_stand_on(policy: Callable[[int], TreePolicy]) -> None:
    cache = Cache(policy(40), 40)
    cache.ask(chain("abcd", 10))
    assert cache.ask([Item(b"X", ROOT, 15)]) == [b"d", b"c"]


@pytest.mark.parametrize("policy", [S3Fifo, Arc])
def test_what_is_kept_does_not_go_and_no_more_goes_than_must(policy: Callable[[int], TreePolicy]) -> None:
    made = policy(40)
    cache = Cache(made, 40)
    cache.ask(chain("abcd", 10))
    assert made.make_room(5, [], {b"d"}) == []
    assert made.make_room(5, [], set()) == [b"d"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [S3Fifo, Arc])
def test_whatever_is_asked_for_the_cache_stays_a_tree_within_its_size(
    policy: Callable[[int], TreePolicy], seed: int
) -> None:
    draw, cache = random.Random(seed), Cache(policy(60), 60)
    for _ in range(300):
        path, name = [], b"r"
        for _ in range(draw.randint(1, 6)):
            name, parent = name + bytes([97 + min(int(draw.expovariate(1)), 4)]), name
            path.append(Item(name, parent, 1 + len(name) % 3))
        cache.ask(path)
        assert sum(one.size_bytes for one in cache.held.values()) <= 60


def naive_s3_fifo(capacity: int, asked: str) -> str:
    """Algorithm 1 of the paper, by lists, oldest first."""
    small: list[str] = []
    main: list[str] = []
    ghost: list[str] = []
    uses: dict[str, int] = {}
    gone = ""
    for page in asked:
        if page in small or page in main:
            uses[page] = min(3, uses[page] + 1)
            continue
        while len(small) + len(main) >= capacity:
            if small and (not main or len(small) >= capacity // 10):
                oldest = small.pop(0)
                if uses[oldest] > 1:
                    uses[oldest] = 0
                    main.append(oldest)
                    continue
                ghost = [*ghost, oldest][-(capacity - capacity // 10) :]
            else:
                oldest = main.pop(0)
                if uses[oldest]:
                    uses[oldest] -= 1
                    main.append(oldest)
                    continue
            gone += oldest
        if page in ghost:
            ghost.remove(page)
            main.append(page)
        else:
            small.append(page)
        uses[page] = 0
    return gone


def naive_arc(capacity: int, asked: str) -> str:
    """Figure 4 of the paper, by lists, oldest first; without the case of equality in REPLACE."""
    t1: list[str] = []
    t2: list[str] = []
    b1: list[str] = []
    b2: list[str] = []
    target, gone = 0.0, ""
    for page in asked:
        if page in t1 or page in t2:
            (t1 if page in t1 else t2).remove(page)
            t2.append(page)
            continue
        if page in b1:
            target = min(capacity, target + max(1, len(b2) / len(b1)))
        elif page in b2:
            target = max(0, target - max(1, len(b1) / len(b2)))
        if len(t1) + len(t2) == capacity:
            from_, to = (t1, b1) if t1 and (len(t1) > target or not t2) else (t2, b2)
            gone += from_[0]
            to.append(from_.pop(0))
        if page in b1 or page in b2:
            (b1 if page in b1 else b2).remove(page)
            t2.append(page)
        else:
            t1.append(page)
        del b1[: max(0, len(t1) + len(b1) - capacity)]
        del b2[: max(0, len(t1) + len(t2) + len(b1) + len(b2) - 2 * capacity)]
    return gone


@pytest.mark.parametrize(("policy", "naive"), [(S3Fifo, naive_s3_fifo), (Arc, naive_arc)])
@pytest.mark.parametrize("seed", range(6))
def test_on_pages_of_one_size_what_goes_is_what_the_paper_says(
    policy: Callable[[int], TreePolicy], naive: Callable[[int, str], str], seed: int
) -> None:
    draw = random.Random(seed)
    asked = ""
    for _ in range(1500):
        # Some pages are in favour, others are scanned.
        number = int(draw.expovariate(1 / 12)) if draw.random() < 0.7 else 100 + len(asked) // 3
        asked += chr(0x4E00 + number)
    assert went(policy(20), 20, asked) == naive(20, asked)
    assert len(naive(20, asked)) > 300
