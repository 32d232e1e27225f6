from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st
from shoal_scheduler.core.leases import Lease
from shoal_scheduler.core.queue import WaitingQueue
from support.scheduler_world import spec


def lease(name: str, *, arrival_s: float = 0.0, was_placed: bool = False, **fields: object) -> Lease:
    made = Lease(
        request_id=name,
        stream_id="g",
        spec=spec(**fields),  # type: ignore[arg-type]
        arrival_s=arrival_s,
        deadline_s=1e9,
    )
    made.worker_id = "w" if was_placed else ""
    return made


def drained(queue: WaitingQueue) -> list[str]:
    """Serve everyone, one at a time."""
    names = []
    while len(queue):
        first = next(queue.in_order())
        queue.take(first, is_served=True)
        names.append(first.request_id)
    return names


def test_who_arrived_first_goes_first_whenever_it_was_put() -> None:
    queue = WaitingQueue()
    for name, arrival_s in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        queue.put(lease(name, arrival_s=arrival_s))
    assert drained(queue) == ["a", "b", "c"]


def test_a_higher_priority_goes_first() -> None:
    queue = WaitingQueue()
    queue.put(lease("low", priority=-1))
    queue.put(lease("high", arrival_s=5.0, priority=3))
    queue.put(lease("usual", arrival_s=1.0))
    assert drained(queue) == ["high", "usual", "low"]


def test_what_was_placed_before_goes_ahead_of_its_priority() -> None:
    queue = WaitingQueue()
    queue.put(lease("fresh"))
    queue.put(lease("moved", arrival_s=9.0, was_placed=True))
    assert drained(queue) == ["moved", "fresh"]


