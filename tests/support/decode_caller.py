"""Calls a decode worker as a gateway does, with every step in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb

TIMEOUT_S = 30.0


def generate_request(request_id: str = "r", **fields: Any) -> pb.GenerateRequest:
    """Attempt 1 of a 16-token answer to a 5-token prompt, greedy, EOS ignored; `fields` replace what is named."""
    params = sampling_pb2.SamplingParams(temperature=0, seed=7, max_tokens=16, ignore_eos=True)
    return pb.GenerateRequest(
        **{"request_id": request_id, "attempt": 1, "prompt_ids": [10, 11, 12, 13, 14], "params": params, **fields}
    )


class FramesCall:
    """One Frames stream. `tokens` holds what came, per (request_id, attempt, choice); reading stops when asked."""

    def __init__(self, stub: Any, gateway_id: str = "gateway") -> None:
        self.gateway_id = gateway_id
        self.tokens: dict[tuple[str, int, int], list[int]] = {}
        self.beats: list[pb.WorkerBeat] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._outgoing: asyncio.Queue[pb.FramesRequest] = asyncio.Queue(1000)
        self._call: Any = stub.Frames(self._messages(), timeout=TIMEOUT_S)
        self._reader: asyncio.Task[None] | None = None

    async def open(self, next_indices: Iterable[pb.NextIndex] = ()) -> FramesCall:
        """Say Hello, wait for the first beat, read on in the background."""
        self.say(pb.FramesRequest(hello=pb.Hello(gateway_id=self.gateway_id, next_indices=next_indices)))
        first = await self._call.read()
        assert isinstance(first, pb.FramesResponse)
        self._take(first)
        self._reader = asyncio.create_task(self._read())
        return self

    def say(self, message: pb.FramesRequest) -> None:
        """Send one message."""
        self._outgoing.put_nowait(message)

    def acknowledge(self, request_id: str = "r", attempt: int = 1, choice_index: int = 0) -> None:
        """Take over everything that came."""
        count = len(self.tokens.get((request_id, attempt, choice_index), ()))
        self.say(
            pb.FramesRequest(acks=pb.Acks(next_indices=[self.next_index(request_id, attempt, choice_index, count)]))
        )

    @staticmethod
    def next_index(request_id: str, attempt: int, choice_index: int, index: int) -> pb.NextIndex:
        """A next index wanted."""
        return pb.NextIndex(request_id=request_id, attempt=attempt, choice_index=choice_index, next_index=index)

    def of(self, request_id: str = "r", attempt: int = 1, choice_index: int = 0) -> list[int]:
        """Tokens that came for one choice."""
        return self.tokens.get((request_id, attempt, choice_index), [])

    async def close(self) -> None:
        """Break the stream."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def _messages(self) -> AsyncIterator[pb.FramesRequest]:
        while True:
            yield await self._outgoing.get()

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), pb.FramesResponse):
                self._take(message)
        except asyncio.CancelledError:
            # A call that the test itself cancelled ends its reads so.
            return
        except grpc.aio.AioRpcError as error:
            self.error = error

    def _take(self, message: pb.FramesResponse) -> None:
        if message.HasField("beat"):
            self.beats.append(message.beat)
        for entry in message.frame.entries:
            held = self.tokens.setdefault((entry.request_id, entry.attempt, entry.choice_index), [])
            assert entry.output_index <= len(held), "a gap in the output"
            held[entry.output_index :] = entry.token_ids
