"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return once `condition()` is true. Raises AssertionError after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"{what} did not come true within {timeout_s} s")
        await asyncio.sleep(0.01)


async def until_async(
    condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 10.0, what: str = "the condition"
) -> None:
    """As `until`, for a condition that must be asked of another process."""
    give_up = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"{what} did not come true within {timeout_s} s")
        await asyncio.sleep(0.01)