def test_two_tenants_take_turns_however_many_one_has() -> None:
    queue = WaitingQueue()
    for index in range(4):
        queue.put(lease(f"a{index}", arrival_s=index, tenant="a"))
    for index in range(2):
        queue.put(lease(f"b{index}", arrival_s=10 + index, tenant="b"))
    assert drained(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_the_users_of_a_tenant_take_turns_and_cost_other_tenants_nothing() -> None:
    queue = WaitingQueue()
    for index in range(4):
        queue.put(lease(f"ann{index}", arrival_s=index, tenant="a", user="ann"))
    for index in range(2):
        queue.put(lease(f"bob{index}", arrival_s=10 + index, tenant="a", user="bob"))
        queue.put(lease(f"other{index}", arrival_s=20 + index, tenant="b", user="ann"))
    assert drained(queue) == ["ann0", "other0", "bob0", "other1", "ann1", "bob1", "ann2", "ann3"]


def test_a_tenant_gains_nothing_by_naming_many_users() -> None:
    def served(users: list[str]) -> list[bool]:
        queue = WaitingQueue()
        for index, user in enumerate(users):
            queue.put(lease(f"a{index}", arrival_s=index, tenant="a", user=user))
        for index in range(6):
            queue.put(lease(f"b{index}", arrival_s=index + 0.5, tenant="b"))
        return [name.startswith("a") for name in drained(queue)]

    assert served([""] * 6) == served([f"u{index}" for index in range(6)]) == [True, False] * 6


def test_a_tenant_that_asks_for_more_tokens_goes_less_often() -> None:
    queue = WaitingQueue()
    for index in range(3):
        queue.put(lease(f"a{index}", arrival_s=index, tenant="a", max_tokens=900))
    for index in range(6):
        queue.put(lease(f"b{index}", arrival_s=10 + index, tenant="b", max_tokens=100))
    assert drained(queue)[:7] == ["a0", "b0", "b1", "b2", "b3", "b4", "a1"]


def test_a_tenant_that_was_away_gains_no_credit() -> None:
    queue = WaitingQueue()
    for index in range(6):
        queue.put(lease(f"a{index}", arrival_s=index, tenant="a"))
    for _ in range(4):
        queue.take(next(queue.in_order()), is_served=True)
    for index in range(3):
        queue.put(lease(f"b{index}", arrival_s=20 + index, tenant="b"))
    assert drained(queue) == ["a4", "b0", "a5", "b1", "b2"]


def test_an_endless_row_of_new_tenants_does_not_starve_one_that_was_served() -> None:
    queue = WaitingQueue()
    for index in range(3):
        queue.put(lease(f"old{index}", arrival_s=index, tenant="old"))
    served = []
    for index in range(20):
        queue.put(lease(f"new{index}", arrival_s=10 + index, tenant=f"new{index}"))
        first = next(queue.in_order())
        queue.take(first, is_served=True)
        served.append(first.request_id)
    assert {"old0", "old1", "old2"} <= set(served[:10])


def test_those_who_give_up_cost_their_tenant_nothing() -> None:
    queue = WaitingQueue()
    gone = lease("a0", tenant="a")
    queue.put(gone)
    queue.put(lease("a1", arrival_s=1.0, tenant="a"))
    queue.put(lease("b", arrival_s=2.0, tenant="b"))
    queue.discard(gone)
    queue.discard(gone)
    assert drained(queue) == ["a1", "b"]


Wanted: TypeAlias = tuple[int, str, str, int, bool, int]
"""Priority, tenant, user, arrival, whether it ran before, tokens."""
requests = st.lists(
    st.tuples(
        st.integers(-1, 1),
        st.sampled_from("abc"),
        st.sampled_from(["", "ann", "bob"]),
        st.integers(0, 5),
        st.booleans(),
        st.integers(1, 400),
    ),
    max_size=25,
)


@given(requests)
def test_the_order_told_is_the_order_in_which_all_are_served(wanted: list[Wanted]) -> None:
    queue = WaitingQueue()
    for index, (priority, tenant, user, arrival, was_placed, tokens) in enumerate(wanted):
        queue.put(
            lease(
                f"r{index}",
                arrival_s=arrival,
                was_placed=was_placed,
                priority=priority,
                tenant=tenant,
                user=user,
                max_tokens=tokens,
            )
        )
    told = [one.request_id for one in queue.in_order()]
    assert len(told) == len(wanted) == len(queue)
    assert drained(queue) == told


@given(requests)
def test_no_tenant_and_no_user_of_one_gets_ahead_of_another_by_more_than_one_request_each(wanted: list[Wanted]) -> None:
    def waiting() -> list[Lease]:
        return list(queue.in_order())

    queue = WaitingQueue()
    largest = 0
    for index, (_, tenant, user, arrival, _, tokens) in enumerate(wanted):
        one = lease(f"r{index}", arrival_s=arrival, tenant=tenant, user=user, max_tokens=tokens)
        largest = max(largest, one.spec.total_tokens)
        queue.put(one)
    served: dict[tuple[str, ...], int] = defaultdict(int)
    groups: list[Callable[[Lease], tuple[str, ...]]] = [lambda one: (one.spec.tenant,)]
    groups += [lambda one: (one.spec.tenant, one.spec.user)]
    # While all shares wait that began: of tenants, and of the users of each tenant.
    begun = [{group(one) for one in waiting()} for group in groups]
    while len(queue):
        first = next(queue.in_order())
        queue.take(first, is_served=True)
        for group, shares in zip(groups, begun, strict=True):
            served[group(first)] += first.spec.total_tokens
            rivals = {one for one in shares if one[:-1] == group(first)[:-1]}
            if rivals <= {group(one) for one in waiting()}:
                assert max(served[one] for one in rivals) - min(served[one] for one in rivals) <= largest


def test_the_queue_forgets_tenants_that_left() -> None:
    queue = WaitingQueue()
    for index in range(500):
        queue.put(lease(f"r{index}", arrival_s=index, tenant=f"t{index}"))
        if index >= 2:
            queue.take(next(queue.in_order()), is_served=True)
    shares = queue._lanes[0]._fresh
    assert len(shares._tags) <= 5
    assert len(shares._shares) == len(queue) == 2
