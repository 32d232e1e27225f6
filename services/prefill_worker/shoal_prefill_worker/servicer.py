"""PrefillService: protobuf in, one call's run, protobuf out."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from shoal.prefill.v1 import prefill_service_pb2 as pb
from shoal.prefill.v1 import prefill_service_pb2_grpc as rpc
from shoal_common.errors import Unavailable

from shoal_prefill_worker.call import PrefillCall, Tools, first_message
from shoal_prefill_worker.core import Job, Jobs, PromptStart, check

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(rpc.PrefillServiceServicer):
    """Serves one engine, from `ready` on."""

    def __init__(self, jobs: Jobs, *, start_timeout_s: float) -> None:
        self._jobs, self._start_timeout_s = jobs, start_timeout_s
        self._tools: Tools | None = None
        self._calls: dict[Job, PrefillCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self, tools: Tools) -> None:
        """The model is loaded."""
        self._tools = tools

    async def idle(self) -> None:
        """Wait until no call is open."""
        await self._idle.wait()

    # A coroutine that writes where the stubs expect a generator: gRPC takes both, and waits are cancelled in place.
    async def Prefill(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.PrefillRequest], context: Context
    ) -> None:
        """One prompt, from Start to Pulled."""
        requests = aiter(request_iterator)
        message = await first_message(requests, self._start_timeout_s)
        tools = self._tools
        if tools is None:
            raise Unavailable("the model is being loaded", reason="LOADING")
        start = _start_from(message)
        check(start, tools.facts)
        job, older = self._jobs.open(start)
        if older is not None and older.superseded is not None and older in self._calls:
            self._calls[older].stop(older.superseded)
        call = self._calls[job] = PrefillCall(job, message.offer, tools, context.write)
        self._idle.clear()
        try:
            await call.run(requests)
        finally:
            del self._calls[job]
            self._jobs.close(job)
            if not self._calls:
                self._idle.set()


def _start_from(message: pb.Start) -> PromptStart:
    return PromptStart(
        request_id=message.request_id,
        attempt=message.attempt,
        numerics_id=message.numerics_id,
        draft_id=message.draft_id,
        cache_root=message.cache_root if message.HasField("cache_root") else None,
        tenant_tag=message.tenant_tag,
        prompt_ids=array("I", message.prompt_ids),
        cache_points=tuple(message.cache_points),
        priority=message.priority,
    )
