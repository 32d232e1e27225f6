"""One `Generate` call to the worker that a placement names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal.decode.v1.decode_service_pb2_grpc import DecodeServiceStub
from shoal.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from shoal_common.errors import MeshError
from shoal_common.rpc import Channels, from_rpc_error, is_transport_failure

from shoal_gateway.encode import Prepared
from shoal_gateway.entry_sinks import EntrySink
from shoal_gateway.frames_client import FramesClient
from shoal_gateway.journal import ChoiceJournal
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.worker_link import WorkerLink, WorkerLost

OPEN_TIMEOUT_S = 2.0
"""A worker whose stream does not open in this time is passed over."""


class LinkedSink(EntrySink, Protocol):
    """Who the entries are for."""

    link: WorkerLink | None
    """Acknowledgements and ends go here."""


class AttemptListener(Protocol):
    """Who runs the attempt."""

    @property
    def intake(self) -> LinkedSink:
        """Where its entries go."""

    def on_admitted(self, numerics_id: str) -> None:
        """The worker holds the request."""


class Workers:
    """Opens `Generate` calls. Holds no state of requests."""

    def __init__(self, *, gateway_id: str, channels: Channels, frames: FramesClient, chains: PrefixChains) -> None:
        self._gateway_id = gateway_id
        self._channels, self._frames, self._chains = channels, frames, chains

    def request(
        self,
        *,
        request_id: str,
        attempt: int,
        prepared: Prepared,
        placement: scheduler_pb.Placement,
        choices: Sequence[ChoiceJournal],
    ) -> decode_pb.GenerateRequest:
        """What the worker is asked: the prompt, and per choice its tokens so far."""
        request = decode_pb.GenerateRequest(
            request_id=request_id,
            attempt=attempt,
            gateway_id=self._gateway_id,
            placement_id=placement.placement_id,
            prompt_ids=prepared.prompt_ids,
            priority=prepared.priority,
            params=prepared.params,
            choices=[
                decode_pb.ChoiceState(output_ids=choice.output_ids, is_finished=choice.is_finished)
                for choice in choices
            ],
            prefill_targets=[
                decode_pb.PrefillTarget(instance_id=one.instance_id, address=one.address) for one in placement.prefill
            ],
        )
        if prepared.constraint is not None:
            request.constraint.CopyFrom(prepared.constraint.message())
        if prepared.is_exact:
            request.determinism = sampling_pb2.DETERMINISM_EXACT
        if placement.numerics_id:
            request.numerics_id = placement.numerics_id
        if placement.kv_id and placement.numerics_id:
            request.cache_root = self._chains.root(
                kv_id=placement.kv_id,
                numerics_id=placement.numerics_id,
                tenant=prepared.tenant,
                user_id=prepared.user_id,
            )
            request.tenant_tag = self._chains.tenant_tag(prepared.tenant)
            request.cache_points.extend(prepared.cache_points)
        return request

    async def run(
        self,
        request: decode_pb.GenerateRequest,
        worker: scheduler_pb.PlacedWorker,
        listener: AttemptListener,
        *,
        timeout_s: float,
    ) -> decode_pb.Ended:
        """Run one attempt to its end. Raises MeshError: the worker's own, or WorkerLost if the connection failed."""
        link = self._frames.link(worker.address)
        await link.wait_open(min(OPEN_TIMEOUT_S, timeout_s))
        key = (request.request_id, request.attempt)
        request.first_number = link.attach(key, listener.intake, max(1, len(request.choices)))
        listener.intake.link = link
        stub: Any = DecodeServiceStub(self._channels.get(worker.address).as_grpc())
        call = None
        try:
            call = stub.Generate(request, timeout=timeout_s)
            async for event in call:
                if event.HasField("admitted"):
                    listener.on_admitted(event.admitted.numerics_id)
                elif event.HasField("ended"):
                    ended: decode_pb.Ended = event.ended
                    return ended
            raise WorkerLost(f"worker {worker.instance_id} ended the call without a result")
        except grpc.RpcError as error:
            raise _judged(error, worker.instance_id) from error
        finally:
            if call is not None:
                call.cancel()
            link.detach(key, max(1, len(request.choices)))


def _judged(error: grpc.RpcError, worker_id: str) -> MeshError:
    if is_transport_failure(error):
        return WorkerLost(f"the call to worker {worker_id} broke: {error.code().name}")
    return from_rpc_error(error)
