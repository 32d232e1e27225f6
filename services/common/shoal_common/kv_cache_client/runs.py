"""Parts of runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.common.v1 import kv_transport_pb2 as pb


def leading(runs: Sequence[pb.PayloadRun], count: int) -> list[pb.PayloadRun]:
    """The first `count` payloads of runs that follow each other."""
    found: list[pb.PayloadRun] = []
    for run in runs:
        here = len(run.checksums)
        if count >= here:
            found.append(run)
        elif count > 0:
            per_payload = len(run.slabs) // here
            part = pb.PayloadRun()
            part.CopyFrom(run)
            del part.checksums[count:]
            del part.slabs[count * per_payload :]
            found.append(part)
        count -= min(count, here)
    return found
