"""A decode worker that does what a test says, for faults that a real one does not show on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[["FakeWorker", pb.GenerateRequest, Context], AsyncIterator[pb.GenerateResponse]]
ADMITTED = pb.GenerateResponse(admitted=pb.Admitted(numerics_id="n"))
ENDED = pb.GenerateResponse(ended=pb.Ended())
GOING = sampling_pb2.FINISH_REASON_UNSPECIFIED


class FakeWorker(rpc.DecodeServiceServicer):
    """Runs `script` for each Generate, and remembers what it heard.

    is_silent   Frames answers nothing, not even a beat
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.is_silent = False
        self.hellos: list[pb.Hello] = []
        self.heard: list[pb.FramesRequest] = []
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.metadata: list[dict[str, Any]] = []
        self._out: asyncio.Queue[pb.FramesResponse | None] = asyncio.Queue()

    def acknowledged(self, request_id: str, choice_index: int = 0) -> int:
        """The highest index that was acknowledged."""
        return max(
            (
                one.next_index
                for message in self.heard
                for one in message.acks.next_indices
                if (one.request_id, one.choice_index) == (request_id, choice_index)
            ),
            default=0,
        )

    def finishes(self) -> list[tuple[int, int]]:
        """Choices that the gateway ended: (choice index, end index)."""
        return [(one.finish.choice_index, one.finish.end_index) for one in self.heard if one.HasField("finish")]

    def emit(
        self,
        request_id: str,
        attempt: int,
        output_index: int,
        token_ids: Sequence[int],
        *,
        choice_index: int = 0,
        finish: sampling_pb2.FinishReason.ValueType = GOING,
        step: int = 1,
        **more: Any,
    ) -> None:
        """Put one entry on the stream; `more` are fields of it."""
        entry = pb.Entry(
            request_id=request_id,
            attempt=attempt,
            choice_index=choice_index,
            output_index=output_index,
            token_ids=token_ids,
            finish_reason=finish,
            **more,
        )
        self.frame(entry, step=step)

    def frame(self, *entries: pb.Entry, step: int = 1) -> None:
        """Put one frame on the stream."""
        self._out.put_nowait(pb.FramesResponse(frame=pb.Frame(step=step, entries=entries)))

    def columns(
        self, *entries: tuple[int, int, Sequence[int]], step: int = 1, drafts: Sequence[int] = (), **more: Any
    ) -> None:
        """Put one frame of columns on the stream: (number of the choice, output index, tokens) each."""
        frame = pb.Frame(
            step=step,
            choice_numbers=[number for number, _, _ in entries],
            output_indices=[output_index for _, output_index, _ in entries],
            token_counts=[len(token_ids) for _, _, token_ids in entries],
            token_ids=[one for _, _, token_ids in entries for one in token_ids],
            draft_counts=drafts,
            **more,
        )
        self.message(pb.FramesResponse(frame=frame))

    def message(self, message: pb.FramesResponse) -> None:
        """Put any message on the stream."""
        self._out.put_nowait(message)

    def beat(self, step: int = 1, runnable_count: int = 0) -> None:
        """Put one beat on the stream."""
        self._out.put_nowait(pb.FramesResponse(beat=pb.WorkerBeat(step=step, runnable_count=runnable_count)))

    def break_stream(self) -> None:
        """End the present stream with an error."""
        self._out.put_nowait(None)

    async def Frames(self, requests: AsyncIterator[pb.FramesRequest], context: Context) -> AsyncIterator[Any]:
        """One gateway."""
        hello = await anext(requests)
        self.hellos.append(hello.hello)
        self._out = asyncio.Queue()
        if self.is_silent:
            await asyncio.Event().wait()
        yield pb.FramesResponse(beat=pb.WorkerBeat(step=1))
        listening = asyncio.create_task(self._listen(requests))
        try:
            while (message := await self._out.get()) is not None:
                yield message
        finally:
            listening.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """One attempt."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        assert self.script is not None
        try:
            async for event in self.script(self, request, context):
                yield event
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise

    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishResponse:
        """Not used by gateways."""
        return pb.FinishResponse()

    async def _listen(self, requests: AsyncIterator[pb.FramesRequest]) -> None:
        async for message in requests:
            self.heard.append(message)


@contextlib.asynccontextmanager
async def serving_worker(worker: FakeWorker) -> AsyncIterator[str]:
    """Serve on a free port; the address."""
    server = grpc.aio.server()
    rpc.add_DecodeServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
