"""Between the messages of the Reserve stream and the core's values."""

from __future__ import annotations

import logging
from array import array

from google.protobuf.duration_pb2 import Duration
from shoal.scheduler.v1 import scheduler_service_pb2 as pb

from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.messages import Denied, LossCause, Outgoing, Placement, Queued, Target
from shoal_scheduler.core.requests import RequestSpec, short_chain

logger = logging.getLogger(__name__)

_MAX_CHAINS = 4
_MAX_CHAIN_BLOCKS = 8192
_HASH_BYTES = 32
LOSS_CAUSES = {
    pb.LOST_CAUSE_UNSPECIFIED: LossCause.BROKEN,
    pb.LOST_CAUSE_BROKEN: LossCause.BROKEN,
    pb.LOST_CAUSE_NO_PROGRESS: LossCause.NO_PROGRESS,
    pb.LOST_CAUSE_MOVED: LossCause.MOVED,
    pb.LOST_CAUSE_DRAINED: LossCause.DRAINED,
}


def spec_of(submit: pb.Submit) -> RequestSpec:
    """What was submitted. An absent choice count means one; a malformed chain counts as not cached."""
    return RequestSpec(
        prompt_tokens=submit.prompt_tokens,
        max_tokens=submit.max_tokens,
        choice_count=max(1, submit.choice_count),
        model=submit.model,
        priority=submit.priority,
        tenant=submit.tenant,
        user=submit.user,
        numerics_id=submit.numerics_id if submit.HasField("numerics_id") else None,
        constraint_id=submit.constraint_id if submit.HasField("constraint_id") else None,
        chains=_chains(submit),
        traceparent=submit.traceparent,
    )


def _chains(submit: pb.Submit) -> dict[str, array[int]]:
    chains = {}
    for chain in submit.chains[:_MAX_CHAINS]:
        hashes = chain.block_hashes[:_MAX_CHAIN_BLOCKS]
        # One bad hint must not cost the gateway the stream that all its requests share.
        if any(len(one) != _HASH_BYTES for one in hashes):
            logger.warning("malformed hash chain", extra={"numerics_id": chain.numerics_id})
        else:
            chains[chain.numerics_id] = short_chain(hashes)
    return chains


def response_of(outgoing: Outgoing) -> pb.ReserveResponse:
    """An answer as it travels."""
    response = pb.ReserveResponse(request_id=outgoing.request_id)
    match outgoing.answer:
        case Queued(position):
            response.queued.position = position
        case Placement() as placement:
            response.placement.CopyFrom(_placement(placement))
        case Denied(reason, retry_after_s):
            response.denied.reason = reason.value
            if retry_after_s is not None:
                response.denied.retry_after.CopyFrom(duration(retry_after_s))
    return response


def _placement(placement: Placement) -> pb.Placement:
    return pb.Placement(
        placement_id=placement.placement_id,
        decode=_target(placement.decode),
        prefill=[_target(one) for one in placement.prefill],
        kv_id=placement.kv_id,
        numerics_id=placement.numerics_id,
        constraint_id=placement.constraint_id,
        expected_hit_tokens=placement.expected_hit_tokens,
    )


def _target(target: Target) -> pb.PlacedWorker:
    return pb.PlacedWorker(instance_id=target.instance_id, address=target.address)


def instance_of(instance: Instance, now_s: float) -> pb.FleetInstance:
    """One instance for people to look at."""
    presence, load = instance.presence, instance.load
    shown = pb.FleetInstance(
        instance_id=presence.instance_id,
        role=presence.role,
        address=presence.address,
        model=presence.model,
        numerics_id=presence.numerics_id,
        is_draining=presence.is_draining,
        block_count=presence.capacity.get("blocks", 0),
        seen_age=duration(max(0.0, now_s - instance.heard_at_s)),
    )
    if load is not None:
        shown.running_count, shown.waiting_count = load.running, load.waiting
        shown.free_block_count, shown.free_slot_count = load.free_blocks, load.free_slots
        shown.step_time.CopyFrom(duration(load.step_time_us / 1e6))
        shown.accept_length = instance.accept_length
    return shown


def seconds(value: Duration) -> float:
    """A duration in seconds, never negative."""
    return max(0.0, value.seconds + value.nanos / 1e9)


def duration(value_s: float) -> Duration:
    """Seconds as a duration, to the microsecond."""
    made = Duration()
    made.FromMicroseconds(round(value_s * 1e6))
    return made
