"""Long blocking work beside an event loop that must be able to end without it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_threads: set[threading.Thread] = set()


def has_left_work() -> bool:
    """Whether work that nobody waits for any more still runs."""
    return any(thread.is_alive() for thread in _threads)


async def run_detached(work: Callable[[], T], *, name: str) -> T:
    """Run `work` on a daemon thread and await its result. When cancelled, the thread is left behind.

    For loading a model: `asyncio.to_thread` would hold the exit of the process until it is done.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(deliver: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if answer.done() else deliver())
        except RuntimeError:
            # The loop has ended meanwhile: nobody waits.
            return

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            tell(lambda: answer.set_exception(failure))
        else:
            tell(lambda: answer.set_result(result))
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return await answer
