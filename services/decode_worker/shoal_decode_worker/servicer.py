"""DecodeService: protobuf in, sessions and core, protobuf out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal_common.errors import Internal, MeshError

from shoal_decode_worker.engine_like import EngineLike, PromptLoader, admitted_by
from shoal_decode_worker.frames import Frames
from shoal_decode_worker.frames_stream import serve_frames
from shoal_decode_worker.generation import GenerationStart, check
from shoal_decode_worker.sessions import Session, Sessions
from shoal_decode_worker.wire import add_entry, ended_message, start_from

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

_MAX_MESSAGE_TOKENS = 1024


class DecodeServicer(rpc.DecodeServiceServicer):
    """Serves one engine."""

    def __init__(
        self,
        *,
        engine: EngineLike,
        loader: PromptLoader,
        sessions: Sessions,
        frames: Frames,
        beat_s: float,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._engine, self._loader, self._sessions, self._frames = engine, loader, sessions, frames
        self._beat_s, self._draw_seed = beat_s, draw_seed

    # Coroutines that write, where the stubs expect generators: gRPC takes both, and a wait is then cancelled in place.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """One request from admission to its last acknowledged token."""
        start = start_from(request, self._draw_seed)
        check(start, self._engine.facts)
        session = self._sessions.open(start)
        try:
            await self._run(start, session, context)
        finally:
            self._sessions.close(session)

    async def Frames(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.FramesRequest], context: Context
    ) -> None:
        """The tokens of one gateway."""
        await serve_frames(
            aiter(request_iterator),
            context.write,
            sessions=self._sessions,
            frames=self._frames,
            beat_s=self._beat_s,
        )

    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishResponse:
        """End one choice."""
        one = request.finish
        self._sessions.finish(one.request_id, one.attempt, one.choice_index, one.end_index)
        return pb.FinishResponse()

    async def _run(self, start: GenerationStart, session: Session, context: Context) -> None:
        admission = self._engine.admit(start)
        # What is cached is asked for while the engine admits; a constraint can take long to compile.
        if start.constraint is not None:
            await admitted_by(admission)
        loading = asyncio.create_task(self._load(start, admission, session))
        try:
            await admitted_by(admission)
            if session.failure is not None:
                # Superseded or moved while its constraint was compiled.
                raise session.failure
            await context.write(pb.GenerateResponse(admitted=self._admitted(start)))
            await self._deliver(session, context)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    def _admitted(self, start: GenerationStart) -> pb.Admitted:
        facts = self._engine.facts
        return pb.Admitted(
            numerics_id=facts.numerics_id,
            seed=start.sampling.seed,
            constraint_id=facts.constraint_id if start.constraint is not None else "",
        )

    async def _load(self, start: GenerationStart, admission: Future[None], session: Session) -> None:
        try:
            await self._loader.load(start, admission)
        except MeshError as error:
            # The caller may have finished every choice meanwhile: then there is nothing to load any more.
            if session.request.usage is None:
                session.fail(error)
        except Exception as error:
            logger.error("loading a prompt failed", exc_info=error)
            session.fail(Internal("internal error; the worker's log has the details"))
        else:
            session.request.is_started = True

    async def _deliver(self, session: Session, context: Context) -> None:
        request = session.request
        while True:
            await session.changed.wait()
            session.changed.clear()
            if session.failure is not None:
                raise session.failure
            while not request.gateway_id and (entries := request.take(_MAX_MESSAGE_TOKENS)):
                message = pb.GenerateResponse()
                for entry in entries:
                    add_entry(message.entries.entries, request, entry)
                await context.write(message)
                self._sessions.delivered(session, entries)
            if request.is_settled:
                await context.write(pb.GenerateResponse(ended=ended_message(request)))
                return
