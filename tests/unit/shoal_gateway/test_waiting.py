"""A waiter is woken by the event or by the end of its own patience, whatever timer an earlier wait left behind."""

from __future__ import annotations

import asyncio

import pytest
from shoal_gateway.waiting import Waiting

LONG_S = 30.0


async def test_the_event_wakes_and_silence_ends_the_patience() -> None:
    waiting = Waiting()
    waiter = asyncio.create_task(waiting.wait(LONG_S))
    await asyncio.sleep(0)
    waiting.wake()
    assert await waiter
    assert not await waiting.wait(0.01)


async def test_a_shorter_patience_is_kept_after_a_longer_one_and_a_longer_after_a_shorter() -> None:
    waiting = Waiting()
    loop = asyncio.get_running_loop()
    for patience_s in (LONG_S, 0.02, LONG_S):
        waiter = asyncio.create_task(waiting.wait(patience_s))
        await asyncio.sleep(0)
        waiting.wake()
        assert await waiter
    for patience_s in (0.03, 0.06):
        began_s = loop.time()
        assert not await waiting.wait(patience_s)
        assert patience_s - 0.001 <= loop.time() - began_s < LONG_S / 2


async def test_a_wake_before_the_wait_is_nobodys() -> None:
    waiting = Waiting()
    waiting.wake()
    assert not await waiting.wait(0.01)


async def test_a_cancelled_waiter_leaves_and_the_next_one_waits() -> None:
    waiting = Waiting()
    waiter = asyncio.create_task(waiting.wait(LONG_S))
    await asyncio.sleep(0)
    waiting.wake()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not await waiting.wait(0.01)
