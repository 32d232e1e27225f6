"""Whoever comes at once goes on a few at a time, in order."""

from __future__ import annotations

import asyncio

from shoal_gateway.turns import PER_TURN, Turns


async def turn_of_the_loop(began: list[int]) -> None:
    """Counts the turns of the event loop from now on."""
    while True:
        await asyncio.sleep(0)
        began[0] += 1


async def test_a_burst_is_spread_over_turns_in_the_order_of_its_coming() -> None:
    turns, clock = Turns(), [0]
    seen: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        await turns.take()
        seen.append((number, clock[0]))

    ticking = asyncio.create_task(turn_of_the_loop(clock))
    await asyncio.gather(*(one(number) for number in range(4 * PER_TURN)))
    ticking.cancel()
    assert [number for number, _ in seen] == list(range(4 * PER_TURN))
    at = [turn for _, turn in seen]
    assert all(at.count(turn) <= PER_TURN for turn in at)
    # Nor does it take longer than that: the second lot is told in the turn after the first.
    assert at[-1] - at[0] <= 4


async def test_one_at_a_time_never_waits() -> None:
    turns = Turns()
    for _ in range(3 * PER_TURN):
        async with asyncio.timeout(5):
            await turns.take()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_who_gives_up_takes_no_turn_from_the_others() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take()) for _ in range(3 * PER_TURN)]
    await asyncio.sleep(0)
    for task in tasks[PER_TURN : 2 * PER_TURN]:
        task.cancel()
    async with asyncio.timeout(5):
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [False] * PER_TURN + [True] * PER_TURN + [
        False
    ] * PER_TURN
    async with asyncio.timeout(5):
        await turns.take()
