"""What a gateway says about a request on the Reserve stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from shoal.common.v1 import sampling_pb2
from shoal.scheduler.v1 import scheduler_service_pb2 as pb

from shoal_gateway.encode import Prepared
from shoal_gateway.prefix_chains import FairShare
from shoal_gateway.session import Session

_NANOS = 1_000_000_000


def submit(
    prepared: Prepared,
    *,
    model: str,
    share: FairShare,
    chains: Sequence[pb.HashChain],
    remaining_s: float,
    waited_s: float,
    traceparent: str,
) -> pb.Submit:
    """What has to be placed."""
    # Empty: any worker that compiles constraints.
    constraint_id = None if prepared.constraint is None else ""
    return pb.Submit(
        prompt_tokens=len(prepared.prompt_ids),
        max_tokens=prepared.params.max_tokens,
        choice_count=prepared.choice_count,
        model=model,
        tenant=share.tenant,
        user=share.user,
        priority=prepared.priority,
        chains=chains,
        remaining=_duration(remaining_s),
        waited=_duration(waited_s),
        traceparent=traceparent,
        constraint_id=constraint_id,
    )


def introduction(request_id: str, session: Session, submit: pb.Submit, worker_id: str) -> pb.ReserveRequest:
    """Adopt if `worker_id` runs it, else Submit. What has output must go on in the same numerics."""
    if session.journal.has_output and session.numerics_id:
        submit.numerics_id = session.numerics_id
    if session.journal.has_output and session.constraint_id and submit.HasField("constraint_id"):
        submit.constraint_id = session.constraint_id
    if not worker_id:
        return pb.ReserveRequest(request_id=request_id, submit=submit)
    counts = session.journal.counts()
    adopt = pb.Adopt(attempt=session.attempt, worker_id=worker_id, output_counts=counts, submit=submit)
    return pb.ReserveRequest(request_id=request_id, adopt=adopt)


def last_word(request_id: str, usage: sampling_pb2.Usage, *, is_complete: bool) -> pb.ReserveRequest:
    """Finished, or Cancelled for whatever else ended it."""
    if is_complete:
        return pb.ReserveRequest(request_id=request_id, finished=pb.Finished(usage=usage))
    return pb.ReserveRequest(request_id=request_id, cancelled=pb.Cancelled(usage=usage))


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * _NANOS)
    return Duration(seconds=nanos // _NANOS, nanos=nanos % _NANOS)
