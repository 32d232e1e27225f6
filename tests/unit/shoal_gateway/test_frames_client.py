"""The streams to all workers, as whoever asks whether there is one sees them."""

from __future__ import annotations

from shoal_common.rpc import Channels
from shoal_gateway.frames_client import FramesClient
from support.fake_worker import FakeWorker, serving_worker
from support.waiting import until


async def test_whoever_asks_is_told_when_the_first_stream_opens_and_the_last_one_ends() -> None:
    told: list[bool] = []
    channels = Channels()
    client = FramesClient(gateway_id="g", channels=channels, on_change=told.append)
    try:
        async with serving_worker(FakeWorker()) as first:
            client.announced("a", first)
            await until(lambda: told == [True])
            async with serving_worker(FakeWorker()) as second:
                client.announced("b", second)
                await until(lambda: told == [True, True])
            # One of two is gone.
            await until(lambda: told[2:3] == [True])
        await until(lambda: told[-1] is False)
        assert not client.is_connected
    finally:
        await client.close()
        await channels.close()
